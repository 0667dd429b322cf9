"""Cross entropy over a vocabulary that is split over the tensor-parallel ranks.

    rank r holds logits [s, b, v/t] for ids [r v/t, (r + 1) v/t)

    lse_r = log sum exp(logits_r)            local, in blocks of rows (fusions.cross_entropy)
    m     = max over ranks of lse_r          one all-reduce
    lse   = m + log sum_r exp(lse_r - m)     one all-reduce, which also carries the target's logit and, for label
    loss  = lse - logit[target]              smoothing, the sum of the logits
    grad  = softmax - onehot                 no communication: softmax_r is scaled by exp(lse_r - lse)

Label smoothing a over K = v classes: target 1 - a on the label and a / (K - 1) elsewhere. With s = a K / (K - 1):
loss' = (1 - s) loss - s mean_k log p_k. K and the mean are those of the whole vocabulary on every rank.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite import collectives
from megatron_lite.errors import ConfigError
from megatron_lite.fusions.cross_entropy import scale_rows, softmax_rows, sum_rows
from megatron_lite.tensor_parallel.mappings import default_group
from megatron_lite.tensor_parallel.utils import VocabUtility


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, smoothing, group, over_logits, wants_grad):
        size, rank = collectives.group_size(group), collectives.group_rank(group)
        share = logits.shape[-1]
        classes = share * size
        first, _ = VocabUtility.vocab_range_from_per_partition_vocab_size(share, rank, size)
        rows = logits.reshape(-1, share)
        local = target.reshape(-1) - first
        mine = (local >= 0) & (local < share)
        local = local.clamp(0, share - 1).unsqueeze(1)
        picked = rows.gather(1, local).squeeze(1).float().masked_fill_(~mine, 0.0)  # before the logits are overwritten
        total = sum_rows(rows) if smoothing > 0.0 else None

        grad = None
        if wants_grad:
            grad = rows if over_logits else torch.empty_like(rows)
        local_lse = softmax_rows(rows, grad)

        lse = local_lse
        if size > 1:
            top = local_lse.clone()
            collectives.all_reduce(top, group, op="max", purpose="cross entropy")
            sums = torch.stack([(local_lse - top).exp_(), picked] + ([] if total is None else [total]))
            collectives.all_reduce(sums, group, purpose="cross entropy")
            lse, picked = top + sums[0].log(), sums[1]
            total = None if total is None else sums[2]
        loss = lse - picked
        s = 0.0
        if total is not None:
            s = smoothing * classes / (classes - 1)
            loss = (1.0 - s) * loss - s * (total / classes - lse)

        if grad is not None:
            if size > 1:
                scale_rows(grad, (local_lse - lse).exp_())
            if s > 0.0:
                grad.sub_(s / classes)
            # The label's own entry is p - 1 + s: computed in fp32 and then rounded, not the other way round.
            flat = grad.view(-1)
            place = torch.arange(rows.shape[0], device=rows.device).mul_(share).add_(local.squeeze(1))
            at_label = (picked - lse).exp_().sub_(1.0 - s + s / classes)
            flat[place] = torch.where(mine, at_label, flat[place].float()).to(grad.dtype)
            ctx.grad, ctx.shape = grad, logits.shape
        return loss.view(target.shape)

    @staticmethod
    def backward(ctx, g):
        if ctx.grad is None:
            raise RuntimeError("the gradient of this cross entropy was used: run forward again for a second backward")
        grad, ctx.grad = ctx.grad, None
        scale_rows(grad, g.reshape(-1))
        return grad.view(ctx.shape), None, None, None, None, None


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: ProcessGroup | None = None,
    *,
    over_logits: bool = False,
) -> Tensor:
    """Loss per token, in fp32.

    Args:
        vocab_parallel_logits: `[s, b, v/t]`, any float dtype (any leading dims).
        target: `[s, b]` global ids.
        label_smoothing: probability moved from the label to all others, in [0, 1).
        tp_group: None = the registered tensor-parallel group.
        over_logits: write the gradient over the logits: saves a tensor of their size; the caller must not read the
            logits afterwards.
    Returns: `[s, b]`.
    """
    if not 0.0 <= label_smoothing < 1.0:
        raise ConfigError(f"label smoothing {label_smoothing}", why="a probability in [0, 1)", fix="for example 0.1")
    logits = vocab_parallel_logits
    if over_logits and not logits.is_contiguous():
        over_logits = False
    wants_grad = torch.is_grad_enabled() and logits.requires_grad
    return _CrossEntropy.apply(logits, target, label_smoothing, default_group(tp_group), over_logits, wants_grad)
