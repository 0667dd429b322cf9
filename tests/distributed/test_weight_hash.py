"""Replicas of the weights are compared bit for bit, and the copy that differs is named."""

import pytest
import torch
from torch import nn

from megatron_lite import collectives
from megatron_lite.errors import RankFailure
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.training.weight_hash import check_weight_hashes, weight_hash


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_a_hash_changes_with_every_single_bit_and_with_the_order(dtype):
    torch.manual_seed(1)
    x = (torch.rand(3, 7) * 100).to(dtype)
    words = x.view(-1).view(torch.uint8)
    before = weight_hash(x).item()
    for place in range(len(words)):
        for bit in range(8):
            words[place] ^= 1 << bit
            assert weight_hash(x).item() != before, (place, bit)
            words[place] ^= 1 << bit
    assert weight_hash(x.flip(0)).item() != before == weight_hash(x.clone()).item()


def test_a_tensor_of_several_pieces_has_the_hash_of_one(monkeypatch):
    x = torch.randn(1000)
    whole = weight_hash(x)
    monkeypatch.setattr("megatron_lite.training.weight_hash._PIECE", 64)
    assert weight_hash(x) == whole


def _check(spoilt, expert=False):
    """A model that is equal everywhere but on the ranks `spoilt`, where one bit of its bias differs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if expert:
        for param in model[1].parameters():
            param.allreduce = False
    rank = torch.distributed.get_rank()
    if rank in spoilt:
        model[1].bias.data.view(torch.int32)[2] ^= 1
    group = collectives.world()
    groups = ProcessGroupCollection(dp_cp=group, expt_dp=group)
    try:
        check_weight_hashes([model], 7, groups)
    except RankFailure as failure:
        return failure.what
    return None


@pytest.mark.parametrize("expert", [False, True])
def test_a_replica_with_one_wrong_bit_is_named_on_every_rank(world, expert):
    assert world(2).run(_check, (), expert) == [None, None]
    found = world(2).run(_check, (1,), expert)
    assert found[0] == found[1] and "after 7 iterations" in found[0]
    assert "rank 1: 1.bias (compared with rank 0)" in found[0] and "weight" not in found[0].split(":", 1)[1]


def test_the_odd_one_out_is_named_also_where_it_is_the_first(world):
    """Compared with rank 0 alone, all the healthy replicas would be blamed."""
    (found, *_) = world(4).run(_check, (0,))
    assert "rank 0: 1.bias (compared with rank 1)" in found and "rank 1:" not in found and "rank 2:" not in found
