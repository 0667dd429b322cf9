"""Rules for the flags about faulty results, as one table."""

from __future__ import annotations

from megatron_lite.training.rule import Rule, positive

FAULTS: tuple[Rule, ...] = (positive("check_weight_hash_across_dp_replicas_interval"),)
