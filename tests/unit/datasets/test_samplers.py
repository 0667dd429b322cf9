"""Every sample once, in one global order, wherever and on however many ranks a run goes on."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.datasets.samplers import (
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
    RoundRobinSampler,
    WholeSetSampler,
)
from megatron_lite.errors import DataError

GRID = [(total, b, ranks) for total in (8, 13, 14, 24, 31) for b in (1, 2, 3) for ranks in (1, 2, 4)]


def single(total, consumed, b, rank, ranks):
    return MegatronPretrainingSampler(total, consumed, b, rank, ranks)


def cyclic(total, consumed, b, rank, ranks, sharding=False):
    return MegatronPretrainingRandomSampler(None, total, consumed, b, rank, ranks, sharding)


@pytest.mark.parametrize(("total", "b", "ranks"), [case for case in GRID if case[0] >= case[1] * case[2]])
def test_ranks_together_read_the_global_order(total, b, ranks):
    per_rank = [list(single(total, 0, b, rank, ranks)) for rank in range(ranks)]
    read = [i for step in zip(*per_rank, strict=True) for batch in step for i in batch]
    assert read == list(range(total // (b * ranks) * b * ranks))


def global_batches(consumed, b, ranks, steps, total=96, batch=8):
    """The ids of each global batch of 8 samples, from `consumed` on."""
    streams = [iter(single(total, consumed, b, rank, ranks)) for rank in range(ranks)]
    return [
        sorted(i for _ in range(batch // (b * ranks)) for stream in streams for i in next(stream)) for _ in range(steps)
    ]


@pytest.mark.parametrize(("b", "ranks"), [(1, 1), (2, 1), (1, 2), (2, 2), (2, 4), (4, 2)])
def test_C039_global_batches_do_not_depend_on_the_layout(b, ranks):
    """Interrupted after 5 steps on 4 ranks, the run goes on with the same samples on any other number."""
    whole = global_batches(0, 2, 4, 12)
    assert global_batches(0, b, ranks, 12) == whole
    assert global_batches(5 * 8, b, ranks, 7) == whole[5:]


@pytest.mark.parametrize("sharding", [True, False])
@pytest.mark.parametrize(("total", "b", "ranks"), [case for case in GRID if case[0] >= case[1] * case[2]])
def test_cyclic_ranks_get_equally_many_batches_and_no_sample_twice(total, b, ranks, sharding):
    per_rank = [list(cyclic(total, 0, b, rank, ranks, sharding)) for rank in range(ranks)]
    assert {len(batches) for batches in per_rank} == {total // (b * ranks)}
    read = [i for batches in per_rank for batch in batches for i in batch]
    assert len(read) == len(set(read)) and all(0 <= i < total for i in read)


@pytest.mark.parametrize("sharding", [True, False])
def test_cyclic_resume_at_every_step_is_the_tail(sharding):
    """Also exactly at the end of an epoch, and epochs differ."""
    total, b, ranks = 26, 2, 3
    epoch = total // (b * ranks)

    def stream(consumed, rank, batches):
        sampler, read = cyclic(total, consumed, b, rank, ranks, sharding), []
        while len(read) < batches:
            read += list(sampler)
        return read[:batches]

    for rank in range(ranks):
        whole = stream(0, rank, 3 * epoch)
        assert whole[:epoch] != whole[epoch : 2 * epoch]
        for step in range(2 * epoch + 1):
            assert stream(step * b * ranks, rank, 3 * epoch - step) == whole[step:]


def test_C041_later_epochs_after_a_late_resume_visit_every_sample():
    total = 40
    sampler = cyclic(total, 36, 2, 0, 1)
    assert len(sampler) == 2 and len(list(sampler)) == 2
    for _ in range(2):
        assert sorted(i for batch in sampler for i in batch) == list(range(total))


def test_C036_resume_exactly_at_the_end_of_an_epoch():
    whole = cyclic(24, 0, 2, 0, 2)
    list(whole)
    assert next(iter(cyclic(24, 24, 2, 0, 2))) == next(iter(whole))


def test_C035_fewer_samples_than_one_group_are_named():
    with pytest.raises(DataError, match="3 samples .* 2 x 2"):
        cyclic(3, 0, 2, 0, 2)


def test_position_inside_a_group_is_refused():
    with pytest.raises(DataError, match="5 consumed samples"):
        cyclic(24, 5, 2, 0, 2)


def test_length_is_the_number_of_batches():
    assert len(single(25, 4, 2, 0, 2)) == 5 == len(list(single(25, 4, 2, 0, 2)))
    last = MegatronPretrainingSampler(25, 4, 2, 0, 2, drop_last=False)
    assert len(last) == 6 == len(list(last))


def test_nothing_to_read_is_an_error():
    for total, consumed in ((0, 0), (8, 8), (8, 9)):
        with pytest.raises(DataError):
            single(total, consumed, 1, 0, 1)


@pytest.mark.parametrize("total", [3, 13, 40])
@pytest.mark.parametrize(("b", "ranks"), [(1, 1), (2, 2), (1, 4), (4, 2)])
def test_round_robin_is_one_endless_order_in_every_layout(total, b, ranks):
    """Also where the data are shorter than one batch; also from any position on."""
    for consumed in (0, 8, 16, 1000):
        streams = [iter(RoundRobinSampler(total, consumed, b, rank, ranks)) for rank in range(ranks)]
        groups = 48 // (b * ranks)
        read = [i for _ in range(groups) for stream in streams for i in next(stream)]
        assert read == [p % total for p in range(consumed, consumed + groups * b * ranks)]


@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_whole_set_is_every_sample_once_in_equally_many_batches(total, b, ranks, num_microbatches):
    samplers = [WholeSetSampler(total, b, rank, ranks, num_microbatches) for rank in range(ranks)]
    per_rank = [list(sampler) for sampler in samplers]
    batch = b * ranks * num_microbatches
    for sampler, batches in zip(samplers, per_rank):
        assert len(batches) == len(sampler) == sampler.num_batches * num_microbatches
        assert all(len(ids) == b for ids in batches)
    assert samplers[0].num_batches == -(-total // batch)
    read = [i for step in zip(*per_rank) for ids in step for i in ids]
    assert read == [*range(total), *[None] * (-total % batch)]


@pytest.mark.parametrize("sharding", [True, False])
def test_C039_cyclic_goes_on_with_other_ranks_where_epochs_are_whole(sharding):
    """Ranks change the order of a cyclic epoch with sharding, and its length where it does not fill whole groups; but
    a position of one layout is one of the other, and no sample of an epoch is read twice after the change."""
    total, batch = 48, 8
    for b, ranks in [(2, 2), (1, 4), (4, 1), (2, 4)]:
        streams = [iter(cyclic(total, 3 * batch, b, rank, ranks, sharding)) for rank in range(ranks)]
        rest = [i for stream in streams for ids in stream for i in ids]
        assert len(rest) == len(set(rest)) == total - 3 * batch
    if not sharding:  # one shared order: with the micro-batch size it stays, ranks take turns in it
        orders = []
        for ranks in (1, 2, 4):
            streams = [islice(cyclic(total, 0, 2, rank, ranks), 24) for rank in range(ranks)]
            groups = [sorted(i for ids in step for i in ids) for step in zip(*streams)]
            per_batch = batch // (2 * ranks)
            orders.append([sorted(sum(groups[k : k + per_batch], [])) for k in range(0, len(groups), per_batch)])
        assert orders[0] == orders[1] == orders[2]
