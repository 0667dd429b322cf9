"""Rows of the layout matrix for the sharded optimizer: sharded or not, overlapped or not, one or two instances."""

from __future__ import annotations

import pytest

from megatron_lite.training.layout_check import table
from tests.distributed.layouts import Layout, Matrix, fit

pytestmark = pytest.mark.slow

# sharded, gradients overlapped, parameters overlapped, instances
MODES = [
    (False, False, False, 1),
    (False, True, False, 1),
    (True, False, False, 1),
    (True, False, False, 2),
    (True, True, False, 1),
    (True, True, True, 1),
    (True, True, True, 2),
]
ROWS = fit(
    [
        Layout(
            dp=dp,
            distributed_optimizer=sharded,
            overlap_grad_reduce=overlap,
            overlap_param_gather=gather,
            optimizer_instances=instances,
        )
        for dp in (2, 4)
        for sharded, overlap, gather, instances in MODES
    ],
    bucket_size=[3000, None],  # some parameters are larger: buckets of one, whose shards cut them
    average_in_collective=[False, True],
    model=["gpt2", "llama"],
)


@pytest.fixture(scope="module")
def matrix(world) -> Matrix:
    """Rows on the session's worlds."""
    return Matrix(world)


def agrees(matrix: Matrix, layout: Layout) -> None:
    """The row's numbers are those of one process."""
    rows = matrix.check(layout)
    assert all(row.is_ok for row in rows), f"{layout}\n{table(rows)}"


@pytest.mark.parametrize("layout", ROWS, ids=str)
def test_sharded_layouts_train_as_one_process(matrix, layout):
    """Losses, gradients, norms, weights after five steps: relative 1e-5."""
    agrees(matrix, layout)


OTHER = [
    Layout(precision="bf16", dp=2, distributed_optimizer=True),
    Layout(
        precision="bf16",
        dp=4,
        distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        bucket_size=3000,
        optimizer_instances=2,
    ),
    Layout(precision="bf16", model="llama", tp=2, sp=True, dp=2, distributed_optimizer=True),
    Layout(
        model="llama",
        tp=2,
        sp=True,
        dp=2,
        distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        bucket_size=3000,
    ),
    Layout(dp=2, distributed_optimizer=True, per_token_loss=True),
    Layout(dp=2, distributed_optimizer=True, flags=("--optimizer", "sgd", "--decoupled-lr", "2e-3")),
]


@pytest.mark.parametrize("layout", OTHER, ids=str)
def test_sharding_beside_tensor_parallelism_16_bits_and_other_means(matrix, layout):
    agrees(matrix, layout)


def test_chunks_of_a_stage_whose_gathers_start_inside_the_step(matrix):
    """Interleaved stages: the first chunk's weights travel while the second's are updated."""
    flags = ("--num-layers", "4", "--global-batch-size", "8")
    agrees(
        matrix,
        Layout(
            pp=2,
            vpp=2,
            dp=2,
            micro_batch_size=1,
            distributed_optimizer=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            gather_with_step=True,
            flags=flags,
        ),
    )


# Two steps of the iteration multiply small singular values by 16 and rounding errors with them; five, by 500.
MUON = "--optimizer muon --muon-num-ns-steps 2".split()


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, distributed_optimizer=True, flags=tuple(MUON)),
        Layout(model="llama", tp=2, sp=True, dp=2, distributed_optimizer=True, flags=tuple(MUON)),
        Layout(model="llama", tp=2, flags=(*MUON, "--muon-tp-mode", "distributed")),
        Layout(dp=2, distributed_optimizer=True, flags=("--optimizer", "lion")),
    ],
    ids=str,
)
def test_muon_and_lion_are_laid_out_as_adam_is(matrix, layout):
    """Matrices cut by tensor parallelism and by shards are made orthogonal as the whole ones."""
    agrees(matrix, layout)
