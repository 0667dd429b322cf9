"""Communication in parts beside the products: the same numbers by the same bytes."""

import pytest
import torch
import torch.distributed as dist

from megatron_lite import collectives
from tests.distributed.test_tensor_parallel import joined, train_step


def counted(size: int, more: dict):
    """A training step, and what it moved by kind: calls and bytes."""
    collectives.COUNTERS.clear()
    result = train_step(size, True, True, False, more)
    moved: dict[str, list[int]] = {}
    for (_, kind, _), (calls, size_of) in collectives.COUNTERS.items():
        entry = moved.setdefault(kind, [0, 0])
        entry[0] += calls
        entry[1] += size_of
    return (*result, moved)


OVERLAPS = {
    "default": {},
    "gather only": {"tp_comm_overlap_rs": False},
    "reduce only": {"tp_comm_overlap_ag": False},
    "input gradients in parts": {"tp_comm_overlap_rs_dgrad": True},
    "nothing beside anything": {
        "tp_comm_overlap_ag": False,
        "tp_comm_overlap_rs": False,
        "tp_comm_bulk_dgrad": False,
        "tp_comm_bulk_wgrad": False,
    },
}
ROWS = [(2, kind) for kind in OVERLAPS] + [(4, "input gradients in parts")]


@pytest.mark.parametrize(("ranks", "kind"), ROWS, ids=[f"{ranks} ranks, {kind}" for ranks, kind in ROWS])
def test_layers_that_send_in_parts_train_as_one_process(world, ranks, kind):
    """A part that lands at another rank's place, or is added twice, shows in loss and gradients."""
    alone = [train_step(1, False, False, False)]
    whole = world(ranks).run(counted, ranks, {})
    parts = world(ranks).run(counted, ranks, {"tp_comm_overlap": True, **OVERLAPS[kind]})
    for result, other in zip(parts, whole):
        torch.testing.assert_close(result[0], alone[0][0], atol=1e-5, rtol=1e-5)
        assert result[3] == other[3] and result[3]["reduce_scatter"][1] > 0
    grads = joined(parts, 1)
    for name, want in joined(alone, 1).items():
        torch.testing.assert_close(grads[name], want, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def in_turn():
    """Places in the order of arrival, and a reduction of parts that tell who made them for whom."""
    group, rank = dist.group.WORLD, dist.get_rank()
    parts = collectives.gather_in_turn(torch.full((2,), rank), group, purpose="test")
    arrivals = [(place, part.clone()) for place, part in parts]
    asked = []

    def part_for(place):
        asked.append(place)
        return torch.tensor([10.0**rank * (place + 1)])

    return arrivals, asked, collectives.reduce_scatter_in_turn(part_for, group, purpose="test").item()


def test_parts_arrive_from_every_rank_once_and_the_own_one_waits_for_nobody(world):
    for rank, (arrivals, asked, total) in enumerate(world(4).run(in_turn)):
        assert [place for place, _ in arrivals] == [(rank - d) % 4 for d in range(4)]
        assert all(part.tolist() == [place, place] for place, part in arrivals)
        assert asked == [(rank + d) % 4 for d in (1, 2, 3, 0)] and total == 1111 * (rank + 1)
