"""What a run of `preprocess` leaves when it is stopped, and how the next one goes on from there.

    PREFIX.preprocess/lock             held while a run works here
                      journal.jsonl    who made it, then a snapshot a line: at the end of every file, and now and then
                      *.bin ...        the growing pairs, see `pair_writer`

A snapshot says how far the input is done and how long each growing file was then. It counts as long as the run is made
from the same recipe, and the files up to there have the same path, size and time: so a mended line costs its file, not
the files before it, and files may be added at the end. The folder goes when the run is complete.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import megatron_lite
from megatron_lite.cli.encoder import Encoder, Recipe
from megatron_lite.cli.jsonl import Position
from megatron_lite.cli.totals import Totals
from megatron_lite.errors import DataError

_HASHED_BYTES = 64 << 20  # a larger file is known by its size and time


@dataclass(frozen=True)
class Snapshot:
    """The state after a block: where the input goes on, what was counted, how long each growing file is."""

    position: Position
    totals: Totals
    sizes: list[list[int]]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Snapshot:
        return cls(Position(**values["position"]), Totals(**values["totals"]), values["sizes"])


class WorkFolder:
    """The folder of one run.

    Args:
        path: where.
        identity: what the tokens depend on beside the input (JSON values).
        files: the input.

    Raises: DataError if another run works there, or it cannot be written.
    """

    def __init__(self, path: str, identity: dict[str, Any], files: Sequence[str]):
        self.path = Path(path)
        self._head: dict[str, Any] = {"identity": identity, "files": [_stamp(file) for file in files]}
        self._journal = self.path / "journal.jsonl"
        self._earlier: dict[str, Any] = {}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / "lock", "w")  # noqa: SIM115 held until close
        except OSError as error:
            raise DataError(
                f"cannot write {path}: {error.strerror or error}", fix="free some space, or write elsewhere"
            ) from error
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise DataError(
                    f"another run is writing {path}",
                    why="two runs with one --output-prefix would write into each other's files",
                    fix="wait for it, or give another --output-prefix",
                ) from None
            # A file system without locks: nothing to hold.

    def stem(self, name: str) -> str:
        return str(self.path / name)

    def begin(self, skip_bad_lines: bool, why_not: str = "") -> Snapshot | None:
        """The last snapshot that this run may go on from. What is of no use is dropped, which is said.

        Args:
            why_not: the reason to begin anew in any case; "": there is none.
        """
        snapshots, other = self._left()
        if other and not why_not:
            why_not = f"{', '.join(other)} differ"
        kept = self._usable(snapshots, skip_bad_lines) if snapshots and not why_not else []
        if snapshots and not kept:
            why = why_not or "its files have changed, or it skipped lines"
            print(f"What an earlier run left in {self.path} is dropped: {why}", file=sys.stderr)
        with open(temporary := f"{self._journal}.tmp", "w", encoding="utf-8") as file:
            for line in (self._head, *(snapshot.as_json() for snapshot in kept)):
                file.write(json.dumps(line) + "\n")
        os.replace(temporary, self._journal)
        return kept[-1] if kept else None

    def _left(self) -> tuple[list[Snapshot], list[str]]:
        """The snapshots of an earlier run, and in which parts of the identity it differs from this one."""
        try:
            lines = self._journal.read_text("utf-8").splitlines()
            self._earlier = json.loads(lines[0])
        except (OSError, ValueError, IndexError):
            return [], []
        snapshots = []
        for line in lines[1:]:
            try:
                snapshots.append(Snapshot.from_json(json.loads(line)))
            except ValueError:  # the run was killed while it wrote this
                break
        then, now = self._earlier["identity"], self._head["identity"]
        return snapshots, [name for name in now if now[name] != then.get(name)]

    def _usable(self, snapshots: list[Snapshot], skip_bad_lines: bool) -> list[Snapshot]:
        """The first ones, as far as the files are the same and lines were only skipped if this run skips them too."""
        same = 0
        for then, now in zip(self._earlier["files"], self._head["files"]):
            if then != now:
                break
            same += 1
        return [
            snapshot
            for snapshot in snapshots
            if snapshot.position.file + (snapshot.position.line > 1) <= same
            and (skip_bad_lines or not snapshot.totals.skipped)
        ]

    def commit(self, snapshot: Snapshot) -> None:
        """One more snapshot. The growing files are on the disk already."""
        with open(self._journal, "a", encoding="utf-8") as file:
            file.write(json.dumps(snapshot.as_json()) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def has_snapshots(self) -> bool:
        with contextlib.suppress(OSError):
            return self._journal.read_bytes().count(b"\n") > 1
        return False

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        self._lock.close()


def identity_of(recipe: Recipe, encoder: Encoder, partitions: int) -> dict[str, Any]:
    """What the tokens depend on: tokenizer and its files, keys, cutting, order."""
    flags = {
        name: [value, _fingerprint(value)] if isinstance(value, str) else value
        for name, value in asdict(recipe.tokenizer).items()
    }
    return {
        "version": megatron_lite.__version__,
        "tokenizer": flags,
        "keys": list(recipe.keys),
        "append_eod": recipe.append_eod,
        "sentences": None if encoder.splitter is None else [encoder.splitter.name, recipe.keep_newlines],
        "partitions": partitions,
    }


def _stamp(file: str) -> list[Any]:
    status = os.stat(file)
    return [os.path.abspath(file), status.st_size, status.st_mtime_ns]


def _fingerprint(path: str) -> Any:
    """Of a file its content, of a folder its files' names, sizes and times; None for a word that names neither."""
    if os.path.isdir(path):
        return sorted(_stamp(entry.path) for entry in os.scandir(path) if entry.is_file())
    if not os.path.isfile(path):
        return None
    if os.path.getsize(path) > _HASHED_BYTES:
        return _stamp(path)
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
