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


def bounded(x: Tensor, limit: float | None, offset: float, *, is_gated: bool) -> Tensor:
    """What enters an activation, kept within a limit: `[..., f]` in [-limit, limit], or of `[gate; up]` the gate up to
    the limit and up within it, plus an offset (OpenAI 2025, "gpt-oss model card", section 2.1)."""
    if not is_gated:
        return x if limit is None else x.clamp(-limit, limit)
    gate, up = x.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return torch.cat([gate, up + offset], dim=-1)


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


class _WeightedSwiGLU(torch.autograd.Function):
    """As _SwiGLU, times a number for each row, without a tensor of its own for either."""

    @staticmethod
    def forward(ctx, x, weights):
        ctx.save_for_backward(x, weights)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up).mul_(weights.unsqueeze(-1))

    @staticmethod
    def backward(ctx, g):
        x, weights = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        grad = torch.empty_like(x)
        d_gate, d_up = grad.chunk(2, dim=-1)
        factors, activated = weights.unsqueeze(-1), F.silu(gate)
        torch.mul(activated, g, out=d_up)
        d_weights = (d_up * up).sum(-1) if ctx.needs_input_grad[1] else None
        d_up.mul_(factors)
        scaled = torch.mul(g, factors, out=activated).mul_(up)
        torch.ops.aten.silu_backward.grad_input(scaled, gate, grad_input=d_gate)
        return grad, d_weights


def weighted(activation: Callable[[Tensor], Tensor], x: Tensor, weights: Tensor, *, is_gated: bool) -> Tensor:
    """`[n, f]` or (gated) `[n, 2 f]` -> `[n, f]` in x's dtype: the activation times a number for each row.

    Args:
        weights: `[n]`; multiplied in their own precision.
    """
    if is_gated and activation is F.silu and x.dtype == weights.dtype and x.dim() == 2:
        return _WeightedSwiGLU.apply(x, weights)
    y = gated(activation, x) if is_gated else activation(x)
    return (y * weights.unsqueeze(-1)).to(y.dtype)
