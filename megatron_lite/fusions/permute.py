"""Rows of tokens sorted by expert, and the way back: one gather there, one sum here.

    tokens [T, h]   map [T, E]                 rows [n, h]
      t0             x . x       expert 0:  t0 t2
      t1             . x x       expert 1:  t1            n = number of marks; inside an expert in the order of tokens
      t2             x . .       expert 2:  t0 t1

`permute` copies a token to each of its rows, `unpermute` adds a token's rows up; each is the other's backward. A sum is
written as sums of bags of rows, not as an addition row by row: no atomics, always the same order of addition, and half
the time on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowPlan:
    """Which token each row is a copy of.

    tokens: `[n]`, the token of each row; places: `[n]`, where in [T, E] it was marked, flattened; order: `[n]`, rows
    sorted by token; begins: `[T]`, where in `order` the rows of a token begin.
    """

    tokens: Tensor
    places: Tensor
    order: Tensor
    begins: Tensor


def plan_rows(routing_map: Tensor, num_rows: int) -> RowPlan:
    """The rows that a map asks for.

    Args:
        routing_map: bool `[T, E]`.
        num_rows: the number of marks, so that no device has to be waited for to learn it.
    """
    marks = torch.nonzero_static(routing_map.t().contiguous(), size=num_rows)
    experts, tokens = marks[:, 0], marks[:, 1].contiguous()
    per_token = routing_map.sum(1)
    return RowPlan(
        tokens,
        tokens * routing_map.shape[1] + experts,
        torch.argsort(tokens, stable=True),
        per_token.cumsum(0) - per_token,
    )


def _summed(rows: Tensor, plan: RowPlan) -> Tensor:
    if not len(plan.order):
        return rows.new_zeros(len(plan.begins), *rows.shape[1:])
    return torch.ops.aten._embedding_bag_forward_only(rows, plan.order, plan.begins)[0]


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, plan):
        ctx.plan = plan
        return x.index_select(0, plan.tokens)

    @staticmethod
    def backward(ctx, g):
        return _summed(g.contiguous(), ctx.plan), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, plan):
        ctx.plan = plan
        return _summed(rows.contiguous(), plan)

    @staticmethod
    def backward(ctx, g):
        return g.index_select(0, ctx.plan.tokens), None


def permute(x: Tensor, plan: RowPlan) -> Tensor:
    """`[T, h]` -> `[n, h]`: each row's token. Backward: `unpermute`."""
    return _Permute.apply(x, plan)


def unpermute(rows: Tensor, plan: RowPlan) -> Tensor:
    """`[n, h]` -> `[T, h]`: the sum of each token's rows, 0 for a token without. Backward: `permute`."""
    return _Unpermute.apply(rows, plan)


def row_values(values: Tensor, plan: RowPlan) -> Tensor:
    """`[T, E]` -> `[n]`: the entry of each row's token and expert."""
    return values.reshape(-1).index_select(0, plan.places)


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, order, inverse):
        ctx.inverse = inverse
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx, g):
        return g.index_select(0, ctx.inverse), None, None


def reorder(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Row i of the result is row `order[i]`; `inverse` is the order that undoes it."""
    return _Reorder.apply(rows, order, inverse)


def transposed_chunks(counts: Tensor) -> tuple[Tensor, Tensor]:
    """The order that sorts chunks of rows the other way round, and its inverse.

    Args:
        counts: `[a, b]`, rows of each chunk; they lie with b running fastest and are to lie with a running fastest.
    Returns: for `reorder`, `[n]` each, on the device of `counts`.
    """
    flat = counts.reshape(-1)
    begins = (flat.cumsum(0) - flat).view(counts.shape)
    lengths = counts.t().reshape(-1)
    there = lengths.cumsum(0) - lengths
    order = torch.repeat_interleave(begins.t().reshape(-1) - there, lengths)
    order += torch.arange(len(order), device=counts.device)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=counts.device)
    return order, inverse
