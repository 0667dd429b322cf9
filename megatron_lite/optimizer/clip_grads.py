"""Norm, clipping and zeros of gradients that lie in flat memory and are counted once over all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite import collectives

# One fp32 sum over 10^7 squares is off by 5e-4 of its value on the CPU. Rows of this size are summed in fp32, which is
# one fast operation, and rows are added in fp64: off by 2e-7 (one row) to 1e-9 (many), in the same time.
_ROW = 1024


def sum_of_powers(flat: Tensor, norm_type: float = 2.0, exact: bool = False) -> Tensor:
    """Sum of |x|^p, or the maximum of |x| for p = inf: what ranks and pieces can add up (or take the maximum of).

    Args:
        flat: `[n]`; 16-bit numbers are raised to fp32 first.
        exact: fp64 from the first addition on; 20 times slower. For numbers whose squares leave fp32.
    Returns: fp64 scalar. Inf or NaN if an element is.
    """
    flat = flat.double() if exact else flat.float()
    whole = flat.numel() // _ROW * _ROW
    parts = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), norm_type, dim=1).double()
    rest = (
        torch.linalg.vector_norm(flat[whole:], norm_type, dim=0, keepdim=True).double() if whole < len(flat) else None
    )
    norms = parts if rest is None else torch.cat([parts, rest])
    if norm_type == math.inf:
        return norms.max() if len(norms) else norms.new_zeros(())
    return norms.pow(norm_type).sum()


def total_power(
    grads: Sequence[Tensor], norm_type: float, group: ProcessGroup | None, device: torch.device, exact: bool = False
) -> float:
    """`sum_of_powers` over pieces and ranks; collective. A rank with nothing to add adds 0. Waits for the device.

    Args:
        device: of the number that is sent: the model's, also where there is no gradient.
    """
    values = [sum_of_powers(grad, norm_type, exact).to(device) for grad in grads]
    total = torch.zeros((), dtype=torch.float64, device=device)
    if values:
        together = torch.stack(values)
        # A maximum loses NaN on some backends; Inf it keeps.
        total = together.max().nan_to_num(nan=math.inf, posinf=math.inf) if norm_type == math.inf else together.sum()
    collectives.all_reduce(total, group, op="max" if norm_type == math.inf else "sum", purpose="gradient norm")
    return float(total)


def norm_of_power(power: float, norm_type: float) -> float:
    """From a sum of powers to the norm."""
    return power if norm_type == math.inf else power ** (1.0 / norm_type)


def get_grad_norm_fp32(
    grads_for_norm: Tensor | Sequence[Tensor],
    norm_type: float = 2.0,
    grad_stats_parallel_group: ProcessGroup | None = None,
) -> float:
    """p-norm of gradients that are spread over ranks, for scripts that clip by themselves; collective.

    Args:
        grads_for_norm: this rank's part: each element of the model on one rank, copies left out. May be empty.
    Returns: the norm, or NaN where an element of any rank is Inf or NaN.
    """
    grads = [grads_for_norm] if isinstance(grads_for_norm, Tensor) else list(grads_for_norm)
    flats = [grad.reshape(-1) for grad in grads]
    device = flats[0].device if flats else _device_of(grad_stats_parallel_group)
    for exact in (False, True):
        power = total_power(flats, norm_type, grad_stats_parallel_group, device, exact)
        if math.isfinite(power):
            return norm_of_power(power, norm_type)
    return math.nan


def _device_of(group: ProcessGroup | None) -> torch.device:
    """Where a group's backend wants its numbers."""
    on_gpu = group is not None and "nccl" in str(torch.distributed.get_backend(group))
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def clip_coefficient(norm: float, max_norm: float) -> float:
    """What gradients are multiplied by so that their norm is at most `max_norm`; 1 when it is, or `max_norm` is 0."""
    if max_norm <= 0.0:
        return 1.0
    return min(max_norm / (norm + 1.0e-6), 1.0)


def count_zeros(runs: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Gradient elements that are exactly 0.

    Args:
        runs: flat gradients, and how many of their elements belong to parameters: the rest is padding, which is zero
            and does not count.
    Returns: fp64 scalar.
    """
    total = torch.zeros((), dtype=torch.float64)
    for flat, numel in runs:
        total = total.to(flat.device) + (numel - torch.count_nonzero(flat)).double()
    return total
