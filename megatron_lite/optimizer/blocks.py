"""What optimizers of our own share: gradients as the step hands them over, and work in blocks that stay in cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_BLOCK = 2**18  # elements: a few fp32 tensors of this size lie in a core's second-level cache or near it


def grad_of(param: Tensor) -> Tensor | None:
    """A segment's gradient: `decoupled_grad` where its number format is another one than the parameter's."""
    grad = getattr(param, "decoupled_grad", None)
    return grad if grad is not None else param.grad


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same ranges of flat tensors, one after another: temporary memory is a block's, whatever the size."""
    for start in range(0, tensors[0].numel(), _BLOCK):
        yield tuple(tensor[start : start + _BLOCK] for tensor in tensors)


def unscaled(grad: Tensor, divisor: Tensor | None) -> Tensor:
    """grad / divisor in fp32; the gradient itself where there is nothing to do."""
    grad = grad.float() if grad.dtype != torch.float32 else grad
    return grad if divisor is None else grad / divisor.to(grad.device)
