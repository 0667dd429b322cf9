"""Which modules Retro's layers are made of: GPT layers, some of which look at neighbours.

12 layers    G G G G G R+encoder G G R G G R        retro_layer_numbers
"""

from __future__ import annotations

from typing import Any

from megatron_lite.errors import ConfigError
from megatron_lite.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron_lite.models.retro.config import RetroConfig, retro_layer_numbers
from megatron_lite.models.retro.decoder_attention import (
    RetroDecoderCrossAttention,
    get_retro_decoder_bias_dropout_add,
)
from megatron_lite.models.retro.encoder_spec import cross_attention_submodules, get_retro_encoder_block_spec
from megatron_lite.transformer.enums import AttnMaskType
from megatron_lite.transformer.spec_utils import ModuleSpec
from megatron_lite.transformer.torch_norm import WrappedTorchNorm
from megatron_lite.transformer.transformer_block import TransformerBlockSubmodules


def get_retro_decoder_layer_local_spec(
    encoder_block_spec: TransformerBlockSubmodules | None = None, qk_layernorm: bool = False
) -> ModuleSpec:
    """A layer that looks at neighbours, of this package's own modules.

    Args:
        encoder_block_spec: their encoder, for the first such layer.
    """
    spec = get_gpt_layer_local_spec(qk_layernorm=qk_layernorm)
    spec.submodules.pre_cross_attn_layernorm = WrappedTorchNorm
    spec.submodules.cross_attention = ModuleSpec(
        module=RetroDecoderCrossAttention,
        params={"attn_mask_type": AttnMaskType.padding, "encoder_block_spec": encoder_block_spec},
        submodules=cross_attention_submodules(),
    )
    spec.submodules.cross_attn_bda = get_retro_decoder_bias_dropout_add
    return spec


def get_retro_decoder_block_spec(
    config: RetroConfig,
    use_transformer_engine: bool = False,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> TransformerBlockSubmodules:
    """All layers of the model.

    Args:
        vp_stage, pp_rank: accepted as Megatron has them: the model is on one stage.
    Raises: ConfigError for layers of Transformer Engine.
    """
    if use_transformer_engine:
        raise ConfigError(
            "--transformer-impl transformer_engine for Retro",
            why="layers of Transformer Engine are not built yet",
            fix="--transformer-impl local: the same arithmetic in plain torch",
        )
    retrieving = retro_layer_numbers(config.num_layers, config.retro_layers)
    specs: list[Any] = []
    for number in range(1, config.num_layers + 1):
        if number not in retrieving:
            specs.append(get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm))
            continue
        encoder = get_retro_encoder_block_spec(config) if number == retrieving[0] else None
        specs.append(get_retro_decoder_layer_local_spec(encoder, config.qk_layernorm))
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=WrappedTorchNorm)
