"""Multi-latent attention and predictions of further tokens under layouts, together and alone."""

from __future__ import annotations

import pytest

from megatron_lite.training.layout_check import table
from tests.distributed.layouts import Layout, Matrix

pytestmark = pytest.mark.slow

APART = ("--pipeline-model-parallel-layout", "Ettmm|L")  # the loss on a stage of its own
ROWS = [
    Layout(model="latent", tp=2, recompute="full"),
    Layout(model="latent", tp=2, sp=True, dp=2, distributed_optimizer=True, overlap_grad_reduce=True),
    Layout(model="latent", cp=2, recompute="selective"),
    Layout(model="latent-tied", tp=2, sp=True, pp=2),
    Layout(model="further", tp=2, sp=True, per_token_loss=True, recompute="selective"),
    Layout(model="further", pp=2, split=APART),
    Layout(model="further", dp=2, distributed_optimizer=True, recompute="full"),
    Layout(model="further-latent-tied", pp=2, overlap_grad_reduce=True, bucket_size=3000),
    Layout(model="further-latent-tied", cp=2, per_token_loss=True),
]


@pytest.fixture(scope="module")
def matrix(world) -> Matrix:
    return Matrix(world)


@pytest.mark.parametrize("layout", ROWS, ids=str)
def test_latent_attention_and_further_tokens_train_as_in_one_process(matrix, layout):
    """A rotary key whose gradient is not summed over heads of other ranks, a latent norm whose gradient is summed
    twice, a successor that lies on another rank, a copy of the embedding that learns by itself: each is far off."""
    rows = matrix.check(layout)
    assert all(row.is_ok for row in rows), f"{layout}\n{table(rows)}"
