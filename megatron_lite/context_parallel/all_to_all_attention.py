"""Ranks trade tokens for heads (Jacobs et al. 2023, "DeepSpeed Ulysses").

    [s/c, b, n, d]  --all-to-all-->  [s, b, n/c, d]  --attention-->  [s, b, n/c, d]  --all-to-all-->  [s/c, b, n, d]

In between a rank has the whole sequence, in the order of positions, and a part of the heads. Under hierarchical context
parallelism it has the tokens of its level's ranks alone, which lie as the two chunks of one rank of the level above.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite import collectives


def _to_heads(xs: Sequence[Tensor], order: Tensor, group: ProcessGroup, purpose: str) -> list[Tensor]:
    """Each `[sl, b, n, d]` -> `[sl * c, b, n/c, d]`, tokens in `order`; one message for all."""
    c = group.size()
    parts = [x.reshape(*x.shape[:2], c, -1, x.shape[-1]).permute(2, 0, 1, 3, 4) for x in xs]  # [c, sl, b, n/c, d]
    sent = torch.cat([part.reshape(c, -1) for part in parts], dim=1)
    received = torch.empty_like(sent)
    collectives.all_to_all(received, sent, group, purpose=purpose)
    pieces = received.split([part[0].numel() for part in parts], dim=1)
    return [
        piece.reshape(c * part.shape[1], *part.shape[2:]).index_select(0, order) for piece, part in zip(pieces, parts)
    ]


def _to_tokens(xs: Sequence[Tensor], order: Tensor, group: ProcessGroup, purpose: str) -> list[Tensor]:
    """Undoes `_to_heads`."""
    c = group.size()
    sent = torch.cat([torch.empty_like(x).index_copy_(0, order, x).view(c, -1) for x in xs], dim=1)
    received = torch.empty_like(sent)
    collectives.all_to_all(received, sent, group, purpose=purpose)
    pieces = received.split([x.numel() // c for x in xs], dim=1)
    results = []
    for piece, x in zip(pieces, xs):
        by_heads = piece.reshape(c, x.shape[0] // c, *x.shape[1:])  # [c, sl, b, n/c, d]
        results.append(by_heads.permute(1, 2, 0, 3, 4).flatten(2, 3))
    return results


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, order, group, *xs):
        ctx.order, ctx.group = order, group
        return tuple(_to_heads(xs, order, group, "tokens to heads"))

    @staticmethod
    def backward(ctx, *grads):
        return None, None, *_to_tokens([g.contiguous() for g in grads], ctx.order, ctx.group, "gradients to tokens")


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, order, group):
        ctx.order, ctx.group = order, group
        return _to_tokens([x.contiguous()], order, group, "heads to tokens")[0]

    @staticmethod
    def backward(ctx, g):
        return _to_heads([g], ctx.order, ctx.group, "gradients to heads")[0], None, None


def tokens_to_heads(xs: Sequence[Tensor], order: Tensor, group: ProcessGroup) -> list[Tensor]:
    """q, k and v, each `[s/c, b, n, d]`, -> `[s, b, n/c, d]`.

    Args:
        order: where the tokens of the group's ranks, one after another, belong (`partition.order_of`).
    """
    return list(_ToHeads.apply(order, group, *xs))


def heads_to_tokens(x: Tensor, order: Tensor, group: ProcessGroup) -> Tensor:
    """`[s, b, n/c, d]` -> `[s/c, b, n, d]`."""
    return _ToTokens.apply(x, order, group)


def gather_rows(rows: Tensor, order: Tensor, group: ProcessGroup) -> Tensor:
    """A mask's rows `[b, 1, s/c, keys]` of all ranks of the group, in order: `[b, 1, s, keys]`."""
    mine = rows.permute(2, 0, 1, 3).contiguous()
    everyone = mine.new_empty(group.size() * mine.shape[0], *mine.shape[1:])
    collectives.all_gather(everyone, mine, group, purpose="attention mask")
    return everyone.index_select(0, order).permute(1, 2, 0, 3)
