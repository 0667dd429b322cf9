"""A weight's gradient straight into the flat gradient buffer, inside backward.

Without it autograd makes a gradient of its own, and the DDP hook adds that to `weight.main_grad` and drops it: one more
tensor and one more pass. With it the product itself accumulates (`addmm_`), and backward returns None for the weight:
the DDP hook fires all the same, finds no gradient to add, and counts the parameter as done.

A store puts the products off: the stage before a pipeline stage waits for input gradients alone, so weight gradients
can fill the time in which the stage would wait (Qi et al. 2023, "Zero bubble pipeline parallelism").
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from megatron_lite.fusions.backends import apex_wgrad, matmul_kernel
from megatron_lite.fusions.matmul import transposed_times, widened_rows


class WeightGradStore:
    """Products that were put off, in groups of one backward pass each, first in, first out.

    Args:
        limit: products that wait at most in a group, one more is computed at once; 0: any number.
    """

    def __init__(self, limit: int = 0) -> None:
        self._limit = limit
        self._passes: deque[list[tuple[Tensor, Tensor, Tensor]]] = deque()
        self._open: list[tuple[Tensor, Tensor, Tensor]] = []

    def put(self, weight: Tensor, g: Tensor, x: Tensor) -> None:
        """Keep what `accumulate_product` needs."""
        if 0 < self._limit <= len(self._open):
            accumulate_product(weight, g, x)
        else:
            self._open.append((weight, g, x))

    def end_pass(self) -> None:
        """What was put since the last call is one group."""
        self._passes.append(self._open)
        self._open = []

    def run_oldest(self) -> None:
        """Compute and forget the oldest group."""
        with torch.no_grad():  # outside of backward x still belongs to the graph that made it: the buffer must not
            for weight, g, x in self._passes.popleft():
                accumulate_product(weight, g, x)


def takes_main_grad(weight: Tensor) -> bool:
    """Whether the weight has a place in a gradient buffer."""
    return getattr(weight, "main_grad", None) is not None


def accumulate_product(weight: Tensor, g: Tensor, x: Tensor) -> None:
    """`weight.main_grad += g^T x` with g `[m, n]`, x `[m, k]`."""
    main_grad = weight.main_grad  # type: ignore[attr-defined]
    kernel = matmul_kernel(x.dtype, x.device.type)
    apex = apex_wgrad(main_grad.dtype) if x.device.type == "cuda" else None
    if apex is not None:
        apex(x, g, main_grad)
    elif main_grad.dtype == x.dtype and kernel == "torch":
        main_grad.addmm_(g.t(), x)
    elif main_grad.dtype == torch.float32 and kernel == "widen":
        for g_block, x_block in widened_rows(g, x):
            main_grad.addmm_(g_block.t(), x_block)
    else:  # no kernel multiplies in one dtype and accumulates in another: a product, then an addition that widens
        main_grad.add_(transposed_times(g, x))


def accumulate_rows(weight: Tensor, rows: Tensor, g: Tensor) -> None:
    """`weight.main_grad[rows[i]] += g[i]` with rows `[m]` and g `[m, h]`: the gradient of a table look-up."""
    main_grad = weight.main_grad  # type: ignore[attr-defined]
    main_grad.index_add_(0, rows, g.to(main_grad.dtype))
