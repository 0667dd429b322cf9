"""Linear layers of several experts over rows that are sorted by expert: y_i = x_i W_e^T + b_e.

    x [n, k]       | rows of expert 0 | rows of expert 1 |  ...          counts [E], sum n
    y [n, m]       |    x W_0^T       |    x W_1^T       |

On a GPU with bf16 it is one grouped product, on other devices one product after the other, written into one result.
Weights are parameters of their own, so that checkpoints, optimizers and layouts see experts and not how they were
multiplied. Weight gradients go straight into `main_grad` where there is one (see `wgrad`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron_lite.fusions.backends import grouped_product, matmul_kernel
from megatron_lite.fusions.matmul import times, times_transposed, transposed_times
from megatron_lite.fusions.wgrad import WeightGradStore, accumulate_product, takes_main_grad


def _ranges(counts: Sequence[int]) -> list[tuple[int, int, int]]:
    """(expert, first row, row behind the last) of the experts that have rows."""
    ends = list(accumulate(counts))
    return [(e, end - n, end) for e, (n, end) in enumerate(zip(counts, ends)) if n]


def _row_ends(counts: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=device)


def _products(
    x: Tensor, weights: Sequence[Tensor], counts: Sequence[int], biases: Sequence[Tensor], transposed: bool
) -> Tensor:
    """x_e W_e^T + b_e, or (not `transposed`) x_e W_e."""
    grouped = grouped_product(x.device.type, x.dtype, *weights[0].shape)
    if grouped is not None:
        stack = torch.stack(list(weights))
        y = grouped(x, stack.transpose(1, 2) if transposed else stack, offs=_row_ends(counts, x.device))
        for e, begin, end in _ranges(counts) if biases else ():
            y[begin:end].add_(biases[e])
        return y
    y = x.new_empty(len(x), weights[0].shape[0 if transposed else 1])
    in_place = matmul_kernel(x.dtype, x.device.type) == "torch"
    product: Callable[[Tensor, Tensor], Tensor] = times_transposed if transposed else times
    for e, begin, end in _ranges(counts):
        part = y[begin:end]
        if not in_place:
            part.copy_(product(x[begin:end], weights[e]))
        else:
            torch.mm(x[begin:end], weights[e].t() if transposed else weights[e], out=part)
        if biases:
            part.add_(biases[e])
    return y


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, counts, fuse_wgrad, store, num, *params):
        weights, biases = params[:num], params[num:]
        ctx.save_for_backward(x, *weights)
        ctx.counts, ctx.fuse_wgrad, ctx.store, ctx.has_biases = counts, fuse_wgrad, store, bool(biases)
        return _products(x, weights, counts, biases, True)

    @staticmethod
    def backward(ctx, g):
        x, *weights = ctx.saved_tensors
        counts, num = ctx.counts, len(weights)
        g = g.contiguous()
        dx = _products(g, weights, counts, (), False) if ctx.needs_input_grad[0] else None
        needed = ctx.needs_input_grad[5 : 5 + num]
        grads: list[Tensor | None] = [None] * num
        if any(needed):
            grads = _weight_grads(g, x, weights, counts, ctx.fuse_wgrad, ctx.store, needed)
        bias_grads: list[Tensor | None] = []
        if ctx.has_biases:
            bias_grads = [part.sum(0) for part in g.split(counts)]
        return dx, None, None, None, None, *grads, *bias_grads


def _weight_grads(
    g: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    counts: Sequence[int],
    fuse_wgrad: bool,
    store: WeightGradStore | None,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """g_e^T x_e: added into `main_grad` (None is returned), or returned. An expert without rows has gradient 0."""
    fused = fuse_wgrad and all(map(takes_main_grad, weights))
    grouped = None if fused and store is not None else grouped_product(x.device.type, x.dtype, g.shape[1], x.shape[1])
    if grouped is not None:
        stack: Any = list(grouped(g.t(), x, offs=_row_ends(counts, x.device)).unbind(0))
        if not fused:
            return [grad if need else None for grad, need in zip(stack, needed)]
        main_grads: Any = [weight.main_grad for weight in weights]  # type: ignore[attr-defined]
        torch._foreach_add_(main_grads, stack)
        return [None] * len(weights)
    grads: list[Tensor | None] = [None] * len(weights)
    put: Callable[[Tensor, Tensor, Tensor], Any] = accumulate_product if store is None else store.put
    for e, begin, end in _ranges(counts):
        if fused:
            put(weights[e], g[begin:end], x[begin:end])
        elif needed[e]:
            grads[e] = transposed_times(g[begin:end], x[begin:end])
    if not fused:
        grads = [
            torch.zeros_like(weight) if grad is None and need else grad
            for grad, weight, need in zip(grads, weights, needed)
        ]
    return grads


def grouped_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    counts: Sequence[int],
    biases: Sequence[Tensor] = (),
    *,
    gradient_accumulation_fusion: bool = False,
    weight_grad_store: WeightGradStore | None = None,
) -> Tensor:
    """`[n, k]` -> `[n, m]`.

    Args:
        weights: `[m, k]`, one for each expert.
        counts: rows of each expert, in their order; n together.
        biases: `[m]` each, or none.
        gradient_accumulation_fusion: add weight gradients into `main_grad` where there is one.
        weight_grad_store: takes the products of weight gradients, to be computed later; with fusion only.
    """
    return _GroupedLinear.apply(
        x, list(counts), gradient_accumulation_fusion, weight_grad_store, len(weights), *weights, *biases
    )
