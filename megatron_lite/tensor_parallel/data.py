"""Rank 0 of a tensor-parallel group reads the batch; the others receive it.

    rank 0   read() --> header [outcome, shapes, dtypes] --> one message of bytes, widest dtype first
    others              header: how much memory to take  --> views of that message

Two broadcasts a batch, whatever it holds. What goes wrong while rank 0 reads (the end of the data, a bad token) is
raised on every rank of the group: a rank that waited for a batch that never comes would hang instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite import collectives
from megatron_lite.errors import DataError
from megatron_lite.tensor_parallel.mappings import default_group

_DTYPES = (
    torch.int64,
    torch.float64,
    torch.int32,
    torch.float32,
    torch.int16,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_MAX_DIMS = 5
_MISSING = -1


def broadcast_tensors(
    keys: Sequence[str],
    read: Callable[[], Mapping[str, Tensor]],
    tp_group: ProcessGroup | None = None,
    device: torch.device | None = None,
) -> dict[str, Tensor]:
    """What `read` gives on rank 0, on every rank of the group.

    Args:
        keys: which entries, the same on all ranks; those that rank 0 lacks are left out everywhere.
        read: called on rank 0 only.
        tp_group: None = the registered tensor-parallel group.
        device: where the tensors are wanted; None: where CUDA is in use this process's GPU, else the CPU.
    Raises: on every rank what `read` raised on rank 0.
    """
    group = default_group(tp_group)
    if collectives.group_size(group) == 1 or collectives.is_fake(group):
        data = read()
        return {key: _moved(data[key], device) for key in keys if key in data}
    if device is None:
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    found: dict[str, Tensor] = {}
    failure: Exception | None = None
    if collectives.group_rank(group) == 0:
        try:
            data = read()
            found = {key: data[key] for key in keys if key in data}
            header = _header(keys, found)
        except Exception as error:
            failure, header = error, [1] + [_MISSING] * (len(keys) * (2 + _MAX_DIMS))
    else:
        header = [0] * (1 + len(keys) * (2 + _MAX_DIMS))
    numbers = torch.tensor(header, dtype=torch.int64, device=device)
    collectives.broadcast(numbers, group, purpose="shapes of the batch")
    outcome, *rest = numbers.tolist()
    if outcome:
        raise collectives.broadcast_object(failure, group, purpose="failure to read a batch")
    shapes = _shapes(keys, rest)
    order = sorted(shapes, key=lambda key: -shapes[key][0].itemsize)  # so that every view is aligned
    sizes = [math.prod(shapes[key][1]) * shapes[key][0].itemsize for key in order]
    if found:
        flat = torch.cat([found[key].contiguous().view(-1).view(torch.uint8) for key in order]).to(device)
    else:
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    if order:
        collectives.broadcast(flat, group, purpose="batch")
    parts = dict(zip(order, flat.split(sizes)))
    return {key: parts[key].view(dtype).view(shape) for key, (dtype, shape) in shapes.items()}


def broadcast_data(
    keys: list[str], data: dict[str, Tensor], datatype: torch.dtype, tp_group: ProcessGroup | None = None
) -> dict[str, Tensor]:
    """The tensors of rank 0, on every rank of the group.

    Args:
        keys: which entries, in the same order on all ranks.
        data: looked at on rank 0 of the group only; all tensors have `datatype`.
    Returns: tensors on this process's device.
    Raises: DataError on every rank if an entry is missing or has another dtype.
    """

    def read() -> dict[str, Tensor]:
        wrong = [key for key in keys if key not in data or data[key].dtype != datatype]
        if wrong:
            found = {key: str(data[key].dtype) if key in data else "missing" for key in wrong}
            raise DataError(
                f"a batch with {found}",
                why=f"{', '.join(keys)} are sent as {datatype}",
                fix="let the data set return them so",
            )
        return data

    return broadcast_tensors(keys, read, tp_group)


def _moved(x: Tensor, device: torch.device | None) -> Tensor:
    return x if device is None else x.to(device, non_blocking=True)


def _header(keys: Sequence[str], found: Mapping[str, Tensor]) -> list[int]:
    """[0], and for each key: dtype, number of dims, sizes; all `_MISSING` where there is no such tensor."""
    header = [0]
    for key in keys:
        if key not in found:
            header += [_MISSING] * (2 + _MAX_DIMS)
            continue
        x = found[key]
        if x.dtype not in _DTYPES or x.dim() > _MAX_DIMS:
            raise DataError(
                f"a batch whose {key} is {x.dim()}-dimensional {x.dtype}",
                why=f"real numbers and flags in at most {_MAX_DIMS} dimensions are sent",
                fix="let the data set return it so",
            )
        header += [_DTYPES.index(x.dtype), x.dim(), *x.shape, *[0] * (_MAX_DIMS - x.dim())]
    return header


def _shapes(keys: Sequence[str], numbers: Sequence[int]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    step = 2 + _MAX_DIMS
    shapes = {}
    for i, key in enumerate(keys):
        dtype, dims, *sizes = numbers[i * step : (i + 1) * step]
        if dtype != _MISSING:
            shapes[key] = _DTYPES[dtype], tuple(sizes[:dims])
    return shapes
