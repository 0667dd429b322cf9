"""Reasons to leave before the end: a signal, the clock, an iteration.

Signals only raise a flag; the loop asks once an iteration, over all ranks, so that every rank leaves at the same step.
SIGUSR1 counts like the exit signal, because schedulers send it ahead of their limit.
"""

from __future__ import annotations

import signal
import time
from argparse import Namespace
from types import FrameType

import torch

from megatron_lite import collectives
from megatron_lite.training.derived import phase_transitions
from megatron_lite.training.launch import program_start


class SignalWatch:
    """Notes signals instead of dying from them; `received` names the first one that any rank got."""

    def __init__(self, exit_signal: int):
        self._seen: int = 0
        self._old = {}
        for number in {exit_signal, signal.SIGUSR1}:
            self._old[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._seen = self._seen or number

    def restore(self) -> None:
        """Put the former handlers back."""
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def give_in(self) -> None:
        """For a run that cannot go on nor save: act on a signal that was put off, as if it had never been caught.

        A launcher that has lost a rank sends SIGTERM to the others, and starts anew when the last one is gone.
        """
        self.restore()
        if self._seen:
            signal.raise_signal(self._seen)


def agree(value: int, device: torch.device) -> int:
    """The largest of all ranks' values: one small collective, so that ranks decide alike."""
    if collectives.world() is None:
        return value
    flag = torch.tensor([value], dtype=torch.int64, device=device)
    collectives.all_reduce(flag, collectives.world(), op="max", purpose="exit conditions")
    return int(flag.item())


def exit_reason(args: Namespace, iteration: int, watch: SignalWatch | None) -> str | None:
    """Why the run should stop after `iteration`, as Megatron words it; None to go on. The same on every rank."""
    signalled = watch._seen if watch is not None else 0
    minutes = args.exit_duration_in_mins
    expired = minutes is not None and (time.time() - program_start()) / 60.0 > minutes
    if watch is not None or minutes is not None:
        code = agree(signalled * 2 + int(expired), args.device)
        if code >= 2:
            return f"exiting program after receiving {signal.Signals(code // 2).name}."
        if code & 1:
            return f"exiting program after {(time.time() - program_start()) / 60.0} minutes"
    if (args.exit_interval and iteration % args.exit_interval == 0) or iteration in phase_transitions(args):
        return f"exiting program at iteration {iteration}"
    return None
