"""Multi-latent attention: its flags, its sizes, and what of them cannot be. No torch here.

The class for code, `transformer_config.MLATransformerConfig`, has Megatron's defaults, which are those of DeepSeek-V3
but for the ranks; the command line has Megatron's other ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_lite.config import flag
from megatron_lite.errors import ConfigError

ROPE_TYPES = ("rope", "yarn")


@dataclass(kw_only=True)
class LatentAttentionConfig:
    """Multi-latent attention: keys and values from one short vector for each token."""

    multi_latent_attention: bool = flag(
        False, "Multi-latent attention: queries, and keys with values, pass through vectors of low rank."
    )
    q_lora_rank: int | None = flag(None, "Rank of the queries' latent vector. Default: queries have none.")
    kv_lora_rank: int = flag(32, "Rank of the latent vector of keys and values.")
    qk_head_dim: int = flag(128, "Channels of a query or key head without positions.")
    qk_pos_emb_head_dim: int = flag(64, "Channels of a query or key head that are rotated.")
    v_head_dim: int = flag(128, "Channels of a value head.")
    rope_type: str | None = flag(
        None, "Multi-latent attention: plain rotary positions, or YaRN's. Default: yarn.", choices=ROPE_TYPES
    )


def mla_problems(config: Any) -> Iterator[ConfigError]:
    """What cannot be, of anything with these fields and `num_attention_heads`, `num_query_groups`."""
    if not config.multi_latent_attention:
        return
    for name in ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"):
        value = getattr(config, name)
        if value is not None and value < 1:
            yield ConfigError(f"--{name.replace('_', '-')} {value}", why="it is a width", fix="a number above 0")
    if config.qk_pos_emb_head_dim % 2:
        yield ConfigError(
            f"--qk-pos-emb-head-dim {config.qk_pos_emb_head_dim}", why="channels turn in pairs", fix="an even number"
        )
    if config.rotary_interleaved:
        yield ConfigError(
            "--rotary-interleaved with --multi-latent-attention",
            why="its rotated channels are even and odd pairs already",
            fix="leave it out",
        )
    if config.attention_output_gate:
        yield ConfigError(
            "--attention-output-gate with --multi-latent-attention",
            why="the gate is a part of the projection to queries, keys and values, which is divided here",
            fix="leave one of them out",
        )
    if config.qk_l2_norm:
        yield ConfigError(
            "--qk-l2-norm with --multi-latent-attention",
            why="its norms are on the latent vectors",
            fix="--qk-layernorm",
        )
