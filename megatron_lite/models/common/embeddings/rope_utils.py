"""Rotary embedding of queries or keys, under Megatron's name."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.errors import ConfigError
from megatron_lite.fusions.rope import rotate


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    config: Any,
    cu_seqlens: Tensor | None = None,
    mscale: float = 1.0,
    cp_group: ProcessGroup | None = None,
) -> Tensor:
    """t `[s, b, n, d]` turned by freqs `[s, 1, 1, r]`, r <= d; channels from r on pass.

    Args:
        config: its `rotary_interleaved` says which channels are pairs.
        cu_seqlens: packed sequences: refused.
        mscale: factor on cos and sin.
    """
    if cu_seqlens is not None:
        raise ConfigError(
            "rotary embedding of packed sequences", why="positions would have to restart in each", fix="cu_seqlens=None"
        )
    return rotate(t, freqs, config.rotary_interleaved, mscale)
