"""Multi-latent attention under layouts: the projections down are on every rank, those up are split by heads."""

from __future__ import annotations

import pytest

from megatron_lite.training.layout_check import table
from tests.distributed.layouts import Layout, Matrix, fit

pytestmark = pytest.mark.slow

ROWS = fit(
    [
        Layout(model="latent", tp=2),
        Layout(model="latent", tp=2, sp=True, per_token_loss=True),
        Layout(model="latent-tied", pp=2, overlap_grad_reduce=True, bucket_size=3000),
        Layout(model="latent-tied", tp=2, sp=True, pp=2),
    ],
    recompute=["none", "selective", "full"],
)[:5] + [
    Layout(model="latent", tp=2, sp=True, dp=2, distributed_optimizer=True, overlap_grad_reduce=True),
]


@pytest.fixture(scope="module")
def matrix(world) -> Matrix:
    return Matrix(world)


@pytest.mark.parametrize("layout", ROWS, ids=str)
def test_latent_attention_trains_as_in_one_process(matrix, layout):
    """A rotary key whose gradient is not summed over heads of other ranks, or a latent norm whose gradient is summed
    twice, is off by the number of ranks."""
    rows = matrix.check(layout)
    assert all(row.is_ok for row in rows), f"{layout}\n{table(rows)}"
