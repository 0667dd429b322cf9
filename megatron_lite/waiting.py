"""Waiting for other ranks as long as it takes, without a collective that could run into its timeout.

    rank 0    at_work: builds the index files for an hour, a pulse in the store every few seconds      } both then
    rank 1    wait_for_all: asks the store now and then; fails if the pulse stops, naming the work     } go on

A collective that ranks enter early is pending until the last one comes, and the group's timeout (minutes) ends the run
of whoever waits for a slow disk. The rendezvous store has no such limit: a look at it takes a millisecond.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed import ProcessGroup, Store

from megatron_lite.errors import RankFailure
from megatron_lite.log import print_rank_0

PULSE_S = 5.0
# Building an index keeps the interpreter's lock for a minute at a time (one shuffle of 10^9 numbers): far below this.
SILENCE_S = 900.0
LONGEST_PAUSE_S = 1.0

_meetings: Counter[str] = Counter()  # how often the ranks of a group have met under a name; the same on all of them


class Meeting:
    """A point that every rank of `group` reaches, some of them after work of any length.

    All ranks make the same meetings in the same order. `group` None: this rank is alone and nothing waits.

    Args:
        what: the work that may take long, as a noun: "the index build".
    """

    def __init__(self, group: ProcessGroup | None, what: str):
        alone = group is None or dist.get_backend(group) == "fake"
        self.what, self.size = what, 1 if alone else group.size()  # type: ignore[union-attr]
        if self.size > 1:
            assert group is not None
            name = f"megatron_lite/meeting/{group.group_name}/{what}"
            self._key = f"{name}/{_meetings[name]}"
            _meetings[name] += 1
            self._store: Store = dist.distributed_c10d._get_default_store()

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Around the work: tells the waiting ranks that this one is alive, and rank 0's log how long it has taken."""
        if self.size == 1:
            yield
            return
        over = threading.Event()
        begun = time.monotonic()

        def beat() -> None:
            said = begun
            while not over.wait(PULSE_S):
                with contextlib.suppress(RuntimeError):  # the store is gone: the run is ending
                    self._store.add(f"{self._key}/pulse", 1)
                if time.monotonic() - said > 60:
                    said = time.monotonic()
                    print_rank_0(f" > {self.what}: {said - begun:.0f} s so far, the other ranks wait")

        pulse = threading.Thread(target=beat, name="pulse", daemon=True)
        pulse.start()
        try:
            yield
        finally:
            over.set()
            pulse.join()

    def wait_for_all(self) -> None:
        """Returns when every rank is here.

        Raises: RankFailure if no rank at work has given a sign of life for `SILENCE_S` seconds.
        """
        if self.size == 1:
            return
        if self._store.add(f"{self._key}/here", 1) == self.size:
            self._store.set(f"{self._key}/all", "here")
            return
        pause, begun = 0.005, time.monotonic()
        pulse, heard, looked = -1, begun, begun
        while not self._store.check([f"{self._key}/all"]):
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
            now = time.monotonic()
            if now - looked < PULSE_S:
                continue
            looked = now
            latest = self._store.add(f"{self._key}/pulse", 0)
            if latest != pulse:
                pulse, heard = latest, now
            elif now - heard > SILENCE_S:
                here = self._store.add(f"{self._key}/here", 0)
                raise RankFailure(
                    f"{self.what} gave no sign of life for {SILENCE_S:.0f} s",
                    why=f"{here} of {self.size} ranks are done with it or wait for it; a rank that is at it was "
                    "killed, or its disk hangs",
                    fix="look at the log of rank 0 and at the disk of the data; what is built already is kept",
                )
