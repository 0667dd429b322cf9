"""How far a layer's communication hides behind its products, under sequence parallelism.

    always               backward of a column layer: the input is gathered again while dX is computed (bulk dgrad), and
                         dX is reduce-scattered while dW is computed (bulk wgrad)
    --tp-comm-overlap    also forward, in t parts: while one rank's part of the sequence travels, another is multiplied

    column   gather in turn     X_0 W | X_1 W | ...         X_r arrives while X_(r-1) is multiplied
    row      reduce in turn     part for rank 1 | rank 2 | ... | own      a part leaves while the next is multiplied

A part has all columns and 1/t of the rows, so that products stay large, and every rank sends and receives at each step
to and from one other. The same bytes in the same kinds of collectives; sums in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite import collectives
from megatron_lite.fusions.matmul import times, times_transposed, transposed_times
from megatron_lite.fusions.wgrad import accumulate_product, takes_main_grad
from megatron_lite.model_parallel_config import ModelParallelConfig
from megatron_lite.tensor_parallel.mappings import gathered_first


@dataclass(frozen=True)
class Overlap:
    """What goes in turn, and what of backward runs beside a product as a whole."""

    gather: bool = False
    reduce: bool = False
    reduce_dgrad: bool = False
    bulk_dgrad: bool = True
    bulk_wgrad: bool = True


BULK = Overlap()


def overlap_of(config: ModelParallelConfig) -> Overlap:
    """What the config asks for; the single settings count under `tp_comm_overlap` only."""
    if not config.tp_comm_overlap:
        return BULK
    return Overlap(
        gather=config.tp_comm_overlap_ag,
        reduce=config.tp_comm_overlap_rs,
        reduce_dgrad=config.tp_comm_overlap_rs_dgrad,
        bulk_dgrad=config.tp_comm_bulk_dgrad,
        bulk_wgrad=config.tp_comm_bulk_wgrad,
    )


def product_in_turn(x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup) -> Tensor:
    """x `[s/t, b, in]` -> X W^T + bias `[s, b, out/t]`, X gathered part by part."""
    y: Any = None
    for place, part in collectives.gather_in_turn(x, group, purpose="column forward"):
        rows = times_transposed(part, weight, bias)
        if y is None:
            y = torch.empty(group.size() * rows.shape[0], *rows.shape[1:], dtype=rows.dtype, device=rows.device)
        y[place * rows.shape[0] : (place + 1) * rows.shape[0]] = rows
    return y


def dgrad_in_turn(g: Tensor, weight: Tensor, group: ProcessGroup) -> Tensor:
    """g `[s, b, out/t]` -> the sum over ranks of g W, this rank's rows `[s/t, b, in]`."""
    parts = g.chunk(group.size())
    return collectives.reduce_scatter_in_turn(
        lambda place: times(parts[place], weight), group, purpose="column backward"
    )


class RowInTurn(torch.autograd.Function):
    """x `[s, b, in/t]` -> the sum over ranks of X W^T, this rank's rows `[s/t, b, out]`."""

    @staticmethod
    def forward(ctx, x, weight, group, fuse_wgrad, store, overlap):
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.fuse_wgrad, ctx.store, ctx.overlap = group, fuse_wgrad, store, overlap
        parts = x.chunk(group.size())
        return collectives.reduce_scatter_in_turn(
            lambda place: times_transposed(parts[place], weight),
            group,
            purpose="reduce_scatter_to_sequence forward",
        )

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        purpose = "reduce_scatter_to_sequence backward"
        dx: Any = None
        if ctx.overlap.gather and needs_x:
            dx, n = torch.empty_like(x, memory_format=torch.contiguous_format), g.shape[0]
            total = torch.empty(x.shape[0], *g.shape[1:], dtype=g.dtype, device=g.device)
            for place, part in collectives.gather_in_turn(g, ctx.group, purpose=purpose):
                rows = slice(place * n, (place + 1) * n)
                total[rows] = part
                dx[rows] = times(part, weight)
        else:
            total = gathered_first(g, ctx.group, purpose)
            dx = times(total, weight) if needs_x else None
        dw = None
        if needs_weight:
            rows_g, rows_x = total.reshape(-1, total.shape[-1]), x.reshape(-1, x.shape[-1])
            if not (ctx.fuse_wgrad and takes_main_grad(weight)):
                dw = transposed_times(rows_g, rows_x)
            elif ctx.store is not None:
                ctx.store.put(weight, rows_g, rows_x)
            else:
                accumulate_product(weight, rows_g, rows_x)
        return dx, dw, None, None, None, None
