"""Promise 1 over pipelines: stages, virtual stages, uneven splits and every schedule train what one process trains."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_lite.training.layout_check import table
from tests.distributed.layouts import Layout, Matrix, fit

pytestmark = pytest.mark.slow

DEEP = ("--num-layers", "12")
EIGHT = ("--num-layers", "8")


@pytest.fixture(scope="module")
def matrix(world) -> Matrix:
    """Rows on the session's worlds; references live as long as this module's tests."""
    return Matrix(world)


def agrees(matrix: Matrix, layout: Layout) -> None:
    """The row's numbers are those of one process."""
    rows = matrix.check(layout, 3)
    assert all(row.is_ok for row in rows), f"{layout}\n{table(rows)}"


def batches(count: int, dp: int = 1) -> tuple[str, ...]:
    """Flags for so many samples on each data-parallel rank."""
    return (*DEEP, "--global-batch-size", str(count * dp))


def _row(**fields) -> Layout:
    return Layout(micro_batch_size=1, **fields)


# Stages x virtual stages x ranks of the other kinds, tied (gpt2) and untied (llama) ends; 4 to 8 workers.
ROWS = fit(
    [
        _row(
            model=model,
            pp=pp,
            vpp=vpp,
            tp=tp,
            dp=dp,
            flags=batches(8 // dp, dp) if (pp, vpp) != (4, 2) else (*EIGHT, "--global-batch-size", "8"),
        )
        for model in ("gpt2", "llama")
        for pp, vpp, tp, dp in (
            (2, None, 1, 1),
            (2, 2, 1, 2),
            (2, 3, 2, 1),
            (2, None, 2, 2),
            (4, None, 1, 1),
            (4, 2, 2, 1),
            (4, 3, 1, 1),
        )
    ]
    + [_row(pp=4, vpp=3, dp=2, flags=batches(4, 2)), _row(model="llama", pp=4, dp=2, flags=batches(4, 2))],
    distributed_optimizer=[False, True],
    overlap_grad_reduce=[True, False],
)
ROWS = [
    replace(
        row,
        sp=row.tp > 1 and row.model == "llama",
        overlap_param_gather=row.distributed_optimizer and row.overlap_grad_reduce,
        bucket_size=3000 if row.overlap_grad_reduce else None,
    )
    for row in ROWS
]


@pytest.mark.parametrize("layout", ROWS, ids=str)
def test_c076_c092_c093_stages_train_as_one_process(matrix, layout):
    """C076 (copies of a tied table stay bit-equal), C093 (grouped queries), and all other numbers within 1e-5."""
    agrees(matrix, layout)


@pytest.mark.parametrize("overlap", [False, True])
def test_c076_tied_copies_stay_bit_equal_for_20_steps(matrix, overlap):
    """C076: the first and the last stage's table, with and without overlapped communication."""
    layout = _row(
        pp=2,
        dp=2,
        distributed_optimizer=overlap,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        flags=("--num-layers", "4", "--global-batch-size", "4", "--train-iters", "20"),
    )
    run = matrix.record(layout, 20)
    assert run.copies["last weights"] == (0.0, "")
    assert run.losses[-1]["lm loss"] < run.losses[0]["lm loss"]


# From as many micro-batches as stages to three times as many and one.
@pytest.mark.parametrize(
    "layout",
    [Layout(pp=pp, flags=batches(2 * count)) for pp, count in ((2, 2), (2, 3), (2, 7), (4, 4), (4, 13))]
    + [
        Layout(
            model="llama",
            pp=2,
            vpp=2,
            flags=batches(2 * m),
            split=(f"--microbatch-group-size-per-virtual-pipeline-stage={n}",),
        )
        for m, n in ((5, 3), (6, 6))
    ],
    ids=str,
)
def test_c057_any_number_of_microbatches(matrix, layout):
    """C057: accumulation over a pipeline averages once."""
    agrees(matrix, layout)


UNEVEN = [
    _row(
        pp=4, flags=batches(4), split=("--decoder-first-pipeline-num-layers=2", "--decoder-last-pipeline-num-layers=4")
    ),
    _row(pp=2, vpp=2, flags=batches(4), split=("--decoder-last-pipeline-num-layers=4",)),
    _row(
        pp=2,
        flags=("--num-layers", "8", "--global-batch-size", "4"),
        split=("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
    ),
    _row(model="llama", pp=4, flags=batches(4), split=("--pipeline-model-parallel-layout=E|t*5|(t|)*3t*2|t|tL",)),
    _row(pp=2, tp=2, flags=batches(4), split=("--pipeline-model-parallel-layout=Et|t*11L",)),
]


@pytest.mark.parametrize("layout", UNEVEN, ids=str)
def test_c088_uneven_splits(matrix, layout):
    """C088: layers placed by numbers or by a string; the reference has none of these flags to look at."""
    agrees(matrix, layout)


MORE = [
    _row(pp=2, dp=2, per_token_loss=True, flags=batches(4, 2)),
    _row(model="llama", pp=2, vpp=2, per_token_loss=True, flags=batches(4)),
    _row(pp=2, vpp=2, flags=batches(4), split=("--no-overlap-p2p-communication",)),
    _row(pp=2, vpp=3, flags=batches(4), split=("--overlap-p2p-communication-warmup-flush",)),
    _row(pp=2, dp=2, vpp=2, overlap_grad_reduce=True, flags=batches(4, 2), split=("--no-align-grad-reduce",)),
    _row(pp=4, recompute="full", flags=batches(4)),
    _row(model="llama", pp=2, tp=2, sp=True, recompute="selective", flags=batches(4)),
    _row(pp=2, flags=(*batches(4), "--apply-query-key-layer-scaling")),
    _row(pp=2, precision="bf16", flags=(*batches(4), "--fp32-residual-connection")),
    _row(pp=2, dp=2, flags=batches(4, 2), split=("--use-tp-pp-dp-mapping",)),
    _row(pp=2, vpp=2, precision="bf16", flags=batches(4)),
    _row(model="llama", pp=2, flags=(*batches(4), "--reset-attention-mask")),
]


@pytest.mark.parametrize("layout", MORE, ids=str)
def test_c058_c092_other_flags_under_pipelines(matrix, layout):
    """C058 (per-token loss), C092 (scaling by the layer's global number), and what else a stage might get wrong."""
    agrees(matrix, layout)


ZERO_BUBBLE = [
    _row(pp=2, flags=batches(4), split=("--delay-wgrad-compute",)),
    _row(model="llama", pp=4, flags=batches(6), split=("--delay-wgrad-compute",)),
    _row(
        pp=2,
        dp=2,
        distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        bucket_size=3000,
        flags=batches(4, 2),
        split=("--delay-wgrad-compute",),
    ),
    _row(model="llama", pp=2, tp=2, sp=True, recompute="full", flags=batches(4), split=("--delay-wgrad-compute",)),
]


DEFERRED = [
    _row(pp=2, flags=batches(4), split=("--defer-embedding-wgrad-compute", "--wgrad-deferral-limit=2")),
    _row(
        model="llama",
        pp=2,
        vpp=2,
        dp=2,
        distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        bucket_size=3000,
        flags=batches(4, 2),
        split=("--defer-embedding-wgrad-compute",),
    ),
    _row(pp=2, dp=2, overlap_grad_reduce=True, flags=batches(4, 2), split=("--defer-embedding-wgrad-compute",)),
]


@pytest.mark.parametrize("layout", DEFERRED, ids=str)
def test_output_layers_that_wait_train_as_one_process(matrix, layout):
    """Weight gradients of the output layer behind all passes, tied and untied: reduced after that, not before."""
    agrees(matrix, layout)


@pytest.mark.parametrize("layout", ZERO_BUBBLE, ids=str)
def test_zero_bubble_schedules_train_as_one_process(matrix, layout):
    """ZB-H1: weight gradients later, the same sums."""
    agrees(matrix, layout)
