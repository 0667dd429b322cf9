"""Reasons to leave before the end: a signal, the clock, an iteration.

Signals only raise a flag; the loop asks once an iteration, over all ranks, so that every rank leaves at the same step.

    --exit-signal-handler               --exit-signal, and SIGUSR1, which schedulers send ahead of their limit: save
    --exit-signal-handler-for-training  SIGINT and SIGTERM, where they do not mean a save: leave without one
"""

from __future__ import annotations

import signal
import time
from argparse import Namespace
from collections.abc import Collection
from types import FrameType
from typing import NamedTuple

import torch

from megatron_lite import collectives
from megatron_lite.log import print_rank_0
from megatron_lite.training.derived import phase_transitions
from megatron_lite.training.launch import program_start

_SAVES = 1 << 16  # above every signal's number


class Exit(NamedTuple):
    """A reason to stop, as Megatron words it, and whether the state is to be saved before."""

    reason: str
    saves: bool = True


class SignalWatch:
    """Notes signals instead of dying from them; `received` is the first one that this rank got, or the first that
    asks for a save, whatever came before it.

    Args:
        saving, leaving: signals that ask for a save and an end, and for an end alone.
    """

    def __init__(self, saving: Collection[int], leaving: Collection[int] = ()):
        self.received: int = 0
        self._saving = set(saving)
        self._old = {number: signal.signal(number, self._note) for number in {*saving, *leaving}}

    @classmethod
    def of(cls, args: Namespace) -> SignalWatch | None:
        """The watch that the flags ask for."""
        saving = {args.exit_signal, signal.SIGUSR1} if args.exit_signal_handler else set()
        leaving = {signal.SIGINT, signal.SIGTERM} if args.exit_signal_handler_for_training else set()
        return cls(saving, leaving) if saving | leaving else None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.received or (number in self._saving and self.received not in self._saving):
            self.received = number

    @property
    def code(self) -> int:
        """For a maximum over ranks: 0, or the signal, those that ask for a save above all others."""
        return self.received and self.received + _SAVES * (self.received in self._saving)

    def restore(self) -> None:
        """Put the former handlers back."""
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def give_in(self) -> None:
        """For a run that cannot go on nor save: act on a signal that was put off, as if it had never been caught.

        A launcher that has lost a rank sends SIGTERM to the others, and starts anew when the last one is gone.
        """
        self.restore()
        if self.received:
            signal.raise_signal(self.received)


def agree(value: int, device: torch.device) -> int:
    """The largest of all ranks' values: one small collective, so that ranks decide alike."""
    if collectives.world() is None:
        return value
    flag = torch.tensor([value], dtype=torch.int64, device=device)
    collectives.all_reduce(flag, collectives.world(), op="max", purpose="exit conditions")
    return int(flag.item())


def largest(value: float, device: torch.device) -> float:
    """The same of numbers that need not be whole; Inf and -Inf count."""
    if collectives.world() is None:
        return value
    box = torch.tensor([value], dtype=torch.float64, device=device)
    collectives.all_reduce(box, collectives.world(), op="max", purpose="largest of all ranks")
    return float(box.item())


def exit_reason(args: Namespace, iteration: int, watch: SignalWatch | None) -> Exit | None:
    """Why the run should stop after `iteration`; None to go on. The same on every rank."""
    minutes = args.exit_duration_in_mins
    expired = minutes is not None and (time.time() - program_start()) / 60.0 > minutes
    if watch is not None or minutes is not None:
        code = agree((watch.code if watch is not None else 0) * 2 + int(expired), args.device)
        number = code // 2
        if number >= _SAVES:
            return Exit(f"exiting program after receiving {signal.Signals(number - _SAVES).name}.")
        if number:
            print_rank_0("Termination requested. Performing orderly shutdown.")
            return Exit(f"exiting program after receiving {signal.Signals(number).name}, without a save", saves=False)
        if code:
            return Exit(f"exiting program after {(time.time() - program_start()) / 60.0} minutes")
    if (args.exit_interval and iteration % args.exit_interval == 0) or iteration in phase_transitions(args):
        return Exit(f"exiting program at iteration {iteration}")
    return None
