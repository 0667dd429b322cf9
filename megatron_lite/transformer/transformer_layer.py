"""One layer of a transformer: three residual halves, of which cross attention is mostly absent.

x = x + dropout(attention(norm(x)))
x = x + dropout(cross attention(norm(x), context))
x = x + dropout(mlp(norm(x)))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.tensor_parallel.random import CheckpointWithoutOutput, checkpoint
from megatron_lite.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron_lite.transformer.inference_context import InferenceContext
from megatron_lite.transformer.module import MegatronModule
from megatron_lite.transformer.moe.moe_layer import MoELayer
from megatron_lite.transformer.spec_utils import ModuleSpec, build_module, get_module
from megatron_lite.transformer.transformer_config import TransformerConfig


@dataclass
class TransformerLayerSubmodules:
    """Parts of a layer; what is left out does nothing."""

    input_layernorm: ModuleSpec | type = IdentityOp
    self_attention: ModuleSpec | type = IdentityOp
    self_attn_bda: ModuleSpec | type | Callable[..., Any] = IdentityFuncOp
    pre_cross_attn_layernorm: ModuleSpec | type = IdentityOp
    cross_attention: ModuleSpec | type = IdentityOp
    cross_attn_bda: ModuleSpec | type | Callable[..., Any] = IdentityFuncOp
    pre_mlp_layernorm: ModuleSpec | type = IdentityOp
    mlp: ModuleSpec | type = IdentityOp
    mlp_bda: ModuleSpec | type | Callable[..., Any] = IdentityFuncOp
    sharded_state_dict_keys_map: dict[str, str] = field(default_factory=dict)


class BaseTransformerLayer:
    """A mark: what a block may take for a layer instead of TransformerLayer.

    fully_sharded_unit: its weights are gathered together, where they are sharded over data-parallel ranks.
    """

    fully_sharded_unit = True


class TransformerLayer(MegatronModule, BaseTransformerLayer):
    """`[s, b, h]` -> `[s, b, h]` (`[s/t, b, h]` with sequence parallelism).

    Args:
        layer_number: global, from 1.
        hidden_dropout: None = the config's.
        pg_collection: None = the registered groups.
        vp_stage: the model chunk; accepted as Megatron has it, `layer_number` says all.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        hidden_dropout: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
    ):
        super().__init__(config)
        self.layer_number = layer_number
        self.hidden_dropout = config.hidden_dropout if hidden_dropout is None else hidden_dropout
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        norm: dict[str, Any] = {
            "config": config,
            "hidden_size": config.hidden_size,
            "eps": config.layernorm_epsilon,
        }
        inner: dict[str, Any] = {
            "config": config,
            "layer_number": layer_number,
            "pg_collection": self.pg_collection,
        }
        self.input_layernorm = build_module(submodules.input_layernorm, **norm)
        self.self_attention = build_module(submodules.self_attention, **inner)
        self.self_attn_bda = build_module(submodules.self_attn_bda)
        self.pre_cross_attn_layernorm = build_module(submodules.pre_cross_attn_layernorm, **norm)
        self.cross_attention = build_module(submodules.cross_attention, **inner)
        self.cross_attn_bda = build_module(submodules.cross_attn_bda)
        self.pre_mlp_layernorm = build_module(submodules.pre_mlp_layernorm, **norm)
        kind = get_module(submodules.mlp)
        has_experts = isinstance(kind, type) and issubclass(kind, MoELayer)
        of_dense: dict[str, Any] = {"config": config, "tp_group": self.pg_collection.tp}
        self.mlp = build_module(submodules.mlp, **(inner if has_experts else of_dense))
        self.mlp_bda = build_module(submodules.mlp_bda)
        # A router balances over all tokens of a micro-batch: experts take them in one piece.
        self.mlp_chunks = 1 if has_experts else config.mlp_chunks_for_training

        selective = config.recompute_granularity == "selective"
        modules = config.recompute_modules or []
        self.recompute_mlp = selective and "mlp" in modules and not has_experts  # "moe": see MoELayer
        # A norm whose output is also the residual cannot be forgotten.
        post = config.apply_residual_connection_post_layernorm
        forgettable = selective and "layernorm" in modules and not post
        self.recompute_input_layernorm = forgettable and not isinstance(self.input_layernorm, IdentityOp)
        self.recompute_pre_mlp_layernorm = forgettable and not isinstance(self.pre_mlp_layernorm, IdentityOp)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        rotary_pos_cos: Tensor | None = None,
        rotary_pos_sin: Tensor | None = None,
        attention_bias: Tensor | None = None,
        inference_context: InferenceContext | None = None,
        packed_seq_params: Any = None,
        sequence_len_offset: int | None = None,
        *,
        inference_params: InferenceContext | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """x `[s, b, h]` -> (y `[s, b, h]`, the context, which a cross attention may have replaced).

        Args:
            attention_mask: bool `[b or 1, 1, s, s]`, True = hidden.
            context: `[s_c, b, h]`, what cross attention looks at, with `context_mask` `[b, 1, s, s_c]`.
            rotary_pos_emb: angles from position 0 on.
            attention_bias: added to self attention's scores.
            inference_context: keys and values so far.
        """
        cache = inference_context if inference_context is not None else inference_params
        x, keep, residual = self._normed(self.input_layernorm, hidden_states, self.recompute_input_layernorm)
        y = self.self_attention(
            x,
            attention_mask=attention_mask,
            inference_context=cache,
            rotary_pos_emb=rotary_pos_emb,
            rotary_pos_cos=rotary_pos_cos,
            rotary_pos_sin=rotary_pos_sin,
            attention_bias=attention_bias,
            packed_seq_params=packed_seq_params,
            sequence_len_offset=sequence_len_offset,
        )
        if keep is not None:
            keep.discard_output_and_register_recompute(y[0])
        hidden_states = self._add(self.self_attn_bda, y, residual)

        if not isinstance(self.cross_attention, IdentityOp):
            x, _, residual = self._normed(self.pre_cross_attn_layernorm, hidden_states, False)
            y = self.cross_attention(x, attention_mask=context_mask, key_value_states=context, inference_context=cache)
            if isinstance(y, dict) and "context" in y:
                context = y["context"]
            hidden_states = self._add(self.cross_attn_bda, y, residual)

        x, keep, residual = self._normed(self.pre_mlp_layernorm, hidden_states, self.recompute_pre_mlp_layernorm)
        y = self._mlp_in_chunks(x) if self.mlp_chunks > 1 and self.training else self._mlp(x)
        if keep is not None:
            keep.discard_output_and_register_recompute(y[0])
        return self._add(self.mlp_bda, y, residual), context

    def _mlp(self, x: Tensor) -> Any:
        return checkpoint(self.mlp, False, x) if self.recompute_mlp and self.training else self.mlp(x)

    def _mlp_in_chunks(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The same, a part of the sequence at a time: what is wide and short-lived, such as the gradient of the inner
        activations, exists for one part; with `--recompute-modules mlp` the inner activations themselves do."""
        parts = [self._mlp(part) for part in x.chunk(self.mlp_chunks)]
        return torch.cat([y for y, _ in parts]), parts[0][1]

    def _normed(self, norm: Any, x: Tensor, recompute: bool) -> tuple[Tensor, CheckpointWithoutOutput | None, Tensor]:
        """norm(x), who can forget it, and the residual."""
        keep = CheckpointWithoutOutput() if recompute and self.training else None
        y = norm(x) if keep is None else keep.checkpoint(norm, x)
        return y, keep, y if self.config.apply_residual_connection_post_layernorm else x

    def _add(self, bda: Any, y_with_bias: Any, residual: Tensor) -> Tensor:
        return bda(self.training, self.config.bias_dropout_fusion)(y_with_bias, residual, self.hidden_dropout)
