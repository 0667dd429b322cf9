"""Context-parallel rows of the matrix of layouts: every exchange trains as one process does, whatever it meets."""

from __future__ import annotations

from argparse import Namespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_lite import collectives
from megatron_lite.process_groups_config import ProcessGroupCollection, register_process_groups
from megatron_lite.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron_lite.tensor_parallel.random import vary_over_context_parallel_ranks
from megatron_lite.training.layout_check import table
from megatron_lite.training.record import RankRecord, record_rank
from tests.distributed.layouts import Layout, Matrix, run

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
    Layout(cp=2, exchange=("a2a", "p2p"), flags=("--dataloader-inter-document-masking",)),
    Layout(model="bert", cp=2, exchange=("a2a",), per_token_loss=True),
    Layout(model="bert-rope", cp=2, tp=2, sp=True),
    Layout(model="t5-rope", cp=2, exchange=("all_gather",), recompute="full"),
    Layout(model="t5-rope", cp=2, pp=2, exchange=("a2a",)),
    Layout(model="llama", cp=4, exchange=("a2a+p2p",), levels=(2, 2), flags=DOCUMENTS),
]


@pytest.mark.parametrize("layout", ROWS, ids=str)
def test_context_parallel_layouts_train_as_one_process(matrix, layout):
    """Losses, gradients of every step, norms, weights after five steps: relative 1e-5. First weights: bit by bit."""
    rows = matrix.check(layout)
    assert all(row.is_ok for row in rows), f"{layout}\n{table(rows)}"


def test_C055_sequences_over_ranks_weigh_as_samples_over_ranks_do(matrix):
    """The same batch over data ranks, and over half as many that share sequences: one loss, one gradient norm."""
    rows = [Layout(dp=4, micro_batch_size=1), Layout(dp=2, cp=2, micro_batch_size=1), Layout(cp=4, micro_batch_size=1)]
    records = [matrix.record(layout, 2) for layout in rows]
    for record in records[1:]:
        for found, wanted in zip(record.losses, records[0].losses):
            assert found == pytest.approx(wanted, rel=1e-6)
        assert record.grad_norms == pytest.approx(records[0].grad_norms, rel=1e-5)


def _counting(args: Namespace, script: str, steps: int, counted: list[float]) -> RankRecord:
    """The run, and the tokens of each step's report: what is averaged over a step, as over an evaluation."""
    real = collectives.all_reduce

    def all_reduce(x: torch.Tensor, *rest: Any, purpose: str, **kwargs: Any) -> Any:
        handle = real(x, *rest, purpose=purpose, **kwargs)
        if purpose == "losses":
            counted.append(x[0, 1].item())
        return handle

    with mock.patch.object(collectives, "all_reduce", all_reduce):
        return record_rank(args, script, steps)


def _tokens(layout: Layout) -> list[float]:
    counted: list[float] = []
    run(layout, 2, _counting, counted)
    return counted


@pytest.mark.parametrize("cp", [1, 2])
def test_C061_tokens_are_counted_once_however_many_ranks_share_a_sequence(world, cp):
    """8 samples of 16 tokens a step. Evaluation adds up the same way: sums and tokens over all parts."""
    for counted in world(cp).run(_tokens, Layout(cp=cp, per_token_loss=True)):
        assert counted == [128.0, 128.0]


@pytest.mark.parametrize("exchange", ["p2p", "a2a"])
def test_dropout_is_the_same_when_it_is_computed_again(matrix, exchange):
    """Attention is recomputed in backward: what was dropped must be dropped again, bit by bit."""
    flags = ("--attention-dropout", "0.2", "--hidden-dropout", "0.1")
    kept, again = (
        matrix.record(Layout(model="llama", cp=2, exchange=(exchange,), recompute=recompute, flags=flags), 2)
        for recompute in ("none", "full")
    )
    assert kept.losses == again.losses and kept.grad_norms == again.grad_norms


def _draws() -> list[float]:
    """A number of each random state: outside of regions, and of the tensor-parallel region."""
    register_process_groups(ProcessGroupCollection(cp=dist.group.WORLD))
    model_parallel_cuda_manual_seed(1234)
    vary_over_context_parallel_ranks(dist.group.WORLD)
    with get_cuda_rng_tracker().fork():
        inside = torch.rand(()).item()
    register_process_groups(None)
    return [torch.rand(()).item(), inside]


def test_ranks_drop_different_parts_of_a_sequence_and_the_first_one_what_a_lone_rank_drops(world):
    first, second = world(2).run(_draws)
    torch.manual_seed(1234)
    assert first[0] == torch.rand(()).item()
    assert len({*first, *second}) == 4
