"""Sums over ranks, as `collectives` makes them on gloo: by sends and receives, added in the order of ranks."""

import pytest
import torch
import torch.distributed as dist

from megatron_lite import collectives


def _mine(numel, dtype=torch.float32, rank=None):
    """A rank's numbers, of very different sizes: another order of addition would round otherwise."""
    generator = torch.Generator().manual_seed(dist.get_rank() if rank is None else rank)
    x = torch.randn(numel, generator=generator) * 10 ** torch.randint(-6, 6, (numel,), generator=generator)
    return x.to(dtype)


def _in_order(numel, times=1):
    """The sum that one process computes, rank after rank."""
    total = _mine(numel, rank=0) * times
    for rank in range(1, dist.get_world_size()):
        total = total + _mine(numel, rank=rank) * times
    return total


def _sums(numel):
    group = collectives.world()
    size, rank = dist.get_world_size(), dist.get_rank()
    expected = _in_order(numel)
    found = {}
    x = _mine(numel)
    collectives.all_reduce(x, group, purpose="test")
    found["sum"] = torch.equal(x, expected)
    x = _mine(numel)
    collectives.all_reduce(x, group, op="avg", scale=3.0, purpose="test")
    found["scaled mean"] = torch.equal(x, expected * (3.0 / size))
    x = _mine(numel).view(-1, 2).t()
    assert not x.is_contiguous()
    collectives.all_reduce(x, group, purpose="test")
    found["transposed"] = torch.equal(x, expected.view(-1, 2).t())
    whole = _mine(numel // size * size)
    part = torch.empty(numel // size)
    collectives.reduce_scatter(part, whole, group, purpose="test")
    there = expected[: len(whole)] if numel % size == 0 else _in_order(len(whole))
    found["part"] = torch.equal(part, there.chunk(size)[rank])
    found["input untouched"] = torch.equal(whole, _mine(numel // size * size))
    own = whole.chunk(size)[rank]
    collectives.reduce_scatter(own, whole, group, scale=0.5, purpose="test")
    found["in place"] = torch.equal(own, 0.5 * there.chunk(size)[rank])
    return found


@pytest.mark.parametrize(("ranks", "numel"), [(2, 4), (2, 1030), (2, 5006), (4, 1030), (4, 5006)])
def test_sums_are_those_of_one_process_bit_for_bit(world, ranks, numel):
    """Also where the number of elements is no multiple of the ranks, where the tensor is a transposed view, and where a
    reduce-scatter writes into its own input. (A few numbers are gloo's own sum: its order matters from 3 ranks on.)"""
    for found in world(ranks).run(_sums, numel):
        assert all(found.values()), found


def _waited_for_in_another_order():
    """Three sums and a gather under way at once, of one size; the ranks wait for them in different orders."""
    group, rank = collectives.world(), dist.get_rank()
    tensors = [_mine(4096) * (i + 1) for i in range(3)]
    gathered = torch.empty(2 * 4096)
    handles = [collectives.all_reduce(x, group, purpose="test", async_op=True) for x in tensors]
    handles.append(collectives.all_gather(gathered, _mine(4096), group, purpose="test", async_op=True))
    for number in ([0, 1, 2, 3], [3, 0, 1, 2])[rank]:
        handles[number].wait()
    sums = [torch.equal(x, _in_order(4096, i + 1)) for i, x in enumerate(tensors)]
    return sums, torch.equal(gathered, torch.cat([_mine(4096, rank=0), _mine(4096, rank=1)]))


def test_calls_under_way_together_do_not_mix(world):
    """Would show: messages of two calls on one group taken for each other."""
    assert world(2).run(_waited_for_in_another_order) == [([True] * 3, True)] * 2


def _counted():
    group = collectives.world()
    x = torch.zeros(4096)
    collectives.all_reduce(x, group, purpose="one")
    with collectives.coalesced(group, x, 2) as batch:
        for _ in range(2):
            batch.add(collectives.all_reduce(x, group, purpose="two", async_op=True))
    batch.wait()
    return {key[1:]: value for key, value in collectives.COUNTERS.items()}


def test_a_sum_is_counted_once_however_it_travels(world):
    assert world(2).run(_counted) == [{("all_reduce", "one"): [1, 16384], ("all_reduce", "two"): [2, 32768]}] * 2


def _no_overflow(op):
    x = torch.full((4096,), 40000.0, dtype=torch.float16)
    collectives.all_reduce(x, collectives.world(), op=op, scale=0.5 if op == "sum" else 1.0, purpose="test")
    return x.unique().tolist()


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_fp16_is_multiplied_before_it_is_added(world, op):
    assert world(2).run(_no_overflow, op) == [[40000.0]] * 2
