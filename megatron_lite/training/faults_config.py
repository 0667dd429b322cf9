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
