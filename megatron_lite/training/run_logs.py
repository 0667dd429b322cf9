"""Files that a run writes beside its checkpoints. One that cannot be written is no reason to stop.

    metrics.jsonl, progress.txt, ...    append_line     a line is there as a whole, or not at all
    TensorBoard's events                SparingWriter   what falls into a bad minute is lost, the rest is written

A full disk is said once for each file, and again when it fills up again after a line could be written.
"""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_lite.log import rank_and_world_size, say

_AGAIN_AFTER_S = 30.0
_failing: set[str] = set()


def append_line(path: Path, line: str) -> None:
    """Append a line to a file, which is made if need be; a failure is said, and the line is lost."""
    content = line.encode() + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab", buffering=0) as file:
            before = file.tell()
            try:
                if file.write(content) < len(content):
                    raise OSError(errno.ENOSPC, "there was room for a part of a line")
            except OSError:
                file.truncate(before)
                raise
    except OSError as error:
        _lost(str(path), error)
    else:
        _failing.discard(str(path))


class SparingWriter:
    """A TensorBoard SummaryWriter that training does not stop for.

    Its thread ends with the first error, and the writer raises that from then on. Here the events of the next half
    minute are dropped, then another event file is begun, which TensorBoard shows with the others.
    """

    def __init__(self, writer: Any, clock: Callable[[], float] = time.monotonic):
        self._writer, self._clock = writer, clock
        self._resume_at = 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._writer, name)
        return self._spared(found) if callable(found) else found

    def _spared(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def spared(*args: Any, **kwargs: Any) -> Any:
            if self._clock() < self._resume_at:
                return None
            try:
                result = method(*args, **kwargs)
            except OSError as error:
                self._resume_at = self._clock() + _AGAIN_AFTER_S
                _lost(self._writer.log_dir, error)
                with suppress(OSError):
                    self._writer.close()
                self._writer.file_writer = self._writer.all_writers = None  # the next call opens a file
                return None
            _failing.discard(self._writer.log_dir)
            return result

        return spared


def _lost(what: str, error: OSError) -> None:
    if what not in _failing:
        _failing.add(what)
        rank, _ = rank_and_world_size()
        say(f"WARNING: rank {rank} cannot write {what}, training goes on: {error}", sys.stderr)
