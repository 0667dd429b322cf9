"""Who holds which positions, and who sees whom: every pair of a query and a key exactly once, whatever the layout."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.context_parallel.partition import (
    Documents,
    Kind,
    Runs,
    held_runs,
    join_sequence,
    natural_runs,
    one_document,
    order_of,
    pieces,
    positions,
    split_sequence,
)
from megatron_lite.context_parallel.visibility import Visible
from megatron_lite.errors import ConfigError
from megatron_lite.packed_seq_params import Document


@pytest.mark.parametrize(
    "cp_size, length, shares",
    [
        (2, 16, [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]),
        (4, 16, [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]),
    ],
)
def test_ranks_hold_an_early_and_a_late_chunk(cp_size: int, length: int, shares: list[list[int]]) -> None:
    """The tables of Megatron's split."""
    documents = one_document(length)
    assert [positions(held_runs(rank, cp_size, documents)).tolist() for rank in range(cp_size)] == shares
    assert [split_sequence(torch.arange(length), rank, cp_size).tolist() for rank in range(cp_size)] == shares


@pytest.mark.parametrize("cp_size, pairs", [(2, 68), (4, 34)])
def test_ranks_have_equal_shares_of_the_causal_triangle(cp_size: int, pairs: int) -> None:
    """Consecutive chunks would give 36 and 100, or 10, 26, 42 and 58 pairs."""
    documents = one_document(16)
    for rank in range(cp_size):
        mine = held_runs(rank, cp_size, documents)
        work = [pieces(mine, held_runs(other, cp_size, documents), None, 0) for other in range(cp_size)]
        assert sum(piece.pairs for found in work for piece in found) == pairs
        others = [sum(piece.pairs for piece in found) for other, found in enumerate(work) if other != rank]
        assert set(others) == {2 * (16 // (2 * cp_size)) ** 2}, "each step of the ring costs the same"


def test_a_step_of_the_ring_is_one_piece() -> None:
    """All queries on the early keys of an earlier rank, the late queries on all keys of a later one."""
    documents = one_document(32)
    runs = [held_runs(rank, 4, documents) for rank in range(4)]
    found = {other: [(p.queries, p.keys, p.kind) for p in pieces(runs[1], runs[other], None, 0)] for other in range(4)}
    all_, early, late = slice(0, 8), slice(0, 4), slice(4, 8)
    assert found == {
        0: [(all_, early, Kind.FULL)],
        1: [(all_, all_, Kind.DIAGONAL)],
        2: [(late, all_, Kind.FULL)],
        3: [(late, all_, Kind.FULL)],
    }


def test_gathered_keys_are_a_prefix_and_a_triangle_for_each_chunk() -> None:
    documents = one_document(32)
    work = pieces(held_runs(1, 4, documents), natural_runs(4, documents), None, 0)
    assert [(p.queries, p.keys, p.kind) for p in work] == [
        (slice(0, 4), slice(0, 4), Kind.FULL),
        (slice(0, 4), slice(4, 8), Kind.DIAGONAL),
        (slice(4, 8), slice(0, 24), Kind.FULL),
        (slice(4, 8), slice(24, 28), Kind.DIAGONAL),
    ]


@st.composite
def sequences(draw: st.DrawFn) -> tuple[int, Documents]:
    """A number of ranks and documents that they can share, some with padding."""
    cp_size = draw(st.integers(1, 5))
    unit = 2 * cp_size if cp_size > 1 else 1
    lengths = draw(st.lists(st.integers(1, 4).map(lambda n: n * unit), min_size=1, max_size=4))
    ends = list(accumulate(lengths))
    documents = []
    for length, end in zip(lengths, ends):
        documents.append(Document(end - length, end, end - draw(st.integers(0, length // 2))))
    return cp_size, tuple(documents)


@given(sequences())
def test_shares_hold_every_position_once_and_join_to_the_sequence(sequence: tuple[int, Documents]) -> None:
    cp_size, documents = sequence
    length = documents[-1].end
    x = torch.arange(3 * length).view(3, length)
    shares = [split_sequence(x, rank, cp_size, 1, documents) for rank in range(cp_size)]
    assert {share.shape for share in shares} == {(3, length // cp_size)}
    assert torch.equal(join_sequence(shares, 1, documents), x)
    for rank in range(cp_size):
        runs = held_runs(rank, cp_size, documents)
        held = positions(runs)
        assert torch.equal(shares[rank][0], held) and bool((held.diff() > 0).all())
        places = [run.place + i for document in runs for run in document for i in range(run.length)]
        assert places == list(range(length // cp_size))
    assert torch.equal(positions(natural_runs(cp_size, documents)), torch.arange(length))


def _seen(q_runs: Runs, k_runs: Runs, work: tuple, visible: Visible) -> torch.Tensor:
    """How often each pair of a query and a key is computed and seen."""
    mine, theirs = positions(q_runs), positions(k_runs)
    count = torch.zeros(len(mine), len(theirs), dtype=torch.int)
    for piece in work:
        part = count[piece.queries, piece.keys]
        if piece.kind is Kind.FULL:
            part += 1
        elif piece.kind is Kind.DIAGONAL:
            part += torch.ones_like(part).tril()
        else:
            hidden = visible.hidden(mine[piece.queries], piece.queries, theirs[piece.keys])
            part += 1 if hidden is None else (~hidden[0, 0]).int()
    return count


@given(sequences(), st.data())
def test_pieces_hold_every_visible_pair_once_and_no_other(sequence: tuple[int, Documents], data: st.DataObject) -> None:
    """Causal, windows, everything; masked or not; keys of each rank, or gathered: against the rule for one pair."""
    cp_size, documents = sequence
    limit = st.one_of(st.none(), st.integers(0, 9))
    left, right = data.draw(st.one_of(st.just((None, 0)), st.tuples(limit, limit)))
    masked = data.draw(st.booleans())
    rank = data.draw(st.integers(0, cp_size - 1))
    visible = Visible(left, right)
    padded = any(d.seen < d.end for d in documents)
    seen = tuple(d.seen for d in documents) if padded else ()
    q_runs = held_runs(rank, cp_size, documents)
    for k_runs in (
        *(held_runs(other, cp_size, documents) for other in range(cp_size)),
        natural_runs(cp_size, documents),
    ):
        work = pieces(q_runs, k_runs, left, right, masked, seen)
        count = _seen(q_runs, k_runs, work, visible)
        for i, q in enumerate(positions(q_runs).tolist()):
            document = next(d for d in documents if d.begin <= q < d.end)
            for j, k in enumerate(positions(k_runs).tolist()):
                inside = document.begin <= k < document.seen
                near = (left is None or k >= q - left) and (right is None or k <= q + right)
                assert count[i, j] == int(inside and near), (q, k)


@given(st.sampled_from([(2, 2), (2, 4), (4, 2), (3, 2)]), st.integers(1, 3))
def test_neighbours_of_a_level_hold_together_what_a_rank_of_the_level_above_holds(
    sizes: tuple[int, int], chunk: int
) -> None:
    """Hierarchical: after the all-to-all inside level 0 the ring over level 1 finds its own zigzag."""
    inner, outer = sizes
    documents = (*one_document(2 * inner * outer * chunk),)
    for block in range(outer):
        ranks = range(block * inner, (block + 1) * inner)
        joined = torch.cat([positions(held_runs(rank, inner * outer, documents)) for rank in ranks])
        order = order_of(ranks, inner * outer, documents)
        assert torch.equal(joined[order], positions(held_runs(block, outer, documents)))


def test_a_length_that_does_not_divide_is_refused_with_one_that_does() -> None:
    with pytest.raises(ConfigError, match=r"--seq-length 20 with --context-parallel-size 4(.|\n)*--seq-length 24"):
        split_sequence(torch.zeros(20), 0, 4)
    with pytest.raises(ConfigError, match="a document of length 6"):
        split_sequence(torch.zeros(14), 0, 4, 0, (Document(0, 8, 8), Document(8, 14, 14)))
