"""The only file that moves data between ranks: counted, named, skipped at size 1, the same on gloo and NCCL.

Every call takes the group (None: this rank is alone, nothing happens) and its purpose. COUNTERS adds up calls and
bytes by (group, kind, purpose); the log, the planner and the tests read it. "Bytes" is the size of the whole tensor
that the operation is about: the reduced one, or the gathered one; `sent_bytes` tells what of it each rank sends.

A call that fails because another rank is gone, or never came, raises PeerLost with the group, its ranks, the purpose
(`calls`).

On gloo the named reduce-scatter and all-gather are 4 times slower than the same sum or copy written as sends and
receives of slices (measured with torch 2.13), so these two choose by backend, and all-reduces of more than a few
numbers are the one after the other; on NCCL the native forms are right. Sums made of sends and receives add in the
order of ranks whoever adds: a reduce-scatter gives bit for bit a part of the all-reduce.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite import calls
from megatron_lite.calls import DONE, NAMES, Call, Handle, Pending, noted

Op = Literal["sum", "avg", "max", "min"]
Key = tuple[str, str, str]  # group, kind, purpose
COUNTERS: dict[Key, list[int]] = defaultdict(lambda: [0, 0])  # -> calls, bytes
_TAGS: dict[ProcessGroup, int] = defaultdict(int)  # transfers of one call share a tag that no other call under way has
_SMALL = 1024  # elements up to which gloo's own all-reduce is as fast as sends and receives

# The names changed in torch 2.13; the arguments did not.
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


# -- what was counted --------------------------------------------------------------------------------------------


def counts() -> dict[Key, tuple[int, int]]:
    """COUNTERS as it stands: (group, kind, purpose) -> calls, bytes."""
    return {key: (number, size) for key, (number, size) in COUNTERS.items()}


def difference(after: dict[Key, tuple[int, int]], before: dict[Key, tuple[int, int]]) -> dict[Key, tuple[int, int]]:
    """What was counted between two times; nothing where nothing was."""
    grown = {}
    for key, (number, size) in after.items():
        number_then, size_then = before.get(key, (0, 0))
        if number > number_then:
            grown[key] = (number - number_then, size - size_then)
    return grown


def sent_bytes(kind: str, size: int, ranks: int) -> float:
    """What each of `ranks` ranks sends when the counted tensors have `size` bytes together, by the best algorithms.

    An all-reduce is a reduce-scatter and an all-gather; each of these sends all but the own part once.
    """
    others = (ranks - 1) / ranks
    shares = {"all_reduce": 2 * others, "reduce_scatter": others, "all_gather": others, "all_to_all": others}
    return shares.get(kind, 1.0) * size


# -- groups ------------------------------------------------------------------------------------------------------


def name_group(group: ProcessGroup | None, name: str) -> None:
    """Give a group the name under which its traffic is counted. A group with two names keeps the first."""
    if group is not None:
        NAMES.setdefault(group, name)


def forget_groups() -> None:
    """Drop the names, and with them the references that would keep destroyed groups alive."""
    calls.forget_groups()
    _TAGS.clear()


def group_sizes() -> dict[str, int]:
    """Number of ranks by the name under which a group's traffic is counted."""
    return {name: group.size() for group, name in NAMES.items()}


def group_size(group: ProcessGroup | None) -> int:
    """Ranks in the group; None is 1."""
    return 1 if group is None else group.size()


def group_rank(group: ProcessGroup | None) -> int:
    """This rank's place in the group; None is 0."""
    return 0 if group is None else group.rank()


def group_ranks(group: ProcessGroup | None) -> list[int]:
    """Global ranks of the group, in its order; None is this rank alone."""
    if group is None:
        return [dist.get_rank() if dist.is_available() and dist.is_initialized() else 0]
    return dist.get_process_group_ranks(group)


def _is_gloo(group: ProcessGroup, x: Tensor) -> bool:
    return x.device.type == "cpu" or dist.get_backend(group) in ("gloo", "fake")


def is_fake(group: ProcessGroup | None) -> bool:
    """Whether the other ranks do not exist: what they would send, or add, is zero."""
    return group is not None and dist.get_backend(group) == "fake"


def _count(group: ProcessGroup, kind: str, purpose: str, x: Tensor) -> None:
    counter = COUNTERS[NAMES.get(group, "world"), kind, purpose]
    counter[0] += 1
    counter[1] += x.numel() * x.element_size()


def _alone(group: ProcessGroup | None) -> bool:
    return group is None or group.size() == 1


# -- tensors -----------------------------------------------------------------------------------------------------

_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Batch:
    """The handle of the calls made inside `coalesced`."""

    def __init__(self) -> None:
        self._manager: Any = None
        self._handles: list[Handle] = []

    def add(self, handle: Handle) -> None:
        """Wait for this call as well."""
        self._handles.append(handle)

    def wait(self) -> None:
        if self._manager is not None:
            self._manager.wait()
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.wait()


