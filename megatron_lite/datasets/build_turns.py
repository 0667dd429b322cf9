"""Who builds the index files, who loads them, and when.

    turn 1   the index builders (one rank)                 build, and write the files
    turn 2   one rank of every other node                  load them; build where the node shares no folder with turn 1
    turn 3   the other ranks that read data                load

A turn lasts as long as it must: the other ranks wait at the rendezvous store, where nothing times out. At its end all
ranks learn whether it went well, so that a failure ends every rank instead of leaving the others waiting.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TypeVar

from torch.distributed import ProcessGroup

from megatron_lite import collectives
from megatron_lite.errors import DataError, MegatronLiteError
from megatron_lite.log import warn_rank_0
from megatron_lite.waiting import Meeting

_T = TypeVar("_T")
_R = TypeVar("_R")
_WHAT = "the index build"


def build_in_turns(
    build: Callable[[], _T],
    group: ProcessGroup | None,
    *,
    builds_index: bool,
    reads_data: bool,
    has_files: bool,
    made_files: Callable[[_T], bool],
) -> _T | None:
    """`build()` on every rank that builds or reads, in turns; its result there, None on the others.

    Args:
        group: the ranks that call this together; None: this one alone.
        builds_index: is this rank of turn 1?
        has_files: are there files to share? Without, all ranks build in one turn.
        made_files: had a result to be built, rather than loaded?

    Raises: DataError on every rank if one of them failed; on that rank its own error.
    """
    work: Callable[[], _T] | None = build if builds_index or reads_data else None
    node = socket.gethostname()
    ranks = collectives.all_gather_object((node, builds_index, reads_data), group, purpose="who reads data")
    result: _T | None = None
    if not has_files:
        alone = _turn(work, group, made_files)
        return alone[0]
    served = {place for place, builder, _ in ranks if builder}
    turns: list[list[int]] = [[rank for rank, (_, builder, _) in enumerate(ranks) if builder], [], []]
    for rank, (place, builder, reader) in enumerate(ranks):
        if reader and not builder:
            turns[1 if place not in served else 2].append(rank)
            served.add(place)
    mine = collectives.group_rank(group)
    for number, turn in enumerate(turns):
        if not turn:
            continue
        outcome = _turn(work if mine in turn else None, group, made_files)
        result = outcome[0] if mine in turn else result
        made = outcome[1]
        if made and number > 0:
            warn_rank_0(
                f"rank{'s' if len(made) > 1 else ''} {', '.join(map(str, made))} built the index files once more: "
                "the cache folder is not shared by all nodes (--data-cache-path)"
            )
    return result


def _turn(
    build: Callable[[], _R] | None, group: ProcessGroup | None, made_files: Callable[[_R], bool]
) -> tuple[_R | None, list[int]]:
    """The result of `build`, if this rank has its turn; and the ranks that had to make files."""
    meeting = Meeting(group, _WHAT)
    result: _R | None = None
    failure: Exception | None = None
    if build is not None:
        with meeting.at_work():
            try:
                result = build()
            except (MegatronLiteError, IndexError) as error:
                failure = error
            except Exception as error:
                failure = DataError(f"the datasets could not be built: {type(error).__name__}: {error}")
                failure.__cause__ = error
    meeting.wait_for_all()
    made = result is not None and made_files(result)
    outcomes = collectives.all_gather_object((failure, made), group, purpose="outcome of the index build")
    if failure is not None:
        raise failure
    for rank, (other, _) in enumerate(outcomes):
        if other is not None:
            raise DataError(f"rank {rank}, which builds the index files, failed: {other}")
    return result, [rank for rank, (_, made) in enumerate(outcomes) if made]
