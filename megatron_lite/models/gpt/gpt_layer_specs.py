"""Which modules a GPT layer is made of."""

from __future__ import annotations

from typing import Any

from megatron_lite.errors import ConfigError
from megatron_lite.fusions.bias_dropout_add import get_bias_dropout_add
from megatron_lite.models.gpt.moe_module_specs import get_moe_module_spec
from megatron_lite.tensor_parallel.layers import ColumnParallelLinear, DuplicatedLinear, RowParallelLinear
from megatron_lite.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron_lite.transformer.dot_product_attention import DotProductAttention
from megatron_lite.transformer.enums import AttnMaskType
from megatron_lite.transformer.identity_op import IdentityOp
from megatron_lite.transformer.mlp import MLP, MLPSubmodules
from megatron_lite.transformer.moe.moe_rules import moe_layers
from megatron_lite.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron_lite.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules, get_mtp_layer_spec
from megatron_lite.transformer.spec_utils import ModuleSpec
from megatron_lite.transformer.torch_norm import L2Norm, WrappedTorchNorm
from megatron_lite.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
    get_transformer_layer_offset,
)
from megatron_lite.transformer.transformer_config import TransformerConfig
from megatron_lite.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules


def get_gpt_layer_local_spec(
    num_experts: int | None = None,
    moe_grouped_gemm: bool | None = False,
    qk_layernorm: bool | None = False,
    multi_latent_attention: bool | None = False,
    fp8: str | None = None,
    moe_use_legacy_grouped_gemm: bool | None = False,
    normalization: str | None = None,
    qk_l2_norm: bool | None = False,
    use_kitchen: bool = False,
    **unknown: Any,
) -> ModuleSpec:
    """A layer of this package's own modules.

    Args:
        num_experts: a layer of so many experts in place of the MLP.
        moe_grouped_gemm, moe_use_legacy_grouped_gemm: experts in one grouped product.
        qk_layernorm: norm queries and keys, head by head; with latent attention the latent vectors.
        multi_latent_attention: queries, keys and values from vectors of low rank.
        qk_l2_norm: divide queries and keys by their root mean square, head by head.
        normalization: accepted as Megatron has it: norms are made by `config.normalization`.
        others: refused while what they ask for is not built.
    """
    _refuse(
        fp8=fp8,
        use_kitchen=use_kitchen,
        **unknown,
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=WrappedTorchNorm,
            self_attention=get_attention_module_spec(qk_layernorm, multi_latent_attention, qk_l2_norm),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=get_mlp_module_spec(False, num_experts, moe_grouped_gemm, moe_use_legacy_grouped_gemm),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def get_attention_module_spec(
    qk_layernorm: bool | None = False, multi_latent_attention: bool | None = False, qk_l2_norm: bool | None = False
) -> ModuleSpec:
    """Causal self attention."""
    norm = WrappedTorchNorm if qk_layernorm else IdentityOp
    if multi_latent_attention:
        return ModuleSpec(
            module=MLASelfAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=MLASelfAttentionSubmodules(
                linear_q_proj=ColumnParallelLinear,
                linear_q_down_proj=DuplicatedLinear,
                linear_q_up_proj=ColumnParallelLinear,
                linear_kv_down_proj=DuplicatedLinear,
                linear_kv_up_proj=ColumnParallelLinear,
                core_attention=DotProductAttention,
                linear_proj=RowParallelLinear,
                q_layernorm=norm,
                kv_layernorm=norm,
            ),
        )
    head_norm = L2Norm if qk_l2_norm else norm
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )


def get_mlp_module_spec(
    use_te: bool | None = False,
    num_experts: int | None = None,
    moe_grouped_gemm: bool | None = False,
    moe_use_legacy_grouped_gemm: bool | None = False,
) -> ModuleSpec:
    """The feed-forward half: an MLP, or experts where their number is given."""
    if num_experts is not None:
        return get_moe_module_spec(use_te, num_experts, moe_grouped_gemm, moe_use_legacy_grouped_gemm)
    return ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )


def get_gpt_mtp_block_spec(
    config: TransformerConfig,
    spec: ModuleSpec | TransformerBlockSubmodules,
    use_transformer_engine: bool = False,
    vp_stage: int | None = None,
) -> MultiTokenPredictionBlockSubmodules | None:
    """The layers that predict further tokens, each like the last one of the main stack. None: the model has none.

    Args:
        spec: of a layer of the main stack, or of all of them.
        vp_stage: accepted as Megatron has it: the model itself builds them on their stage alone.
    """
    if not config.mtp_num_layers:
        return None
    if isinstance(spec, TransformerBlockSubmodules):
        spec = get_gpt_decoder_layer_specs(config)[-1]
    depth = get_mtp_layer_spec(spec, use_transformer_engine)
    return MultiTokenPredictionBlockSubmodules(
        [depth] * (1 if config.mtp_use_repeated_layer else config.mtp_num_layers)
    )


def get_gpt_decoder_layer_specs(
    config: TransformerConfig,
    use_transformer_engine: bool = False,
    normalization: str | None = None,
    qk_l2_norm: bool | None = False,
) -> list[ModuleSpec]:
    """A spec for every layer of the model: experts where `moe_layer_freq` says so, an MLP elsewhere."""
    if use_transformer_engine:
        return [get_gpt_layer_with_transformer_engine_spec()]

    def layer(num_experts: int | None) -> ModuleSpec:
        return get_gpt_layer_local_spec(
            num_experts=num_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
            normalization=normalization,
            qk_l2_norm=qk_l2_norm or config.qk_l2_norm,
        )

    dense, experts = layer(None), layer(config.num_moe_experts)
    kinds = moe_layers(config.num_layers, config.num_moe_experts, config.moe_layer_freq)
    return [experts if has_experts else dense for has_experts in kinds]


def get_gpt_decoder_block_spec(
    config: TransformerConfig,
    use_transformer_engine: bool = False,
    normalization: str | None = None,
    qk_l2_norm: bool | None = False,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage.

    Args:
        vp_stage: which chunk of the stage.
        pp_rank: None = this rank's.
    """
    specs = get_gpt_decoder_layer_specs(config, use_transformer_engine, normalization, qk_l2_norm)
    first = get_transformer_layer_offset(config, vp_stage, pp_rank)
    count = get_num_layers_to_build(config, vp_stage, pp_rank)
    return TransformerBlockSubmodules(layer_specs=specs[first : first + count], layer_norm=WrappedTorchNorm)


def get_gpt_layer_with_transformer_engine_spec(*args: Any, **kwargs: Any) -> ModuleSpec:
    """Raises ConfigError: layers of Transformer Engine are not part of this package yet."""
    raise ConfigError(
        "--transformer-impl transformer_engine",
        why="layers of Transformer Engine are not built yet",
        fix="--transformer-impl local: the same arithmetic in plain torch",
    )


def _refuse(**asked: Any) -> None:
    wanted = [name for name, value in asked.items() if value]
    if wanted:
        raise ConfigError(
            f"a GPT layer with {', '.join(wanted)}",
            why="these kinds of layers are not built yet",
            fix="a dense layer with standard attention: leave them out",
        )