@contextmanager
def coalesced(group: ProcessGroup | None, x: Tensor, calls: int) -> Iterator[Batch]:
    """Asynchronous calls of one kind on one group, on NCCL sent as one. Their handles are added to the batch.

    Args:
        x: a tensor of the device in question.
        calls: how many there will be; one needs no batch.
    """
    batch = Batch()
    if _alone(group) or calls == 1 or _is_gloo(group, x):  # type: ignore[arg-type]
        yield batch
        return
    with dist._coalescing_manager(group, device=x.device, async_ops=True) as manager:
        yield batch
    batch._manager = manager


@noted
def all_reduce(
    x: Tensor,
    group: ProcessGroup | None,
    *,
    op: Op = "sum",
    scale: float = 1.0,
    purpose: str,
    async_op: bool = False,
) -> Handle:
    """Reduce `x` over the group, in place (also where it is not contiguous).

    Args:
        scale: of a sum or mean, a factor; see `reduce_scatter`.
    Returns: a handle; without `async_op` it is already done.
    """
    if _alone(group):
        _scale(x, scale)
        return DONE
    assert group is not None
    _count(group, "all_reduce", purpose, x)
    if is_fake(group):
        _scale(x, scale)
        return DONE
    buffer = x if x.is_contiguous() else x.contiguous()
    gloo = _is_gloo(group, x)
    kind, after = _sum_op(buffer, group, op, scale, gloo) if op in ("sum", "avg") else (_REDUCE[op], 1.0)
    if gloo and op in ("sum", "avg") and x.numel() > _SMALL:
        pending = _all_reduce_by_parts(buffer, group, after)
    else:
        work = dist.all_reduce(buffer, op=kind, group=group, async_op=True)
        pending = Pending([work], lambda: _scale(buffer, after))
    if buffer is not x:
        inner = pending
        pending = Pending([inner], lambda: x.copy_(buffer))
    if not async_op:
        pending.wait()
    return pending


@noted
def reduce_scatter(
    output: Tensor,
    input: Tensor,
    group: ProcessGroup | None,
    *,
    op: Literal["sum", "avg"] = "sum",
    scale: float = 1.0,
    accumulate_in_fp32: bool = False,
    purpose: str,
    async_op: bool = False,
) -> Handle:
    """Sum `input` `[n * size, ...]` over the group and keep this rank's part in `output` `[n, ...]`.

    `output` may be this rank's own slice of `input`.

    Args:
        scale: a factor of the result. fp16 is multiplied before the sum (`input` is overwritten then), because the sum
            might leave its range; other formats inside the collective (NCCL), or after it, and only this rank's part.
        accumulate_in_fp32: add 16-bit numbers up in fp32 and round once. On NCCL they then travel as an all-to-all.
    """
    if _alone(group):
        if output.data_ptr() != input.data_ptr():
            output.copy_(input)
        _scale(output, scale)
        return DONE
    assert group is not None
    size = group.size()
    _count(group, "reduce_scatter", purpose, input)
    gloo, wide = _is_gloo(group, input), accumulate_in_fp32 and input.dtype in (torch.float16, torch.bfloat16)
    kind, after = _sum_op(input, group, op, scale, gloo or wide)
    if gloo:
        pending = _reduce_part(output, list(input.chunk(size)), group, _next_tag(group), after, wide)
    elif wide:
        received = torch.empty_like(input)
        work = dist.all_to_all_single(received, input.contiguous(), group=group, async_op=True)

        def finish() -> None:
            total = received.view(size, -1).sum(0, dtype=torch.float32).mul_(after)
            output.copy_(total.view_as(output))

        pending = Pending([work], finish)
    else:
        work = _reduce_scatter_single(output, input.contiguous(), op=kind, group=group, async_op=True)
        pending = Pending([work], lambda: _scale(output, after))
    if not async_op:
        pending.wait()
    return pending


def _sum_op(x: Tensor, group: ProcessGroup, op: Op, scale: float, plain: bool) -> tuple[Any, float]:
    """How a scaled sum or mean is asked for.

    Args:
        plain: sums alone: gloo averages floats only, and older versions not at all.
    Returns: torch's operation, and the factor that is left for the result.
    """
    if x.dtype == torch.float16 or plain:
        factor = scale / group.size() if op == "avg" else scale
        if x.dtype == torch.float16:
            _scale(x, factor)
            factor = 1.0
        return dist.ReduceOp.SUM, factor
    if scale == 1.0:
        return (dist.ReduceOp.AVG if op == "avg" else dist.ReduceOp.SUM), 1.0
    factor = scale / group.size() if op == "avg" else scale
    return dist._make_nccl_premul_sum(factor), 1.0


