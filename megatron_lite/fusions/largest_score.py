"""The largest score of an attention, which no fused kernel tells: q k^T once more, a block of queries at a time.

Scores are what the softmax sees: scaled, with the bias, of what is visible. The products are made in fp32 from the
values that the kernel gets. A block holds so many queries that its scores take some tens of MiB, whatever the length.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 2**23


class LargestScore:
    """A maximum over all calls since it was made.

    value: `[]` fp32 on the device of the scores, which nobody has waited for; None before the first call. Minus
    infinity where nothing was visible.
    """

    def __init__(self) -> None:
        self.value: Tensor | None = None

    @torch.no_grad()
    def note(
        self, q: Tensor, k: Tensor, hidden: Tensor | None, causal: bool, scale: float, bias: Tensor | None = None
    ) -> None:
        """Scores of these queries and keys.

        Args:
            q: `[b, n, sq, d]`; k: `[b, groups, sk, d]`; any strides, groups divides n.
            hidden: bool `[b or 1, n or 1, sq or 1, sk]`, True = hidden.
            causal: hide the future; then sq = sk.
            bias: `[b or 1, n or 1, sq, sk]`, added to the scaled scores.
        """
        b, n, sq, d = q.shape
        groups, sk = k.shape[1], k.shape[2]
        keys = k.float().transpose(2, 3)  # [b, groups, d, sk]
        step = max(1, _BLOCK_ELEMENTS // (b * n * sk))
        for begin in range(0, sq, step):
            end = min(begin + step, sq)
            seen = end if causal else sk
            queries = q[:, :, begin:end].float().reshape(b, groups, -1, d)
            scores = (queries @ keys[..., :seen]).mul_(scale).view(b, n, end - begin, seen)
            if bias is not None:
                scores += bias[:, :, begin:end, :seen]
            if causal:
                future = torch.ones(end - begin, seen, dtype=torch.bool, device=q.device).triu_(begin + 1)
                scores.masked_fill_(future, float("-inf"))
            if hidden is not None:
                rows = hidden if hidden.shape[2] == 1 else hidden[:, :, begin:end]
                scores.masked_fill_(rows[..., :seen], float("-inf"))
            largest = scores.amax()
            self.value = largest if self.value is None else torch.maximum(self.value, largest)
