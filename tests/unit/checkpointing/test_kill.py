"""Saves that are killed: SIGKILL before each step of the file system, and at random moments.

A save runs in a forked process. After each kill the newest tracked checkpoint must be complete and hold one
iteration's numbers, and the next save must work and tidy up.
"""

import multiprocessing
import os
import random
import signal
import sys
import time
from multiprocessing import connection

import pytest
import torch

from megatron_lite.checkpointing import folders, sharded
from megatron_lite.checkpointing.async_save import AsyncSaver
from megatron_lite.checkpointing.checkpoint import Content, HowToWrite, read_common, write_checkpoint
from megatron_lite.sharding import whole

KILLS = int(os.environ.get("MEGATRON_LITE_KILLS", "12"))
_FORK = multiprocessing.get_context("fork")
_STEPS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}


def _content(iteration, salt=0, size=64):
    value = torch.full((size,), float(iteration + salt))
    tensors = {key: (value, whole(key, (size,))) for key in ("w", "m")}
    return Content(tensors=tensors, objects={"rng": {"i": iteration}}, common={"iteration": iteration, "salt": salt})


def _save(root, iteration, salt=0, size=64):
    write_checkpoint(root, iteration, _content(iteration, salt, size), None)


def _check(root, size=64):
    """The tracked checkpoint is whole and of one save. Returns: (iteration, salt)."""
    which = folders.read_tracker(root)
    folder = folders.find(root, which)
    folders.read_manifest(folder)
    common = read_common(folder)
    tensors = {key: (torch.zeros(size), whole(key, (size,))) for key in ("w", "m")}
    sharded.read(folder, tensors)
    assert common["iteration"] == which == sharded.read_object(folder, "rng")["i"]
    for tensor, _ in tensors.values():
        assert tensor.eq(which + common["salt"]).all()
    return which, common["salt"]


def _killed_before_step(number, work, *args):
    """Runs `work` and dies, by SIGKILL, right before the given step of the file system."""
    done = 0

    def step(event, _):
        nonlocal done
        if event in _STEPS:
            done += 1
            if done == number:
                os.kill(os.getpid(), signal.SIGKILL)

    real = os.fsync

    def fsync(handle):
        step("open", ())
        real(handle)

    os.fsync = fsync
    sys.addaudithook(step)
    work(*args)


def _fork(*args):
    process = _FORK.Process(target=_killed_before_step, args=args, daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode == 0


def _save_and_prune(root):
    _save(root, 20)
    folders.prune(root, every=15)


def _save_again(root):
    _save(root, 10, salt=1000)


@pytest.mark.parametrize(
    "work, outcomes", [(_save_and_prune, {(10, 0), (20, 0)}), (_save_again, {(10, 0), (10, 1000)})]
)
def test_a_save_killed_before_any_step_leaves_a_complete_checkpoint(tmp_path, work, outcomes):
    """Also while old checkpoints are pruned, and while one iteration is replaced by a second save of it."""
    seen, number, finished = set(), 0, False
    while not finished:
        number += 1
        root = tmp_path / str(number)
        _save(root, 10)
        finished = _fork(number, work, root)
        seen.add(_check(root))
        _save(root, 30)
        assert _check(root) == (30, 0)
        left = {path.name for path in root.iterdir()}
        assert left <= {"iter_0000010", "iter_0000020", "iter_0000030", folders.TRACKER}, left
        for iteration in folders.complete_iterations(root):
            folders.read_manifest(folders.find(root, iteration))
    assert seen == outcomes
    assert number > 15  # the kills really were in the middle of something


def test_the_first_save_killed_before_any_step_leaves_nothing_or_a_complete_checkpoint(tmp_path):
    """Between its rename and the first tracker the checkpoint is complete, and is found by looking for it."""
    number, finished, found = 0, False, set()
    while not finished:
        number += 1
        root = tmp_path / str(number)
        finished = _fork(number, _save, root, 10)
        found.add((folders.read_tracker(root), tuple(folders.complete_iterations(root))))
        for iteration in folders.complete_iterations(root):
            folders.read_manifest(folders.find(root, iteration))
    assert found == {(None, ()), (None, (10,)), (10, (10,))}


def _save_for_ever(root, begin, pipe, size, beside):
    saver = AsyncSaver(None, None, HowToWrite(plans={}), persistent=beside == "one writer") if beside else None
    pipe.send("go")
    while True:
        if saver is None:
            _save(root, begin, size=size)
        else:
            saver.start(root, begin, _content(begin, size=size))
        folders.prune(root, every=50)
        begin += 1


@pytest.mark.parametrize("beside", ["", "one writer", "a writer each"])
def test_saves_killed_at_random_moments_always_go_on_from_a_complete_checkpoint(tmp_path, beside):
    """Kills of one run that saves without a pause; tensors of 1 MB, so that kills also fall into writes."""
    size, numbers, last = 2**18, random.Random(7), 0
    start = time.monotonic()
    _save(tmp_path, 0, size=size)
    span = 4 * (time.monotonic() - start)  # a busy machine saves slowly, and some saves must end before the kill
    kills = 0
    while kills < KILLS or (last == 0 and kills < 10 * KILLS):
        kills, span = kills + 1, span * (1.5 if kills >= KILLS else 1.0)  # more time where no save has ended yet
        ours, theirs = _FORK.Pipe()
        process = _FORK.Process(target=_save_for_ever, args=(tmp_path, last + 1, theirs, size, beside), daemon=True)
        process.start()
        assert ours.recv() == "go"
        connection.wait([process.sentinel], numbers.uniform(0.0, span))
        assert process.exitcode is None, "the saving process failed by itself"
        process.kill()
        process.join()
        iteration, _ = _check(tmp_path, size)
        assert iteration >= last
        last = iteration
    assert last > 0
