"""Who holds which positions of a sequence, and which of them see each other. Pure arithmetic, no communication.

A causal sequence falls into 2 c chunks for c ranks; rank r holds chunks r and 2 c - 1 - r. An early chunk sees little
and its late partner much, so all ranks have the same share of the causal triangle (Llama Team 2024, section 3.3.2):

    c = 2, 16 tokens     rank 0   0  1  2  3 | 12 13 14 15        rank 1   4  5  6  7 | 8  9 10 11

Packed documents are cut one by one, each into 2 c chunks, and lie in the same order on every rank. On any rank tokens
lie in the order of their positions: that is all that is needed to put shares together again.

`pieces` cuts the work of queries on keys into rectangles that a kernel can do: all of it seen, the causal triangle, or
with a mask. What nobody sees is in no piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor

from megatron_lite.errors import ConfigError
from megatron_lite.packed_seq_params import Document

Documents = tuple[Document, ...]


@dataclass(frozen=True)
class Run:
    """Positions [begin, begin + length), which lie from `place` on in a tensor."""

    begin: int
    length: int
    place: int


Runs = tuple[tuple[Run, ...], ...]  # of each document


def one_document(length: int) -> Documents:
    """A sequence that is not packed."""
    return (Document(0, length, length),)


def check_length(length: int, cp_size: int, what: str = "--seq-length") -> None:
    """Raises: ConfigError unless the length falls into 2 * cp_size chunks."""
    if cp_size > 1 and length % (2 * cp_size):
        raise ConfigError(
            f"{what} {length} with --context-parallel-size {cp_size}",
            why=f"each rank takes an early and a late chunk, so that {2 * cp_size} must divide the length",
            fix=f"{what} {-(-length // (2 * cp_size)) * 2 * cp_size}, or another context-parallel size",
        )


@lru_cache(maxsize=4096)
def held_runs(cp_rank: int, cp_size: int, documents: Documents) -> Runs:
    """What a rank holds of each document: two chunks, or all of it where there is one rank.

    Raises: ConfigError if 2 * cp_size does not divide every document.
    """
    if cp_size == 1:
        return tuple((Run(d.begin, d.end - d.begin, d.begin),) for d in documents)
    runs = []
    for d in documents:
        check_length(d.end - d.begin, cp_size, "a document of length" if len(documents) > 1 else "--seq-length")
        chunk = (d.end - d.begin) // (2 * cp_size)
        place = d.begin // cp_size
        early = Run(d.begin + cp_rank * chunk, chunk, place)
        late = Run(d.begin + (2 * cp_size - 1 - cp_rank) * chunk, chunk, place + chunk)
        runs.append((early, late))
    return tuple(runs)


@lru_cache(maxsize=4096)
def natural_runs(cp_size: int, documents: Documents) -> Runs:
    """All chunks of all ranks, in the order of positions: the place is the position."""
    if cp_size == 1:
        return held_runs(0, 1, documents)
    runs = []
    for d in documents:
        chunk = (d.end - d.begin) // (2 * cp_size)
        runs.append(tuple(Run(d.begin + i * chunk, chunk, d.begin + i * chunk) for i in range(2 * cp_size)))
    return tuple(runs)


def positions(runs: Runs, device: torch.device | None = None) -> Tensor:
    """The position of each token, int64, in the order in which tokens lie."""
    return torch.cat(
        [torch.arange(run.begin, run.begin + run.length, device=device) for document in runs for run in document]
    )


def order_of(ranks: Sequence[int], cp_size: int, documents: Documents, device: torch.device | None = None) -> Tensor:
    """Puts the shares of these ranks, laid one after another, into the order of positions: `joined[order]`."""
    return torch.cat([positions(held_runs(rank, cp_size, documents), device) for rank in ranks]).argsort()


# -- tensors -----------------------------------------------------------------------------------------------------


def split_sequence(x: Tensor, cp_rank: int, cp_size: int, dim: int = 0, documents: Documents | None = None) -> Tensor:
    """This rank's share of a sequence.

    Args:
        x: `[..., s, ...]` with s at `dim`.
        documents: of a packed sequence.
    Returns: `[..., s/cp, ...]`, a copy (x itself where there is one rank). `join_sequence` undoes it.
    Raises: ConfigError if 2 * cp_size does not divide s.
    """
    if cp_size == 1:
        return x
    runs = held_runs(cp_rank, cp_size, documents or one_document(x.shape[dim]))
    return torch.cat([x.narrow(dim, run.begin, run.length) for document in runs for run in document], dim)


def join_sequence(shares: Sequence[Tensor], dim: int = 0, documents: Documents | None = None) -> Tensor:
    """The sequence that `split_sequence` cut, from the shares of all ranks in rank order."""
    size = len(shares)
    if size == 1:
        return shares[0]
    order = order_of(range(size), size, documents or one_document(size * shares[0].shape[dim]), shares[0].device)
    return torch.cat(list(shares), dim).index_select(dim, order)


# -- who sees whom -----------------------------------------------------------------------------------------------


class Kind(Enum):
    """What is hidden inside a piece: nothing, the future (both sides are the same tokens), or what a mask says."""

    FULL = "full"
    DIAGONAL = "diagonal"
    MASKED = "masked"


@dataclass(frozen=True)
class Piece:
    """Queries at places [q_begin, q_end) on keys at places [k_begin, k_end)."""

    q_begin: int
    q_end: int
    k_begin: int
    k_end: int
    kind: Kind

    @property
    def queries(self) -> slice:
        """Places of the queries."""
        return slice(self.q_begin, self.q_end)

    @property
    def keys(self) -> slice:
        """Places of the keys."""
        return slice(self.k_begin, self.k_end)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that see each other, where no mask says more."""
        rows, columns = self.q_end - self.q_begin, self.k_end - self.k_begin
        return rows * (rows + 1) // 2 if self.kind is Kind.DIAGONAL else rows * columns