def _scale(x: Tensor, factor: float) -> None:
    if factor != 1.0:
        x.mul_(factor)


def _next_tag(group: ProcessGroup) -> int:
    """Ranks make calls on a group in the same order, so they agree; calls may be waited for in any order."""
    _TAGS[group] = _TAGS[group] % 2**30 + 1
    return _TAGS[group]


def _exchange(sent: Sequence[Tensor | None], received: Sequence[Tensor | None], group: ProcessGroup, tag: int) -> Any:
    """Send `sent[r]` to rank r of the group and receive `received[r]` from it; None or empty: nothing."""
    if is_fake(group):
        for tensor in received:
            if tensor is not None:
                tensor.zero_()
        return []
    transfers = []
    for place, (out, into) in enumerate(zip(sent, received)):
        peer = dist.get_global_rank(group, place)
        if out is not None and out.numel():
            transfers.append(dist.P2POp(dist.isend, out.contiguous(), peer, group, tag))
        if into is not None and into.numel():
            transfers.append(dist.P2POp(dist.irecv, into, peer, group, tag))
    return dist.batch_isend_irecv(transfers) if transfers else []


def _reduce_part(
    output: Tensor, parts: list[Tensor], group: ProcessGroup, tag: int, scale: float, wide: bool
) -> Pending:
    """`output` = scale * the sum of every rank's part for this rank; parts are this rank's contributions to all."""
    size, rank = group.size(), group.rank()
    own = parts[rank]
    temporary = [None if r == rank else torch.empty_like(own) for r in range(size)]
    works = _exchange([None if r == rank else part for r, part in enumerate(parts)], temporary, group, tag)

    def finish() -> None:
        pieces = [own if piece is None else piece for piece in temporary]  # in the order of ranks
        if wide:
            total = pieces[0].float()
            for piece in pieces[1:]:
                total.add_(piece)
            output.copy_(total.mul_(scale))
            return
        total = pieces[0]
        for place, piece in enumerate(pieces[1:], 1):  # `own` may be `output`: written only once it has been added
            into = output if place == size - 1 or rank == 0 else total
            total = torch.add(total, piece, out=into)
        _scale(output, scale)

    return Pending(works, finish)


def _all_reduce_by_parts(x: Tensor, group: ProcessGroup, scale: float) -> Pending:
    """Every rank sums one part of the contiguous `x`, times `scale`, and sends it to the others."""
    size, rank = group.size(), group.rank()
    parts = list(x.view(-1).tensor_split(size))
    own, gathering = parts[rank], _next_tag(group)
    first = _reduce_part(own, parts, group, _next_tag(group), scale, wide=False)

    def gather() -> None:
        others = [None if r == rank else part for r, part in enumerate(parts)]
        Pending(_exchange([None if r == rank else own for r in range(size)], others, group, gathering)).wait()

    return Pending([first], gather)


@noted
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
        others = [None if r == rank else slices[r] for r in range(size)]
        works = _exchange([None if r == rank else mine for r in range(size)], others, group, _next_tag(group))
        pending = Pending(works)
    else:
        pending = Pending([_all_gather_single(output, input.contiguous(), group=group, async_op=True)])
    if not async_op:
        pending.wait()
    return pending


@noted
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
    if is_fake(group):
        output.zero_()
        return
    dist.all_to_all_single(output, input.contiguous(), output_splits, input_splits, group=group)


@noted
def send(x: Tensor, group: ProcessGroup, *, to: int, tag: int = 0, purpose: str) -> Handle:
    """Send `x` to the rank at place `to` of the group; `x` may be dropped at once, the handle only when waited for.

    Args:
        tag: gloo tells messages of one pair of ranks apart by it; elsewhere they arrive in the order of sending.
    """
    _count(group, "send", purpose, x)
    if is_fake(group):
        return DONE
    return Pending([dist.isend(x.detach().contiguous(), dist.get_global_rank(group, to), group=group, tag=tag)])


@noted
def receive(x: Tensor, group: ProcessGroup, *, source: int, tag: int = 0, purpose: str) -> Handle:
    """Receive into `x`, contiguous, from the rank at place `source` of the group; counted by the sender alone."""
    if is_fake(group):
        x.zero_()
        return DONE
    return Pending([dist.irecv(x, dist.get_global_rank(group, source), group=group, tag=tag)])


@noted
def shift(received: Tensor, sent: Tensor, group: ProcessGroup, *, purpose: str) -> Handle:
    """Send to the next rank of the ring, receive from the one before; both are under way when this returns.

    `sent` must stay as it is until the handle is waited for. Counted as a send.
    """
    _count(group, "send", purpose, sent)
    return Pending(_shift(sent.contiguous(), received, 1, group, _next_tag(group)))


