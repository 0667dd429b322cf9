"""Rank 0 of a tensor-parallel group reads the batch; the others receive it, as one flat message."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite import collectives
from megatron_lite.errors import DataError
from megatron_lite.tensor_parallel.mappings import default_group


def broadcast_data(
    keys: list[str], data: dict[str, Tensor], datatype: torch.dtype, tp_group: ProcessGroup | None = None
) -> dict[str, Tensor]:
    """The tensors of rank 0, on every rank of the group.

    Args:
        keys: which entries, in the same order on all ranks.
        data: read on rank 0 of the group only; all tensors have `datatype`.
    Returns: tensors on the device of rank 0's (of the default device elsewhere).
    Raises: DataError on every rank if an entry is missing or has another dtype.
    """
    group = default_group(tp_group)
    first = collectives.group_rank(group) == 0
    shapes: dict[str, tuple[int, ...]] | str = ""
    if first:
        wrong = [key for key in keys if key not in data or data[key].dtype != datatype]
        found = {key: str(data[key].dtype) if key in data else "missing" for key in wrong}
        shapes = f"{found}" if wrong else {key: tuple(data[key].shape) for key in keys}
    shapes = collectives.broadcast_object(shapes, group, purpose="shapes of the batch")
    if isinstance(shapes, str):
        raise DataError(
            f"a batch with {shapes}",
            why=f"{', '.join(keys)} are sent as {datatype}",
            fix="let the data set return them so",
        )
    if collectives.group_size(group) == 1:
        return {key: data[key] for key in keys}
    sizes = [math.prod(shapes[key]) for key in keys]
    if first:
        flat = torch.cat([data[key].contiguous().view(-1) for key in keys])
    else:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        flat = torch.empty(sum(sizes), dtype=datatype, device=device)
    collectives.broadcast(flat, group, purpose="batch")
    return {key: part.view(shapes[key]) for key, part in zip(keys, flat.split(sizes))}
