"""The only file that moves data between ranks: counted, named, skipped at size 1, the same on gloo and NCCL.

Every call takes the group (None: this rank is alone, nothing happens) and its purpose. COUNTERS adds up calls and
bytes by (group, kind, purpose); the log, the planner and the tests read it. "Bytes" is the size of the whole tensor
that the operation is about: the reduced one, or the gathered one.

On gloo the named reduce-scatter and all-gather are 4 times slower than the same sum or copy written as sends and
receives of slices (measured with torch 2.13), so these two choose by backend; on NCCL the native forms are right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

Op = Literal["sum", "avg", "max", "min"]
COUNTERS: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])  # (group, kind, purpose) -> calls, bytes
_NAMES: dict[ProcessGroup, str] = {}

# The names changed in torch 2.13; the arguments did not.
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Handle(Protocol):
    """What an asynchronous call returns: `wait()` blocks until the result may be read."""

    def wait(self) -> Any: ...


class _Done:
    """The handle of a call that had nothing to do."""

    def wait(self) -> None:
        return None


DONE = _Done()


class _Pending:
    """Several transfers, and what is still to be done with their results when they are there."""

    def __init__(self, works: Sequence[Any], finish=lambda: None):
        self._works, self._finish = list(works), finish

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []
        finish, self._finish = self._finish, lambda: None
        finish()


# -- groups ------------------------------------------------------------------------------------------------------


def name_group(group: ProcessGroup | None, name: str) -> None:
    """Give a group the name under which its traffic is counted. A group with two names keeps the first."""
    if group is not None:
        _NAMES.setdefault(group, name)


def forget_groups() -> None:
    """Drop the names, and with them the references that would keep destroyed groups alive."""
    _NAMES.clear()


def group_size(group: ProcessGroup | None) -> int:
    """Ranks in the group; None is 1."""
    return 1 if group is None else group.size()


def group_rank(group: ProcessGroup | None) -> int:
    """This rank's place in the group; None is 0."""
    return 0 if group is None else group.rank()


def _is_gloo(group: ProcessGroup, x: Tensor) -> bool:
    return x.device.type == "cpu" or dist.get_backend(group) == "gloo"


def _count(group: ProcessGroup, kind: str, purpose: str, x: Tensor) -> None:
    counter = COUNTERS[_NAMES.get(group, "world"), kind, purpose]
    counter[0] += 1
    counter[1] += x.numel() * x.element_size()


def _alone(group: ProcessGroup | None) -> bool:
    return group is None or group.size() == 1


# -- tensors -----------------------------------------------------------------------------------------------------

_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def all_reduce(
    x: Tensor, group: ProcessGroup | None, *, op: Op = "sum", purpose: str, async_op: bool = False
) -> Handle:
    """Reduce `x` over the group, in place (also where it is not contiguous).

    Returns: a handle; without `async_op` it is already done.
    """
    if _alone(group):
        return DONE
    assert group is not None
    _count(group, "all_reduce", purpose, x)
    buffer = x if x.is_contiguous() else x.contiguous()
    scale = 1.0
    if op == "avg":  # gloo averages floats only, and older versions not at all: a sum and one product always work
        scale = 1.0 / group.size()
    work = dist.all_reduce(buffer, op=_REDUCE["sum" if op == "avg" else op], group=group, async_op=True)

    def finish() -> None:
        if scale != 1.0:
            buffer.mul_(scale)
        if buffer is not x:
            x.copy_(buffer)

    pending = _Pending([work], finish)
    if not async_op:
        pending.wait()
    return pending


def reduce_scatter(
    output: Tensor,
    input: Tensor,
    group: ProcessGroup | None,
    *,
    op: Literal["sum", "avg"] = "sum",
    purpose: str,
    async_op: bool = False,
) -> Handle:
    """Sum `input` `[n * size, ...]` over the group and keep this rank's part in `output` `[n, ...]`.

    `output` may be this rank's own slice of `input`.
    """
    if _alone(group):
        if output.data_ptr() != input.data_ptr():
            output.copy_(input)
        return DONE
    assert group is not None
    size, rank = group.size(), group.rank()
    _count(group, "reduce_scatter", purpose, input)
    if _is_gloo(group, input):
        parts = input.chunk(size)
        received = [torch.empty_like(parts[rank]) for _ in range(size - 1)]
        transfers, peers = [], [r for r in range(size) if r != rank]
        for peer, buffer in zip(peers, received):
            other = dist.get_global_rank(group, peer)
            transfers.append(dist.P2POp(dist.isend, parts[peer].contiguous(), other, group))
            transfers.append(dist.P2POp(dist.irecv, buffer, other, group))

        def finish() -> None:
            # In rank order, so that every element is summed in the same order whoever owns it.
            pieces = list(received)
            pieces.insert(rank, parts[rank])
            total = pieces[0].clone()
            for piece in pieces[1:]:
                total.add_(piece)
            output.copy_(total if op == "sum" else total.div_(size))

        pending = _Pending(dist.batch_isend_irecv(transfers), finish)
    else:
        reduce_op = dist.ReduceOp.AVG if op == "avg" else dist.ReduceOp.SUM
        pending = _Pending(
            [_reduce_scatter_single(output, input.contiguous(), op=reduce_op, group=group, async_op=True)]
        )
    if not async_op:
        pending.wait()
    return pending


