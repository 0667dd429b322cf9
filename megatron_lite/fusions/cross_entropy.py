"""Softmax cross entropy over a share of the vocabulary, a block of rows at a time.

    logits [rows, v/t]  --block of rows-->  fp32 in cache  -->  softmax  -->  back over the logits, in their dtype

No fp32 copy of the logits ever exists: a block is widened, reduced, and its softmax is written where its logits were
(or into one tensor of their dtype). Backward scales that by the incoming gradient in place. This file knows one rank's
share; `tensor_parallel.cross_entropy` joins the shares.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK_BYTES = 2**21  # a block in fp32: small enough for the cache, large enough to drown the cost of the calls


def _rows_per_block(x: Tensor) -> int:
    if x.device.type != "cpu":
        return max(1, 2**28 // (4 * x.shape[-1]))  # a GPU wants few large kernels; 256 MiB bounds the fp32 block
    return max(1, _BLOCK_BYTES // (4 * x.shape[-1]))


def softmax_rows(logits: Tensor, out: Tensor | None) -> Tensor:
    """Per row the log of the sum of exponentials; the softmax goes to `out`.

    Args:
        logits: `[rows, v]`.
        out: `[rows, v]` of the logits' dtype, possibly the logits themselves; None: not wanted.
    Returns: `[rows]`, fp32.
    """
    lse = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    step = _rows_per_block(logits)
    for begin in range(0, logits.shape[0], step):
        block = logits[begin : begin + step]
        if out is None:
            torch.logsumexp(block.float(), dim=-1, out=lse[begin : begin + step])
            continue
        probabilities = torch.softmax(block, dim=-1, dtype=torch.float32)
        # The largest probability is 1 / sum of exp(x - max): no second exponential.
        largest = block.amax(dim=-1).float()
        lse[begin : begin + step] = largest - probabilities.amax(dim=-1).log_()
        out[begin : begin + step] = probabilities
    return lse


def scale_rows(x: Tensor, factors: Tensor) -> None:
    """x `[rows, v]` times factors `[rows]` (fp32), in place; rounded once."""
    if x.dtype == factors.dtype:
        x.mul_(factors.unsqueeze(1))
        return
    step = _rows_per_block(x)  # in one go torch would widen all of x
    for begin in range(0, x.shape[0], step):
        block = x[begin : begin + step]
        block.copy_(block.float().mul_(factors[begin : begin + step].unsqueeze(1)))


def sum_rows(logits: Tensor) -> Tensor:
    """`[rows, v]` -> `[rows]`: sums in fp32."""
    return logits.sum(dim=-1, dtype=torch.float32)
