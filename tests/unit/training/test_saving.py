"""What the loop does about saves: which stay, how a failed one is told, and what a save beside the training holds."""

import os
import signal
from contextlib import contextmanager

import pytest

from megatron_lite.checkpointing import folders
from megatron_lite.errors import CheckpointError, ResultRejected
from megatron_lite.timers import Timers
from megatron_lite.training import global_vars
from megatron_lite.training.saving import Saves
from tests.unit.checkpointing.test_async_save import wait_for_job
from tests.unit.training.test_checkpointing import Run, _same


@pytest.fixture(autouse=True)
def own_globals(monkeypatch):
    """`get_args()` and its kin are those of this test alone."""
    monkeypatch.setattr(global_vars, "_values", {})


def test_the_newest_are_kept_and_what_is_superseded_goes(tmp_path, capsys):
    run = Run("--save", tmp_path, "--save-interval", 1, "--save-keep-last", 2)
    for _ in range(4):
        run.steps(1)
        run.save()
    assert folders.complete_iterations(tmp_path) == [3, 4]
    assert f"  successfully deleted checkpoint from iteration       2 at {tmp_path}" in capsys.readouterr().out


def test_a_run_goes_back_to_its_newest_checkpoint_whatever_it_was_started_from(tmp_path):
    """--finetune and the like say how a run starts, and are no part of going back. The flags are as before then."""
    run = Run("--save", tmp_path / "new", "--load", tmp_path / "old", "--finetune", "--no-load-rng", "--ckpt-step", 7)
    loop = Loop(run)
    loop.step()
    loop.saves.save()
    state, expected = run.state(), loop.step() + loop.step()
    assert not _same(state, run.state())
    loop.saves.load_last()
    assert run.args.iteration == 1 and run.args.consumed_train_samples == 2 and _same(run.state(), state)
    run.iteration = 1
    assert loop.step() + loop.step() == expected
    assert run.args.finetune and run.args.no_load_rng and run.args.ckpt_step == 7


def test_without_a_checkpoint_to_go_back_to_the_error_says_so(tmp_path):
    loop = Loop(Run("--save", tmp_path))
    loop.step()
    with pytest.raises(ResultRejected, match=r"holds no checkpoint to go back to(.|\n)*--save-interval"):
        loop.saves.load_last()


def test_an_iteration_is_saved_again_when_something_has_been_found_out(tmp_path):
    """Saved once, it is not due any more, and what the watch over results suspects would be lost."""
    loop = Loop(Run("--save", tmp_path))
    loop.step()
    loop.saves.save()
    loop.saves.rerun_state = lambda: {"suspected_iteration": 2}
    loop.saves.save_last()
    run = Run("--save", tmp_path, "--load", tmp_path)
    run.load()
    assert run.args.rerun_state is None
    loop.saves.save_again()
    run.load()
    assert run.args.rerun_state == {"suspected_iteration": 2}


class Loop:
    """What the training loop does about saves, around the toy's steps."""

    def __init__(self, run):
        run.args.iteration, run.args.timers = run.iteration, Timers(0, "minmax")
        self.run, self.saves = run, Saves(run.args, [run.model], run.optimizer, run.schedule)

    def step(self):
        self.saves.poll()
        losses = self.run.steps(1)
        self.run.args.iteration = self.run.iteration
        self.run.args.num_floating_point_operations_so_far = 1e6 * self.run.iteration
        return losses


@contextmanager
def _stopped_writer(saves):
    os.kill(saves._beside._process._process.pid, signal.SIGSTOP)
    yield
    os.kill(saves._beside._process._process.pid, signal.SIGCONT)


def test_steps_after_an_async_save_do_not_reach_the_checkpoint(tmp_path, capsys):
    """The writer sleeps until the run has gone on: what it then writes is the state of the save, to the bit."""
    loop = Loop(Run("--save", tmp_path, "--async-save", "--use-persistent-ckpt-worker"))
    loop.step()
    loop.saves.save()
    loop.saves.save_last()  # complete: the writer is there
    loop.step()
    with _stopped_writer(loop.saves):
        loop.saves.save()
        state, expected = loop.run.state(), loop.step() + loop.step()
        assert folders.read_tracker(tmp_path) == 1
    assert not _same(state, loop.run.state())
    loop.saves.close()
    assert capsys.readouterr().out.count("successfully saved checkpoint") == 2
    again = Run("--save", tmp_path, "--load", tmp_path)
    assert again.load()[0] == 2 and _same(again.state(), state)
    assert again.steps(2) == expected


def test_a_failed_async_save_is_told_at_a_step_and_the_next_one_works(tmp_path, capsys):
    loop = Loop(Run("--save", tmp_path, "--async-save", "--use-persistent-ckpt-worker"))
    loop.step()
    loop.saves.save()
    loop.saves._wait()
    loop.step()
    os.kill(loop.saves._beside._process._process.pid, signal.SIGSTOP)
    loop.saves.save()
    loop.step()
    assert "NOT saved" not in capsys.readouterr().err
    wait_for_job(loop.saves._beside)
    os.kill(loop.saves._beside._process._process.pid, signal.SIGKILL)
    loop.saves._beside._thread.join()
    loop.step()
    assert "WARNING: the checkpoint of iteration 2 was NOT saved; training goes on." in capsys.readouterr().err
    loop.saves.save_last()
    assert folders.complete_iterations(tmp_path) == [1, 4] and folders.read_tracker(tmp_path) == 4
    loop.saves.close()


def test_the_last_async_save_is_tried_again_and_its_failure_is_the_runs(tmp_path, capsys, monkeypatch):
    loop = Loop(Run("--save", tmp_path, "--async-save"))
    loop.step()
    with monkeypatch.context() as patch:
        patch.setattr(folders, "write_file", lambda path, data: (_ for _ in ()).throw(OSError(30, "Read-only")))
        loop.saves.save()
        with pytest.raises(CheckpointError, match="Read-only"):
            loop.saves.save_last()
    assert "iteration 1 was NOT saved" in capsys.readouterr().err
    loop.saves.save_last()
    assert folders.read_tracker(tmp_path) == 1
    loop.saves.close()