def all_gather(
    output: Tensor, input: Tensor, group: ProcessGroup | None, *, purpose: str, async_op: bool = False
) -> Handle:
    """Lay every rank's `input` `[n, ...]` one after another in `output` `[n * size, ...]`, in rank order.

    `input` may be this rank's own slice of `output`.
    """
    if _alone(group):
        if output.data_ptr() != input.data_ptr():
            output.copy_(input)
        return DONE
    assert group is not None
    size, rank = group.size(), group.rank()
    _count(group, "all_gather", purpose, output)
    if _is_gloo(group, input):
        slices = output.chunk(size)
        mine = input.contiguous()
        if slices[rank].data_ptr() != mine.data_ptr():
            slices[rank].copy_(mine)
        transfers = []
        for peer in (r for r in range(size) if r != rank):
            other = dist.get_global_rank(group, peer)
            transfers.append(dist.P2POp(dist.isend, mine, other, group))
            transfers.append(dist.P2POp(dist.irecv, slices[peer], other, group))
        pending = _Pending(dist.batch_isend_irecv(transfers))
    else:
        pending = _Pending([_all_gather_single(output, input.contiguous(), group=group, async_op=True)])
    if not async_op:
        pending.wait()
    return pending


def all_to_all(
    output: Tensor,
    input: Tensor,
    group: ProcessGroup | None,
    *,
    output_splits: list[int] | None = None,
    input_splits: list[int] | None = None,
    purpose: str,
) -> None:
    """Send slice r of `input` (first dim) to rank r and lay what arrives in `output`, in rank order."""
    if _alone(group):
        output.copy_(input)
        return
    assert group is not None
    _count(group, "all_to_all", purpose, input)
    dist.all_to_all_single(output, input.contiguous(), output_splits, input_splits, group=group)


def broadcast(x: Tensor, group: ProcessGroup | None, *, source: int = 0, purpose: str) -> None:
    """Overwrite `x` on every rank with the values of the rank at place `source` of the group."""
    if _alone(group):
        return
    assert group is not None
    _count(group, "broadcast", purpose, x)
    buffer = x if x.is_contiguous() else x.contiguous()
    dist.broadcast(buffer, src=dist.get_global_rank(group, source), group=group)
    if buffer is not x:
        x.copy_(buffer)


def barrier(group: ProcessGroup | None, *, purpose: str) -> None:
    """Wait until every rank of the group is here."""
    if _alone(group):
        return
    assert group is not None
    COUNTERS[_NAMES.get(group, "world"), "barrier", purpose][0] += 1
    dist.barrier(group=group)


# -- Python objects (start-up, checkpoints; never per step) ------------------------------------------------------


def all_gather_object(obj: Any, group: ProcessGroup | None, *, purpose: str) -> list[Any]:
    """Every rank's object, in rank order."""
    if _alone(group):
        return [obj]
    assert group is not None
    COUNTERS[_NAMES.get(group, "world"), "all_gather_object", purpose][0] += 1
    objects: list[Any] = [None] * group.size()
    dist.all_gather_object(objects, obj, group=group)
    return objects


def broadcast_object(obj: Any, group: ProcessGroup | None, *, source: int = 0, purpose: str) -> Any:
    """The object of the rank at place `source` of the group."""
    if _alone(group):
        return obj
    assert group is not None
    COUNTERS[_NAMES.get(group, "world"), "broadcast_object", purpose][0] += 1
    box = [obj]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, source), group=group)
    return box[0]


def world() -> ProcessGroup | None:
    """The group of all ranks, or None in a run of one process."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 else None
