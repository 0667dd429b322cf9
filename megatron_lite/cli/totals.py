"""What a corpus holds, counted: documents, sequences, tokens, and how long the documents are."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

# Bin 0: no token; bin k: 2**(k - 1) up to 2**k - 1 tokens.
_BINS = 64


def length_bins(token_counts: np.ndarray) -> np.ndarray:
    """How many documents have how many tokens: int64 [64], by powers of two."""
    return np.bincount(np.frexp(token_counts.astype(np.float64))[1], minlength=_BINS)


def histogram(bins: np.ndarray | list[int]) -> list[str]:
    """A line for each bin from the first to the last that holds something."""
    filled = np.flatnonzero(bins)
    if not len(filled):
        return []
    most = max(bins)
    lines = []
    for k in range(filled[0], filled[-1] + 1):
        low, high = (0, 0) if k == 0 else (2 ** (k - 1), 2**k - 1)
        span = str(low) if low == high else f"{low}-{high}"
        lines.append(f"  {span:>21}  {int(bins[k]):>12}  {'#' * round(30 * bins[k] / most)}".rstrip())
    return lines


@dataclass
class Totals:
    """Counts of a `preprocess` run; the lists have one entry a key."""

    lines: int = 0  # of all files, blank ones too
    documents: int = 0
    empty: int = 0  # records without a token under any key
    skipped: int = 0
    text_bytes: int = 0
    earlier_documents: int = 0  # of a run that was stopped, which this one goes on from
    earlier_bytes: int = 0
    sequences: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    lengths: list[list[int]] = field(default_factory=list)  # bins of `length_bins`

    @classmethod
    def of_keys(cls, count: int) -> Totals:
        return cls(sequences=[0] * count, tokens=[0] * count, lengths=[[0] * _BINS for _ in range(count)])

    def copy(self) -> Totals:
        return Totals(**asdict(self))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
