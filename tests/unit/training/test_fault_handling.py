"""Reasons to leave: which signals save, which do not, and what a lost run does with a signal that it had put off."""

import os
import signal
from argparse import Namespace

import pytest
import torch

from megatron_lite.training import fault_handling
from megatron_lite.training.fault_handling import Exit, SignalWatch, exit_reason


def _args(**more):
    plain = {"exit_signal": signal.SIGTERM, "exit_signal_handler": False, "exit_signal_handler_for_training": False}
    plain |= {"exit_duration_in_mins": None, "exit_interval": None, "phase_transition_iterations": None}
    return Namespace(**{**plain, "device": torch.device("cpu"), **more})


def _after(number, **flags):
    args = _args(**flags)
    watch = SignalWatch.of(args)
    try:
        os.kill(os.getpid(), number)
        return exit_reason(args, 7, watch)
    finally:
        watch.restore()


def test_without_the_flags_no_signal_is_caught():
    assert SignalWatch.of(_args()) is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_leaving_in_order_saves_nothing(number, capsys):
    leave = _after(number, exit_signal_handler_for_training=True)
    assert leave is not None and not leave.saves and number.name in leave.reason
    assert "Termination requested. Performing orderly shutdown." in capsys.readouterr().out


def test_with_both_flags_the_exit_signal_saves_and_an_interrupt_does_not():
    both = {"exit_signal_handler": True, "exit_signal_handler_for_training": True}
    assert _after(signal.SIGTERM, **both) == Exit("exiting program after receiving SIGTERM.")
    assert _after(signal.SIGUSR1, **both) == Exit("exiting program after receiving SIGUSR1.")
    leave = _after(signal.SIGINT, **both)
    assert leave is not None and not leave.saves
    other = _after(signal.SIGTERM, exit_signal=signal.SIGHUP, **both)
    assert other is not None and not other.saves


def test_another_rank_that_wants_a_save_has_its_way(monkeypatch):
    """One rank gets SIGINT, another one SIGTERM: all must do the same."""
    args = _args(exit_signal_handler=True, exit_signal_handler_for_training=True)
    other = fault_handling._SAVES + signal.SIGTERM
    monkeypatch.setattr(fault_handling, "agree", lambda value, device: max(value, 2 * other))
    watch = SignalWatch.of(args)
    watch._note(signal.SIGINT, None)
    watch.restore()
    assert exit_reason(args, 7, watch) == Exit("exiting program after receiving SIGTERM.")


@pytest.mark.parametrize("numbers", [(signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)])
def test_a_rank_that_gets_both_signals_saves_whichever_came_first(numbers):
    """Ctrl-C, then a scheduler's SIGTERM before the step is over."""
    args = _args(exit_signal_handler=True, exit_signal_handler_for_training=True)
    watch = SignalWatch.of(args)
    try:
        for number in numbers:
            os.kill(os.getpid(), number)
        assert exit_reason(args, 7, watch) == Exit("exiting program after receiving SIGTERM.")
    finally:
        watch.restore()


def test_a_lost_run_gives_in_to_the_signal_that_it_had_put_off():
    """torchrun waits for the survivors of a lost rank, which can neither go on nor save."""
    got = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    try:
        watch = SignalWatch({signal.SIGUSR1})
        watch.give_in()
        assert got == []
        watch = SignalWatch({signal.SIGUSR1})
        os.kill(os.getpid(), signal.SIGUSR1)
        assert got == []
        watch.give_in()
        assert got == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)
