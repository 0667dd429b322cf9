"""The worlds that other tests stand on."""

import os

import pytest
import torch
import torch.distributed as dist

from megatron_lite import collectives
from megatron_lite.errors import RankFailure


def _sum_of_ranks() -> tuple[int, float]:
    x = torch.tensor([float(dist.get_rank())])
    collectives.all_reduce(x, collectives.world(), purpose="test")
    return dist.get_rank(), x.item()


def _fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 has had enough")
    dist.barrier()


def _die() -> None:
    if dist.get_rank() == 0:
        os._exit(3)
    dist.barrier()


def test_every_rank_answers_in_rank_order(world):
    assert world(2).run(_sum_of_ranks) == [(0, 1.0), (1, 1.0)]


def test_a_failing_rank_shows_its_own_traceback_and_the_world_is_replaced(world):
    """Would show: the test that hangs until a timeout because one rank of two failed."""
    first = world(2)
    with pytest.raises(RankFailure, match=r"(?s)rank 1: .*rank 1 has had enough"):
        first.run(_fail_on_rank_1)
    assert first.closed and world(2) is not first
    assert world(2).run(_sum_of_ranks) == [(0, 1.0), (1, 1.0)]


def test_a_dead_rank_is_named(world):
    with pytest.raises(RankFailure, match="rank 0: the process died"):
        world(2).run(_die)
