"""Which modules T5's encoder and decoder layers are made of.

encoder layer    norm, self attention | norm, MLP
decoder layer    norm, causal self attention | norm, attention to the encoder's output | norm, MLP
"""

from __future__ import annotations

from typing import Any

from megatron_lite.errors import ConfigError
from megatron_lite.fusions.bias_dropout_add import get_bias_dropout_add
from megatron_lite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron_lite.transformer.attention import (
    CrossAttention,
    CrossAttentionSubmodules,
    SelfAttention,
    SelfAttentionSubmodules,
)
from megatron_lite.transformer.dot_product_attention import DotProductAttention
from megatron_lite.transformer.enums import AttnMaskType
from megatron_lite.transformer.identity_op import IdentityOp
from megatron_lite.transformer.mlp import MLP, MLPSubmodules
from megatron_lite.transformer.spec_utils import ModuleSpec
from megatron_lite.transformer.torch_norm import WrappedTorchNorm
from megatron_lite.transformer.transformer_block import TransformerBlockSubmodules
from megatron_lite.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules


def encoder_model_with_local_spec(qk_layernorm: bool = False) -> ModuleSpec:
    """An encoder layer of this package's own modules; with norms on queries and keys, head by head, where asked."""
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=WrappedTorchNorm,
            self_attention=_self_attention(AttnMaskType.padding, qk_layernorm),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=_mlp(),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def decoder_model_with_local_spec(qk_layernorm: bool = False) -> ModuleSpec:
    """A decoder layer of this package's own modules; norms on queries and keys are self attention's."""
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=WrappedTorchNorm,
            # Padding is at the end, behind every token that counts: without a mask, causal is all that is needed.
            self_attention=_self_attention(AttnMaskType.padding_causal, qk_layernorm),
            self_attn_bda=get_bias_dropout_add,
            pre_cross_attn_layernorm=WrappedTorchNorm,
            cross_attention=ModuleSpec(
                module=CrossAttention,
                params={"attn_mask_type": AttnMaskType.padding},
                submodules=CrossAttentionSubmodules(
                    linear_q=ColumnParallelLinear,
                    linear_kv=ColumnParallelLinear,
                    core_attention=DotProductAttention,
                    linear_proj=RowParallelLinear,
                ),
            ),
            cross_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=_mlp(),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def get_t5_encoder_with_local_block_spec(
    num_layers: int, final_layernorm: bool = True, qk_layernorm: bool = False
) -> TransformerBlockSubmodules:
    """All encoder layers of the model (a pipeline stage takes its own of them), with or without a final norm."""
    return TransformerBlockSubmodules(
        [encoder_model_with_local_spec(qk_layernorm)] * num_layers, WrappedTorchNorm if final_layernorm else None
    )


def get_t5_decoder_with_local_block_spec(
    num_layers: int, final_layernorm: bool = True, qk_layernorm: bool = False
) -> TransformerBlockSubmodules:
    """All decoder layers of the model, with or without a final norm."""
    return TransformerBlockSubmodules(
        [decoder_model_with_local_spec(qk_layernorm)] * num_layers, WrappedTorchNorm if final_layernorm else None
    )


def get_t5_encoder_with_transformer_engine_block_spec(*args: Any, **kwargs: Any) -> TransformerBlockSubmodules:
    """Raises ConfigError: layers of Transformer Engine are not part of this package yet."""
    raise _no_transformer_engine()


def get_t5_decoder_with_transformer_engine_block_spec(*args: Any, **kwargs: Any) -> TransformerBlockSubmodules:
    """Raises ConfigError: layers of Transformer Engine are not part of this package yet."""
    raise _no_transformer_engine()


def _no_transformer_engine() -> ConfigError:
    return ConfigError(
        "--transformer-impl transformer_engine for T5",
        why="layers of Transformer Engine are not built yet",
        fix="--transformer-impl local: the same arithmetic in plain torch",
    )


def _self_attention(mask_type: AttnMaskType, qk_layernorm: bool) -> ModuleSpec:
    head_norm = WrappedTorchNorm if qk_layernorm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": mask_type},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )


def _mlp() -> ModuleSpec:
    return ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )
