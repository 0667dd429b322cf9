"""Promise 1, row by row: any layout, the same training. And the proof that a row can fail."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_lite import collectives, initialization
from megatron_lite.distributed import distributed_data_parallel, finalize_model_grads
from megatron_lite.optimizer import builder
from megatron_lite.training import data_loading
from megatron_lite.training.layout_check import table
from megatron_lite.training.record import RankRecord, record_rank
from tests.distributed.layouts import Layout, Matrix, fit

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def matrix(world) -> Matrix:
    """Rows on the session's worlds; references live as long as this module's tests."""
    return Matrix(world)


def agrees(matrix: Matrix, layout: Layout) -> None:
    """The row's numbers are those of one process."""
    rows = matrix.check(layout)
    assert all(row.is_ok for row in rows), f"{layout}\n{table(rows)}"


# -- tensor and sequence parallel, data parallel -----------------------------------------------------------------

TENSOR = fit(
    [
        Layout(model=model, tp=tp, sp=sp, dp=dp)
        for model in ("gpt2", "llama")
        for tp in (1, 2, 4)
        for sp in ([False, True] if tp > 1 else [False])
        for dp in (1, 2)
    ],
    recompute=["none", "selective", "full"],
    fusion=[True, False],
)


@pytest.mark.parametrize("layout", TENSOR, ids=str)
def test_tensor_and_sequence_parallel_layouts_train_as_one_process(matrix, layout):
    """Losses, gradients of every step, norms, weights after five steps: relative 1e-5. First weights: bit by bit."""
    agrees(matrix, layout)


def test_the_rows_hold_the_whole_product_and_every_pair_with_recompute_and_fusion():
    """A covering selection that covers less than it says would let a layout rot."""
    whole = {(r.model, r.tp, r.sp, r.dp) for r in TENSOR}
    assert len(whole) == 20
    for name in ("model", "tp", "sp", "dp", "fusion"):
        values = {getattr(row, name) for row in TENSOR}
        found = {(getattr(row, name), row.recompute) for row in TENSOR}
        assert len(values) > 1 and found == {(v, r) for v in values for r in ("none", "selective", "full")}, name
        if name != "fusion":
            assert {(getattr(row, name), row.fusion) for row in TENSOR} == {(v, f) for v in values for f in (0, 1)}


MORE = [
    Layout(tp=2, sp=True, dp=2, per_token_loss=True),
    Layout(model="llama", tp=2, dp=2, per_token_loss=True, micro_batch_size=1),
    Layout(dp=2, overlap_grad_reduce=True, bucket_size=5000),
    Layout(model="llama", tp=2, sp=True, dp=2, overlap_grad_reduce=True, bucket_size=3000, average_in_collective=True),
    Layout(dp=4, micro_batch_size=1, average_in_collective=True),
]


@pytest.mark.parametrize("layout", MORE, ids=str)
def test_buckets_overlap_and_the_kind_of_mean_change_nothing(matrix, layout):
    agrees(matrix, layout)


SHARDED = [
    Layout(dp=2, distributed_optimizer=True),
    Layout(dp=2, distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=5000),
    Layout(model="llama", tp=2, sp=True, dp=2, distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=3000),
    Layout(
        model="llama",
        tp=2,
        dp=2,
        distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        recompute="full",
        bucket_size=3000,
        per_token_loss=True,
    ),
    Layout(
        dp=4,
        micro_batch_size=1,
        distributed_optimizer=True,
        optimizer_instances=2,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    ),
]


@pytest.mark.parametrize("layout", SHARDED, ids=str)
def test_sharded_optimizers_train_as_one_process(matrix, layout):
    """A range that no rank steps on, or a gather that forward does not wait for."""
    agrees(matrix, layout)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(precision="bf16", dp=2),
        Layout(precision="bf16", dp=2, distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True),
        Layout(precision="bf16", tp=2, sp=True),
        Layout(precision="bf16", model="llama", tp=2, sp=True, dp=2, recompute="full"),
        Layout(precision="bf16", model="llama", tp=2),
    ],
    ids=str,
)
def test_bf16_layouts_train_as_one_bf16_process(matrix, layout):
    """Within the rounding of bf16: `TOLERANCE`."""
    agrees(matrix, layout)


# -- faults: each is put in once, and must be seen ---------------------------------------------------------------


