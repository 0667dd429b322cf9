"""The three products of a linear layer, by the kernel that `backends` chose.

    forward   y  = x w^T    times_transposed(x, w)
    backward  dx = g w      times(g, w)
              dw = g^T x    transposed_times(g, x)     2-d, sums over the rows

`linear` is all three as one differentiable operation; where torch's own kernel is the choice it is `F.linear`.

Widened products go by blocks of rows, so that never more than a few MiB of a large operand (logits!) exist in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite.fusions.backends import matmul_kernel, onednn_linear

_BLOCK_ELEMENTS = 2**19  # fp32 elements of the wider operand in one block: 2 MiB


def widened_rows(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors `[m, ...]`, of equal m, in fp32, a block of rows at a time."""
    step = max(256, _BLOCK_ELEMENTS // max(t.shape[-1] for t in tensors))
    for begin in range(0, tensors[0].shape[0], step):
        yield tuple(t[begin : begin + step].float() for t in tensors)


def _by_rows(x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
    """x w^T + bias of half-precision x in fp32 products; w and bias are fp32."""
    rows = x.reshape(-1, x.shape[-1])
    y = torch.empty(rows.shape[0], w.shape[0], dtype=out_dtype or x.dtype, device=x.device)
    step = max(256, _BLOCK_ELEMENTS // max(w.shape))
    for begin in range(0, rows.shape[0], step):
        y[begin : begin + step] = F.linear(rows[begin : begin + step].float(), w, bias)
    return y.view(*x.shape[:-1], w.shape[0])


def times_transposed(x: Tensor, w: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """x `[..., k]`, w `[n, k]`, bias `[n]` -> `[..., n]` in `out_dtype` (None: x's).

    An `out_dtype` wider than x's gets the sums as they are, not rounded to x's first.
    """
    kernel = matmul_kernel(x.dtype, x.device.type)
    widens = out_dtype == torch.float32 and x.dtype != torch.float32
    if kernel == "widen" or widens:
        return _by_rows(x, w.float(), None if bias is None else bias.float(), out_dtype)
    if out_dtype not in (None, x.dtype):
        return times_transposed(x, w, bias).to(out_dtype)
    if kernel == "onednn":
        y = onednn_linear()(x, w)
        return y if bias is None else y.add_(bias)
    return F.linear(x, w, bias)


def times(g: Tensor, w: Tensor) -> Tensor:
    """g `[..., n]`, w `[n, k]` -> `[..., k]` in g's dtype."""
    kernel = matmul_kernel(g.dtype, g.device.type)
    if kernel == "widen":
        return _by_rows(g, w.float().t(), None)
    if kernel == "onednn":
        return onednn_linear()(g, w.t())
    return g @ w


def transposed_times(g: Tensor, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """g `[m, n]`, x `[m, k]` -> `[n, k]` in `out_dtype` (None: x's)."""
    kernel = matmul_kernel(x.dtype, x.device.type)
    if kernel == "widen":
        total = torch.zeros(g.shape[1], x.shape[1], device=g.device)
        for g_block, x_block in widened_rows(g, x):
            total.addmm_(g_block.t(), x_block)
        return total.to(out_dtype or x.dtype)
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
