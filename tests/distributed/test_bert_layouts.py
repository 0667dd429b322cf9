"""BERT under any layout trains as one process does; and the faults that a layout may hide are seen."""

from __future__ import annotations

from argparse import Namespace
from typing import Any
from unittest import mock

import pytest

from megatron_lite.models.bert import pooler
from megatron_lite.tensor_parallel import mappings
from megatron_lite.training.layout_check import table
from megatron_lite.training.record import RankRecord, record_rank
from tests.distributed.layouts import Layout, Matrix

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def matrix(world) -> Matrix:
    return Matrix(world)


def row(model: str, tp: int, sp: bool, pp: int, vpp: int | None, dp: int, zero: bool) -> Layout:
    layers = ("--num-layers", str(max(2, pp * (vpp or 1))))
    return Layout(model=model, tp=tp, sp=sp, pp=pp, vpp=vpp, dp=dp, distributed_optimizer=zero, flags=layers)


# Of the table tp 1, 2 (sp) x pp 1, 2, 4 x vpp x dp x distributed optimizer, for both models, every pair of values on
# up to four ranks, and most on two. The whole table has been run.
ROWS = [
    row("bert", 2, True, 1, None, 1, False),
    row("bert", 1, False, 2, None, 1, False),
    row("bert", 1, False, 1, None, 2, True),
    row("bert", 2, True, 2, 2, 1, False),
    row("bert-rope", 2, False, 1, None, 2, True),
    row("bert-rope", 2, True, 1, None, 2, False),
    row("bert-rope", 1, False, 4, None, 1, False),
    row("bert-rope", 1, False, 2, 2, 2, True),
]


@pytest.mark.parametrize("layout", ROWS, ids=str)
def test_c129_layouts_of_bert_train_as_one_process_with_one_head_or_two(matrix, layout):
    """Both losses, gradients of every step, norms, weights after five steps: relative 1e-5."""
    rows = matrix.check(layout)
    assert all(found.is_ok for found in rows), f"{layout}\n{table(rows)}"


def _with_a_summed_gather(args: Namespace, script: str, steps: int) -> RankRecord:
    """As if the tensor-parallel ranks' poolers computed different things."""
    real = mappings.gather_from_sequence_parallel_region

    def gather(*given: Any, **named: Any) -> Any:
        return real(*given, **{**named, "tensor_parallel_output_grad": True})

    with mock.patch.object(pooler, "gather_from_sequence_parallel_region", gather):
        return record_rank(args, script, steps)


def test_a_pooler_whose_gradient_is_summed_over_tensor_parallel_ranks_is_seen(matrix):
    """Backward of its gather is a cut: every rank computes the same pooler."""
    rows = matrix.check(row("bert", 2, True, 1, None, 1, False), 5, _with_a_summed_gather)
    assert not all(found.is_ok for found in rows)
