"""Lion: steps of one size in the direction of the sign of a momentum.

    p <- p (1 - lr wd) - lr sign(b1 m + (1 - b1) g)
    m <- b2 m + (1 - b2) g

Source: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_lite.optimizer.blocks import blocks, grad_of, unscaled


class Lion(torch.optim.Optimizer):
    """On flat fp32 tensors whose state `exp_avg` exists already.

    Args:
        betas: b1, b2.

    Attributes: grad_scale: what gradients are divided by, None: nothing.
    """

    grad_scale: Tensor | None = None

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every tensor that has a gradient."""
        for group in self.param_groups:
            (beta1, beta2), lr, weight_decay = group["betas"], group["lr"], group["weight_decay"]
            for param in group["params"]:
                grad = grad_of(param)
                if grad is None:
                    continue
                for p, g, m in blocks(param, grad, self.state[param]["exp_avg"]):
                    g = unscaled(g, self.grad_scale)
                    p.mul_(1.0 - lr * weight_decay)
                    p.add_(m.lerp(g, 1.0 - beta1).sign_(), alpha=-lr)
                    m.lerp_(g, 1.0 - beta2)
