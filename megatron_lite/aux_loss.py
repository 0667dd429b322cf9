"""A loss that rides along in backward: it is not part of the loss that is printed, but its gradient is.

    y = AuxLossAutoScaler.apply(x, loss)          forward: y is x, the loss is kept
                                                  backward: dx = dy, and d loss = the scale of this step

Layers attach their losses (balance of experts, predictions of further tokens) to tensors that lead to the main loss.
The schedule says at the start of a step what a loss of one micro-batch weighs, so that gradients come out as those of
the main loss do: the loss scale, times context-parallel size / micro-batches where gradients are averaged, or the loss
scale alone where they are sums over tokens (then a layer multiplies its mean loss by the tokens that it stands for).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_scale: Tensor | float = 1.0


class AuxLossAutoScaler(torch.autograd.Function):
    """Identity on `output` that lets `aux_loss` (a scalar of its micro-batch) take part in backward."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, aux_loss: Tensor) -> Tensor:
        """`output`, unchanged."""
        ctx.shape, ctx.dtype, ctx.device = aux_loss.shape, aux_loss.dtype, aux_loss.device
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of `output` as it comes, and the step's scale for the loss."""
        scale = torch.as_tensor(_scale, dtype=ctx.dtype, device=ctx.device)
        return grad_output, scale.expand(ctx.shape)

    @staticmethod
    def set_loss_scale(scale: Tensor | float) -> None:
        """What an attached loss weighs from now on."""
        global _scale
        _scale = scale.detach().reshape(()) if isinstance(scale, Tensor) else scale


def attach_aux_loss(output: Tensor, aux_loss: Tensor) -> Tensor:
    """`output`, with a loss that backward sees and forward does not."""
    return AuxLossAutoScaler.apply(output, aux_loss)
