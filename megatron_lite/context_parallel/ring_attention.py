"""Attention in which keys and values go round the ranks (Liu et al. 2023, "Ring Attention").

    step       0        1              2              c - 1
    rank r     its own  those of r-1   those of r-2   those of r+1       keys and values move one rank on each step

A rank adds what each block of keys gives to its queries (`fusions.block_attention`), while the next block is on its
way. For backward it keeps its own q, k, v, the result and its lse: s/c tokens' worth, whatever c. Then keys and values
go round again, and their gradients one step behind: each rank adds its part and sends them on, and after c - 1 steps
they are home.

Sent per rank: (c-1) k and v forward, (c-1) k, v and (c-1) dk, dv backward.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite import collectives
from megatron_lite.context_parallel.blocks import Share
from megatron_lite.fusions.block_attention import Arithmetic, Sum, sink_backward, zeros_for_sums


class _Pair:
    """Two tensors in one buffer, so that they travel as one message."""

    def __init__(self, buffer: Tensor, first: torch.Size, second: torch.Size):
        self.buffer, self.shapes = buffer, (first, second)

    @staticmethod
    def of(first: Tensor, second: Tensor) -> _Pair:
        return _Pair(torch.cat([first.reshape(-1), second.reshape(-1)]), first.shape, second.shape)

    def like(self) -> _Pair:
        """One to receive into."""
        return _Pair(torch.empty_like(self.buffer), *self.shapes)

    def parts(self) -> tuple[Tensor, Tensor]:
        """The tensors: views."""
        first, second = self.buffer.split([shape.numel() for shape in self.shapes])
        return first.view(self.shapes[0]), second.view(self.shapes[1])


def _around(k: Tensor, v: Tensor, group: ProcessGroup | None) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(place, k, v) of every rank, the own ones first; while the caller works on them the next are on their way."""
    size, rank = collectives.group_size(group), collectives.group_rank(group)
    if group is None or size == 1:
        yield rank, k, v
        return
    held = _Pair.of(k, v)
    for step in range(size):
        coming = held
        handle: collectives.Handle = collectives.DONE
        if step + 1 < size:
            coming = held.like()
            handle = collectives.shift(coming.buffer, held.buffer, group, purpose="ring keys and values")
        yield (rank - step) % size, *((k, v) if step == 0 else held.parts())
        handle.wait()
        held = coming


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sink, share, group, arithmetic):
        total = Sum(q, v.shape[-1])
        for rank, its_k, its_v in _around(k, v, group):
            share.keys_of(rank).add(total, q, its_k, its_v, arithmetic)
        if sink is not None:
            total.add_sink(sink)
        y, lse = total.kept(q, share.visible.masked)
        ctx.save_for_backward(q, k, v, sink, y, lse)
        ctx.share, ctx.group, ctx.arithmetic = share, group, arithmetic
        return y

    @staticmethod
    def backward(ctx, g):
        q, k, v, sink, y, lse = ctx.saved_tensors
        dq = zeros_for_sums(q)
        own: tuple[Tensor, ...] = ()
        handle: collectives.Handle = collectives.DONE
        arriving: _Pair | None = None  # gradients of other ranks' keys, on their way home
        for rank, its_k, its_v in _around(k, v, ctx.group):
            part = ctx.share.keys_of(rank).backward(dq, g, q, its_k, its_v, y, lse, ctx.arithmetic)
            if not own:
                own = part
                continue
            handle.wait()
            if arriving is not None:  # what the ranks before have added up for these keys
                for own_part, others in zip(part, arriving.parts()):
                    own_part.add_(others)
            sent = _Pair.of(*(x.to(k.dtype) for x in part))
            del part
            arriving = sent.like()
            handle = collectives.shift(arriving.buffer, sent.buffer, ctx.group, purpose="ring gradients")
        handle.wait()
        if arriving is not None:
            for own_part, others in zip(own, arriving.parts()):
                own_part.add_(others)
        dsink = None if sink is None else sink_backward(sink, g, y, lse)
        return dq.to(q.dtype), own[0].to(k.dtype), own[1].to(v.dtype), dsink, None, None, None


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    share: Share,
    group: ProcessGroup | None,
    arithmetic: Arithmetic,
    sink: Tensor | None = None,
) -> Tensor:
    """Attention of this rank's queries on the keys of all ranks of the group.

    Args:
        q: `[b, n, sq/cp, d]`; k: `[b, groups, sk/cp, d]`; v: `[b, groups, sk/cp, dv]`: this rank's share.
        share: its rank and size are the group's.
        group: None: all keys are here.
        sink: scores `[n]` of one more key that has no value.
    Returns: `[b, n, sq/cp, dv]`.
    """
    return _RingAttention.apply(q, k, v, sink, share, group, arithmetic)
