"""--fake-process-group: the real script as one rank of a world that nobody else is in."""

import pytest

from tests.e2e.launch import TINY, run

pytestmark = pytest.mark.slow
FLAGS = [*TINY, *"--train-iters 2 --global-batch-size 32 --fake-process-group".split()]


@pytest.mark.parametrize(
    "rank, layout",
    [
        (5, "--use-torch-fsdp2 --init-model-with-meta-device --bf16 --eval-interval 1 --eval-iters 1"),
        (6, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 4 --sequence-parallel"),
        (3, "--num-experts 8 --expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall"),
    ],
    ids=["fully sharded", "a stage's slice", "experts"],
)
def test_a_rank_trains_by_itself_and_says_what_that_is_worth(rank, layout):
    """Memory that nobody fills would bring NaN, or tokens outside of the vocabulary; waiting would never end."""
    done = run(*FLAGS, *layout.split(), RANK=str(rank), WORLD_SIZE="8", timeout=120).ok()
    assert len(done.lines) == 2 and done.values("number of nan iterations") == [0, 0]
    assert f"rank {rank} of 8 under a fake process group" in done.out and "losses and norms mean nothing" in done.out
    assert f"[Rank {rank}] (after 1 iterations) memory (MB)" in done.out


def test_such_a_rank_saves_nothing(tmp_path):
    done = run(*FLAGS, "--save", tmp_path / "x", RANK="3", WORLD_SIZE="8")
    assert done.status == 2 and "--save with --fake-process-group" in done.err and not (tmp_path / "x").exists()
