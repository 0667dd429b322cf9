"""Rotary position embedding (Su et al. 2021): rotate pairs of channels by the position's angle.

    halves (GPT-NeoX):  pairs (i, i + d/2)        interleaved (GPT-J):  pairs (2i, 2i + 1)
        y_1 = x_1 cos - x_2 sin
        y_2 = x_2 cos + x_1 sin

The adjoint of a rotation is the rotation back, so backward is the same kernel with -sin, and only the angles are kept.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def _rotate(t: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """t `[..., d]`, cos and sin `[..., r]` with r <= d: the first r channels turn, the others pass."""
    rotated = cos.shape[-1]
    out = torch.empty_like(t, memory_format=torch.contiguous_format)
    if interleaved:
        pairs = slice(0, rotated, 2), slice(1, rotated, 2)
        cos_1, cos_2, sin_1, sin_2 = cos[..., ::2], cos[..., 1::2], sin[..., ::2], sin[..., 1::2]
    else:
        half = rotated // 2
        pairs = slice(0, half), slice(half, rotated)
        cos_1, cos_2, sin_1, sin_2 = cos[..., :half], cos[..., half:], sin[..., :half], sin[..., half:]
    x_1, x_2 = t[..., pairs[0]], t[..., pairs[1]]
    y_1, y_2 = out[..., pairs[0]], out[..., pairs[1]]
    torch.mul(x_1, cos_1, out=y_1)
    y_1.addcmul_(x_2, sin_1, value=-1.0)
    torch.mul(x_2, cos_2, out=y_2)
    y_2.addcmul_(x_1, sin_2)
    if rotated < t.shape[-1]:
        out[..., rotated:] = t[..., rotated:]
    return out


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(t, cos, sin, interleaved)

    @staticmethod
    def backward(ctx, g):
        # The two angles of a pair are equal, so the rotation back needs no reordering of sin.
        cos, sin = ctx.saved_tensors
        return _rotate(g, cos, -sin, ctx.interleaved), None, None, None


def rotate(t: Tensor, freqs: Tensor, interleaved: bool = False, mscale: float = 1.0) -> Tensor:
    """Turn t `[s, b, n, d]` by the angles freqs `[s, 1 or b, 1, r]` (radians, r <= d; both channels of a pair hold it).

    Args:
        mscale: factor on cos and sin (YaRN's concentration).
    Returns: a new tensor in t's dtype.
    """
    assert freqs.shape[0] == t.shape[0], f"{freqs.shape[0]} angles for {t.shape[0]} positions"
    cos, sin = freqs.cos(), freqs.sin()
    if mscale != 1.0:
        cos, sin = cos * mscale, sin * mscale
    return _Rope.apply(t, cos.to(t.dtype), sin.to(t.dtype), interleaved)


def yarn_mscale(scale: float, mscale: float = 1.0) -> float:
    """0.1 m ln(scale) + 1: how much more sharply a model attends whose context grew `scale` times (Peng et al. 2023,
    section 3.4)."""
    return 1.0 if scale <= 1.0 else 0.1 * mscale * math.log(scale) + 1.0


def yarn_concentration(scale: float, mscale: float = 1.0, mscale_all_dim: float = 0.0) -> float:
    """YaRN's factor on cos and sin. What `mscale_all_dim` says goes into the scale of the softmax instead."""
    return yarn_mscale(scale, mscale) / yarn_mscale(scale, mscale_all_dim)
