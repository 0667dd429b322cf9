"""Which rank does everyone wait for? An answer before the timeout ends the run.

    rank 0   waits in all_reduce for losses over dp_cp, call 17    too long: asks everyone, through the store --.
    rank 1   waits in all_reduce for losses over dp_cp, call 17    answers                                      |
    rank 2   has made 16 calls of dp_cp; is in load_batch (my_data.py:40)    answers                            |
    rank 3   (stopped, or its machine is gone)                     no answer                                    v
                                                               one report: who is missing, who does what where

Each rank has a thread that looks at its own calls (`calls`) and at the store a few times a minute, or, when SIGUSR2
arrives, at once. It works while the main thread is stuck in a collective. After the report the backend's timeout ends
the run, as always; where it does not, this thread does.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from argparse import Namespace
from contextlib import suppress
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from megatron_lite import calls
from megatron_lite.calls import Call
from megatron_lite.errors import RankFailure
from megatron_lite.log import rank_and_world_size, say

_REPORT_AT = 0.8  # of the time limit
_OVERTIME_S = 5.0  # for the backend to end the run by itself; gloo keeps to limits set late in few of its operations
_SLOWEST_PULSE_S = 5.0

State = dict[str, Any]  # what one rank tells of itself: plain values


class HangWatch:
    """Looks after one rank, from a thread of its own. `close` ends it.

    Args:
        store: shared by all ranks; the watch has a part of it to itself.
        limit_s: how long a collective may take.
        listen: for SIGUSR2, which asks for a report. Only in the main thread.
    """

    def __init__(self, store: dist.Store, limit_s: float, *, listen: bool = True):
        self.rank, self.size = rank_and_world_size()
        self._store = dist.PrefixStore("megatron_lite/hang", _own_connection(store))
        self._doing, self._since = "start-up", time.monotonic()
        self._answered = 0  # the last report that this rank has added to
        self._told: tuple[int, float] | None = None  # the wait that has been reported
        self._main = threading.main_thread().ident
        self._closing = False
        self._old: Any = None
        self.set_limit(limit_s)
        self._ear, self._mouth = os.pipe()
        os.set_blocking(self._mouth, False)
        os.set_blocking(self._ear, False)
        self._listening = listen and threading.current_thread() is threading.main_thread()
        if self._listening:
            self._old = signal.signal(signal.SIGUSR2, _nothing)
            self._old_fd = signal.set_wakeup_fd(self._mouth, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, name="hang watch", daemon=True)
        self._thread.start()

    def set_limit(self, limit_s: float) -> None:
        """How long a collective may take from now on."""
        self._limit = limit_s
        self._pulse = min(_SLOWEST_PULSE_S, limit_s / 40)
        self._patience = max(2.0, 2.5 * self._pulse)

    def note(self, doing: str) -> None:
        """What this rank does now, for a report: "iteration 12"."""
        self._doing, self._since = doing, time.monotonic()

    def close(self) -> None:
        """End the thread, give the signal back."""
        self._closing = True
        if self._listening:
            signal.set_wakeup_fd(self._old_fd)
            signal.signal(signal.SIGUSR2, self._old)
        with suppress(BlockingIOError):
            os.write(self._mouth, b"\0")
        self._thread.join(self._patience + 5.0)
        if not self._thread.is_alive():
            os.close(self._ear)
            os.close(self._mouth)

    # -- the thread ------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        with suppress(RuntimeError, ValueError):  # the store is gone: the run is ending
            while not self._closing:
                ready, _, _ = select.select([self._ear], [], [], self._pulse)
                heard = os.read(self._ear, 4096) if ready else b""
                if self._closing:
                    return
                self._look(asked=signal.SIGUSR2 in heard)

    def _look(self, asked: bool) -> None:
        self._answer()
        stuck = self._longest_wait()
        if asked:
            self._ask(f"asked for by SIGUSR2 to rank {self.rank}", None)
        elif stuck is not None and self._told != (id(stuck), stuck.began):
            waits_s = time.monotonic() - stuck.began
            if waits_s > _REPORT_AT * self._limit:
                self._told = (id(stuck), stuck.began)
                self._ask(f"rank {self.rank} has waited {waits_s:.0f} s of at most {self._limit:.0f}", stuck)
        if stuck in calls.under_way() and time.monotonic() - stuck.began > self._limit + _OVERTIME_S:
            self._end(stuck)

    def _end(self, stuck: Call) -> None:
        """End this process, whose main thread cannot be reached."""
        found = self._store.get("finding").decode() if self._store.check(["finding"]) else ""
        error = RankFailure(
            f"rank {self.rank}: {_named(stuck.facts())} did not end within {self._limit:.0f} s",
            why=found or "a rank of the group did not come",
            fix="look at the HANG REPORT; a longer --distributed-timeout-minutes if that rank was only slow",
        )
        say(f"\nRankFailure: {error}", sys.stderr)
        os._exit(error.exit_status)

    def _waits(self) -> list[Call]:
        """The calls that this rank is in, the longest first. A device works calls off later than the host makes them:
        there a rank that has been silent for long is taken to wait in its last one."""
        waits = sorted(calls.under_way(), key=lambda call: call.began)
        last = calls.last_call()
        if waits or last is None or not torch.cuda.is_available():
            return waits
        silent_s = time.monotonic() - max(self._since, last.ended)
        return [last] if silent_s > _REPORT_AT * self._limit / 2 else []

    def _longest_wait(self) -> Call | None:
        return next(iter(self._waits()), None)

    def _answer(self) -> None:
        number = self._store.add("reports", 0)
        if number > self._answered:
            self._answered = number
            stuck = self._longest_wait()
            if stuck is not None and time.monotonic() - stuck.began > _REPORT_AT * self._limit / 2:
                self._told = (id(stuck), stuck.began)  # it is in this report
            self._store.set(f"{number}/{self.rank}", json.dumps(self.state()))

    def state(self) -> State:
        """What this rank waits in, or did last, and where its main thread is."""
        now = time.monotonic()
        waits = [{**call.facts(), "seconds": now - call.began} for call in self._waits()]
        last = calls.last_call()
        return {
            "doing": self._doing,
            "waits": waits,
            "last": None if last is None else {**last.facts(), "seconds": now - last.ended},
            "numbers": calls.numbers(),
            "place": _place(sys._current_frames().get(self._main or 0)),
        }

    def _ask(self, why: str, stuck: Call | None) -> None:
        """Have everyone answer, and print one report; of several ranks that ask at once the first one does."""
        if self._store.add(f"{self._answered + 1}/asked", 1) > 1:
            return
        number = self._store.add("reports", 1)
        self._answer()
        deadline = time.monotonic() + self._patience
        missing = set(range(self.size)) - {self.rank}
        while missing and time.monotonic() < deadline and not self._closing:
            missing -= {rank for rank in missing if self._store.check([f"{number}/{rank}"])}
            time.sleep(0.02)
        if missing and self._closing and stuck is None:  # the others may have ended as well: no answer means nothing
            say(f"\nHANG REPORT: {why}: none, as the run of this rank ended before all ranks had answered", sys.stderr)
            return
        states: list[State | None] = [
            None if rank in missing else json.loads(self._store.get(f"{number}/{rank}")) for rank in range(self.size)
        ]
        lines = report(why, states, stuck.facts() if stuck else None)
        if stuck:
            self._store.set("finding", lines[-1].strip())
        say("\n" + "\n".join(lines), sys.stderr)


def start(args: Namespace) -> HangWatch | None:
    """A watch over this rank of a run; None where it is alone."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    store = dist.distributed_c10d._get_default_store()
    return HangWatch(store, 60.0 * args.distributed_timeout_minutes, listen=args.exit_signal != signal.SIGUSR2)


