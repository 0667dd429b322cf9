"""Where the ranks of one start find each other in a store that outlives them.

    torchrun's store    the addresses of attempt 0 | those of attempt 1 | ...     each below a prefix of its own
                                                         ^-- rank 0 draws it and hands it to those who start now

torchrun (`--max-restarts`) keeps its store over restarts, and torch writes every attempt's addresses under the same
names: a rank that starts a little earlier than another one reads where that one's dead predecessor listened, and fails
or waits for minutes. A count of restarts cannot tell attempts apart, since machines count only their own.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from megatron_lite.errors import RankFailure

_NAME = "megatron_lite/start"
_PAUSE_S = 0.01


def launchers_store(timeout: timedelta) -> dist.Store | None:
    """The store that torchrun's agent keeps for this job, or None where rank 0 opens one for each start."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timeout)


def fresh(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """A part of `store` that no former start has written to; the same for all ranks that call this now.

    Every rank leaves a ticket with a word that is its alone, and rank 0 answers each ticket with its prefix. Tickets of
    the dead are answered too, and nobody reads that. Rank 0 is done when everyone has come.

    Raises: RankFailure on rank 0 naming who did not come within `timeout`; elsewhere when rank 0 did not answer.
    """
    if rank == 0:
        return _receive_all(store, world_size, timeout)
    word = uuid.uuid4().hex
    store.set(f"{_NAME}/ticket/{store.add(f'{_NAME}/tickets', 1)}", word)
    try:
        prefix = store.get(f"{_NAME}/answer/{word}").decode()
    except dist.DistStoreError:
        raise RankFailure(
            f"rank {rank}: rank 0 did not come to the start within {timeout.total_seconds():.0f} s",
            why="it hands out the place in torchrun's store where the ranks of this start meet",
            fix="look at what rank 0 said; a longer --distributed-timeout-minutes if its machine is only slow",
        ) from None
    part = dist.PrefixStore(prefix, store)
    part.set(f"here/{rank}", "")
    part.add("here", 1)
    return part


def _receive_all(store: dist.Store, world_size: int, timeout: timedelta) -> dist.Store:
    prefix = f"{_NAME}/{uuid.uuid4().hex}"
    part = dist.PrefixStore(prefix, store)
    deadline = time.monotonic() + timeout.total_seconds()
    seen = 0
    unanswered: list[int] = []
    while part.add("here", 0) < world_size - 1:
        latest = store.add(f"{_NAME}/tickets", 0)
        unanswered += range(seen + 1, latest + 1)
        seen = latest
        written = [number for number in unanswered if store.check([f"{_NAME}/ticket/{number}"])]
        for number in written:
            word = store.get(f"{_NAME}/ticket/{number}").decode()
            store.set(f"{_NAME}/answer/{word}", prefix)
            unanswered.remove(number)
        if time.monotonic() > deadline:
            late = [rank for rank in range(1, world_size) if not part.check([f"here/{rank}"])]
            raise RankFailure(
                f"ranks {late} did not come to the start within {timeout.total_seconds():.0f} s",
                why="a run begins when all of its ranks are there",
                fix="look at what they said; a longer --distributed-timeout-minutes if their machines are only slow",
            )
        if not written:
            time.sleep(_PAUSE_S)
    return part
