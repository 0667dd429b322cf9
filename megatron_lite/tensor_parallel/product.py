"""The product of a linear layer that is split over ranks, with its communication, also of operands cast to FP8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite import collectives
from megatron_lite.fusions.matmul import linear, times, times_transposed, transposed_times
from megatron_lite.fusions.wgrad import WeightGradStore, accumulate_product, takes_main_grad
from megatron_lite.tensor_parallel.mappings import default_group, gathered_first
from megatron_lite.tensor_parallel.overlap import BULK, Overlap, dgrad_in_turn, product_in_turn


class _ParallelLinear(torch.autograd.Function):
    """Y = X W^T + b, with X gathered along the sequence first if asked; backward overlaps the input gradient's
    collective with the weight gradient, which may go straight into `main_grad`."""

    @staticmethod
    def forward(
        ctx, x, weight, bias, group, sequence_parallel, reduce_grad, fuse_wgrad, store, overlap, out_dtype, fp8
    ):
        ctx.save_for_backward(x, weight)
        ctx.fp8, ctx.casts = fp8, None if fp8 is None else fp8.begin(x, weight)
        if ctx.casts is not None:
            x, weight = ctx.casts.forward(x, weight)
        ctx.store, ctx.overlap = store, overlap
        ctx.group, ctx.sequence_parallel, ctx.reduce_grad = group, sequence_parallel, reduce_grad
        ctx.fuse_wgrad, ctx.has_bias = fuse_wgrad, bias is not None
        if sequence_parallel and overlap.gather and out_dtype is None:
            return product_in_turn(x, weight, bias, group)
        total = gathered_first(x, group, "column forward") if sequence_parallel else x
        return times_transposed(total, weight, bias, out_dtype)

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        g = g.to(x.dtype)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        overlap: Overlap = ctx.overlap
        g_of_x, w_of_x = g, weight
        if ctx.casts is not None:
            ctx.fp8.take_grad(ctx.casts, g)
            g_of_x, w_of_x = ctx.casts.dgrad(g, weight)
        total = x
        handle: collectives.Handle = collectives.DONE
        if ctx.sequence_parallel and needs_weight:  # not kept in forward: gathered again while dX is computed
            total = torch.empty(x.shape[0] * ctx.group.size(), *x.shape[1:], dtype=x.dtype, device=x.device)
            handle = collectives.all_gather(total, x.contiguous(), ctx.group, purpose="column re-gather", async_op=True)
            if not overlap.bulk_dgrad:
                handle.wait()
        in_turn = needs_x and ctx.sequence_parallel and overlap.reduce_dgrad
        dx: Any = None
        if in_turn:
            dx = dgrad_in_turn(g_of_x, w_of_x, ctx.group)
        elif needs_x:
            dx = times(g_of_x, w_of_x)
        handle.wait()
        handle = collectives.DONE
        if needs_x and ctx.sequence_parallel and not in_turn:
            full, dx = dx, torch.empty_like(x, memory_format=torch.contiguous_format)
            handle = collectives.reduce_scatter(dx, full, ctx.group, purpose="column backward", async_op=True)
        elif needs_x and ctx.reduce_grad:
            handle = collectives.all_reduce(dx, ctx.group, purpose="column backward", async_op=True)
        if not overlap.bulk_wgrad:
            handle.wait()
        rows = g.reshape(-1, g.shape[-1])
        dw = None
        if needs_weight:
            g_of_w, inputs = rows, total.reshape(-1, total.shape[-1])
            if ctx.casts is not None:
                g_of_w, inputs = ctx.casts.wgrad(rows, inputs)
            if ctx.fuse_wgrad and takes_main_grad(weight):
                (accumulate_product if ctx.store is None else ctx.store.put)(weight, g_of_w, inputs)
            else:
                dw = transposed_times(g_of_w, inputs)
        db = rows.sum(0) if ctx.has_bias and needs_bias else None
        handle.wait()
        return dx, dw, db, None, None, None, None, None, None, None, None


def linear_with_grad_accumulation_and_async_allreduce(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: ProcessGroup | None = None,
    overlap: Overlap = BULK,
    *,
    weight_grad_store: WeightGradStore | None = None,
    output_dtype: torch.dtype | None = None,
    fp8: Any = None,
) -> Tensor:
    """X W^T + b on this rank's W.

    Args:
        input: `[s, b, in]`, or `[s/t, b, in]` with `sequence_parallel`.
        gradient_accumulation_fusion: add the weight gradient into `weight.main_grad` where there is one.
        allreduce_dgrad: sum the input gradient over the group (input equal on all ranks).
        sequence_parallel: gather the input along s; backward reduce-scatters its gradient.
        overlap: how far this hides behind the products.
        weight_grad_store: takes the weight gradient's product, to be computed later; with fusion only.
        output_dtype: of the product; None: the input's.
        fp8: the layer's `fp8.LayerCasts`; None: no casts.
    """
    group = default_group(tp_group)
    alone = collectives.group_size(group) == 1
    if alone and not gradient_accumulation_fusion and output_dtype is None and fp8 is None:
        return linear(input, weight, bias)
    return _ParallelLinear.apply(
        input,
        weight,
        bias,
        group,
        sequence_parallel and not alone,
        allreduce_dgrad,
        gradient_accumulation_fusion,
        weight_grad_store,
        overlap,
        output_dtype,
        fp8,
    )
