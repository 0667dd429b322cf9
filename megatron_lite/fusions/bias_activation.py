"""Bias, activation and gate of an MLP: `act(x + bias)`, or `act(gate) * up` with [gate; up] stacked in the last dim.

Names and numbers are Megatron's; `bias_gelu` and `bias_geglu` take the tanh form of GELU, as its fused kernels do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2 (So et al. 2021, "Primer")."""
    return F.relu(x).square()


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), the cheap approximation of GELU (Hendrycks and Gimpel 2016)."""
    return x * torch.sigmoid(1.702 * x)


def tanh_gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form."""
    return F.gelu(x, approximate="tanh")


def bias_gelu(x: Tensor, bias: Tensor | None) -> Tensor:
    """GELU (tanh form) of x + bias."""
    return tanh_gelu(x if bias is None else x + bias)


def bias_geglu(x: Tensor, bias: Tensor | None) -> Tensor:
    """`[..., 2 f]` -> `[..., f]`: GELU (tanh form) of the gate, times up."""
    return gated(tanh_gelu, x if bias is None else x + bias)


def bias_swiglu(x: Tensor, bias: Tensor | None) -> Tensor:
    """`[..., 2 f]` -> `[..., f]`: silu of the gate, times up."""
    return swiglu(x if bias is None else x + bias)


def gated(activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`[..., 2 f]` -> `[..., f]`: activation(gate) * up."""
    if activation is F.silu:
        return swiglu(x)
    gate, up = x.chunk(2, dim=-1)
    return activation(gate) * up


class _SwiGLU(torch.autograd.Function):
    """Keeps only x for backward (autograd would keep silu(gate) too) and writes both gradients into one tensor."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        grad = torch.empty_like(x)
        d_gate, d_up = grad.chunk(2, dim=-1)
        torch.mul(F.silu(gate), g, out=d_up)
        d_gate.copy_(torch.ops.aten.silu_backward(g * up, gate))
        return grad


def swiglu(x: Tensor) -> Tensor:
    """`[..., 2 f]` -> `[..., f]`: silu(gate) * up (Shazeer 2020, "GLU variants")."""
    return _SwiGLU.apply(x)
