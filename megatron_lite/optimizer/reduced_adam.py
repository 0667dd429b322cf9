"""Adam whose moments are kept in 16 bits and computed in fp32: half the memory of the moments.

Every step raises a block of the moments to fp32, lets torch's fused kernel update it, and rounds it back. A block's
temporaries stay in cache, so the price is the rounding, not the traffic. bf16 has the range of fp32, which is what the
second moment (squares of small gradients) needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from megatron_lite.optimizer.blocks import blocks, grad_of


class ReducedAdam(torch.optim.Optimizer):
    """On flat fp32 tensors whose states `exp_avg`, `exp_avg_sq` (of any floating format) and `step` exist already.

    Args:
        decoupled_weight_decay: AdamW; else the decay is a part of the gradient.

    Attributes: grad_scale: what gradients are divided by, None: nothing.
    """

    grad_scale: Tensor | None = None

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        decoupled_weight_decay: bool,
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._decoupled = decoupled_weight_decay

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every tensor that has a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                grad = grad_of(param)
                if grad is None:
                    continue
                state = self.state[param]
                for p, g, m, v in blocks(param, grad, state["exp_avg"], state["exp_avg_sq"]):
                    m32, v32 = m.float(), v.float()
                    adam(
                        [p],
                        [g.float()],
                        [m32],
                        [v32],
                        [],
                        [state["step"].clone()],  # the kernel counts
                        fused=True,
                        grad_scale=self.grad_scale,
                        amsgrad=False,
                        beta1=group["betas"][0],
                        beta2=group["betas"][1],
                        lr=group["lr"],
                        weight_decay=group["weight_decay"],
                        eps=group["eps"],
                        maximize=False,
                        decoupled_weight_decay=self._decoupled,
                    )
                    if m32 is not m:
                        m.copy_(m32)
                    if v32 is not v:
                        v.copy_(v32)
                state["step"] += 1
