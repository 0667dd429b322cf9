"""Blocks made by several processes, on several ranks, as often as it takes: what is there and whole is not made again.

    ranks (torchrun)    the k-th block is rank k mod W's; each rank waits for the files of the others
      processes         of a rank, any of its blocks

Ranks share a directory and nothing else: they need no process group, so that no timeout ends a stage of many hours.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lite.cli.progress import progress
from megatron_lite.datasets.retro_blocks import Arrays, Block, read_block, share, write_block
from megatron_lite.errors import DataError
from megatron_lite.log import say, set_rank, warn_rank_0

Advance = Callable[[int], None]
# (what the process was set up with, the block, advance) -> its arrays
Task = Callable[[Any, Block, Advance], Arrays]
_SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_BETWEEN_NOTES = 60.0

_state: Any = None
_counter: Any = None


def _set_up(make_state: Callable[[], Any], counter: Any, threads: int) -> None:
    """In a worker process, once."""
    import torch

    global _state, _counter
    torch.set_num_threads(threads)
    set_rank(1, 2)  # what rank 0 prints, the process that started this one prints
    _state, _counter = make_state(), counter


def _advance(count: int) -> None:
    with _counter.get_lock():
        _counter.value += count


def _work(task: Task, block: Block) -> None:
    write_block(block.path, task(_state, block, _advance))


def _work_again(task: Task, block: Block) -> bool:
    """Whether a block is what the task gives once more."""
    return _equal(task(_state, block, _advance), block)


def _equal(made: Arrays, block: Block) -> bool:
    there = read_block(block, lambda *_: True)
    return (
        there is not None
        and set(there) == set(made)
        and all(np.array_equal(np.asarray(there[name]), made[name]) for name in made)
    )


@dataclass
class Crew:
    """Who makes blocks.

    Args:
        make_state: makes what every process needs, such as tokenizer and corpora; a picklable function.
        workers: processes of this rank; 1: this one.
        rank, world_size: of the launcher.
        validate: share of the blocks that are there which is made again and compared.
    """

    make_state: Callable[[], Any]
    workers: int = 1
    rank: int = 0
    world_size: int = 1
    validate: float | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank does what only one may."""
        return self.rank == 0

    def make(
        self,
        what: str,
        blocks: Sequence[Block],
        task: Task,
        unit: str = "chunks",
        check: Callable[[Block, Arrays], bool] | None = None,
    ) -> int:
        """Every block that is not there, and wait until all of all ranks are.

        Args:
            what: a verb, for the progress. unit: what `advance` counts, the rows of a block.
            check: see `read_block`.
        Returns: how many this rank made.
        Raises: DataError for a dead process, a full disk, a block that comes out otherwise (`validate`).
        """
        own = share(list(blocks), self.rank, self.world_size)
        missing = [block for block in own if read_block(block, check) is None]
        there = [block for block in own if block not in missing]
        if self.validate and there:
            count = max(1, round(self.validate * len(there)))
            self._run(f"{what} again", random.Random(0).sample(there, count), task, unit, _work_again)
        if missing:
            self._run(what, missing, task, unit, _work)
        self.wait_for(f"blocks ({what})", lambda: all(read_block(block, check) is not None for block in blocks))
        return len(missing)

    def _run(self, what: str, blocks: list[Block], task: Task, unit: str, work: Callable[[Task, Block], Any]) -> None:
        with progress(what, sum(block.rows for block in blocks), unit) as advance:
            processes = min(self.workers, len(blocks))
            if processes == 1:
                state = self.state()
                for block in blocks:
                    made = task(state, block, advance)
                    if work is _work:
                        write_block(block.path, made)
                    elif not _equal(made, block):
                        raise _differs(block)
                return
            context = get_context("forkserver")
            context.set_forkserver_preload(["megatron_lite.cli.retro_preprocess"])
            counter = context.Value("q", 0)
            told = 0
            with ProcessPoolExecutor(processes, context, _set_up, (self.make_state, counter, 1)) as pool:
                futures: dict[Future[Any], Block] = {pool.submit(work, task, block): block for block in blocks}
                waiting = set(futures)
                try:
                    while waiting:
                        done, waiting = wait(waiting, _SECONDS_BETWEEN_LOOKS, FIRST_COMPLETED)
                        for future in done:
                            if future.result() is False:
                                raise _differs(futures[future])
                        now = counter.value
                        if now > told:
                            advance(now - told)
                            told = now
                except BrokenProcessPool:
                    raise DataError(
                        f"a worker process ended while {what}",
                        why="it was killed, perhaps for want of memory",
                        fix="fewer --workers, or smaller blocks; what is done is kept, the same command goes on",
                    ) from None
                finally:
                    for future in waiting:
                        future.cancel()

    def state(self) -> Any:
        """The state, in this process."""
        if getattr(self, "_own", None) is None:
            self._own = self.make_state()
        return self._own

    def forget_state(self) -> None:
        """What the state was made from has changed."""
        self._own = None

    def wait_for(self, what: str, ready: Callable[[], bool]) -> None:
        """Until other ranks have made something."""
        said = time.monotonic()
        while not ready():
            if self.world_size == 1:
                raise DataError(f"{what} are not there though they were written", why="another process removes them")
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            if time.monotonic() - said > _SECONDS_BETWEEN_NOTES:
                said = time.monotonic()
                say(f"[rank {self.rank}] waiting for {what} of other ranks")


def _differs(block: Block) -> DataError:
    return DataError(
        f"{block.path} comes out otherwise when it is made again",
        why="--retro-task-validate compares bit for bit; the file is damaged, or corpus or model have changed",
        fix=f"delete it (or {block.path.parent}, if they have changed) and run again",
    )


def remove(folder: Path) -> None:
    """A folder of blocks that have served."""
    for path in sorted(folder.glob("*"), reverse=True):
        path.unlink()
    try:
        folder.rmdir()
    except OSError as error:
        warn_rank_0(f"{folder} stays: {error.strerror}")
