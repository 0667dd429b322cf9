"""Attention in which every rank collects the keys and values of all.

Forward gathers them and attends; backward gathers them again, rather than keep s tokens' worth, and sums their
gradients back to where they came from. One large message each instead of the ring's c - 1 small ones, for s tokens of
keys and values in memory while a layer computes (Llama Team 2024, section 3.3.2).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite import collectives
from megatron_lite.context_parallel.blocks import Keys, Share
from megatron_lite.context_parallel.partition import natural_runs, order_of
from megatron_lite.fusions.block_attention import Arithmetic, Sum, sink_backward, zeros_for_sums


def _gathered(k: Tensor, v: Tensor, share: Share, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """k and v `[b, groups, sk/cp, d]` of all ranks, in the order of positions: `[b, groups, sk, d]`, views of one."""
    mine = torch.cat([k, v], dim=-1).permute(2, 0, 1, 3).contiguous()
    everyone = mine.new_empty(share.size * mine.shape[0], *mine.shape[1:])
    collectives.all_gather(everyone, mine, group, purpose="keys and values")
    order = order_of(range(share.size), share.size, share.key_documents, k.device)
    both = everyone.index_select(0, order).permute(1, 2, 0, 3)
    return both[..., : k.shape[-1]], both[..., k.shape[-1] :]


def _all_keys(share: Share) -> Keys:
    return Keys(share, natural_runs(share.size, share.key_documents))


class _AllGatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sink, share, group, arithmetic):
        total = Sum(q, v.shape[-1])
        # Ranks drop different probabilities: their random states differ, and so do the seeds.
        _all_keys(share).add(total, q, *_gathered(k, v, share, group), arithmetic)
        if sink is not None:
            total.add_sink(sink)
        y, lse = total.kept(q, share.visible.masked)
        ctx.save_for_backward(q, k, v, sink, y, lse)
        ctx.share, ctx.group, ctx.arithmetic = share, group, arithmetic
        return y

    @staticmethod
    def backward(ctx, g):
        q, k, v, sink, y, lse = ctx.saved_tensors
        share, group = ctx.share, ctx.group
        dq = zeros_for_sums(q)
        all_k, all_v = _gathered(k, v, share, group)
        grads = _all_keys(share).backward(dq, g, q, all_k, all_v, y, lse, ctx.arithmetic)
        order = order_of(range(share.size), share.size, share.key_documents, k.device)
        natural = torch.cat([grad.to(k.dtype) for grad in grads], dim=-1).permute(2, 0, 1, 3)
        by_rank = torch.empty(natural.shape, dtype=k.dtype, device=k.device).index_copy_(0, order, natural)
        mine = by_rank.new_empty(by_rank.shape[0] // share.size, *by_rank.shape[1:])
        collectives.reduce_scatter(
            mine, by_rank, group, accumulate_in_fp32=True, purpose="gradients of keys and values"
        )
        both = mine.permute(1, 2, 0, 3)
        dsink = None if sink is None else sink_backward(sink, g, y, lse)
        return dq.to(q.dtype), both[..., : k.shape[-1]], both[..., k.shape[-1] :], dsink, None, None, None


def all_gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    share: Share,
    group: ProcessGroup,
    arithmetic: Arithmetic,
    sink: Tensor | None = None,
) -> Tensor:
    """As `ring_attention`."""
    return _AllGatherAttention.apply(q, k, v, sink, share, group, arithmetic)
