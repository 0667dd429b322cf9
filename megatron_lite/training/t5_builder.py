"""The T5 that arguments describe. For `pretrain_t5.py`, and for whoever loads what it saved."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

from megatron_lite.models.T5 import (
    T5Model,
    get_t5_decoder_with_local_block_spec,
    get_t5_encoder_with_local_block_spec,
)
from megatron_lite.training.arguments import core_transformer_config_from_args


def t5_builder(
    args: Namespace, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
) -> T5Model:
    """The whole model, or a pipeline stage's part of it.

    Args:
        args: validated, with `padded_vocab_size` set.
        pre_process, post_process: this is the first, the last stage.
        vp_stage: which chunk of the stage.
    """
    encoder = core_transformer_config_from_args(args)
    # The projections back to the residual stream start the smaller, the deeper their own stack is.
    decoder = replace(encoder, num_layers=args.decoder_num_layers, output_layer_init_method=None)
    return T5Model(
        config=decoder,
        encoder_config=encoder,
        transformer_encoder_layer_spec=get_t5_encoder_with_local_block_spec(
            encoder.num_layers, qk_layernorm=args.qk_layernorm
        ),
        transformer_decoder_layer_spec=get_t5_decoder_with_local_block_spec(
            decoder.num_layers, qk_layernorm=args.qk_layernorm
        ),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        relative_attention_num_buckets=args.relative_attention_num_buckets,
        relative_attention_max_distance=args.relative_attention_max_distance,
        vp_stage=vp_stage,
        rotary_base=args.rotary_base,
        lm_head_bias=args.lm_head_bias,
        scaled_logits=args.scaled_logits,
    )