def _without(kind: str, purpose: str) -> Any:
    """A collective that does nothing for one purpose."""
    real = getattr(collectives, kind)

    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs["purpose"] != purpose:
            return real(*args, **kwargs)
        if kind == "reduce_scatter":  # as if every other rank had sent zeros
            args[0].copy_(args[1].chunk(collectives.group_size(args[2]))[collectives.group_rank(args[2])])
        return collectives.DONE

    return mock.patch.object(collectives, kind, call)


def _norms_reduced_on_no_rank() -> Any:
    # By path: the room's face gives the function of the same name.
    module = sys.modules[finalize_model_grads.__module__]
    return mock.patch.object(module, "_reduce_over_tensor_parallel_ranks", lambda *args, **kwargs: None)


def _sum_instead_of_mean() -> Any:
    return mock.patch.object(
        distributed_data_parallel.DistributedDataParallel, "_scaling_factor", lambda self, is_expert: 1.0
    )


def _copies_counted_twice() -> Any:
    return mock.patch.object(builder, "_counts_here", lambda param, pg_collection: True)


def _own_initial_values() -> Any:
    real = initialization.fill

    def fill(param: torch.Tensor, shard: Any, method: Any, seed: int) -> None:
        real(param, shard, method, seed + dist.get_rank())

    return mock.patch.object(initialization, "fill", fill)


def _same_samples_on_both_ranks() -> Any:
    real = data_loading.MegatronPretrainingSampler
    return mock.patch.object(
        data_loading,
        "MegatronPretrainingSampler",
        lambda *args, **kwargs: real(*args, **{**kwargs, "data_parallel_rank": 0}),
    )


TWO = {
    "dp": Layout(dp=2),
    "tp": Layout(tp=2),
    "sp": Layout(tp=2, sp=True),
    "zero1": Layout(dp=2, distributed_optimizer=True),
}
FAULTS: dict[str, tuple[str, Any, set[str]]] = {
    # name: layout, the fault, comparisons that must fail
    "data-parallel reduction dropped": ("dp", lambda: _without("all_reduce", "gradients"), {"gradients", "weights"}),
    "sum instead of mean": ("dp", _sum_instead_of_mean, {"gradients", "gradient norm"}),
    "same samples on both ranks": ("dp", _same_samples_on_both_ranks, {"losses", "gradients"}),
    "row-parallel sum dropped": ("tp", lambda: _without("all_reduce", "reduce_from forward"), {"losses", "gradients"}),
    "input-gradient sum dropped": ("tp", lambda: _without("all_reduce", "column backward"), {"gradients", "weights"}),
    "softmax over the own vocabulary": (
        "tp",
        lambda: _without("all_reduce", "cross entropy"),
        {"losses", "gradients"},
    ),
    "copies counted twice in the norm": ("tp", _copies_counted_twice, {"gradient norm", "weights"}),
    "ranks start differently": ("tp", _own_initial_values, {"first weights", "losses"}),
    "norm gradients not summed": ("sp", _norms_reduced_on_no_rank, {"gradients", "copies on other ranks"}),
    "reduce-scatter forward dropped": (
        "sp",
        lambda: _without("reduce_scatter", "reduce_scatter_to_sequence forward"),
        {"losses", "gradients"},
    ),
    "reduce-scatter backward dropped": (
        "sp",
        lambda: _without("reduce_scatter", "column backward"),
        {"gradients", "weights"},
    ),
    "reduce-scatter of gradients dropped": (
        "zero1",
        lambda: _without("reduce_scatter", "gradients"),
        {"gradients", "weights"},
    ),
    "gather of parameters dropped": (
        "zero1",
        lambda: _without("all_gather", "parameters"),
        {"losses", "weights", "copies on other ranks"},
    ),
    "gradient norm of one rank alone": ("sp", lambda: _without("all_reduce", "gradient norm"), {"gradient norm"}),
}


def record_faulty(args: Namespace, script: str, steps: int, name: str) -> RankRecord:
    """`record_rank` with a fault of FAULTS in place."""
    with FAULTS[name][1]():
        return record_rank(args, script, steps)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(matrix, name):
    """A matrix that passes whatever is broken proves nothing."""
    kind, _, expected = FAULTS[name]
    rows = matrix.check(TWO[kind], 2, record_faulty, name)
    failed = {row.what for row in rows if not row.is_ok}
    assert expected <= failed, table(rows)


def test_the_same_rows_without_a_fault_are_clean(matrix):
    """The control: what the faults are put into is right."""
    for layout in TWO.values():
        rows = matrix.check(layout, 2)
        assert all(row.is_ok for row in rows), table(rows)
