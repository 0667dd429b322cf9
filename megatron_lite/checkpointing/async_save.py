"""Saves that go on beside the training: the loop waits for a copy in memory, and for nothing else.

    the loop      start: agree who writes what, copy (staging.py) ------ steps, steps, steps ------ poll: the outcome
    a thread             `--> waits for this rank's writer --> for all ranks --> rank 0: files, name, tracker --^
    a process                  writes and flushes this rank's files (writer_process.py)

A process writes, since a thread would share the interpreter with the training; it needs no torch, so it starts at once
and costs no memory of its own. It only ever writes into the temporary folder. A checkpoint gets its name by rank 0
after every rank's files are on the disk, which the threads agree on over a group of their own: the loop takes part in
none of it, and a rank that is killed takes its writer along and leaves a temporary folder, which the next save removes.

One save is under way at a time: a second one waits for the first. What fails, fails the save and not the training.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.storage import WriteResult

from megatron_lite.checkpointing import folders, sharded, writer_process
from megatron_lite.checkpointing.checkpoint import Content, HowToWrite, files_of, finish, on_rank_0, together
from megatron_lite.checkpointing.dcp_files import Writer, written
from megatron_lite.checkpointing.folders import Which
from megatron_lite.checkpointing.sharded import Planned
from megatron_lite.checkpointing.staging import Image, Staging, folder_job
from megatron_lite.collectives import all_gather_object, broadcast_object, group_rank
from megatron_lite.errors import CheckpointError

_HELD_BACK = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP}


@dataclass
class Outcome:
    """How a save ended: on every rank the same, but for `lines`, which rank 0 is to print.

    error: None when the checkpoint is there. blocked_s: how long the loop waited for the copy. total_s: until the end.
    """

    which: Which
    error: CheckpointError | None
    lines: list[str] = field(default_factory=list)
    blocked_s: float = 0.0
    total_s: float = 0.0


class AsyncSaver:
    """Writes checkpoints beside the loop of this rank.

    Args:
        group: the ranks that save.
        side_group: the same ranks; nothing else may use it. None in a run of one process.
        how: see HowToWrite; `files` are also how many are written at the same time.
        persistent: keep the writing process alive between saves.
        nice, io_class: of the writing process; Linux' classes are 1 real time, 2 best effort, 3 idle.
    """

    def __init__(
        self,
        group: ProcessGroup | None,
        side_group: ProcessGroup | None,
        how: HowToWrite | None = None,
        *,
        persistent: bool = False,
        nice: int = 10,
        io_class: int = 3,
    ):
        self._group, self._side, self._how = group, side_group, how or HowToWrite()
        self._staging = Staging()
        self._process = _WriterProcess(self._staging.fd, nice, io_class, persistent)
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None
        # Counters get their entries here, not while the loop reads them.
        all_gather_object(None, self._side, purpose=_GATHER)
        broadcast_object(None, self._side, purpose=_DECIDE)

    def start(
        self, root: Path, which: Which, content: Content, finished: Callable[[], list[str]] = lambda: []
    ) -> Outcome | None:
        """Begin to save under `root`; collective. Returns as soon as nothing of `content` is needed any more.

        Args:
            finished: called on rank 0 when the checkpoint is complete; returns lines to print.
        Returns: the outcome of the save before, if nobody has asked for it yet.
        Raises: CheckpointError, the same on every rank, when it cannot even begin.
        """
        before = self.wait()
        begun = time.monotonic()
        temporary = on_rank_0(lambda: folders.begin(root, which), self._group)
        try:
            writer = Writer(temporary, self._how.files)
            plan, planner, planned = sharded.plan(
                writer,
                content.tensors,
                content.objects,
                self._group,
                spread=self._how.spread,
                known=self._how.known(which),
            )
            self._how.keep(which, planned)
            images, texts = together(
                lambda: (self._staging.fill(plan, planner, self._how.files), files_of(content)), self._group
            )
        except BaseException:
            if group_rank(self._group) == 0:
                folders.abandon(temporary)
            raise
        save = _Save(root, which, temporary, images, texts, dict(content.description), writer, planned, finished)
        outcome = Outcome(which, None, blocked_s=time.monotonic() - begun)

        def conduct() -> None:
            outcome.error, outcome.lines = self._conduct(save)
            outcome.total_s = time.monotonic() - begun
            self._outcome = outcome

        self._thread = threading.Thread(target=conduct, name="checkpoint", daemon=True)
        self._thread.start()
        return before

    def poll(self) -> Outcome | None:
        """The outcome of a save that has ended since the last question; does not wait, so ranks may differ."""
        if self._thread is None or self._thread.is_alive():
            return None
        return self.wait()

    def wait(self) -> Outcome | None:
        """The outcome of the save under way, once it has ended; None when there is none."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        outcome, self._outcome = self._outcome, None
        return outcome

    def close(self) -> Outcome | None:
        """Wait for the save under way, then end the process and give the memory back."""
        outcome = self.wait()
        self._process.close()
        self._staging.close()
        return outcome

    # -- in the thread ---------------------------------------------------------------------------------------------

    def _conduct(self, save: _Save) -> tuple[CheckpointError | None, list[str]]:
        """From this rank's images to a checkpoint that all ranks know of. Returns: the error; rank 0's lines."""
        try:
            mine: list[WriteResult] | CheckpointError
            try:
                mine = self._write(save)
            except CheckpointError as error:
                mine = CheckpointError(f"rank {group_rank(self._group)}: {error.what}", why=error.why, fix=error.fix)
            parts = all_gather_object(mine, self._side, purpose=_GATHER)
            failed = next((part for part in parts if isinstance(part, CheckpointError)), None)
            lines: list[str] = []
            if group_rank(self._group) == 0:
                failed, lines = _complete(save, parts) if failed is None else (failed, [])
                if failed is not None:
                    folders.abandon(save.temporary)
            return broadcast_object(failed, self._side, purpose=_DECIDE), lines
        except Exception as error:  # a thread has nobody to raise to
            return CheckpointError(f"the save broke off: {type(error).__name__}: {error}"), []

    def _write(self, save: _Save) -> list[WriteResult]:
        sums = self._process.run(folder_job(save.temporary, save.images), f"save to {save.root}")
        return [
            result for image in save.images for result in written(image.name, image.places, sums.get(image.name, ""))
        ]


