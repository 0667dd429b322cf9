"""Rules on positions and kinds of attention: those of the configs, told before anything is built, and those of runs."""

from __future__ import annotations

from argparse import Namespace

from megatron_lite.errors import ConfigError
from megatron_lite.training.rule import Rule, broken
from megatron_lite.transformer.mla_config import mla_problems
from megatron_lite.transformer.rotary_config import rotary_problems

ATTENTION: tuple[Rule, ...] = (
    Rule(
        lambda a: a.position_embedding_type == "mrope" and a.mrope_section is None,
        "--position-embedding-type mrope without --mrope-section",
        "it says which channels turn by a token's time, which by its height and its width",
        "--mrope-section 16 24 24, for heads of 128 channels",
    ),
    Rule(
        lambda a: (
            a.position_embedding_type == "mrope"
            and a.mrope_section is not None
            and a.kv_channels is not None
            and not a.multi_latent_attention
            and 2 * sum(a.mrope_section) != int(a.kv_channels * a.rotary_percent)
            and {"section": " ".join(map(str, a.mrope_section)), "pairs": int(a.kv_channels * a.rotary_percent) // 2}
        ),
        "--mrope-section {section} with heads of {kv_channels} channels",
        "time, height and width share the {pairs} pairs of channels that turn",
        "three numbers whose sum is {pairs}",
    ),
    Rule(
        lambda a: a.rope_type == "yarn" and not a.multi_latent_attention,
        "--rope-type yarn without --multi-latent-attention",
        "it is about the rotated part of multi-latent attention",
        "--position-embedding-type yarn",
    ),
    Rule(
        lambda a: a.rotary_scaling_factor <= 0.0,
        "--rotary-scaling-factor {rotary_scaling_factor}",
        "it is the new context divided by the old one",
        "for example --rotary-scaling-factor 40",
    ),
    Rule(
        lambda a: a.multi_latent_attention and a.position_embedding_type != "rope",
        "--multi-latent-attention with --position-embedding-type {position_embedding_type}",
        "its keys have a part for rotary positions; --rope-type says which",
        "--position-embedding-type rope",
    ),
    Rule(
        lambda a: a.multi_latent_attention and a.group_query_attention,
        "--multi-latent-attention with --group-query-attention",
        "every head has its own keys and values, made from the latent vector",
        "leave --group-query-attention out",
    ),
    Rule(
        lambda a: a.multi_latent_attention and a.use_rope_scaling and a.rope_type != "rope",
        "--use-rope-scaling with YaRN in multi-latent attention",
        "both rescale the frequencies",
        "--rope-type rope, or leave --use-rope-scaling out",
    ),
)


def problems_of_attention(args: Namespace) -> list[ConfigError]:
    """What of the arguments about attention and its positions cannot be, after `derived.derive`."""
    return [*rotary_problems(args), *mla_problems(args), *broken(ATTENTION, args)]
