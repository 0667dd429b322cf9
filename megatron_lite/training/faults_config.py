"""The settings for results that cannot be right: NaN, Inf, spikes, replicas that drift apart."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config import flag


@dataclass(kw_only=True)
class FaultsConfig:
    """What is looked for in losses, gradients and weights, and what happens then."""

    check_weight_hash_across_dp_replicas_interval: int | None = flag(
        None,
        "Compare the parameters of data-parallel replicas before the first step and every N iterations.",
        unit="iterations",
    )

    # -- results that cannot be right
    rerun_mode: str = flag(
        "validate_results",
        "Repeat a step with a bad loss or gradient, to tell faults of the machine from those of data or model; or run "
        "every step twice and say how much results vary.",
        choices=("disabled", "validate_results", "report_stats"),
    )
    check_for_spiky_loss: bool = flag(False, "A loss far above the largest before is a bad one, as NaN is.")
    spiky_loss_factor: float = flag(10.0, "How far above: so many times. Not in Megatron.")
    spiky_loss_window: int | None = flag(
        None,
        "The largest of the last N iterations, not of all; the check begins after N (else after 100). Not in Megatron.",
        unit="iterations",
    )
    on_bad_loss: str = flag(
        "stop",
        "After a step whose loss or gradients are bad: stop; leave its batch out; or load the last checkpoint of "
        "--save, and leave the batch out when it comes again. Not in Megatron.",
        choices=("stop", "skip", "rollback"),
    )
    bad_loss_limit: int = flag(10, "Stop when more batches than this were left out. Not in Megatron.", unit="batches")
    bad_loss_window: int = flag(
        1,
        "With --on-bad-loss rollback: leave out the last N batches, up to the bad one. Not in Megatron.",
        unit="iterations",
    )
    result_rejected_tracker_filename: str | None = flag(
        None, "File to which rejected results are added; the batches that were given up are left out at the next start."
    )
    error_injection_rate: int = flag(
        0, "Pretend a fault at every N-th iteration, to see what a run does about it.", unit="iterations"
    )
    error_injection_type: str = flag(
        "transient_error",
        "What is pretended.",
        choices=("correct_result", "transient_error", "persistent_error"),
    )
