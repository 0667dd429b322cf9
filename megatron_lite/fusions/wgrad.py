"""A weight's gradient straight into the flat gradient buffer, inside backward.

Without it autograd makes a gradient of its own, and the DDP hook adds that to `weight.main_grad` and drops it: one more
tensor and one more pass. With it the product itself accumulates (`addmm_`), and backward returns None for the weight:
the DDP hook fires all the same, finds no gradient to add, and counts the parameter as done.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lite.fusions.backends import matmul_kernel
from megatron_lite.fusions.matmul import transposed_times, widened_rows


def takes_main_grad(weight: Tensor) -> bool:
    """Whether the weight has a place in a gradient buffer."""
    return getattr(weight, "main_grad", None) is not None


def accumulate_product(weight: Tensor, g: Tensor, x: Tensor) -> None:
    """`weight.main_grad += g^T x` with g `[m, n]`, x `[m, k]`."""
    main_grad = weight.main_grad  # type: ignore[attr-defined]
    kernel = matmul_kernel(x.dtype, x.device.type)
    if main_grad.dtype == x.dtype and kernel == "torch":
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
