"""What a query may see, said without a matrix of the whole sequence: a mask is made for the piece that needs one.

    limits      how far before and after itself (causal: no limit before, 0 after; a sliding window)
    segments    a number for each token of the sequence, [b, s]: tokens of one number see each other
    rows        a given mask: the rows of this rank's queries, for the keys of the whole sequence, [b, 1, s/cp, s], or
                one row for all of them, [b, 1, 1, s]

Segments cost s numbers where a mask costs s * s / cp, so that is what batches carry under context parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.errors import ConfigError


@dataclass(frozen=True)
class SegmentMask:
    """In place of an attention mask: tokens see each other if they have the same number, and it is not negative.

    ids: int `[b, s]`, the whole sequence in its own order, equal on all context-parallel ranks. Whether the future is
    hidden as well is the layer's matter.
    """

    ids: Tensor

    @staticmethod
    def of_documents(cu_seqlens: Tensor) -> SegmentMask:
        """Attention inside each document.

        Args:
            cu_seqlens: `[b, s + 1]`: 0, then where each document of the sample ends, then s up to the end.
        """
        ends = cu_seqlens[:, 1:].contiguous()
        at = torch.arange(ends.shape[1], device=ends.device, dtype=ends.dtype)
        return SegmentMask(torch.searchsorted(ends, at.expand_as(ends).contiguous(), right=True))

    @staticmethod
    def of_padding(real: Tensor) -> SegmentMask:
        """Attention between real tokens.

        Args:
            real: `[b, s]`, the whole sequence: not 0 where a token is no padding.
        """
        return SegmentMask(real.ne(0).long() - 1)

    def dense(self, *, causal: bool) -> Tensor:
        """bool `[b, 1, s, s]`, True = hidden."""
        s = self.ids.shape[1]
        at = torch.arange(s, device=self.ids.device)
        hidden = Visible(right=0 if causal else None, segments=self.ids).hidden(at, slice(0, s), at)
        assert hidden is not None
        return hidden


@dataclass(frozen=True)
class Visible:
    """The three together; a key is hidden if one of them hides it.

    left, right: None = no limit.
    """

    left: int | None = None
    right: int | None = None
    segments: Tensor | None = None
    rows: Tensor | None = None

    @property
    def masked(self) -> bool:
        """Whether more is hidden than the limits say."""
        return self.segments is not None or self.rows is not None

    def check(self, queries: int, keys: int, total: int) -> None:
        """Raises: ConfigError for a mask that is not of this rank's queries and all keys."""
        if self.segments is not None and self.segments.shape[-1] != total:
            raise ConfigError(
                f"segments of {self.segments.shape[-1]} tokens in a sequence of {total}",
                why="every context-parallel rank holds the numbers of all tokens",
                fix="segments of the whole sequence",
            )
        if self.rows is not None and tuple(self.rows.shape[-2:]) not in ((queries, keys), (1, keys)):
            raise ConfigError(
                f"an attention mask {list(self.rows.shape)} for {queries} queries and {keys} keys",
                why="under context parallelism a mask has the rows of this rank's queries and a column for every key "
                "of the whole sequence (`get_batch_on_this_cp_rank` cuts it so)",
                fix=f"a mask [b, 1, {queries}, {keys}]",
            )

    def hidden(self, q_positions: Tensor, q_places: slice, k_positions: Tensor) -> Tensor | None:
        """What is hidden from some queries: bool `[b or 1, 1 or n, queries, keys]`, or None.

        Args:
            q_positions, k_positions: `[queries]`, `[keys]`, int64, in the whole sequence.
            q_places: where the queries lie among this rank's.
        """
        hidden: Tensor | None = None
        if self.left is not None or self.right is not None:
            distance = k_positions - q_positions.unsqueeze(1)
            if self.left is not None:
                hidden = distance < -self.left
            if self.right is not None:
                after = distance > self.right
                hidden = after if hidden is None else hidden.logical_or_(after)
            assert hidden is not None
            hidden = hidden.view(1, 1, *hidden.shape)
        if self.segments is not None:
            mine, theirs = self.segments[:, q_positions].unsqueeze(2), self.segments[:, k_positions].unsqueeze(1)
            other = ((mine != theirs) | (theirs < 0)).unsqueeze(1)
            hidden = other if hidden is None else hidden | other
        if self.rows is not None:
            rows = self.rows if self.rows.shape[2] == 1 else self.rows[:, :, q_places]
            given = rows.index_select(-1, k_positions).expand(-1, -1, len(q_positions), -1)
            hidden = given if hidden is None else hidden | given
        return hidden
