"""A disk that refuses a checkpoint costs the checkpoint, not the training."""

import shlex
import subprocess

import pytest

from megatron_lite.checkpointing import folders
from tests.e2e.launch import ROOT, TINY, Finished, command, environment, run

pytestmark = pytest.mark.slow


def _run_with_small_files(*flags: object) -> Finished:
    """Like `run`, with no file allowed above 512 KiB: the tensors of a checkpoint do not fit."""
    words = shlex.join(command(*flags))
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 512; exec {words}"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def test_training_goes_on_after_a_failed_save_and_the_last_failure_is_the_exit_status(tmp_path):
    """The checkpoint from before stays usable, nothing half written is left, and the same command goes on from it.

    Beside the training too, here; saves at once: tests/unit/training/test_full_disk.py.
    """
    flags = [*TINY, "--save", tmp_path, "--load", tmp_path, "--save-interval", 2, "--async-save"]
    run(*flags, "--train-iters", 6, "--exit-interval", 2).ok()
    failed = _run_with_small_files(*flags, "--train-iters", 6)
    assert failed.values("iteration") == [3, 4, 5, 6]
    assert "the checkpoint of iteration 4 was NOT saved; training goes on" in failed.err
    assert "CheckpointError: " in failed.err and "ulimit -f" in failed.err and failed.status == 1
    assert "successfully saved" not in failed.out and "Traceback" not in failed.err
    assert folders.read_tracker(tmp_path) == 2 and folders.complete_iterations(tmp_path) == [2]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".iter")]
    again = run(*flags, "--train-iters", 6).ok()
    assert again.values("lm loss") == failed.values("lm loss") and folders.read_tracker(tmp_path) == 6
