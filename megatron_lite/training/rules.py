"""The rules across flags, as two tables of one form (`rule.Rule`).

    GIVEN      hold for what was typed                       --train-iters or --train-samples, not both
    DERIVED    hold for the outcome of `derived.derive`      global batch a multiple of micro-batch * dp

A row tells when it is broken and, as templates over the arguments' names, what was found, why it cannot be, and what to
type instead. `broken` reports all rows at once. A rule over one config's fields sits in that config instead; rows here
that repeat one say it before anything is built.
"""

from megatron_lite.training import fully_sharded
from megatron_lite.training.rule import Rule, broken
from megatron_lite.training.rules_attention import problems_of_attention
from megatron_lite.training.rules_context import problems_of_context
from megatron_lite.training.rules_derived import DERIVED
from megatron_lite.training.rules_encoder_decoder import ENCODER_DECODER
from megatron_lite.training.rules_experts import problems_of_experts
from megatron_lite.training.rules_given import GIVEN
from megatron_lite.training.rules_numbers import problems_of_numbers
from megatron_lite.training.rules_retro import problems_of_retro_run, take_project

GIVEN += fully_sharded.GIVEN
DERIVED += fully_sharded.DERIVED

__all__ = [
    "DERIVED",
    "ENCODER_DECODER",
    "GIVEN",
    "Rule",
    "broken",
    "problems_of_attention",
    "problems_of_context",
    "problems_of_experts",
    "problems_of_numbers",
    "problems_of_retro_run",
    "take_project",
]
