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
    Layout(model="mixtral", tp=2, sp=True, per_token_loss=True, recompute="full"),
    Layout(model="mixtral", pp=2),
    Layout(model="mixtral", dp=2, distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True),
    Layout(model="mixtral", dp=2, per_token_loss=True),
    Layout(model="deepseek", pp=2),
    Layout(model="deepseek", dp=2, distributed_optimizer=True, recompute="full"),
    Layout(model="deepseek", tp=2, sp=True, pp=2, per_token_loss=True),
    Layout(model="deepseek", tp=2, sp=True, dp=2, distributed_optimizer=True),
]


def agrees(matrix: Matrix, layout: Layout) -> None:
    rows = matrix.check(layout)
    assert all(row.is_ok for row in rows), f"{layout}\n{table(rows)}"


@pytest.mark.parametrize("layout", ROWS, ids=str)
def test_models_with_experts_train_as_one_process(matrix: Matrix, layout: Layout) -> None:
    """Losses, gradients of every step, norms, weights after five steps: relative 1e-5."""
    agrees(matrix, layout)


def test_c067_every_copy_of_a_router_has_one_gradient(matrix: Matrix) -> None:
    """C067: a router sees its rank's tokens alone; without the sum over tensor-parallel ranks copies drift apart."""
    layout = Layout(model="deepseek", tp=2, sp=True)
    record = matrix.record(layout)
    assert {name for name in record.first_weights if "router" in name} == {
        f"decoder.layers.{i}.mlp.router.weight" for i in range(2)
    }
    assert all(difference == 0.0 for difference, _ in record.copies.values()), record.copies
    agrees(matrix, layout)


LARGE = """--moe-router-load-balancing-type aux_loss seq_aux_loss global_aux_loss --moe-aux-loss-coeff 1.0 1.0 1.0
    --moe-z-loss-coeff 0.1""".split()


@pytest.mark.parametrize(("tp", "cp", "per_token"), [(2, 1, False), (1, 2, False), (1, 2, True), (2, 2, True)], ids=str)
def test_c105_gradients_of_large_balancing_losses_do_not_depend_on_the_layout(matrix, tp, cp, per_token) -> None:
    """C105: the router's gradient is then mostly that of its own losses."""
    agrees(matrix, Layout(model="mixtral", tp=tp, sp=tp > 1, cp=cp, per_token_loss=per_token, flags=tuple(LARGE)))
