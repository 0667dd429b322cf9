"""AdamW as one kernel over many tensors where a package brings it: Transformer Engine's or apex's FusedAdam.

torch has a fused AdamW of its own, which is what runs on CPUs and where neither package is there. On a GPU a package's
kernel is taken, as Megatron does. Found at run time: neither is needed.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

_PACKAGES = ("transformer_engine.pytorch.optimizers", "apex.optimizers")


@functools.cache
def packaged_adam(device_type: str) -> type[torch.optim.Optimizer] | None:
    """The class FusedAdam of the first package that has one, spoken to as torch's AdamW is; None: use torch's.

    Its constructor takes `(params, lr, betas, eps, adam_w_mode)`. It counts steps in `group["step"]`, and takes states
    `exp_avg` and `exp_avg_sq` that exist already.
    """
    if device_type != "cuda":
        return None
    for name in _PACKAGES:
        try:
            found = import_module(name).FusedAdam
        except (ImportError, OSError, AttributeError):  # OSError: built for another CUDA
            continue
        return _with_divisor(found)
    return None


def _with_divisor(fused_adam: Any) -> type[torch.optim.Optimizer]:
    """The class with torch's attribute `grad_scale`: what gradients are divided by. The packages have none, so the
    division is a pass of its own."""

    class FusedAdam(fused_adam):
        grad_scale: Tensor | None = None

        def step(self, closure: None = None) -> None:
            if self.grad_scale is not None:
                grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
                if grads:
                    torch._foreach_div_(grads, self.grad_scale)
            super().step()

    FusedAdam.__qualname__ = f"{fused_adam.__module__}.FusedAdam"
    return FusedAdam
