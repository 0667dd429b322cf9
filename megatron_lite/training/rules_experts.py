"""Rules on experts: those of the config, told with all others before anything is built, and those of a run."""

from __future__ import annotations

from argparse import Namespace

from megatron_lite.errors import ConfigError
from megatron_lite.training.rule import Rule, broken
from megatron_lite.transformer.moe.moe_rules import moe_problems

EXPERTS: tuple[Rule, ...] = (
    Rule(
        lambda a: bool(a.num_experts) and a.tensor_model_parallel_size > 1 and not a.sequence_parallel,
        "--num-experts {num_experts} with --tensor-model-parallel-size {tensor_model_parallel_size} without "
        "--sequence-parallel",
        "all tensor-parallel ranks would route the same tokens, and experts get every token once",
        "--sequence-parallel",
    ),
)


def problems_of_experts(args: Namespace) -> list[ConfigError]:
    """What of the arguments about experts cannot be, after `derived.derive`."""
    config = Namespace(**vars(args), num_moe_experts=args.num_experts, variable_seq_lengths=False)
    return [*moe_problems(config), *broken(EXPERTS, args)]
