"""Attention as batched products, with its backward written out.

    scores = q k^T * scale + bias, hidden filled    [n, sq, sk]   a few heads at a time: the scores stay in cache
    p      = softmax(scores)                        kept for backward in q's dtype
    y      = dropout(p) v

In bf16 at short sequences this beats torch's flash kernel on a CPU three times over (that kernel computes in fp32);
the price is p, n * sq * sk elements. Grouped queries need no repeat: the queries of a group are stacked as rows,
`[groups, r * sq, d]`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_lite.fusions.backends import matmul_kernel

MASKED = -10000.0  # Megatron's fill: a query that may see nothing attends to everything equally, and stays finite
_BLOCK_BYTES = 2**20  # scores of one call


def split_groups(x: Tensor, groups: int) -> Tensor:
    """`[b, n, s, d]` -> `[b * groups, n / groups * s, d]`; a view where a group has one head."""
    b, n, s, d = x.shape
    return x.reshape(b * groups, n // groups * s, d)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask, bias, scale, probability):
        b, n, sq, _ = q.shape
        groups, sk = k.shape[1], k.shape[2]
        out_dtype = q.dtype
        if matmul_kernel(q.dtype, q.device.type) == "widen":
            q, k, v = q.float(), k.float(), v.float()
        ctx.shape, ctx.scale = q.shape, scale
        rows = n // groups * sq
        q3, k3, v3 = split_groups(q, groups), split_groups(k, groups), split_groups(v, groups)
        mask3 = None if mask is None else rows_of(mask, b, n, groups, sq, sk)
        bias3 = None if bias is None else rows_of(bias.to(q.dtype), bias.shape[0], n, groups, sq, sk)
        ctx.bias = (bias.shape, bias.dtype, bias3.shape) if bias3 is not None and bias.requires_grad else None
        p = torch.empty(b * groups, rows, sk, dtype=q.dtype, device=q.device)
        y = torch.empty(b * groups, rows, v.shape[-1], dtype=q.dtype, device=q.device)
        keep = None
        if probability > 0.0:
            keep = torch.empty(p.shape, dtype=torch.bool, device=p.device).bernoulli_(1.0 - probability)
        ctx.scale_kept = 1.0 / (1.0 - probability)
        for part in parts_of(b * groups, rows * sk * p.element_size(), q.device):
            if bias3 is None:
                scores = torch.bmm(q3[part], k3[part].transpose(1, 2)).mul_(scale)
            else:
                scores = torch.baddbmm(bias3[_cycle(part, bias3)], q3[part], k3[part].transpose(1, 2), alpha=scale)
            if mask3 is not None:
                scores.masked_fill_(take_part(mask3, part), MASKED)
            torch.softmax(scores, dim=-1, out=p[part])
            used = p[part] if keep is None else (p[part] * keep[part]).mul_(ctx.scale_kept)
            torch.bmm(used, v3[part], out=y[part])
        ctx.save_for_backward(q3, k3, v3, p, mask3, keep)
        ctx.out_dtype = out_dtype
        return y.view(b, n, sq, -1).to(out_dtype)

    @staticmethod
    def backward(ctx, g):
        q3, k3, v3, p, mask3, keep = ctx.saved_tensors
        b, n, sq, _ = ctx.shape
        groups = k3.shape[0] // b
        g3 = split_groups(g.to(p.dtype), groups)
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q3, k3, v3))
        wide = torch.promote_types(p.dtype, torch.float32)
        dbias = None if ctx.bias is None else torch.zeros(ctx.bias[2], dtype=wide, device=p.device)
        for part in parts_of(p.shape[0], p.shape[1] * p.shape[2] * p.element_size(), p.device):
            used = p[part] if keep is None else (p[part] * keep[part]).mul_(ctx.scale_kept)
            torch.bmm(used.transpose(1, 2), g3[part], out=dv[part])
            dp = torch.bmm(g3[part], v3[part].transpose(1, 2))
            if keep is not None:
                dp.mul_(keep[part]).mul_(ctx.scale_kept)
            ds = torch.ops.aten._softmax_backward_data(dp, p[part], -1, p.dtype)
            if mask3 is not None:
                ds.masked_fill_(take_part(mask3, part), 0.0)
            if dbias is not None:
                dbias.index_add_(0, _cycle(part, dbias), ds.to(wide))
            ds.mul_(ctx.scale)
            torch.bmm(ds, k3[part], out=dq[part])
            torch.bmm(ds.transpose(1, 2), q3[part], out=dk[part])
        dq, dk, dv = dq.view(b, n, sq, -1), dk.view(b, groups, *dk.shape[1:]), dv.view(b, groups, *dv.shape[1:])
        if dbias is not None:
            shape, dtype, _ = ctx.bias
            dbias = dbias.view(shape[0], n, *shape[2:]).sum_to_size(shape).to(dtype)
        return dq.to(ctx.out_dtype), dk.to(ctx.out_dtype), dv.to(ctx.out_dtype), None, dbias, None, None


def parts_of(batches: int, bytes_each: int, device: torch.device) -> list[slice]:
    """Slices of the batch whose scores fit the cache; with more threads than one a slice takes more heads."""
    step = batches
    if device.type == "cpu":
        step = max(1, _BLOCK_BYTES * torch.get_num_threads() // bytes_each)
    return [slice(begin, min(begin + step, batches)) for begin in range(0, batches, step)]


def rows_of(x: Tensor, b: int, n: int, groups: int, sq: int, sk: int) -> Tensor:
    """A mask or bias, `[b or 1, n or 1, sq or 1, sk]` -> `[b * groups or 1, n / groups * sq, sk]`; what is the same for
    all queries (padding) stays one row."""
    r = n // groups
    if x.shape[1] == 1 and x.shape[2] == 1 and x.dtype == torch.bool:
        return x.expand(x.shape[0], 1 if x.shape[0] == 1 else groups, 1, sk).reshape(-1, 1, sk)
    if x.shape[0] == 1 and x.shape[1] == 1:
        return x.expand(1, 1, sq, sk).reshape(1, sq, sk).repeat(1, r, 1)
    return x.expand(b, n, sq, sk).reshape(b * groups, r * sq, sk)


def take_part(mask: Tensor, part: slice) -> Tensor:
    """The mask of some of the batch; one mask may serve all."""
    return mask if mask.shape[0] == 1 else mask[part]


def _cycle(part: slice, x: Tensor) -> Tensor:
    """Places of a part of the batch in a bias that may have one row of groups for all of the batch."""
    return torch.arange(part.start, part.stop, device=x.device) % x.shape[0]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None = None,
    dropout: float = 0.0,
    bias: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T scale + bias) v.

    Args:
        q: `[b, n, sq, d]`; k: `[b, groups, sk, d]`; v: `[b, groups, sk, dv]`; any strides, groups divides n.
        mask: bool `[b or 1, n or 1, sq or 1, sk]`, True = hidden; None: everything is seen.
        scale: None: 1 / sqrt(d).
        dropout: share of the probabilities that is dropped.
        bias: `[b or 1, n or 1, sq, sk]`; its gradient is summed in fp32.
    Returns: `[b, n, sq, dv]`.
    """
    return _Attention.apply(q, k, v, mask, bias, 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale, dropout)
