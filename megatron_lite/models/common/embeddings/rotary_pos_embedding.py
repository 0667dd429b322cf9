"""Angles of the rotary position embedding (Su et al. 2021).

    inverse frequency of pair i   f_i = base^(-2 i / r)      r = rotated channels of a head
    angle at position p           p * f_i (positions divided by `seq_len_interpolation_factor`)

Llama 3.1 stretches the context by slowing the slow pairs: wave lengths below old/high stay, above old/low are
divided by the factor, and in between the two are mixed linearly in old / wave length. YaRN has a file of its own.

With three positions to a token (time, height, width: `MultimodalRotaryEmbedding`) each pair turns by one of them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_lite import collectives
from megatron_lite.context_parallel.partition import split_sequence
from megatron_lite.errors import ConfigError
from megatron_lite.packed_seq_params import PackedSeqParams
from megatron_lite.transformer.inference_context import InferenceContext
from megatron_lite.transformer.transformer_config import TransformerConfig


class _Rotary(nn.Module):
    inv_freq: Tensor
    cp_group: ProcessGroup | None

    def get_rotary_seq_len(
        self,
        inference_context: InferenceContext | None,
        transformer: Any,
        transformer_input: Tensor,
        transformer_config: TransformerConfig,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> int:
        """How many positions this forward pass needs: the whole sequence's, also where a rank holds a shard."""
        if inference_context is not None:
            return inference_context.max_sequence_length
        if packed_seq_params is not None:
            return max(d.end - d.begin for of in ("q", "kv") for d in packed_seq_params.documents(of))
        held = transformer_input if getattr(transformer, "input_tensor", None) is None else transformer.input_tensor
        length = held.shape[0]
        if transformer_config.sequence_parallel:
            length *= collectives.group_size(transformer.pg_collection.tp)
        return length * collectives.group_size(self.cp_group)


