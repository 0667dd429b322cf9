"""Pieces and boxes cover every element exactly once."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.sharding import boxes_of_range, flat_range, rows, rows_of, split, whole


@st.composite
def shapes_and_ranges(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=4)))
    numel = math.prod(shape)
    begin = draw(st.integers(0, numel))
    return shape, begin, draw(st.integers(begin, numel))


@given(shapes_and_ranges())
def test_boxes_of_a_flat_range_are_that_range_in_order(case):
    """An off-by-one at a row boundary loses or repeats optimizer state of one parameter at a shard's edge."""
    shape, begin, end = case
    flat = torch.arange(math.prod(shape)).view(shape)
    parts = [
        flat[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))].reshape(-1)
        for offset, size in boxes_of_range(shape, begin, end)
    ]
    joined = torch.cat(parts) if parts else torch.empty(0, dtype=torch.long)
    assert joined.tolist() == list(range(begin, end))
    assert len(parts) <= max(2 * len(shape) - 1, 1)


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 2),
)
def test_shards_of_all_ranks_join_to_the_global_tensor(shape, size, stride, dim):
    """With stride 2 (gate and up stacked) a contiguous cut would give a rank gates without their ups."""
    dim %= len(shape)
    shape[dim] *= stride
    specs = [split("w", tuple(shape), dim, rank, size, stride) for rank in range(size)]
    joined = torch.zeros(specs[0].global_shape)
    for spec in specs:
        assert spec.local_shape == tuple(shape)
        for piece in spec.pieces:
            joined[piece.global_slices()] += 1
    assert torch.equal(joined, torch.ones_like(joined))


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(0, 2),
    st.lists(st.integers(0, 200), max_size=3),
)
def test_flat_ranges_of_all_ranks_join_to_the_global_tensor(shape, size, stride, dim, cuts):
    """Each rank's tensor is flattened and cut at any places, as a sharded optimizer does. A wrong box would load one
    element's moments into another's."""
    dim %= len(shape)
    shape[dim] *= stride
    numel = math.prod(shape)
    truth = torch.arange(numel * size).view(split("w", tuple(shape), dim, 0, size, stride).global_shape)
    joined = torch.full_like(truth, -1)
    for rank in range(size):
        spec = split("w", tuple(shape), dim, rank, size, stride)
        local = torch.empty(tuple(shape), dtype=truth.dtype)
        for piece in spec.pieces:
            local[piece.local_slices()] = truth[piece.global_slices()]
        borders = sorted({0, numel, *(min(cut, numel) for cut in cuts)})
        for begin, end in zip(borders, borders[1:]):
            part = local.reshape(-1)[begin:end]
            boxes = flat_range(spec, begin, end)
            assert (boxes.name, boxes.global_shape) == ("w", spec.global_shape)
            assert sum(math.prod(piece.shape) for piece in boxes.pieces) == end - begin
            for piece in boxes.pieces:
                (start,) = piece.local_offset
                flat = part[start : start + math.prod(piece.shape)]
                joined[piece.global_slices()] = flat.view(piece.shape)
    assert torch.equal(joined, truth)


def test_gated_rows_are_cut_inside_each_half():
    """Eight rows, [gate; up] stacked, two ranks: rank 0 has rows 0 1 4 5."""
    rows = [
        [r for p in split("w", (4, 3), 0, rank, 2, stride=2).pieces for r in range(8)[p.global_slices()[0]]]
        for rank in range(2)
    ]
    assert rows == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_whole_is_whole():
    """A scalar too."""
    assert whole("w", ()).is_whole and whole("w", (2, 3)).is_whole
    assert not split("w", (2, 3), 0, 0, 2).is_whole


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("stride", [1, 2])
def test_rows_of_a_cut_tensor_are_those_of_the_global_one(ranks, stride):
    """Stacked parts fall into several pieces, of which a rank's rows may touch any; the last ranks may have none."""
    whole_tensor = np.arange(12 * 5).reshape(12, 5)
    for tp_rank in range(2):
        spec = split("w", (6, 5), 0, tp_rank, 2, stride)
        local = np.zeros((6, 5), dtype=int)
        for piece in spec.pieces:
            local[piece.local_slices()] = whole_tensor[piece.global_slices()]
        seen = []
        for rank in range(ranks):
            begin, end = rows_of(6, rank, ranks)
            part = rows(spec, begin, end)
            for piece in part.pieces:
                assert (local[begin:end][piece.local_slices()] == whole_tensor[piece.global_slices()]).all()
            seen += range(begin, end)
            assert part.local_shape == ((end - begin, 5) if end > begin else ())
        assert seen == list(range(6))
