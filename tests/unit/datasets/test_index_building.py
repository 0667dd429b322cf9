"""Which tokens make a sample, against a walk token by token; blends against the recurrence itself."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_lite.datasets import index_building
from megatron_lite.datasets.index_building import (
    build_blending_indices,
    build_document_index,
    build_exhaustive_blending_indices,
    build_sample_index,
    build_shuffle_index,
    number_of_epochs,
    number_of_samples,
    separate_last_epoch,
)
from megatron_lite.datasets.utils import normalize


def walk(sizes, documents, s, x, samples):
    """Sample by sample, document by document: the plain meaning of the index."""
    rows, position, offset = [(0, 0)], 0, 0
    for _ in range(samples):
        need = s + x
        while True:
            have = sizes[documents[position]] - offset
            if have >= need:
                offset += need - x
                break
            need -= have
            if position == len(documents) - 1:
                offset = sizes[documents[position]] - x
                break
            position, offset = position + 1, 0
        rows.append((position, offset))
    return rows


sizes_of_documents = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(sum)


@settings(max_examples=200)
@given(sizes_of_documents, st.integers(1, 12), st.integers(0, 1), st.integers(1, 4), st.integers(1, 5))
def test_sample_index_equals_the_walk(sizes, s, x, epochs, chunk):
    """In chunks as small as one document, so that every boundary between chunks is passed."""
    sizes = np.array(sizes, np.int32)
    documents = build_document_index(np.arange(len(sizes), dtype=np.int32), epochs, np.random.RandomState(1), False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_building, "_CHUNK", chunk)
        index = build_sample_index(sizes, documents, s, int(sizes.sum()), epochs, True, bool(x))
    samples = number_of_samples(int(sizes.sum()) * epochs, s, x)
    assert index.tolist() == [list(row) for row in walk(sizes, documents, s, x, samples)]


def read(index, documents, tokens, k, x):
    """The tokens of sample k, `tokens[document]` being its list."""
    (p0, o0), (p1, o1) = index[k], index[k + 1]
    if p0 == p1:
        return tokens[documents[p0]][o0 : o1 + x]
    middle = [t for p in range(p0 + 1, p1) for t in tokens[documents[p]]]
    return [*tokens[documents[p0]][o0:], *middle, *tokens[documents[p1]][: o1 + x]]


@settings(max_examples=150)
@given(sizes_of_documents, st.integers(1, 9), st.integers(0, 1), st.booleans(), st.integers(1, 3))
@example([3, 5, 0], 4, 1, False, 1)  # an empty last document
@example([1], 1, 1, True, 1)
def test_samples_in_order_are_the_flat_stream(sizes, s, x, drop, epochs):
    """Inputs joined = the documents joined, labels = the same moved by one; no token is lost without drop."""
    sizes = np.array(sizes, np.int32)
    ends = np.cumsum(sizes)
    tokens = [list(range(end - size, end)) for size, end in zip(sizes, ends)]
    documents = build_document_index(np.arange(len(sizes), dtype=np.int32), epochs, np.random.RandomState(3), False)
    stream = [t for d in documents for t in tokens[d]]
    index = build_sample_index(sizes, documents, s, len(stream) // epochs, epochs, drop, bool(x))
    for k in range(len(index) - 1):
        assert read(index, documents, tokens, k, x) == stream[k * s : k * s + s + x]
    covered = (len(index) - 1) * s + x
    if drop:
        assert covered <= max(len(stream), x) and len(stream) - covered < s
    else:
        assert covered >= len(stream)


@pytest.mark.parametrize("s", [1, 3, 10, 64])
@pytest.mark.parametrize("tokens", [1, 7, 30, 64, 1000])
@pytest.mark.parametrize("extra", [0, 1])
def test_epochs_are_the_fewest_that_give_the_samples(s, tokens, extra):
    for wanted in (0, 1, 2, 7, 100, 1001):
        epochs = number_of_epochs(wanted, tokens, s, extra)
        assert number_of_samples(epochs * tokens, s, extra) >= wanted
        assert epochs == 1 or number_of_samples((epochs - 1) * tokens, s, extra) < wanted
    assert number_of_epochs(None, tokens, s, extra) == 1


def test_C023_small_corpus_takes_166_epochs():
    assert number_of_epochs(100, 620, 1024, 1) == 166


def test_last_epoch_is_apart_below_exactly_80_percent():
    """T = 1001, S = 10: 100 samples an epoch; 79 of the last one are less than 80, 80 are not."""
    assert number_of_epochs(179, 1001, 10, 1) == number_of_epochs(180, 1001, 10, 1) == 2
    assert separate_last_epoch(179, 2, 1001, 10, 1) == 100
    assert separate_last_epoch(180, 2, 1001, 10, 1) is None
    assert separate_last_epoch(None, 1, 1001, 10, 1) is None


def test_separate_last_epoch_holds_every_document_once():
    documents = np.arange(50, dtype=np.int32)
    index = build_document_index(documents, 4, np.random.RandomState(7), True)
    assert sorted(index[-50:]) == list(range(50))
    assert np.bincount(index[:-50]).tolist() == [3] * 50


def test_C022_every_document_is_drawn_once_per_epoch_and_seeds_differ():
    documents = np.arange(50, dtype=np.int32)
    first, same, other = (build_document_index(documents, 3, np.random.RandomState(s), False) for s in (1, 1, 2))
    assert np.bincount(first).tolist() == [3] * 50
    assert np.array_equal(first, same) and not np.array_equal(first, other)


@given(st.integers(0, 200), st.integers(0, 200))
def test_shuffle_index_permutes_both_parts(a, b):
    first, total = min(a, b), max(a, b)
    index = build_shuffle_index(first, total, np.random.RandomState(5))
    assert index.dtype == np.uint32
    assert sorted(index[:first]) == list(range(first)) and sorted(index[first:]) == list(range(first, total))


@pytest.mark.parametrize(
    ("tokens", "s", "samples"),
    [(2**24 + k, 1, 2**24 + k - 1) for k in (1, 2, 3)]
    + [(1_000_000_071, 8, 125_000_009), (1_000_000_071, 2048, 488_282), (2**31 + 1, 2048, 2**20)],
)
def test_samples_are_counted_in_integers(tokens, s, samples):
    """float32 is one off from 2**24 tokens on."""
    assert number_of_samples(tokens, s, 1, drop_last_partial_sequence=False) == samples


def test_C024_sample_index_past_2_to_31_tokens():
    """2,200 documents of a million tokens: rows sorted, every sample 2,049 tokens, the last one too."""
    sizes = np.full(2200, 1_000_000, np.int32)
    documents = build_document_index(np.arange(2200, dtype=np.int32), 1, np.random.RandomState(1), False)
    index = build_sample_index(sizes, documents, 2048, 2_200_000_000, 1).astype(np.int64)
    assert len(index) - 1 == (2_200_000_000 - 1) // 2048
    flat = index[:, 0] * 1_000_000 + index[:, 1]
    assert index.min() >= 0 and (index[:, 1] < 1_000_000).all()
    assert (np.diff(flat) == 2048).all()


def test_offsets_past_32_bits_widen_the_index():
    index = build_sample_index(np.array([2**31 + 9]), np.array([0]), 2**30, 2**31 + 9, 1)
    assert index.dtype == np.int64 and index.tolist() == [[0, 0], [0, 2**30], [0, 2**31]]


def greedy(weights, size, limits=None):
    """The rule, item by item."""
    counts, datasets, samples = np.zeros(len(weights), np.int64), [], []
    for i in range(size):
        lag = weights * max(i, 1.0) - counts
        if limits is not None:
            lag[counts >= limits] = -np.inf
        j = int(lag.argmax())
        datasets.append(j)
        samples.append(int(counts[j]))
        counts[j] += 1
    return datasets, samples


@settings(max_examples=80)
@given(st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=8), st.integers(0, 2000))
@example([0.25] * 4, 1001)
@example([1.0, 1e-4, 1e-4], 2000)
def test_blend_equals_the_rule_and_keeps_every_share(weights, size):
    """Counts stay within 1 of the share for two datasets and below 2 for up to eight, at every prefix."""
    shares = np.array(normalize(weights))
    datasets, samples = build_blending_indices(shares, size)
    assert (datasets.tolist(), samples.tolist()) == greedy(shares, size)
    drawn = np.cumsum(datasets[:, None] == np.arange(len(shares)), axis=0)
    gap = np.abs(drawn - shares * np.arange(1, size + 1)[:, None])
    assert not size or gap.max() <= (1 + 1e-9 if len(shares) <= 2 else 2)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=8))
def test_exhaustive_blend_uses_every_sample_once(sizes):
    datasets, samples = build_exhaustive_blending_indices(sizes)
    limits = np.array(sizes)
    assert (datasets.tolist(), samples.tolist()) == greedy(limits / limits.sum(), int(limits.sum()), limits)
    for j, size in enumerate(sizes):
        assert samples[datasets == j].tolist() == list(range(size))


def test_blend_of_worked_weights():
    assert build_blending_indices([0.3, 0.7], 10)[0].tolist() == [1, 0, 1, 1, 0, 1, 1, 0, 1, 1]
    assert build_blending_indices([0.5, 0.5], 4)[0].tolist() == [0, 1, 0, 1]
    assert build_exhaustive_blending_indices([3, 2])[0].tolist() == [0, 1, 0, 1, 0]