class RotaryEmbedding(_Rotary):
    """Angles for positions 0, 1, ...

    Args:
        kv_channels: channels of a head.
        rotary_percent: share of them that is rotated.
        rotary_interleaved: pairs (2i, 2i + 1) instead of (i, i + r/2).
        seq_len_interpolation_factor: divides positions.
        rotary_base: base of the frequencies.
        rope_scaling, rope_scaling_factor: Llama 3.1's stretching, from a context of 8192.
        use_cpu_initialization: accepted as Megatron has it.
        cp_group: ranks that hold the other positions of a sequence; None: there are none.
    """

    def __init__(
        self,
        kv_channels: int,
        rotary_percent: float,
        rotary_interleaved: bool = False,
        seq_len_interpolation_factor: float | None = None,
        rotary_base: float = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        use_cpu_initialization: bool = False,
        cp_group: ProcessGroup | None = None,
    ):
        super().__init__()
        self.rotary_interleaved, self.seq_len_interpolation_factor = rotary_interleaved, seq_len_interpolation_factor
        self.inv_freq = inverse_frequencies(kv_channels, rotary_percent, rotary_base)
        if rope_scaling:
            self.inv_freq = stretch_frequencies(self.inv_freq, rope_scaling_factor)
        self.cp_group = cp_group
        self._cached: tuple[Any, Tensor] | None = None

    def get_freqs_non_repeated(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """`[s, r / 2]`: the angle of each pair."""
        positions = torch.arange(max_seq_len, device=self.inv_freq.device, dtype=self.inv_freq.dtype) + offset
        if self.seq_len_interpolation_factor is not None:
            positions = positions / self.seq_len_interpolation_factor
        return torch.outer(positions, self.inv_freq)

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Any:
        """`[s/cp, 1, 1, r]`: the angle of each channel (both channels of a pair hold it).

        Args:
            max_seq_len: s.
            packed_seq: give all s, which are those of a document: `apply_rotary_pos_emb` picks them.
            cp_group: instead of the one of construction.
        """
        angles, group = self.angles(max_seq_len, offset), cp_group or self.cp_group
        if packed_seq:
            return angles
        return split_sequence(angles, collectives.group_rank(group), collectives.group_size(group))

    def angles(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """`[s, 1, 1, r]`: of all positions, whatever else a kind of embedding returns; kept from call to call."""
        device = torch.get_default_device() if self.inv_freq.device.type == "meta" else self.inv_freq.device
        key = (max_seq_len, offset, device)
        if self._cached is None or self._cached[0] != key:
            freqs = self.get_freqs_non_repeated(max_seq_len, offset)
            self._cached = key, of_channels(freqs, self.rotary_interleaved)[:, None, None, :]
        return self._cached[1]


class MultimodalRotaryEmbedding(_Rotary):
    """Angles of tokens that have three positions each: time, height and width (Wang et al. 2024, Qwen2-VL).

    The pairs of a head fall into three sections; a section turns by its own position. Text has three equal positions,
    and so the plain angles.

    Args: as RotaryEmbedding's.
    """

    def __init__(
        self,
        kv_channels: int,
        rotary_percent: float,
        rotary_interleaved: bool = False,
        seq_len_interpolation_factor: float | None = None,
        rotary_base: float = 10000,
        cp_group: ProcessGroup | None = None,
    ):
        super().__init__()
        self.rotary_interleaved, self.seq_len_interpolation_factor = rotary_interleaved, seq_len_interpolation_factor
        self.inv_freq = inverse_frequencies(kv_channels, rotary_percent, rotary_base)
        self.cp_group = cp_group

    def forward(self, position_ids: Tensor, mrope_section: list[int], cp_group: Any = None) -> Tensor:
        """`[s, b, 1, r]`: the angle of each channel.

        Args:
            position_ids: `[3, b, s]`.
            mrope_section: pairs that turn by time, by height, by width; together r / 2.
        """
        pairs = self.inv_freq.shape[0]
        if len(mrope_section) != 3 or sum(mrope_section) != pairs or min(mrope_section) < 0:
            raise ConfigError(
                f"--mrope-section {' '.join(map(str, mrope_section))}",
                why=f"time, height and width share the {pairs} pairs of rotated channels",
                fix=f"three numbers whose sum is {pairs}",
            )
        positions = position_ids.to(self.inv_freq)
        if self.seq_len_interpolation_factor is not None:
            positions = positions / self.seq_len_interpolation_factor
        each = positions.unsqueeze(-1) * self.inv_freq  # [3, b, s, r / 2]
        freqs = torch.cat([part[axis] for axis, part in enumerate(each.split(mrope_section, dim=-1))], dim=-1)
        return of_channels(freqs, self.rotary_interleaved).transpose(0, 1).unsqueeze(2)


def inverse_frequencies(kv_channels: int, rotary_percent: float, rotary_base: float) -> Tensor:
    """`[r / 2]`, fp32. Raises: ConfigError where channels do not come in pairs."""
    if not 0.0 < rotary_percent <= 1.0:
        raise ConfigError(f"--rotary-percent {rotary_percent}", why="a share in (0, 1]", fix="--rotary-percent 1.0")
    channels = int(kv_channels * rotary_percent)
    if channels % 2:
        raise ConfigError(
            f"{channels} rotated channels (head size {kv_channels}, --rotary-percent {rotary_percent})",
            why="channels turn in pairs",
            fix="another --rotary-percent or --kv-channels, so that the number is even",
        )
    return 1.0 / rotary_base ** (torch.arange(0, channels, 2, dtype=torch.float32) / channels)


def of_channels(freqs: Tensor, interleaved: bool) -> Tensor:
    """Angles of pairs `[..., r / 2]` -> of channels `[..., r]`."""
    return freqs.repeat_interleave(2, dim=-1) if interleaved else torch.cat([freqs, freqs], dim=-1)


def stretch_frequencies(
    freqs: Tensor, factor: float = 8.0, low: float = 1.0, high: float = 4.0, old_context: int = 8192
) -> Tensor:
    """Llama 3.1's frequencies for a context `factor` times as long (Llama Team 2024; formula of its reference code)."""
    wave = 2 * math.pi / freqs
    slow = freqs / factor
    share = (old_context / wave - low) / (high - low)
    mixed = (1 - share) * slow + share * freqs
    return torch.where(wave > old_context / low, slow, torch.where(wave < old_context / high, freqs, mixed))
