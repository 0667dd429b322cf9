"""Rules for the flags about faulty results and early ends, as one table."""

from __future__ import annotations

import signal
from argparse import Namespace
from typing import Any

from megatron_lite.training.rule import Rule, flag_of, positive


def _spike_flags(a: Namespace) -> bool | dict[str, Any]:
    given = [
        name
        for name, default in (("spiky_loss_factor", 10.0), ("spiky_loss_window", None))
        if getattr(a, name) != default
    ]
    return not a.check_for_spiky_loss and bool(given) and {"given": flag_of(given[0])}


def _lost(a: Namespace) -> bool | dict[str, Any]:
    """What a checkpoint to roll back to would lack."""
    left_out = [name for name in ("no_save_optim", "no_save_rng") if getattr(a, name)]
    return a.on_bad_loss == "rollback" and bool(left_out) and {"left_out": flag_of(left_out[0])}


_UNCATCHABLE = (signal.SIGKILL, signal.SIGSTOP)

FAULTS: tuple[Rule, ...] = (
    Rule(
        lambda a: a.exit_signal_handler and a.exit_signal in _UNCATCHABLE,
        "--exit-signal {exit_signal} with --exit-signal-handler",
        "SIGKILL and SIGSTOP cannot be caught by a process",
        "--exit-signal SIGTERM",
    ),
    *(
        positive(name)
        for name in ("check_weight_hash_across_dp_replicas_interval", "spiky_loss_window", "bad_loss_window")
    ),
    positive("bad_loss_limit", 0),
    positive("error_injection_rate", 0),
    Rule(
        lambda a: a.spiky_loss_factor <= 1.0,
        "--spiky-loss-factor {spiky_loss_factor}",
        "a loss is a spike if it is so many times the largest before",
        "a number above 1",
    ),
    Rule(
        _spike_flags,
        "{given} without --check-for-spiky-loss",
        "it says what a spike is, and nobody looks for spikes",
        "--check-for-spiky-loss",
    ),
    Rule(
        lambda a: a.on_bad_loss == "rollback" and not a.save,
        "--on-bad-loss rollback without --save",
        "it goes back to the last checkpoint of this run",
        "--save FOLDER, or --on-bad-loss skip",
    ),
    Rule(
        _lost,
        "--on-bad-loss rollback with {left_out}",
        "a checkpoint without it cannot be gone back to",
        "leave one of the two out",
    ),
    Rule(
        lambda a: a.on_bad_loss == "rollback" and a.dataloader_type == "external",
        "--on-bad-loss rollback with --dataloader-type external",
        "an iterator of yours cannot be asked for former samples",
        "--on-bad-loss skip",
    ),
    Rule(
        lambda a: a.bad_loss_window > 1 and a.on_bad_loss != "rollback",
        "--bad-loss-window {bad_loss_window} with --on-bad-loss {on_bad_loss}",
        "batches before the bad one have been trained on; only after a rollback can they be left out",
        "--on-bad-loss rollback",
    ),
    Rule(
        lambda a: a.error_injection_rate > 0 and a.rerun_mode != "validate_results",
        "--error-injection-rate {error_injection_rate} with --rerun-mode {rerun_mode}",
        "an injected fault shows what repeating a step makes of it",
        "--rerun-mode validate_results",
    ),
)
