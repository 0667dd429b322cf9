"""Saves beside the training: what is copied is what is saved, and neither loop nor checkpoint pays for a fault."""

import fcntl
import os
import resource
import signal
import sys
import termios
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from megatron_lite.checkpointing import folders, sharded
from megatron_lite.checkpointing.async_save import AsyncSaver
from megatron_lite.checkpointing.checkpoint import Content, HowToWrite, read_common, write_checkpoint
from megatron_lite.errors import CheckpointError
from megatron_lite.sharding import Piece, ShardSpec, whole

SIZE = 2**18


def _tensors(value):
    """All that makes a file special: large and tiny ones, no elements, no dimension, other types, a strided view."""
    made = {
        "large": torch.full((SIZE,), float(value)),
        "scalar": torch.tensor(float(value)),
        "none": torch.empty(0, 3),
        "truth": torch.tensor([True, False, value % 2 == 0]),
        "half": torch.full((3, 5), float(value), dtype=torch.bfloat16),
        "strided": torch.arange(12.0).view(3, 4).t() + value,
    }
    tensors = {name: (tensor, whole(name, tuple(tensor.shape))) for name, tensor in made.items()}
    flat = torch.arange(10.0) + value
    pieces = (Piece((0, 0), (0,), (1, 4)), Piece((1, 0), (4,), (1, 4)))
    tensors["pieces"] = (flat, ShardSpec("pieces", (2, 4), pieces))
    return tensors


def _content(value):
    return Content(tensors=_tensors(value), objects={"rng": {"value": value}}, common={"value": value})


def _values(folder):
    """Everything in a checkpoint."""
    manifest = folders.read_manifest(folder)
    assert not folders.damaged_files(folder, manifest["files"], manifest)
    tensors = {key: (torch.full_like(tensor, 1), spec) for key, (tensor, spec) in _tensors(0).items()}
    sharded.read(folder, tensors)
    return (
        {key: tensor for key, (tensor, _) in tensors.items()},
        sharded.read_object(folder, "rng"),
        read_common(folder),
    )


def _same(one, other):
    return one[1:] == other[1:] and all(torch.equal(one[0][key], other[0][key]) for key in one[0])


@contextmanager
def _saver(**more):
    saver = AsyncSaver(None, None, HowToWrite(files=more.pop("files", 1), plans=more.pop("plans", None)), **more)
    try:
        yield saver
    finally:
        pid = _pid(saver)
        if pid is not None:
            os.kill(pid, signal.SIGCONT)
        saver.close()


def _pid(saver):
    process = saver._process._process
    return None if process is None else process.pid


def wait_for_job(saver, seconds=30.0):
    """Until the stopped writer has its job before it."""
    pipe = saver._process._process.stdin.fileno()
    end = time.monotonic() + seconds
    while not int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder):
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("files, persistent, plans", [(1, False, None), (3, True, {})])
def test_a_save_beside_the_training_is_the_save_of_that_moment(tmp_path, files, persistent, plans):
    """Tensors change right after the copy, as the next step does; memory, process and plan are used again."""
    with _saver(files=files, persistent=persistent, plans=plans) as saver:
        memory = set()
        for value in (1, 2, 3):
            content = _content(value)
            before = saver.start(tmp_path / "beside", value, content)
            for tensor, _ in content.tensors.values():
                tensor.zero_()
            assert before is None or (before.which, before.error) == (value - 1, None)
            memory.add(id(saver._staging._memory))
        assert saver.wait().error is None and len(memory) == 1
    for value in (1, 2, 3):
        write_checkpoint(tmp_path / "at_once", value, _content(value), None)
        folder = folders.find(tmp_path / "beside", value)
        assert _same(_values(folder), _values(folders.find(tmp_path / "at_once", value)))
        assert len(list(folder.glob("*.distcp"))) == files
    assert folders.read_tracker(tmp_path / "beside") == 3


def test_the_loop_goes_on_while_the_writer_does_not(tmp_path):
    """The writer is stopped: the loop has its tensors back all the same, the tracker stays, and the next save waits."""
    with _saver(persistent=True) as saver:
        saver.start(tmp_path, 1, _content(1))
        assert saver.wait().error is None
        os.kill(_pid(saver), signal.SIGSTOP)
        saver.start(tmp_path, 2, _content(2))
        assert saver.poll() is None
        assert folders.read_tracker(tmp_path) == 1 and folders.complete_iterations(tmp_path) == [1]
        started = threading.Event()

        def next_save():
            outcome = saver.start(tmp_path, 3, _content(3))
            assert (outcome.which, outcome.error) == (2, None)
            started.set()

        thread = threading.Thread(target=next_save)
        thread.start()
        assert not started.wait(0.3) and folders.read_tracker(tmp_path) == 1
        os.kill(_pid(saver), signal.SIGCONT)
        thread.join(30)
        assert started.is_set() and folders.read_tracker(tmp_path) in (2, 3)
        assert saver.close().which == 3
    assert folders.complete_iterations(tmp_path) == [1, 2, 3]


@contextmanager
def _small_files():
    """No file may grow above 256 KiB, in this process and in those that it starts."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_writer_that_fails_costs_that_save_alone(tmp_path):
    with _saver() as saver:
        saver.start(tmp_path, 1, _content(1))
        saver.wait()
        with _small_files():
            saver.start(tmp_path, 2, _content(2))
            outcome = saver.wait()
        assert isinstance(outcome.error, CheckpointError) and "ulimit -f" in outcome.error.fix
        assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", folders.TRACKER]
        saver.start(tmp_path, 3, _content(3))
        assert saver.wait().error is None and folders.read_tracker(tmp_path) == 3


def test_a_writer_that_is_killed_is_told_and_replaced(tmp_path):
    with _saver(persistent=True) as saver:
        saver.start(tmp_path, 1, _content(1))
        saver.wait()
        os.kill(_pid(saver), signal.SIGSTOP)
        saver.start(tmp_path, 2, _content(2))
        wait_for_job(saver)
        os.kill(_pid(saver), signal.SIGKILL)
        assert "the process that writes ended with signal 9" in str(saver.wait().error)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", folders.TRACKER]
        saver.start(tmp_path, 3, _content(3))
        assert saver.wait().error is None and folders.read_tracker(tmp_path) == 3


def test_rank_0s_own_files_fail_a_save_like_those_of_tensors(tmp_path, monkeypatch):
    with _saver() as saver, monkeypatch.context() as patch:
        patch.setattr(folders, "write_file", lambda path, data: (_ for _ in ()).throw(OSError(28, "No space left")))
        saver.start(tmp_path, 2, _content(2))
        assert saver.wait().error.why == "the disk is full" and list(tmp_path.iterdir()) == []


def test_a_constant_structure_that_changes_is_an_error(tmp_path):
    how = HowToWrite(plans={})
    write_checkpoint(tmp_path, 1, _content(1), None, how)
    write_checkpoint(tmp_path, 2, _content(2), None, how)
    content = _content(3)
    content.tensors["more"] = (torch.zeros(2), whole("more", (2,)))
    with pytest.raises(CheckpointError, match="not those of the last one"):
        write_checkpoint(tmp_path, 3, content, None, how)
    assert folders.complete_iterations(tmp_path) == [1, 2]
    write_checkpoint(tmp_path / "anew", 2, _content(2), None)
    assert _same(_values(folders.find(tmp_path, 2)), _values(folders.find(tmp_path / "anew", 2)))
