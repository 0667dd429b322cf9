"""Rules on how numbers are scaled and rounded: those of the config, told with all others before anything is built."""

from __future__ import annotations

from argparse import Namespace

from megatron_lite.errors import ConfigError
from megatron_lite.training.rule import Rule, broken
from megatron_lite.transformer.fp8 import fp8_problems
from megatron_lite.transformer.mup import mup_problems

# Flags on FP8 weights in memory do nothing here; what Megatron refuses is refused.
NUMBERS: tuple[Rule, ...] = (
    Rule(
        lambda a: a.fp8_param_gather and a.fp8_format is None,
        "--fp8-param-gather without --fp8-format",
        "there are no FP8 weights to gather",
        "--fp8-format hybrid, or leave it out",
    ),
    Rule(
        lambda a: a.fp8_param_gather and not (a.use_distributed_optimizer or a.use_megatron_fsdp or a.use_torch_fsdp2),
        "--fp8-param-gather without --use-distributed-optimizer",
        "nothing is gathered without it",
        "--use-distributed-optimizer, or leave --fp8-param-gather out",
    ),
    Rule(
        lambda a: a.reuse_grad_buf_for_mxfp8_param_ag and not (a.fp8_param_gather and a.fp8_recipe == "mxfp8"),
        "--reuse-grad-buf-for-mxfp8-param-ag without --fp8-param-gather and --fp8-recipe mxfp8",
        "it says where the weights of this gather lie",
        "both, or leave it out",
    ),
)


def problems_of_numbers(args: Namespace) -> list[ConfigError]:
    """What of the arguments about number formats and factors cannot be, after `derived.derive`."""
    return [*mup_problems(args), *fp8_problems(args), *broken(NUMBERS, args)]