@dataclass
class _Save:
    """A save under way."""

    root: Path
    which: Which
    temporary: Path
    images: list[Image]
    texts: dict[str, bytes]
    description: dict[str, Any]
    writer: Writer
    planned: Planned
    finished: Callable[[], list[str]]


def _complete(save: _Save, parts: list[Any]) -> tuple[CheckpointError | None, list[str]]:
    """Rank 0, when all files of all ranks are on the disk."""
    assert save.planned.metadata is not None
    try:
        save.writer.finish(save.planned.metadata, parts)
        finish(save.temporary, save.root, save.which, save.description, save.texts, save.writer.checksums)
    except CheckpointError as error:
        return error, []
    except Exception as error:
        return CheckpointError(f"cannot save to {save.root}: {type(error).__name__}: {error}"), []
    return None, save.finished()


_GATHER, _DECIDE = "written files of a checkpoint", "outcome of a checkpoint"


class _WriterProcess:
    """This rank's writing process, which is started when there is something to write."""

    def __init__(self, memory_fd: int, nice: int, io_class: int, persistent: bool):
        self._command = [sys.executable, "-I", writer_process.__file__, str(memory_fd), str(nice), str(io_class)]
        self._memory_fd, self._persistent = memory_fd, persistent
        self._process: subprocess.Popen[str] | None = None

    def run(self, job: dict[str, Any], action: str) -> dict[str, str]:
        """Have a job done. Returns: name of a file -> checksum. Raises: CheckpointError."""
        try:
            process = self._started()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError as error:
            self.close()
            raise folders.explain(error, action) from error
        if not line:
            status = self.close()
            cause = f"signal {-status}" if status < 0 else f"status {status}"
            raise CheckpointError(
                f"cannot {action}: the process that writes ended with {cause}",
                why="something else has ended it: the system, when memory runs out, or a person",
            )
        if not self._persistent:
            self.close()
        answer = json.loads(line)
        if "error" in answer:
            number, text, name = answer["error"]
            raise folders.explain(OSError(number or 0, text, name or None), action)
        checksums: dict[str, str] = answer["checksums"]
        return checksums

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            # Until it ignores the signals by itself, the writer keeps them waiting, as this thread does now.
            old = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
            try:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    pass_fds=[self._memory_fd],
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, old)
        return self._process

    def close(self) -> int:
        """End the process. Returns: its status."""
        if self._process is None:
            return 0
        process, self._process = self._process, None
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what could not be written any more
                    pipe.close()
        return process.wait()
