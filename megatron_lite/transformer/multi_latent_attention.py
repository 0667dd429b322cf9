"""Multi-latent attention: keys and values of all heads from one short vector for each token (DeepSeek-AI 2024,
"DeepSeek-V2", section 2.1).

    q    x -> down [q rank] -> norm -> up -> [s, b, n, dn + dr]  =  [q without positions | q_pe]
    kv   x -> down [kv rank + dr]  =  [c | k_pe]                    k_pe: one rotary key for all heads
         c -> norm -> up -> [s, b, n, dn + dv]  =  [k without positions | v]

    scores  [q ; rope(q_pe)] . [k ; rope(k_pe)] * m^2 / sqrt(dn + dr)      m: YaRN's, where it goes into the softmax

Without a q rank queries come from x at once. Generation keeps c and k_pe of each token, kv rank + dr numbers, and makes
keys and values from them anew.

    tensor parallel     the projections down are narrow and every rank has them; those up are split by heads.
    sequence parallel   down and norm work on the rank's part of the sequence, the projections up gather it, and so does
                        k_pe, whose gradient is a sum over all heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lite import collectives
from megatron_lite.errors import ConfigError
from megatron_lite.fusions.rope import rotate, yarn_concentration, yarn_mscale
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron_lite.tensor_parallel.random import CheckpointWithoutOutput
from megatron_lite.transformer.attention import Attention
from megatron_lite.transformer.enums import AttnMaskType
from megatron_lite.transformer.identity_op import IdentityOp
from megatron_lite.transformer.inference_context import InferenceContext
from megatron_lite.transformer.spec_utils import ModuleSpec, build_module
from megatron_lite.transformer.transformer_config import MLATransformerConfig


@dataclass
class MLASelfAttentionSubmodules:
    """Parts of multi-latent attention; of the queries' either `linear_q_proj` is used, or down and up."""

    linear_q_proj: ModuleSpec | type = None  # type: ignore[assignment]
    linear_q_down_proj: ModuleSpec | type = None  # type: ignore[assignment]
    linear_q_up_proj: ModuleSpec | type = None  # type: ignore[assignment]
    linear_kv_down_proj: ModuleSpec | type = None  # type: ignore[assignment]
    linear_kv_up_proj: ModuleSpec | type = None  # type: ignore[assignment]
    core_attention: ModuleSpec | type = None  # type: ignore[assignment]
    linear_proj: ModuleSpec | type = None  # type: ignore[assignment]
    q_layernorm: ModuleSpec | type | None = None
    kv_layernorm: ModuleSpec | type | None = None


