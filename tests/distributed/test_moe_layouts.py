"""Models with experts, every rank holding all of them: any layout trains as one process does."""

from __future__ import annotations

import pytest

from megatron_lite.training.layout_check import table
from tests.distributed.layouts import Layout, Matrix

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def matrix(world) -> Matrix:
    return Matrix(world)


ROWS = [
    Layout(model="mixtral", tp=2, sp=True),
    Layout(model="mixtral", tp=2, sp=True, per_token_loss=True, recompute="full"),
    Layout(model="mixtral", pp=2, distributed_optimizer=False),
    Layout(model="mixtral", dp=2, distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True),
    Layout(model="mixtral", dp=2, per_token_loss=True),
    Layout(model="deepseek", tp=2, sp=True),
    Layout(model="deepseek", pp=2),
    Layout(model="deepseek", dp=2, distributed_optimizer=True, recompute="full"),
    Layout(model="deepseek", tp=2, sp=True, pp=2, dp=1, per_token_loss=True),
    Layout(model="deepseek", tp=2, sp=True, dp=2, distributed_optimizer=True),
]


@pytest.mark.parametrize("layout", ROWS, ids=str)
def test_models_with_experts_train_as_one_process(matrix: Matrix, layout: Layout) -> None:
    """Losses, gradients of every step, norms, weights after five steps: relative 1e-5."""
    rows = matrix.check(layout)
    assert all(row.is_ok for row in rows), f"{layout}\n{table(rows)}"
