"""The nearest orthogonal matrix, by a polynomial iteration: no decomposition, only matrix products.

With X = U S V^T, one step a X + b (X X^T) X + c (X X^T)^2 X = U (a S + b S^3 + c S^5) V^T changes the singular values
alone. The coefficients drive each of them from (0, 1] to about 1, so that X becomes about U V^T.

    whole matrix on every rank      orthogonalize(x)
    cut by columns over ranks       orthogonalize(x, group): X X^T is the sum of the ranks' products

Sources: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks" (simple); Amsel et al. 2025, "The
Polar Express" (polar_express). The five steps called quintic are the ones that the speed runs of Jordan et al. settled
on later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite import collectives
from megatron_lite.errors import ConfigError

COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
}


def orthogonalize(
    x: Tensor, steps: int = 5, coefficient_type: str = "quintic", columns: ProcessGroup | None = None
) -> Tensor:
    """About U V^T of a matrix U S V^T, in fp32.

    Args:
        x: `[m, n]`, or with `columns` this rank's `[m, n/size]`.
        steps: where there are more steps than sets of coefficients, these start again.
        columns: ranks over which the columns are cut.
    Raises: ConfigError for an unknown `coefficient_type`.
    """
    if coefficient_type not in COEFFICIENTS:
        raise ConfigError(
            f"--muon-coefficient-type {coefficient_type}", why="no such polynomial", fix=", ".join(COEFFICIENTS)
        )
    # The smaller side is squared; of a matrix that is cut, the side that is whole.
    turned = columns is None and x.shape[0] > x.shape[1]
    x = (x.mT if turned else x).float()
    square = x.square().sum()
    collectives.all_reduce(square, columns, purpose="norm of a matrix")
    x = x / square.sqrt().clamp(min=1e-7)
    for a, b, c in islice(cycle(COEFFICIENTS[coefficient_type]), steps):
        gram = x @ x.mT
        collectives.all_reduce(gram, columns, purpose="product of a matrix with itself")
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if turned else x


def scale_of(rows: int, columns: int, mode: str) -> float:
    """What an orthogonal update of `[rows, columns]` is multiplied by.

    Args:
        mode: spectral: the size of AdamW's steps up to a constant, so that learning rates carry over; unit_rms_norm:
            outputs of norm 1 from inputs of norm 1; shape_scaling: the same, but never below 1.
    """
    return {
        "spectral": max(rows, columns) ** 0.5,
        "unit_rms_norm": (rows / columns) ** 0.5,
        "shape_scaling": max(1.0, rows / columns) ** 0.5,
    }[mode]


@contextmanager
def matmul_precision(name: str, device_type: str) -> Iterator[None]:
    """fp32 products on a GPU: low and medium in bf16, high in tf32. On a CPU they stay fp32: a CPU with AMX would round
    to bf16 as well, and runs on two machines, or in two layouts, would drift apart."""
    before = torch.get_float32_matmul_precision()
    gpu = "high" if name == "high" else "medium"
    torch.set_float32_matmul_precision("highest" if device_type == "cpu" else gpu)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
