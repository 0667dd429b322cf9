"""The end of each half of a layer: residual + dropout(x + bias)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

WithBias = tuple[Tensor, Tensor | None]


def dropout(x: Tensor, probability: float, training: bool) -> Tensor:
    """Dropout that keeps a mask of one byte an element (on a CPU `F.dropout` keeps one of x's dtype)."""
    if probability == 0.0 or not training:
        return x
    return torch.native_dropout(x, probability, True)[0]


def bias_dropout_add(x_with_bias: WithBias, residual: Tensor, probability: float, training: bool) -> Tensor:
    """residual + dropout(x + bias), in the residual's dtype (fp32 with `--fp32-residual-connection`)."""
    x, bias = x_with_bias
    if bias is not None:
        x = x + bias
    x = dropout(x, probability, training)
    return residual + (x if x.dtype == residual.dtype else x.to(residual.dtype))


def get_bias_dropout_add(training: bool, fused: bool) -> Callable[[WithBias, Tensor, float], Tensor]:
    """The operation with the mode set.

    Args:
        fused: accepted as Megatron has it; eager torch on a CPU gains nothing from compiling three additions.
    """

    def add(x_with_bias: WithBias, residual: Tensor, probability: float) -> Tensor:
        return bias_dropout_add(x_with_bias, residual, probability, training)

    return add