def gather_in_turn(x: Tensor, group: ProcessGroup, *, purpose: str) -> Iterator[tuple[int, Tensor]]:
    """(place, its `x`) of every rank, the own one first: what arrives later is under way while the caller computes.

    Counted as one all-gather.
    """
    size, rank = group.size(), group.rank()
    _count_in_turn(group, "all_gather", purpose, x)
    mine, tag = x.contiguous(), _next_tag(group)
    arriving = []
    with Call(group, "all_gather", purpose):
        for distance in range(1, size):  # at each distance all ranks send and receive once
            part = torch.empty_like(mine)
            arriving.append(((rank - distance) % size, part, _shift(mine, part, distance, group, tag)))
    yield rank, mine
    for place, part, works in arriving:
        with Call(group, "all_gather", purpose):
            for work in works:
                work.wait()
        yield place, part


def reduce_scatter_in_turn(part_for: Callable[[int], Tensor], group: ProcessGroup, *, purpose: str) -> Tensor:
    """This rank's share of a sum whose parts are computed one after another: a part travels while the next is computed.

    Args:
        part_for: place -> what this rank adds to the share of the rank at that place; the own one is asked for last.
    Counted as one reduce-scatter; added in rank order, as `reduce_scatter` does.
    """
    size, rank = group.size(), group.rank()
    tag = _next_tag(group)
    parts: dict[int, Tensor] = {}
    under_way: list[Any] = []
    sent: list[Tensor] = []  # must live until it is there
    for distance in range(1, size):
        mine = part_for((rank + distance) % size).contiguous()
        part = parts[(rank - distance) % size] = torch.empty_like(mine)
        sent.append(mine)
        with Call(group, "reduce_scatter", purpose):
            under_way += _shift(mine, part, distance, group, tag)
    parts[rank] = part_for(rank)
    _count_in_turn(group, "reduce_scatter", purpose, parts[rank])
    with Call(group, "reduce_scatter", purpose):
        for work in under_way:
            work.wait()
    total = parts[0].clone()
    for place in range(1, size):
        total.add_(parts[place])
    return total


def _shift(sent: Tensor, received: Tensor, distance: int, group: ProcessGroup, tag: int) -> list[Any]:
    """Send to the rank `distance` places on, receive from the one as far back."""
    if is_fake(group):
        received.zero_()
        return []
    size, rank = group.size(), group.rank()
    to, source = (dist.get_global_rank(group, (rank + step) % size) for step in (distance, -distance))
    return dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, to, group, tag), dist.P2POp(dist.irecv, received, source, group, tag)]
    )


def _count_in_turn(group: ProcessGroup, kind: str, purpose: str, part: Tensor) -> None:
    counter = COUNTERS[NAMES.get(group, "world"), kind, purpose]
    counter[0] += 1
    counter[1] += part.numel() * part.element_size() * group.size()


@noted
def broadcast(x: Tensor, group: ProcessGroup | None, *, source: int = 0, purpose: str) -> None:
    """Overwrite `x` on every rank with the values of the rank at place `source` of the group."""
    if _alone(group):
        return
    assert group is not None
    _count(group, "broadcast", purpose, x)
    if is_fake(group):
        if group.rank() != source:
            x.zero_()
        return
    buffer = x if x.is_contiguous() else x.contiguous()
    dist.broadcast(buffer, src=dist.get_global_rank(group, source), group=group)
    if buffer is not x:
        x.copy_(buffer)


@noted
def barrier(group: ProcessGroup | None, *, purpose: str) -> None:
    """Wait until every rank of the group is here."""
    if _alone(group):
        return
    assert group is not None
    COUNTERS[NAMES.get(group, "world"), "barrier", purpose][0] += 1
    dist.barrier(group=group)


# -- Python objects (start-up, checkpoints; never per step) ------------------------------------------------------


@noted
def all_gather_object(obj: Any, group: ProcessGroup | None, *, purpose: str) -> list[Any]:
    """Every rank's object, in rank order."""
    if _alone(group):
        return [obj]
    assert group is not None
    COUNTERS[NAMES.get(group, "world"), "all_gather_object", purpose][0] += 1
    objects: list[Any] = [None] * group.size()
    dist.all_gather_object(objects, obj, group=group)
    return objects


@noted
def broadcast_object(obj: Any, group: ProcessGroup | None, *, source: int = 0, purpose: str) -> Any:
    """The object of the rank at place `source` of the group."""
    if _alone(group):
        return obj
    assert group is not None
    COUNTERS[NAMES.get(group, "world"), "broadcast_object", purpose][0] += 1
    box = [obj]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, source), group=group)
    return box[0]


def world() -> ProcessGroup | None:
    """The group of all ranks, or None in a run of one process."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 else None
