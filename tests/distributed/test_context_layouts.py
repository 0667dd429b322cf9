"""Context-parallel rows of the matrix of layouts: every exchange trains as one process does, whatever it meets."""

from __future__ import annotations

import pytest

from megatron_lite.training.layout_check import table
from tests.distributed.layouts import Layout, Matrix

pytestmark = pytest.mark.slow

DOCUMENTS = ("--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss")  # uneven masks


@pytest.fixture(scope="module")
def matrix(world) -> Matrix:
    """Rows on the session's worlds; references live as long as this module's tests."""
    return Matrix(world)


ROWS = [
    Layout(cp=2),
    Layout(model="llama", cp=2, exchange=("all_gather",), recompute="full"),
    Layout(model="llama", cp=2, exchange=("a2a",), recompute="selective", flags=DOCUMENTS),
    Layout(cp=2, exchange=("p2p", "all_gather"), flags=DOCUMENTS, per_token_loss=True),
    Layout(model="llama", cp=2, tp=2, sp=True, flags=DOCUMENTS),
    Layout(cp=2, dp=2, exchange=("a2a",), distributed_optimizer=True, overlap_grad_reduce=True, flags=DOCUMENTS),
    Layout(cp=2, pp=2, exchange=("all_gather",), flags=DOCUMENTS),
    Layout(model="t5-rope", cp=2, exchange=("all_gather",), recompute="full"),
    Layout(model="t5-rope", cp=2, pp=2, exchange=("a2a",)),
    Layout(model="llama", cp=4, exchange=("a2a+p2p",), levels=(2, 2), flags=DOCUMENTS),
]


@pytest.mark.parametrize("layout", ROWS, ids=str)
def test_context_parallel_layouts_train_as_one_process(matrix, layout):
    """Losses, gradients of every step, norms, weights after five steps: relative 1e-5. First weights: bit by bit."""
    rows = matrix.check(layout)
    assert all(row.is_ok for row in rows), f"{layout}\n{table(rows)}"