def _own_connection(store: dist.Store) -> dist.Store:
    """The main thread may wait inside the store for long, and would lock this thread out of its connection."""
    try:
        return store.clone()  # type: ignore[attr-defined]  # of torch 2.7 and newer
    except (AttributeError, NotImplementedError, RuntimeError):
        return store


def _nothing(number: int, frame: FrameType | None) -> None:
    """A signal that has a handler does not end the process; the thread hears of it through the pipe."""


# -- the report: pure --------------------------------------------------------------------------------------------


def report(why: str, states: list[State | None], stuck: State | None) -> list[str]:
    """The lines of a report.

    Args:
        states: every rank's; None: it did not answer.
        stuck: facts of the call that is waited in.
    """
    lines = [f"HANG REPORT: {why}" + (f" in {_named(stuck)}" if stuck else "")]
    if stuck:
        absent = missing(stuck, states)
        lines.append(f"  not there: {_ranks(absent) if absent else 'nobody; all its ranks have begun it'}")
    others = {_named(call): missing(call, states) for state in states if state for call in state["waits"]}
    others.pop(_named(stuck) if stuck else "", None)
    lines += [f"  not there: {_ranks(absent)} in {name}" for name, absent in others.items() if absent]
    alike: dict[str, list[int]] = {}
    for rank, state in enumerate(states):
        alike.setdefault(_told_of(state), []).append(rank)
    lines += [f"  {_ranks(ranks)}: {text}" for text, ranks in alike.items()]
    suspects = causes(states)
    if suspects:
        lines.append(f"  waited for, and waiting for nobody: {_ranks(suspects)}. Look there first.")
    elif stuck:
        lines.append("  every rank waits for another one: they make their calls in different orders")
    return lines


def missing(call: State, states: list[State | None]) -> list[int]:
    """Ranks that `call` waits for."""
    if call["peer"] is not None:
        return [call["peer"]]
    return [
        rank
        for rank in call["ranks"]
        if (state := states[rank]) is None or state["numbers"].get(call["key"], 0) < call["number"]
    ]


def causes(states: list[State | None]) -> list[int]:
    """Ranks that others wait for and that wait for nobody themselves."""
    waits_for = [{r for call in state["waits"] for r in missing(call, states)} if state else set() for state in states]
    return sorted(rank for rank in set().union(*waits_for) if not waits_for[rank])


def _told_of(state: State | None) -> str:
    if state is None:
        return "NO ANSWER: ended, stopped, or its machine is gone"
    where = f"; now in {state['place']}" if state["place"] else ""
    if state["waits"]:
        return f"{state['doing']}, waits in {' and in '.join(map(_named, state['waits']))}{where}"
    last = state["last"]
    if last is None:
        return f"{state['doing']}, has made no call yet{where}"
    seconds = last["seconds"]
    ago = f"{round(seconds / 10) * 10} s" if seconds > 20 else f"{seconds:.0f} s"
    return f"{state['doing']}, in no call for {ago}; the last one was {_named(last)}{where}"


def _named(call: State) -> str:
    number = f"call {call['number']} of it" if call["number"] is not None else f"with rank {call['peer']}"
    return f"{call['kind']} for {call['purpose']} over {call['group']} ({_ranks(call['ranks'])}; {number})"


def _ranks(ranks: list[int]) -> str:
    """[0, 1, 2, 5] -> 'ranks 0-2, 5'."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def _place(frame: FrameType | None) -> str:
    """Where a thread is: the innermost function that is neither torch's nor of the files that move data."""
    beneath = (os.path.dirname(torch.__file__), calls.__file__, calls.__file__.replace("calls.py", "collectives.py"))
    while frame is not None and frame.f_code.co_filename.startswith(beneath):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
