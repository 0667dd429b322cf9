"""Norm, clipping and zeros of gradients that lie in flat memory and are counted once over all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# One fp32 sum over 10^7 squares is off by 5e-4 of its value on the CPU. Rows of this size are summed in fp32, which is
# one fast operation, and rows are added in fp64: off by 2e-7 (one row) to 1e-9 (many), in the same time.
_ROW = 1024


def sum_of_powers(flat: Tensor, norm_type: float = 2.0, exact: bool = False) -> Tensor:
    """Sum of |x|^p, or the maximum of |x| for p = inf: what ranks and pieces can add up (or take the maximum of).

    Args:
        flat: `[n]`, fp32.
        exact: fp64 from the first addition on; 20 times slower. For numbers whose squares leave fp32.
    Returns: fp64 scalar. Inf or NaN if an element is.
    """
    if exact:
        flat = flat.double()
    whole = flat.numel() // _ROW * _ROW
    parts = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), norm_type, dim=1).double()
    rest = (
        torch.linalg.vector_norm(flat[whole:], norm_type, dim=0, keepdim=True).double() if whole < len(flat) else None
    )
    norms = parts if rest is None else torch.cat([parts, rest])
    if norm_type == math.inf:
        return norms.max() if len(norms) else norms.new_zeros(())
    return norms.pow(norm_type).sum()


def clip_coefficient(norm: float, max_norm: float) -> float:
    """What gradients are multiplied by so that their norm is at most `max_norm`; 1 when it is, or `max_norm` is 0."""
    if max_norm <= 0.0:
        return 1.0
    return min(max_norm / (norm + 1.0e-6), 1.0)


def count_zeros(runs: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Gradient elements that are exactly 0.

    Args:
        runs: flat gradients, and how many of their elements belong to parameters: the rest is padding, which is zero
            and does not count.
    Returns: fp64 scalar.
    """
    total = torch.zeros((), dtype=torch.float64)
    for flat, numel in runs:
        total = total.to(flat.device) + (numel - torch.count_nonzero(flat)).double()
    return total
