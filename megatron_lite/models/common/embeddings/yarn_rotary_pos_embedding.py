"""Angles of YaRN (Peng et al. 2023): rotary positions for a context several times as long as a model was trained with.

A pair that turns often within the old context tells near tokens apart and keeps its frequency; one that turns less than
once tells far ones apart and is slowed by the factor; in between the two are mixed linearly in the number of the pair:

    pair that turns n times in the old context    r ln(old / (2 pi n)) / (2 ln base)
    turns >= beta_fast: kept      beta_slow <= turns <= beta_fast: mixed      turns <= beta_slow: slowed

The longer context is attended to more sharply: cos and sin are multiplied by a concentration factor.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.fusions.rope import yarn_concentration
from megatron_lite.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding


class YarnRotaryEmbedding(RotaryEmbedding):
    """Angles for positions 0, 1, ... of the longer context.

    Args:
        kv_channels, rotary_percent, rotary_interleaved, seq_len_interpolation_factor, rotary_base: as
            RotaryEmbedding's.
        scaling_factor: new context / old context.
        original_max_position_embeddings: the old context, in tokens.
        beta_fast, beta_slow: turns within the old context from which on a pair keeps its frequency; up to which it is
            slowed by the whole factor.
        mscale, mscale_all_dim: of the concentration factor (`fusions.rope.yarn_concentration`).
        correction_range_round_to_int: mix between whole pairs.
        use_cpu_initialization: accepted as Megatron has it.
        cp_group: as RotaryEmbedding has it.
    """

    def __init__(
        self,
        kv_channels: int,
        rotary_percent: float = 1.0,
        rotary_interleaved: bool = False,
        seq_len_interpolation_factor: float | None = None,
        rotary_base: float = 10000.0,
        scaling_factor: float = 1.0,
        original_max_position_embeddings: int = 4096,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        mscale: float = 1.0,
        mscale_all_dim: float = 0.0,
        correction_range_round_to_int: bool = True,
        use_cpu_initialization: bool = False,
        cp_group: ProcessGroup | None = None,
    ):
        super().__init__(
            kv_channels,
            rotary_percent,
            rotary_interleaved,
            seq_len_interpolation_factor,
            rotary_base,
            cp_group=cp_group,
        )
        self.mscale = yarn_concentration(scaling_factor, mscale, mscale_all_dim)
        low, high = correction_range(
            2 * len(self.inv_freq),
            rotary_base,
            original_max_position_embeddings,
            beta_fast,
            beta_slow,
            correction_range_round_to_int,
        )
        slowed = ((torch.arange(len(self.inv_freq), dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
        self.inv_freq = self.inv_freq / scaling_factor * slowed + self.inv_freq * (1.0 - slowed)

    def forward(
        self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None
    ) -> tuple[Tensor, float]:
        """(angles `[s, 1, 1, r]`, the factor on cos and sin)."""
        return super().forward(max_seq_len, offset, packed_seq, cp_group), self.mscale


def correction_range(
    channels: int, base: float, old_context: int, beta_fast: float, beta_slow: float, rounded: bool = True
) -> tuple[float, float]:
    """(last pair that keeps its frequency, first pair that is slowed by the whole factor); not equal."""

    def pair(turns: float) -> float:
        return channels * math.log(old_context / (2 * math.pi * turns)) / (2 * math.log(base))

    low, high = pair(beta_fast), pair(beta_slow)
    if rounded:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, channels - 1)
    return low, high + 0.001 if low == high else high
