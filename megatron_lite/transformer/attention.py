"""The attention half of a layer: project, norm and turn queries and keys, attend, project back.

    self    [q; k; v] = x W_qkv     rows by query group: its query heads, then its key, then its value
            with an output gate [q; gate; k; v]: y = attention(q, k, v) * sigmoid(gate)
    cross   q = x W_q,  [k; v] = c W_kv     rows by head: key, value

Grouped queries: np heads share ng keys and values. Heads are split over tp; a rank holds whole groups. Where there are
fewer groups than ranks, tp/ng neighbours share one: each computes its rows of [q; k; v], all rows are gathered, and a
rank takes its own query heads and the key and value that they look at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lite import collectives
from megatron_lite.errors import ConfigError
from megatron_lite.fusions.rope import rotate, yarn_concentration
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron_lite.tensor_parallel.random import checkpoint
from megatron_lite.tensor_parallel.utils import divide
from megatron_lite.transformer.enums import AttnMaskType
from megatron_lite.transformer.identity_op import IdentityOp
from megatron_lite.transformer.inference_context import InferenceContext
from megatron_lite.transformer.module import MegatronModule
from megatron_lite.transformer.spec_utils import ModuleSpec, build_module
from megatron_lite.transformer.transformer_config import TransformerConfig


@dataclass
class SelfAttentionSubmodules:
    """Parts of self attention."""

    linear_qkv: ModuleSpec | type = None  # type: ignore[assignment]
    core_attention: ModuleSpec | type = None  # type: ignore[assignment]
    linear_proj: ModuleSpec | type = None  # type: ignore[assignment]
    q_layernorm: ModuleSpec | type | None = None
    k_layernorm: ModuleSpec | type | None = None


@dataclass
class CrossAttentionSubmodules:
    """Parts of cross attention."""

    linear_q: ModuleSpec | type = None  # type: ignore[assignment]
    linear_kv: ModuleSpec | type = None  # type: ignore[assignment]
    core_attention: ModuleSpec | type = None  # type: ignore[assignment]
    linear_proj: ModuleSpec | type = None  # type: ignore[assignment]


def skips_rope(config: TransformerConfig, layer_number: int) -> bool:
    """Whether this layer (counted from 1) does without rotary positions: every N-th, or as a list says."""
    pattern = config.no_rope_freq
    if pattern is None:
        return False
    return layer_number % pattern == 0 if isinstance(pattern, int) else bool(pattern[layer_number - 1])


class Attention(MegatronModule):
    """What self and cross attention share; subclasses make q, k and v.

    Args:
        layer_number: global, from 1.
        attn_mask_type: whether the layer is causal where no mask is given.
        attention_type: "self" or "cross".
        cp_comm_type: handed to the core attention.
        pg_collection: None = the registered groups.
        softmax_scale: None = the config's, or what follows from the head size.
        value_size: channels of a value head; None = kv_channels.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules | CrossAttentionSubmodules | Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        softmax_scale: float | None = None,
        value_size: int | None = None,
    ):
        super().__init__(config)
        self.layer_number, self.attn_mask_type, self.attention_type = layer_number, attn_mask_type, attention_type
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        assert config.kv_channels is not None and config.num_query_groups is not None
        tp_size = collectives.group_size(self.pg_collection.tp)
        # Ranks that share a key/value head; TransformerConfig has refused sizes of which neither divides the other.
        self.ranks_per_group = max(1, tp_size // config.num_query_groups)
        self.hidden_size_per_attention_head = config.kv_channels
        self.query_projection_size = config.kv_channels * config.num_attention_heads
        self.kv_projection_size = config.kv_channels * config.num_query_groups
        self.num_attention_heads_per_partition = divide(config.num_attention_heads, tp_size)
        self.num_query_groups_per_partition = divide(config.num_query_groups * self.ranks_per_group, tp_size)
        self.use_rope = not skips_rope(config, layer_number)
        self.rope_mscale = 1.0
        if config.yarn_rotary_scaling_factor is not None:
            factor, mscale = config.yarn_rotary_scaling_factor, config.yarn_mscale
            self.rope_mscale = yarn_concentration(factor, mscale, config.yarn_mscale_all_dim)
        self.recompute_core = config.recompute_granularity == "selective" and "core_attn" in (
            config.recompute_modules or ()
        )

        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type=attention_type,
            cp_comm_type=cp_comm_type,
            softmax_scale=config.softmax_scale if softmax_scale is None else softmax_scale,
            pg_collection=self.pg_collection,
        )
        self.linear_proj = build_module(
            submodules.linear_proj,
            (value_size or config.kv_channels) * config.num_attention_heads,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_comm_buffer_name="proj",
            tp_group=self.pg_collection.tp,
        )

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x `[s, b, h]` -> q `[s, b, np, hn]`, k and v `[sk, b, ng, hn]`."""
        raise NotImplementedError

    def projected(
        self, hidden_states: Tensor, key_value_states: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys and values, and the gate `[s, b, np * hn]` of the output where the layer has one."""
        return *self.get_query_key_value_tensors(hidden_states, key_value_states), None

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        key_value_states: Tensor | None = None,
        inference_context: InferenceContext | None = None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        rotary_pos_cos: Tensor | None = None,
        rotary_pos_sin: Tensor | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        sequence_len_offset: int | None = None,
        *,
        inference_params: InferenceContext | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """x `[s, b, h]` -> (y `[s, b, h]`, the bias that is still to be added, or None).

        Args:
            attention_mask: bool `[b or 1, 1, s, sk]`, True = hidden.
            key_value_states: `[sk, b, h]`, cross attention's other sequence.
            inference_context: keys and values of the tokens so far; x are the next ones.
            rotary_pos_emb: angles `[positions, 1 or b, 1, r]` of this rank's tokens, in their order (with a
                context from position 0 on), for queries and keys or one each.
            packed_seq_params: documents in the one sequence.
            rotary_pos_cos, rotary_pos_sin: accepted as Megatron has them (its decoding kernels); the angles decide.
        """
        context = inference_context if inference_context is not None else inference_params
        query, key, value, gate = self.projected(hidden_states, key_value_states)
        if context is not None and collectives.group_size(self.pg_collection.cp) > 1:
            raise ConfigError(
                "generating token by token on context-parallel ranks",
                why="a prompt and the tokens after it lie on one rank; the weights are the same on all",
                fix="--context-parallel-size 1",
            )
        if context is not None and self.attention_type == "self":
            context.check_room(*query.shape[:2])
        if rotary_pos_emb is not None and self.use_rope:
            q_freqs, k_freqs = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
            begin = context.sequence_len_offset if context is not None else 0
            interleaved = self.config.rotary_interleaved
            query = rotate(query, q_freqs[begin : begin + query.shape[0]], interleaved, self.rope_mscale)
            key = rotate(key, k_freqs[begin : begin + key.shape[0]], interleaved, self.rope_mscale)
        if context is not None and self.attention_type == "self":
            key, value = context.store(self.layer_number, key, value)

        y = self.attend(query, key, value, attention_mask, attention_bias, packed_seq_params)
        if gate is not None:
            y = y * torch.sigmoid(gate.float()).to(y.dtype)
        return self.linear_proj(y)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """The core attention, which may be computed again in backward instead of kept. -> `[s, b, np * hn]`."""

        def core(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
            return self.core_attention(
                q,
                k,
                v,
                attention_mask,
                attn_mask_type=self.attn_mask_type,
                attention_bias=bias,
                packed_seq_params=packed_seq_params,
            )

        if self.recompute_core and self.training:
            return checkpoint(core, False, query, key, value, attention_bias)
        return core(query, key, value, attention_bias)


class SelfAttention(Attention):
    """Queries, keys and values from one sequence."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.padding,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__(config, submodules, layer_number, attn_mask_type, "self", cp_comm_type, pg_collection)
        self.has_gate = config.attention_output_gate
        self.linear_qkv = build_module(
            submodules.linear_qkv,
            config.hidden_size,
            (2 if self.has_gate else 1) * self.query_projection_size + 2 * self.kv_projection_size,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=config.add_bias_linear or config.add_qkv_bias,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="qkv",
            tp_group=self.pg_collection.tp,
        )
        size = self.hidden_size_per_attention_head
        self.q_layernorm = self.k_layernorm = None
        if submodules.q_layernorm is not None and submodules.q_layernorm is not IdentityOp:
            self.q_layernorm = _head_norm(submodules.q_layernorm, size, config)
        if submodules.k_layernorm is not None and submodules.k_layernorm is not IdentityOp:
            self.k_layernorm = _head_norm(submodules.k_layernorm, size, config)

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x `[s, b, h]` -> q `[s, b, np, hn]`, k and v `[s, b, ng, hn]`."""
        return self.projected(hidden_states, key_value_states)[:3]

    def projected(
        self, hidden_states: Tensor, key_value_states: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """x `[s, b, h]` -> q `[s, b, np, hn]`, k and v `[s, b, ng, hn]`, the gate `[s, b, np * hn]` or None."""
        mixed, _ = self.linear_qkv(hidden_states)
        groups, size = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        heads = self.num_attention_heads_per_partition
        s, b = mixed.shape[:2]
        if self.ranks_per_group > 1:
            queries, key, value = self._own_heads_of_shared_group(mixed)
        else:
            parts = self._parts(heads // groups)
            # One split: its backward is one concatenation, where slices would fill and add a tensor each.
            *queries, key, value = mixed.view(s, b, groups, sum(parts)).split(parts, dim=-1)
        query = queries[0].reshape(s, b, heads, size)
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        return query, key, value, queries[1].reshape(s, b, heads * size) if self.has_gate else None

    def _parts(self, heads: int) -> list[int]:
        """Channels of a group of `heads` query heads: queries, the gate of their output if there is one, key, value."""
        size = self.hidden_size_per_attention_head
        return [heads * size, *([heads * size] if self.has_gate else []), size, size]

    def _own_heads_of_shared_group(self, mixed: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
        """This rank's rows of [q; k; v] `[s, b, out/t]` -> its queries (and gate), and the key and value of its group.

        Each is `[s, b, 1, channels]`. The gradient of what is gathered differs from rank to rank, so it is summed.
        """
        size, own = self.hidden_size_per_attention_head, self.num_attention_heads_per_partition
        rows = all_gather_last_dim_from_tensor_parallel_region(mixed, self.pg_collection.tp)
        group, place = divmod(collectives.group_rank(self.pg_collection.tp), self.ranks_per_group)
        parts = self._parts(own * self.ranks_per_group)
        of_group = rows.view(*rows.shape[:2], -1, sum(parts))[:, :, group : group + 1]
        *queries, key, value = of_group.split(parts, dim=-1)
        return [x[..., place * own * size : (place + 1) * own * size] for x in queries], key, value


def _head_norm(module: ModuleSpec | type, size: int, config: TransformerConfig) -> Any:
    """A norm over the channels of one head. Every tensor-parallel rank holds it and sees its own heads only."""
    norm = build_module(module, hidden_size=size, config=config, eps=config.layernorm_epsilon)
    for param in norm.parameters():
        param.sequence_parallel = config.sequence_parallel  # without it finalize_model_grads goes by the norm's name
    return norm


class CrossAttention(Attention):
    """Queries from one sequence, keys and values from another. No rotary positions, no grouped queries."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: CrossAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.padding,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__(config, submodules, layer_number, attn_mask_type, "cross", cp_comm_type, pg_collection)
        if config.num_query_groups != config.num_attention_heads:
            raise ConfigError(
                f"--num-query-groups {config.num_query_groups} with cross attention",
                why="cross attention has a key/value head for every query head",
                fix="leave --group-query-attention out",
            )
        common: dict[str, Any] = {
            "config": config,
            "init_method": config.init_method,
            "gather_output": False,
            "bias": config.add_bias_linear,
            "skip_bias_add": False,
            "is_expert": False,
            "tp_group": self.pg_collection.tp,
        }
        self.linear_q = build_module(submodules.linear_q, config.hidden_size, self.query_projection_size, **common)
        self.linear_kv = build_module(submodules.linear_kv, config.hidden_size, 2 * self.kv_projection_size, **common)
        self.use_rope = False

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x `[s, b, h]`, c `[sk, b, h]` -> q `[s, b, np, hn]`, k and v `[sk, b, np, hn]`."""
        assert key_value_states is not None, "cross attention without the other sequence"
        heads, size = self.num_attention_heads_per_partition, self.hidden_size_per_attention_head
        mixed, _ = self.linear_kv(key_value_states)
        key, value = mixed.view(*mixed.shape[:2], heads, 2 * size).split([size, size], dim=-1)
        query, _ = self.linear_q(hidden_states)
        return query.view(*query.shape[:2], heads, size), key, value
