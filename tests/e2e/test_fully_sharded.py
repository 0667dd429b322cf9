"""The real script, fully sharded: what it says, and a save beside the training that one process goes on from."""

import pytest

from tests.e2e.launch import TINY, run, torchrun

pytestmark = pytest.mark.slow
FLAGS = [*TINY, *"--train-iters 4 --bf16 --log-params-norm".split()]
SHARDED = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads --ckpt-format fsdp_dtensor".split()


def test_a_run_leaves_full_sharding_with_a_save_beside_the_training(tmp_path):
    """The 16-bit weights of the checkpoint are made for it: copied too late they would be those of a later step."""
    save = ["--save", tmp_path, "--load", tmp_path, "--save-interval", 2]
    first = torchrun(2, *FLAGS, *SHARDED, *save, "--async-save", "--dist-ckpt-workers", 1).ok()
    assert "weights, gradients and optimizer state are shared out over 2 ranks" in first.out
    assert "of which this rank keeps its rows" in first.out and "whole weights of layers that run" in first.out
    assert "in fsdp_dtensor format" in first.out and "successfully saved checkpoint from iteration       2" in first.out
    rest = run(*FLAGS, *save, "--ckpt-step", 2).ok()
    assert rest.values("iteration") == [3, 4]
    assert rest.values("lm loss") == pytest.approx(first.values("lm loss")[2:], rel=1e-3)
    assert rest.values("params norm") == pytest.approx(first.values("params norm")[2:], rel=1e-3)
