"""RMSNorm (Zhang and Sennrich 2019) with fewer passes over memory than torch's composite on a CPU; fp32 inside."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class _RMSNorm(torch.autograd.Function):
    """y = x / rms(x) * w. Keeps x and one number a row."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()  # 1 / rms, [..., 1]
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight.float()).to(weight.dtype)

    @staticmethod
    def backward(ctx, g):
        x, weight, scale = ctx.saved_tensors
        g = g.float()
        x_hat = x.float() * scale
        product = g * x_hat
        d_weight = product.reshape(-1, product.shape[-1]).sum(0).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, d_weight, None
        mean = torch.mv(product.reshape(-1, product.shape[-1]), weight.float()).div_(x.shape[-1]).view(scale.shape)
        d_x = torch.mul(g, weight.float(), out=product)
        d_x.addcmul_(x_hat, mean, value=-1.0).mul_(scale)
        return d_x.to(x.dtype), d_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x `[..., h]`, weight `[h]` -> `[..., h]` in weight's dtype; the arithmetic is fp32."""
    if x.device.type != "cpu" and x.dtype == weight.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    return _RMSNorm.apply(x, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """x `[..., h]` -> `[..., h]` in weight's dtype; the arithmetic is fp32, as torch's kernels have it."""
    if x.dtype == weight.dtype:
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    y = F.layer_norm(x.float(), weight.shape, weight.float(), None if bias is None else bias.float(), eps)
    return y.to(weight.dtype)
