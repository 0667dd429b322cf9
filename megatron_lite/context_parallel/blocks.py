"""Attention of this rank's queries on one set of keys, piece by piece.

    keys of a rank --pieces--> blocks (`fusions.block_attention`) --> sum over blocks, or dq, dk, dv

Which keys there are, and how they come here, is the matter of `ring_attention` and `all_gather_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.context_parallel.partition import Documents, Kind, Piece, Runs, held_runs, pieces, positions
from megatron_lite.context_parallel.visibility import Visible
from megatron_lite.fusions.block_attention import Arithmetic, Sum, block_backward, block_forward, zeros_for_sums


@dataclass(frozen=True)
class Share:
    """A rank's queries, and all that decides what they see.

    documents, key_documents: of the whole sequence, for queries and for keys (they differ in cross attention).
    """

    rank: int
    size: int
    documents: Documents
    key_documents: Documents
    visible: Visible

    @property
    def runs(self) -> Runs:
        """Where this rank's queries lie."""
        return held_runs(self.rank, self.size, self.documents)

    def keys_of(self, rank: int) -> Keys:
        """The keys that a rank holds."""
        return Keys(self, held_runs(rank, self.size, self.key_documents), rank)


@dataclass(frozen=True)
class Keys:
    """Some keys, as `runs` says they lie.

    number: tells them from the other keys of the call: blocks of different keys drop different probabilities.
    """

    share: Share
    runs: Runs
    number: int = 0

    def pieces(self) -> tuple[Piece, ...]:
        """The work of the share's queries on these keys."""
        share, visible = self.share, self.share.visible
        padded = any(d.seen < d.end for d in share.key_documents)
        seen = tuple(d.seen for d in share.key_documents) if padded else ()
        return pieces(share.runs, self.runs, visible.left, visible.right, visible.masked, seen)

    def add(self, into: Sum, q: Tensor, k: Tensor, v: Tensor, arithmetic: Arithmetic) -> None:
        """Attention on these keys, added to what others gave.

        Args:
            q: `[b, n, sq, d]`; k, v: `[b, groups, sk, d]`.
        """
        for i, (piece, hidden) in enumerate(self._masks(q.device)):
            y, lse = block_forward(
                q[:, :, piece.queries],
                k[:, :, piece.keys],
                v[:, :, piece.keys],
                hidden,
                piece.kind is Kind.DIAGONAL,
                self._of_block(arithmetic, i),
            )
            into.add(piece.queries, y, lse)

    def backward(
        self, dq: Tensor, g: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, arithmetic: Arithmetic
    ) -> tuple[Tensor, Tensor]:
        """Adds to `dq`. Returns: dk, dv: what these queries give; all three of `zeros_for_sums`."""
        dk, dv = (zeros_for_sums(x) for x in (k, v))
        for i, (piece, hidden) in enumerate(self._masks(q.device)):
            of_q, of_k = piece.queries, piece.keys
            grads = block_backward(
                g[:, :, of_q],
                q[:, :, of_q],
                k[:, :, of_k],
                v[:, :, of_k],
                y[:, :, of_q],
                lse[:, :, of_q],
                hidden,
                piece.kind is Kind.DIAGONAL,
                self._of_block(arithmetic, i),
            )
            for total, places, grad in zip((dq, dk, dv), (of_q, of_k, of_k), grads):
                total[:, :, places] += grad
        return dk, dv

    def _masks(self, device: torch.device) -> list[tuple[Piece, Tensor | None]]:
        """Pieces, and of those that need one the mask."""
        found = self.pieces()
        if all(piece.kind is not Kind.MASKED for piece in found):
            return [(piece, None) for piece in found]
        mine, theirs = positions(self.share.runs, device), positions(self.runs, device)
        return [
            (
                piece,
                self.share.visible.hidden(mine[piece.queries], piece.queries, theirs[piece.keys])
                if piece.kind is Kind.MASKED
                else None,
            )
            for piece in found
        ]

    def _of_block(self, arithmetic: Arithmetic, piece: int) -> Arithmetic:
        return arithmetic.of_block(piece * self.share.size + self.number)
