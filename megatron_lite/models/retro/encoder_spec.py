"""Which modules the encoder of neighbours is made of: bidirectional GPT layers, the first with a look at the chunk."""

from __future__ import annotations

from dataclasses import replace

from megatron_lite.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron_lite.models.retro.config import RetroConfig
from megatron_lite.models.retro.encoder_attention import (
    RetroEncoderCrossAttention,
    get_retro_encoder_bias_dropout_add,
)
from megatron_lite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron_lite.transformer.attention import CrossAttentionSubmodules
from megatron_lite.transformer.dot_product_attention import DotProductAttention
from megatron_lite.transformer.enums import AttnMaskType
from megatron_lite.transformer.spec_utils import ModuleSpec
from megatron_lite.transformer.torch_norm import WrappedTorchNorm
from megatron_lite.transformer.transformer_block import TransformerBlockSubmodules


def cross_attention_submodules() -> CrossAttentionSubmodules:
    """Plain tensor-parallel parts."""
    return CrossAttentionSubmodules(
        linear_q=ColumnParallelLinear,
        linear_kv=ColumnParallelLinear,
        core_attention=DotProductAttention,
        linear_proj=RowParallelLinear,
    )


def get_retro_encoder_layer_local_spec(
    num_neighbors: int = 2, residual: str = "normed", qk_layernorm: bool = False
) -> ModuleSpec:
    """The first layer, of this package's own modules. Arguments: see RetroEncoderCrossAttention."""
    spec = _bidirectional(qk_layernorm)
    spec.submodules.pre_cross_attn_layernorm = WrappedTorchNorm
    spec.submodules.cross_attention = ModuleSpec(
        module=RetroEncoderCrossAttention,
        params={"attn_mask_type": AttnMaskType.padding, "num_neighbors": num_neighbors, "residual": residual},
        submodules=cross_attention_submodules(),
    )
    spec.submodules.cross_attn_bda = get_retro_encoder_bias_dropout_add
    return spec


def get_retro_encoder_block_spec(
    config: RetroConfig, use_transformer_engine: bool = False
) -> TransformerBlockSubmodules:
    """All layers of the encoder; it has no final norm."""
    first = get_retro_encoder_layer_local_spec(
        config.retro_num_neighbors, config.retro_encoder_residual, config.qk_layernorm
    )
    others = [_bidirectional(config.qk_layernorm) for _ in range(config.retro_encoder_num_layers - 1)]
    return TransformerBlockSubmodules(layer_specs=[first, *others])


def _bidirectional(qk_layernorm: bool = False) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(qk_layernorm=qk_layernorm)
    spec.submodules.self_attention = replace(
        spec.submodules.self_attention, params={"attn_mask_type": AttnMaskType.padding}
    )
    return spec
