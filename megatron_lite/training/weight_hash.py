"""Do the data-parallel replicas still hold the same parameters? (`--check-weight-hash-across-dp-replicas-interval`)

    parameter -> its bits as integers x_i -> sum of (2 i + 1) x_i modulo 2^64        one number, on its device

An odd factor is invertible modulo 2^64, so a change of one element always changes the number, and several cancel
by unlikely chance alone. Replicas are compared bit for bit: they started equal and took equal steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_lite import collectives
from megatron_lite.distributed import whole_parameters
from megatron_lite.errors import RankFailure
from megatron_lite.log import print_rank_0
from megatron_lite.process_groups_config import ProcessGroupCollection

_PIECE = 1 << 22  # elements hashed at once: int64 copies of them are all the memory it takes
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


@torch.no_grad()
def weight_hash(x: Tensor) -> Tensor:
    """An int64 scalar on `x`'s device that tells its bits: equal for equal bits, whatever they mean as numbers."""
    flat = x.detach().contiguous().view(-1)
    words = flat.view(_INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, len(words), _PIECE):
        piece = words[start : start + _PIECE].to(torch.int64)
        factors = torch.arange(2 * start + 1, 2 * (start + len(piece)) + 1, 2, device=x.device)
        total += (piece * factors).sum()
    return total


def check_weight_hashes(model: Sequence[nn.Module], iteration: int, pg_collection: ProcessGroupCollection) -> None:
    """Compare every parameter with its copies on the other replicas; collective over all ranks.

    Dense parameters are held by data- and context-parallel ranks, experts by expert-data-parallel ones.

    Raises: RankFailure, on every rank, naming rank and parameter of each copy that differs from what most hold.
    """
    whole_parameters(model)
    different: list[str] = []
    for is_expert, group in ((False, pg_collection.dp_cp), (True, pg_collection.expt_dp)):
        held = [pair for pair in _parameters(model) if is_expert == (not getattr(pair[1], "allreduce", True))]
        if held and collectives.group_size(group) > 1:
            different += _different(held, group)
    found = collectives.all_gather_object(different, collectives.world(), purpose="weight hashes that differ")
    lines = sorted({line for of_rank in found for line in of_rank})
    if lines:
        more = f"\n  and {len(lines) - 10} more" if len(lines) > 10 else ""
        raise RankFailure(
            f"replicas of the weights differ after {iteration} iterations:\n  " + "\n  ".join(lines[:10]) + more,
            why="replicas start equal and take equal steps: memory or a computation of one of them is at fault, or "
            "something other than the optimizer has written into its weights",
            fix="look at the machine of the rank that is named, and go on from the last checkpoint before a check that "
            "passed (--ckpt-step N)",
        )
    print_rank_0(f">>> Weight hashes match after {iteration} iterations...")


def _parameters(model: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """By global name where the parameter knows it."""
    for chunk in model:
        for name, param in chunk.named_parameters():
            spec = getattr(param, "shard", None)
            yield name if spec is None else spec.name, param


def _different(held: Sequence[tuple[str, nn.Parameter]], group: ProcessGroup | None) -> list[str]:
    mine = torch.stack([weight_hash(param) for _, param in held])
    table = mine.new_empty(collectives.group_size(group) * len(held))
    collectives.all_gather(table, mine, group, purpose="weight hashes")
    rows = table.view(-1, len(held))
    ranks = collectives.group_ranks(group)
    lines = []
    for number in (rows != rows[0]).any(0).nonzero().flatten().tolist():
        column = rows[:, number].tolist()
        usual = Counter(column).most_common(1)[0][0]  # of equally many the first rank's
        alike = ranks[column.index(usual)]
        lines += [
            f"rank {rank}: {held[number][0]} (compared with rank {alike})"
            for rank, value in zip(ranks, column)
            if value != usual
        ]
    return lines
