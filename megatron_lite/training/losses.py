"""What the loss of a micro-batch is to the training loop: a sum, the number of its terms, and both for the log."""

from __future__ import annotations

from torch import Tensor


def language_model_loss(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Sum in fp32 of the losses that count, their number, and both under the name of Megatron's log line.

    The loop divides: by the number in each micro-batch, or with --calculate-per-token-loss by that of the whole batch.

    Args:
        loss_mask, losses: `[b, s]`.
    """
    mask = loss_mask.reshape(-1).float()
    total, num_tokens = (losses.reshape(-1).float() * mask).sum(), mask.sum()
    return total, num_tokens, {"lm loss": (total.detach(), num_tokens.detach())}
