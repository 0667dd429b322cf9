"""Global truth, local view: which part of a global tensor a rank holds. Pure arithmetic, no torch.

Every parameter has one global name and one global shape, whatever the layout. A rank's tensor is one or several
boxes of it; several when the cut is not contiguous, as for the stacked [gate; up] rows of a gated MLP:

    global rows   | gate 0 1 2 3 | up 4 5 6 7 |       tp rank 0 of 2 holds rows 0 1 and 4 5:
    local rows    | 0 1 | 2 3 |                       pieces  (0 -> 0, 2 rows), (4 -> 2, 2 rows)

Initialisation fills the boxes, checkpoints write and read them, tests join them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

Index = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A box that lies at `global_offset` in the global tensor and at `local_offset` in this rank's."""

    global_offset: Index
    local_offset: Index
    shape: Index

    def local_slices(self) -> tuple[slice, ...]:
        """Indexes the rank's tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.local_offset, self.shape))

    def global_slices(self) -> tuple[slice, ...]:
        """Indexes the global tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.global_offset, self.shape))


@dataclass(frozen=True)
class ShardSpec:
    """Where a rank's tensor lies in the global tensor `name` of `global_shape`."""

    name: str
    global_shape: Index
    pieces: tuple[Piece, ...]

    @property
    def local_shape(self) -> Index:
        """The shape of the rank's tensor: the corner furthest from the origin."""
        ends = [tuple(o + n for o, n in zip(p.local_offset, p.shape)) for p in self.pieces]
        return tuple(map(max, zip(*ends))) if ends and ends[0] else ()

    @property
    def is_whole(self) -> bool:
        """Whether the rank holds all of the tensor."""
        return self.local_shape == self.global_shape

    def renamed(self, name: str) -> ShardSpec:
        """The same place in a tensor of another name."""
        return replace(self, name=name)


def whole(name: str, shape: Index) -> ShardSpec:
    """A tensor that every rank holds completely."""
    return ShardSpec(name, tuple(shape), (Piece((0,) * len(shape), (0,) * len(shape), tuple(shape)),))


def split(name: str, local_shape: Index, dim: int, rank: int, size: int, stride: int = 1) -> ShardSpec:
    """A tensor cut along `dim` over `size` ranks.

    Args:
        local_shape: what one rank holds.
        stride: number of stacked parts, each of which is cut (2 for [gate; up]): the global dimension falls into
            `size * stride` blocks and rank r keeps blocks r, r + size, ...
    """
    if size == 1:
        return whole(name, local_shape)
    local_shape = tuple(local_shape)
    block, rest = divmod(local_shape[dim], stride)
    assert rest == 0, f"{name}: {local_shape[dim]} rows cannot hold {stride} parts"
    global_shape = tuple(n * size if d == dim else n for d, n in enumerate(local_shape))
    shape = tuple(block if d == dim else n for d, n in enumerate(local_shape))

    def at(n: int) -> Index:
        return tuple(n if d == dim else 0 for d in range(len(local_shape)))

    pieces = tuple(Piece(at((k * size + rank) * block), at(k * block), shape) for k in range(stride))
    return ShardSpec(name, global_shape, pieces)


def rows_of(length: int, rank: int, ranks: int) -> tuple[int, int]:
    """`[begin, end)` of the rows that a rank keeps, as `torch.chunk` cuts them."""
    each = -(-length // ranks)
    return min(rank * each, length), min((rank + 1) * each, length)


def rows(spec: ShardSpec, begin: int, end: int) -> ShardSpec:
    """Where the rows `[begin, end)` of a rank's tensor lie in the global one; they are a tensor of their own."""
    pieces = []
    for piece in spec.pieces:
        first = max(begin, piece.local_offset[0])
        last = min(end, piece.local_offset[0] + piece.shape[0])
        if first < last:
            there = piece.global_offset[0] + first - piece.local_offset[0]
            pieces.append(
                Piece(
                    (there, *piece.global_offset[1:]),
                    (first - begin, *piece.local_offset[1:]),
                    (last - first, *piece.shape[1:]),
                )
            )
    return ShardSpec(spec.name, spec.global_shape, tuple(pieces))


def boxes_of_range(shape: Index, begin: int, end: int) -> Iterator[tuple[Index, Index]]:
    """The range `[begin, end)` of a flattened tensor as boxes (offset, shape): part of a row, whole rows, part of one.

    Boxes come in flat order, touch each element of the range once, and there are at most 2 * ndim - 1 of them.
    """
    assert 0 <= begin <= end <= math.prod(shape), f"range [{begin}, {end}) outside of {shape}"
    if begin == end:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # whole rows lie in [first, last)
    if first > last:  # inside one row
        for offset, size in boxes_of_range(shape[1:], begin - last * row, end - last * row):
            yield (last, *offset), (1, *size)
        return
    if begin < first * row:
        for offset, size in boxes_of_range(shape[1:], begin - (first - 1) * row, row):
            yield (first - 1, *offset), (1, *size)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    if last * row < end:
        for offset, size in boxes_of_range(shape[1:], 0, end - last * row):
            yield (last, *offset), (1, *size)


def flat_range(spec: ShardSpec, begin: int, end: int) -> ShardSpec:
    """Where the elements `[begin, end)` of a rank's flattened tensor lie in the global one.

    Returns: a description for a flat tensor of `end - begin` elements: `local_offset` is one number, from which on a
        piece lies row by row. Pieces come in no order, touch each element once.
    """
    shape = spec.local_shape
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    pieces = []
    for offset, size in boxes_of_range(shape, begin, end):
        for piece in spec.pieces:
            start = tuple(map(max, offset, piece.local_offset))
            stop = tuple(min(o + n, p + m) for o, n, p, m in zip(offset, size, piece.local_offset, piece.shape))
            if any(a >= b for a, b in zip(start, stop)):
                continue
            for at, cut in _row_by_row(start, tuple(b - a for a, b in zip(start, stop)), shape):
                there = tuple(g + a - o for g, a, o in zip(piece.global_offset, at, piece.local_offset))
                pieces.append(Piece(there, (sum(a * n for a, n in zip(at, strides)) - begin,), cut))
    return ShardSpec(spec.name, spec.global_shape, tuple(pieces))


def _row_by_row(start: Index, cut: Index, shape: Index) -> Iterator[tuple[Index, Index]]:
    """A box of a tensor, divided until each part is one run of the tensor's memory."""
    lead = next((d for d, n in enumerate(cut) if n > 1), len(cut))
    if cut[lead + 1 :] == shape[lead + 1 :]:
        yield start, cut
        return
    for i in range(cut[lead]):
        at = (*start[:lead], start[lead] + i, *start[lead + 1 :])
        yield from _row_by_row(at, (*cut[:lead], 1, *cut[lead + 1 :]), shape)
