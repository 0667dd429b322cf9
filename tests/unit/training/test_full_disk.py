"""A disk that is full, or read-only, costs the checkpoint and not the training; with room again the next is saved."""

import os
import subprocess
from contextlib import suppress

import pytest

from megatron_lite.checkpointing import folders
from megatron_lite.errors import CheckpointError
from megatron_lite.timers import Timers
from megatron_lite.training import global_vars
from megatron_lite.training.saving import Saves
from tests.unit.training.test_checkpointing import Run, _same


@pytest.fixture(autouse=True)
def own_globals(monkeypatch):
    """`get_args()` and its kin are those of this test alone."""
    monkeypatch.setattr(global_vars, "_values", {})


@pytest.fixture
def disk(tmp_path):
    """A disk of 1 MiB: enough for some checkpoints of the toy."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a small disk takes the rights of root")
    yield place
    subprocess.run(["mount", "-o", "remount,rw", str(place)], check=False, capture_output=True)
    subprocess.run(["umount", "-l", str(place)], check=True)


def _fill(disk):
    """Take what is left."""
    with suppress(OSError), open(disk / "filling", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@pytest.mark.parametrize("more", [[], ["--async-save"]], ids=["sync", "async"])
def test_a_real_disk_fills_up_and_turns_read_only(disk, more, capsys):
    run = Run("--save", disk / "run", *more)
    run.args.iteration, run.args.timers = 0, Timers(0, "minmax")
    run.args.num_floating_point_operations_so_far = 0.0
    saves = Saves(run.args, [run.model], run.optimizer, run.schedule)

    def step_and_save():
        run.steps(1)
        run.args.iteration = run.iteration
        saves.save()
        saves._wait()
        return capsys.readouterr().err

    assert "NOT saved" not in step_and_save()
    _fill(disk)
    told = step_and_save()
    assert "iteration 2 was NOT saved; training goes on" in told and "the disk is full" in told
    assert folders.read_tracker(disk / "run") == 1
    folders.read_manifest(folders.find(disk / "run", 1))
    os.remove(disk / "filling")
    assert "NOT saved" not in step_and_save()
    assert folders.read_tracker(disk / "run") == 3

    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    told = step_and_save()
    assert "iteration 4 was NOT saved" in told and "mounted read-only" in told
    with pytest.raises(CheckpointError, match="Read-only"):
        saves.save_last()
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    saves.save_last()
    saves.close()
    again = Run("--save", disk / "run", "--load", disk / "run")
    assert again.load()[0] == 4 and _same(again.state(), run.state())
