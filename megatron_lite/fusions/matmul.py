"""The three products of a linear layer, by the kernel that `backends` chose.

    forward   y  = x w^T    times_transposed(x, w)
    backward  dx = g w      times(g, w)
              dw = g^T x    transposed_times(g, x)     2-d, sums over the rows

`linear` is all three as one differentiable operation; where torch's own kernel is the choice it is `F.linear`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite.fusions.backends import matmul_kernel, onednn_linear


def times_transposed(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x `[..., k]`, w `[n, k]`, bias `[n]` -> `[..., n]` in x's dtype."""
    kernel = matmul_kernel(x.dtype, x.device.type)
    if kernel == "widen":
        return F.linear(x.float(), w.float(), None if bias is None else bias.float()).to(x.dtype)
    if kernel == "onednn":
        y = onednn_linear()(x, w)
        return y if bias is None else y.add_(bias)
    return F.linear(x, w, bias)


def times(g: Tensor, w: Tensor) -> Tensor:
    """g `[..., n]`, w `[n, k]` -> `[..., k]` in g's dtype."""
    kernel = matmul_kernel(g.dtype, g.device.type)
    if kernel == "widen":
        return (g.float() @ w.float()).to(g.dtype)
    if kernel == "onednn":
        return onednn_linear()(g, w.t())
    return g @ w


def transposed_times(g: Tensor, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """g `[m, n]`, x `[m, k]` -> `[n, k]` in `out_dtype` (None: x's)."""
    kernel = matmul_kernel(x.dtype, x.device.type)
    if kernel == "widen":
        return (g.float().t() @ x.float()).to(out_dtype or x.dtype)
    y = onednn_linear()(g.t(), x.t()) if kernel == "onednn" else g.t() @ x
    return y if out_dtype is None else y.to(out_dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, bias):
        ctx.save_for_backward(x, w)
        ctx.has_bias = bias is not None
        return times_transposed(x, w, bias)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        dx = times(g, w) if ctx.needs_input_grad[0] else None
        rows = g.reshape(-1, g.shape[-1])
        dw = transposed_times(rows, x.reshape(-1, x.shape[-1])) if ctx.needs_input_grad[1] else None
        db = rows.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return dx, dw, db


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Differentiable `F.linear` by the chosen kernel."""
    if matmul_kernel(x.dtype, x.device.type) == "torch":
        return F.linear(x, w, bias)
    return _Linear.apply(x, w, bias)
