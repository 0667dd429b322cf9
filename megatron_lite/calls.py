"""Every call that moves data between ranks, while it lasts and when it fails. `collectives` makes them.

    all_reduce(x, dp, purpose="gradients")         begins the 17th call of dp, and is in it until it returns
      `- handle.wait()                             is in it again
    from another thread: under_way(), last_call()  what this rank waits in, or what it did last
    gloo: "connection closed by peer"              PeerLost, with the call's kind, purpose, group and ranks

Calls of a group have numbers, the same on all its ranks, so that ranks which wait for each other can be compared. Sends
and receives have none: two ranks of a group make them without the others. Noting a call costs under a microsecond.
"""

from __future__ import annotations

import functools
import inspect
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_lite.errors import PeerLost
from megatron_lite.log import rank_and_world_size

NAMES: dict[ProcessGroup, str] = {}  # under which a group's traffic is counted
_NUMBERS: dict[ProcessGroup, int] = defaultdict(int)  # calls so far
_UNDER_WAY: dict[int, Call] = {}  # by thread
_last: Call | None = None
_seconds = 0.0

# How backends word what another rank has done to them; torch has no type of its own for gloo's errors.
_OF_THE_BACKEND = re.compile("gloo|nccl|connection|peer|timed? ?out", re.IGNORECASE)
_OF_TWO = ("send", "receive")


class Handle(Protocol):
    """What an asynchronous call returns: `wait()` blocks until the result may be read."""

    def wait(self) -> Any: ...


class _Done:
    """The handle of a call that had nothing to do."""

    def wait(self) -> None:
        return None


DONE = _Done()


class Pending:
    """Several transfers, and what is still to be done with their results when they are there."""

    def __init__(self, works: Sequence[Any], finish=lambda: None):
        self._works, self._finish = list(works), finish

    def wait(self) -> None:
        for work in self._works:
            if work is not None and type(work).__name__ != "_IllegalWork":  # of a call inside `coalesced`
                work.wait()
        self._works = []
        finish, self._finish = self._finish, lambda: None
        finish()


class Call:
    """A call of a group: a context around what may block, in which an error of the backend becomes PeerLost.

    As a handle of an asynchronous call it waits in that context.

    Args:
        peer: of a send or receive, the other rank's place in the group.
    """

    __slots__ = ("began", "ended", "group", "handle", "kind", "number", "peer", "purpose")

    def __init__(self, group: ProcessGroup, kind: str, purpose: str, peer: int | None = None):
        self.group, self.kind, self.purpose, self.peer = group, kind, purpose, peer
        self.handle: Handle = DONE
        self.began = self.ended = 0.0
        if kind not in _OF_TWO:
            _NUMBERS[group] += 1
        self.number = _NUMBERS[group]

    def __enter__(self) -> None:
        self.began = time.monotonic()
        _UNDER_WAY[get_ident()] = self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        global _last, _seconds
        _UNDER_WAY.pop(get_ident(), None)
        self.ended = time.monotonic()
        _seconds += self.ended - self.began
        _last = self
        if not isinstance(error, RuntimeError) or not _OF_THE_BACKEND.search(str(error)):
            return
        rank, _ = rank_and_world_size()
        ranks = ", ".join(map(str, dist.get_process_group_ranks(self.group)))
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise PeerLost(
            f"rank {rank}: {self.kind} for {self.purpose} over the group {NAMES.get(self.group, 'world')} "
            f"(ranks {ranks}) failed: {reason[0]}",
            why="another rank of the group has ended, or did not come within --distributed-timeout-minutes",
            fix="look at what the other ranks said: the first one to fail tells the cause",
        ) from error

    def wait(self) -> None:
        with self:
            self.handle.wait()
            self.handle = DONE  # the last call is remembered, its tensors are not

    def facts(self) -> dict[str, Any]:
        """What may be told to another rank: plain values. `key` names the group alike on all its ranks.

        A group that has been destroyed since has no ranks any more.
        """
        try:
            ranks = dist.get_process_group_ranks(self.group)
        except KeyError:
            ranks = []
        return {
            "kind": self.kind,
            "purpose": self.purpose,
            "group": NAMES.get(self.group, "world"),
            "key": self.group.group_name,
            "ranks": ranks,
            "number": None if self.kind in _OF_TWO else self.number,
            "peer": None if self.peer is None or not ranks else ranks[self.peer],
        }


_Call = TypeVar("_Call", bound=Callable[..., Any])


def noted(call: _Call) -> _Call:
    """For a function that moves data and has `group`, `purpose` and, where two ranks make it, `to` or `source`."""
    place = list(inspect.signature(call).parameters).index("group")
    kind = call.__name__
    peer = {"send": "to", "receive": "source"}.get(kind)

    @functools.wraps(call)
    def calling(*args: Any, **kwargs: Any) -> Any:
        group = kwargs["group"] if "group" in kwargs else args[place]
        if group is None or group.size() == 1:
            return call(*args, **kwargs)
        this = Call(group, kind, kwargs["purpose"], None if peer is None else kwargs[peer])
        with this:
            result = call(*args, **kwargs)
        if not isinstance(result, Pending):
            return result
        this.handle = result
        return this

    return calling  # type: ignore[return-value]


# -- for an onlooker, who may be another thread ------------------------------------------------------------------


def under_way() -> list[Call]:
    """The calls that this process is in, one a thread at most."""
    return list(_UNDER_WAY.values())


def last_call() -> Call | None:
    """The call that ended last."""
    return _last


def numbers() -> dict[str, int]:
    """Calls of each group so far, by the `key` of `Call.facts`."""
    return {group.group_name: number for group, number in list(_NUMBERS.items())}


def seconds() -> float:
    """Time that this process has spent in calls so far, all threads together."""
    return _seconds


def forget_groups() -> None:
    """Drop all references to groups, which would keep destroyed groups alive."""
    global _last
    NAMES.clear()
    _NUMBERS.clear()
    _last = None
