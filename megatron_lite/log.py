"""Loggers that know their rank: one line on one rank, not a thousand alike.

Rank 0 says what the run does; the *last* rank prints losses, because with pipeline parallelism only it knows them
(Megatron's rule). Until `set_rank` is called, the launcher's RANK and WORLD_SIZE count, so that messages before
`init_process_group` are not repeated either.
"""

import logging
import os
import sys
from typing import TextIO

_rank: tuple[int, int] | None = None
_said: set[str] = set()
_speaks_for_all = False


def set_rank(rank: int, world_size: int) -> None:
    """Called once by start-up, when the process group is there."""
    global _rank
    _rank = (rank, world_size)


def speak_for_all_ranks() -> None:
    """This process is the only one of its world: it says what rank 0 and the last rank would."""
    global _speaks_for_all
    _speaks_for_all = True


def speaks_for_rank_0() -> bool:
    """Whether this process says what is to be said once."""
    return _speaks_for_all or rank_and_world_size()[0] == 0


def rank_and_world_size() -> tuple[int, int]:
    """This process's rank and the number of processes, as started or as the launcher says."""
    if _rank is not None:
        return _rank
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    return (int(rank), int(size)) if rank.isdigit() and size.isdigit() else (0, 1)


def say(message: str, file: TextIO | None = None) -> None:
    """A line in one write, by whoever calls: ranks share a pipe, and launchers switch buffering off, so that a line end
    written by itself could land behind another rank's text.

    Args:
        file: None: standard output.
    """
    print(f"{message}\n", end="", file=file, flush=True)


def print_rank_0(message: str) -> None:
    """On standard output, by global rank 0 alone."""
    if speaks_for_rank_0():
        say(message)


def print_rank_last(message: str) -> None:
    """On standard output, by the last global rank alone."""
    rank, size = rank_and_world_size()
    if _speaks_for_all or rank == size - 1:
        say(message)


def warn_rank_0(message: str) -> None:
    """A line `WARNING: ...` on standard error, by global rank 0 alone."""
    if speaks_for_rank_0():
        say(f"WARNING: {message}", sys.stderr)


def once(message: str) -> None:
    """A notice that a run prints once, however often the place is passed (rank 0)."""
    if message not in _said:
        _said.add(message)
        print_rank_0(message)


def get_logger(name: str) -> logging.Logger:
    """The logger of a module. `--logging-level` sets the level of the package's root logger."""
    return logging.getLogger(name)