class MultiLatentAttention(Attention):
    """What multi-latent attention is beside its projections: sizes, the scale of the softmax, the order of steps.

    Args: as Attention's.
    """

    config: MLATransformerConfig

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        self.q_head_dim = config.qk_head_dim + config.qk_pos_emb_head_dim
        mscale = 1.0
        if config.rope_type == "yarn":
            mscale = yarn_mscale(config.rotary_scaling_factor, config.mscale_all_dim)
        super().__init__(
            config,
            submodules,
            layer_number,
            attn_mask_type,
            attention_type,
            cp_comm_type,
            pg_collection,
            softmax_scale=config.softmax_scale or mscale**2 * config.score_scale(self.q_head_dim),
            value_size=config.v_head_dim,
        )
        if config.rope_type == "yarn":
            self.rope_mscale = yarn_concentration(config.rotary_scaling_factor, config.mscale, config.mscale_all_dim)
        self.recompute_up_proj = config.recompute_granularity == "selective" and "mla_up_proj" in (
            config.recompute_modules or ()
        )

    def compressed(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x `[s, b, h]` -> what queries, keys and values are made of; see `MLASelfAttention`."""
        raise NotImplementedError

    def expanded(
        self, q: Tensor, c: Tensor, k_pe: Tensor, freqs: Tensor | None, begin: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k `[s, b, np, dn + dr]` and v `[s, b, np, dv]` from what `compressed` gave."""
        raise NotImplementedError

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

        Args: as Attention's, and
            rotary_pos_emb: angles `[positions, 1, 1, dr]` whose pairs are even and odd channels
                (`models.common.embeddings.rotary_choice` makes them).
        """
        context = inference_context if inference_context is not None else inference_params
        freqs = rotary_pos_emb[0] if isinstance(rotary_pos_emb, tuple) else rotary_pos_emb
        if not self.use_rope:
            freqs = None
        elif freqs is None:
            raise ConfigError(
                "multi-latent attention without rotary positions",
                why="a part of its queries and keys is there for them",
                fix='rotary_pos_emb, or a GPTModel with position_embedding_type="rope", which makes it',
            )
        begin = context.sequence_len_offset if context is not None else 0
        q, c, k_pe = self.compressed(hidden_states)
        if freqs is not None:
            k_pe = rotate(k_pe, freqs[begin : begin + k_pe.shape[0]], True, self.rope_mscale)
        if context is not None:
            if self.config.sequence_parallel and collectives.group_size(self.pg_collection.tp) > 1:
                raise ConfigError(
                    "generation with multi-latent attention under --sequence-parallel",
                    why="a rank would keep the latent vectors of its part of the sequence only",
                    fix="leave --sequence-parallel out",
                )
            c, k_pe = context.store(self.layer_number, c.unsqueeze(2), k_pe)
            c = c.squeeze(2)

        keep = CheckpointWithoutOutput() if self.recompute_up_proj and self.training else None

        def up(q: Tensor, c: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self.expanded(q, c, k_pe, freqs, begin)

        query, key, value = up(q, c, k_pe) if keep is None else keep.checkpoint(up, q, c, k_pe)
        y = self.attend(query, key, value, attention_mask, attention_bias, packed_seq_params)
        if keep is not None:
            keep.discard_output_and_register_recompute(y)
        return self.linear_proj(y)


class MLASelfAttention(MultiLatentAttention):
    """Queries, keys and values from one sequence."""

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.padding,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__(config, submodules, layer_number, attn_mask_type, "self", cp_comm_type, pg_collection)
        heads, hidden = config.num_attention_heads, config.hidden_size
        tp = self.pg_collection.tp
        common: dict[str, Any] = {"config": config, "init_method": config.init_method, "bias": False, "tp_group": tp}
        if config.q_lora_rank is None:
            self.linear_q_proj = build_module(submodules.linear_q_proj, hidden, heads * self.q_head_dim, **common)
        else:
            self.linear_q_down_proj = build_module(submodules.linear_q_down_proj, hidden, config.q_lora_rank, **common)
            self.linear_q_up_proj = build_module(
                submodules.linear_q_up_proj, config.q_lora_rank, heads * self.q_head_dim, **common
            )
        self.linear_kv_down_proj = build_module(
            submodules.linear_kv_down_proj, hidden, config.kv_lora_rank + config.qk_pos_emb_head_dim, **common
        )
        self.linear_kv_up_proj = build_module(
            submodules.linear_kv_up_proj,
            config.kv_lora_rank,
            heads * (config.qk_head_dim + config.v_head_dim),
            **common,
        )
        self.q_layernorm = self.kv_layernorm = None
        if config.q_lora_rank is not None and submodules.q_layernorm not in (None, IdentityOp):
            self.q_layernorm = self._latent_norm(submodules.q_layernorm, config.q_lora_rank)
        if submodules.kv_layernorm not in (None, IdentityOp):
            self.kv_layernorm = self._latent_norm(submodules.kv_layernorm, config.kv_lora_rank)

    def _latent_norm(self, module: Any, size: int) -> Any:
        norm = build_module(module, hidden_size=size, config=self.config, eps=self.config.layernorm_epsilon)
        for param in norm.parameters():
            param.sees_all_heads = True  # finalize_model_grads adds up the norms of single heads, which see their own
        return norm

    def compressed(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x `[s, b, h]` -> the queries' latent vector `[s, b, q rank]` (x where they have none), that of keys and
        values `[s, b, kv rank]`, both `[s/t, ...]` with sequence parallelism; the rotary key `[s, b, 1, dr]`."""
        q = hidden_states
        if self.config.q_lora_rank is not None:
            q, _ = self.linear_q_down_proj(hidden_states)
            if self.q_layernorm is not None:
                q = self.q_layernorm(q)
        both, _ = self.linear_kv_down_proj(hidden_states)
        c, k_pe = both.split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1)
        if self.kv_layernorm is not None:
            c = self.kv_layernorm(c)
        tp = self.pg_collection.tp
        if self.config.sequence_parallel:
            k_pe = gather_from_sequence_parallel_region(k_pe, group=tp)
        else:
            k_pe = copy_to_tensor_model_parallel_region(k_pe, tp)
        return q, c, k_pe.unsqueeze(2)

    def expanded(
        self, q: Tensor, c: Tensor, k_pe: Tensor, freqs: Tensor | None, begin: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k `[s, b, np, dn + dr]` and v `[s, b, np, dv]`; k_pe is rotated already."""
        heads, nope, pe = self.num_attention_heads_per_partition, self.config.qk_head_dim, k_pe.shape[-1]
        query, _ = (self.linear_q_proj if self.config.q_lora_rank is None else self.linear_q_up_proj)(q)
        query = query.view(*query.shape[:2], heads, nope + pe)
        if freqs is not None:
            q_nope, q_pe = query.split([nope, pe], dim=-1)
            q_pe = rotate(q_pe, freqs[begin : begin + q_pe.shape[0]], True, self.rope_mscale)
            query = torch.cat([q_nope, q_pe], dim=-1)
        both, _ = self.linear_kv_up_proj(c)
        both = both.view(*both.shape[:2], heads, nope + self.config.v_head_dim)
        k_nope, value = both.split([nope, self.config.v_head_dim], dim=-1)
        return query, torch.cat([k_nope, k_pe.expand(-1, -1, heads, -1)], dim=-1), value

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Tensor | None = None, rotary_pos_emb: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x `[s, b, h]` -> q, k `[s, b, np, dn + dr]`, v `[s, b, np, dv]`; turned where angles are given."""
        q, c, k_pe = self.compressed(hidden_states)
        if rotary_pos_emb is not None:
            k_pe = rotate(k_pe, rotary_pos_emb[: k_pe.shape[0]], True, self.rope_mscale)
        return self.expanded(q, c, k_pe, rotary_pos_emb, 0)
