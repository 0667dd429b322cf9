"""The GPT that arguments describe. For `pretrain_gpt.py`, and for whoever loads what it saved."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron_lite.models.gpt import GPTModel, get_gpt_layer_local_spec
from megatron_lite.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron_lite.training.arguments import core_transformer_config_from_args
from megatron_lite.transformer.spec_utils import ModuleSpec, spec_of_user
from megatron_lite.transformer.transformer_block import TransformerBlockSubmodules


def gpt_builder(
    args: Namespace, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
) -> GPTModel:
    """The whole model, or a pipeline stage's part of it.

    Args:
        args: validated, with `padded_vocab_size` set.
        pre_process, post_process: this is the first, the last stage.
        vp_stage: which chunk of the stage.
    """
    config = core_transformer_config_from_args(args)
    layer_spec: ModuleSpec | TransformerBlockSubmodules | None = spec_of_user(args.spec)
    if layer_spec is None and args.num_experts:
        layer_spec = get_gpt_decoder_block_spec(config, normalization=args.normalization, vp_stage=vp_stage)
    if layer_spec is None:
        layer_spec = get_gpt_layer_local_spec(
            qk_layernorm=args.qk_layernorm,
            multi_latent_attention=args.multi_latent_attention,
            normalization=args.normalization,
            qk_l2_norm=args.qk_l2_norm,
        )
    return GPTModel(
        config=config,
        transformer_layer_spec=layer_spec,
        pre_process=pre_process,
        post_process=post_process,
        mtp_block_spec=get_gpt_mtp_block_spec(config, layer_spec, vp_stage=vp_stage),
        vp_stage=vp_stage,
        **options_of(args),
    )


def options_of(args: Namespace) -> dict[str, Any]:
    """What a GPTModel takes beside its config, its layers and its stage."""
    return dict(
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
    )