@lru_cache(maxsize=4096)
def pieces(
    queries: Runs, keys: Runs, left: int | None, right: int | None, masked: bool = False, seen: tuple[int, ...] = ()
) -> tuple[Piece, ...]:
    """The work of queries on keys.

    Args:
        queries, keys: what is held of each document, in the same order of documents.
        left, right: how far before and after its own position a query sees; None: to the end. Causal is (None, 0).
        masked: a mask hides more, anywhere.
        seen: position of each document at which its padding begins; keys from there on are in no piece.
    """
    found: list[Piece] = []
    for number, (q_runs, k_runs) in enumerate(zip(queries, keys, strict=True)):
        if seen:
            k_runs = tuple(_before(k_runs, seen[number]))
        if not q_runs or not k_runs:
            continue
        if q_runs == k_runs and left is None and right == 0:
            # A rank's own tokens lie in the order of positions: one triangle, not three pieces.
            begin, end = q_runs[0].place, q_runs[-1].place + q_runs[-1].length
            found.append(Piece(begin, end, begin, end, Kind.DIAGONAL))
            continue
        rows = [_row(q, k_runs, left, right) for q in q_runs]
        found += _joined_rows(rows)
    if masked:
        found = [replace(piece, kind=Kind.MASKED) for piece in found]
    return tuple(found)


def _before(runs: Sequence[Run], end: int) -> Iterator[Run]:
    for run in runs:
        if run.begin < end:
            yield replace(run, length=min(run.length, end - run.begin))


def _row(q: Run, k_runs: Sequence[Run], left: int | None, right: int | None) -> list[Piece]:
    """A run of queries on all runs of keys; neighbours that are wholly seen become one piece."""
    row: list[Piece] = []
    for k in k_runs:
        kind = _kind(q, k, left, right)
        if kind is None:
            continue
        piece = Piece(q.place, q.place + q.length, k.place, k.place + k.length, kind)
        if row and kind is row[-1].kind is Kind.FULL and row[-1].k_end == piece.k_begin:
            row[-1] = replace(row[-1], k_end=piece.k_end)
        else:
            row.append(piece)
    return row


def _kind(q: Run, k: Run, left: int | None, right: int | None) -> Kind | None:
    """What of k is seen from q; None: nothing."""
    nearest_before, farthest_after = k.begin - (q.begin + q.length - 1), k.begin + k.length - 1 - q.begin
    if (left is not None and farthest_after < -left) or (right is not None and nearest_before > right):
        return None
    if (left is None or nearest_before >= -left) and (right is None or farthest_after <= right):
        return Kind.FULL
    same = (q.begin, q.length) == (k.begin, k.length)
    return Kind.DIAGONAL if same and left is None and right == 0 else Kind.MASKED


def _joined_rows(rows: list[list[Piece]]) -> Iterator[Piece]:
    """Rows below each other that see the same keys wholly become one."""

    def what(row: list[Piece]) -> list[tuple[int, int]] | None:
        return [(p.k_begin, p.k_end) for p in row] if all(p.kind is Kind.FULL for p in row) else None

    for keys, group in groupby(rows, what):
        same = [row for row in group if row]
        if keys is None or not same or any(a[0].q_end != b[0].q_begin for a, b in zip(same, same[1:])):
            yield from (piece for row in same for piece in row)
        else:
            yield from (replace(piece, q_end=same[-1][0].q_end) for piece in same[0])
