"""The BERT that arguments describe, and its data sets."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron_lite.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
from megatron_lite.models.bert import BertModel, get_bert_layer_local_spec
from megatron_lite.training.arguments import core_transformer_config_from_args
from megatron_lite.training.data_loading import masked_options
from megatron_lite.transformer.spec_utils import spec_of_user


def bert_builder(
    args: Namespace, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
) -> BertModel:
    """The whole model, or a pipeline stage's part of it.

    Args:
        args: validated, with `padded_vocab_size` set.
        pre_process, post_process: this is the first, the last stage.
        vp_stage: which chunk of the stage.
    """
    return BertModel(
        config=core_transformer_config_from_args(args),
        num_tokentypes=2 if args.bert_binary_head else 0,
        transformer_layer_spec=spec_of_user(args.spec) or get_bert_layer_local_spec(args.qk_layernorm),
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
        add_binary_head=args.bert_binary_head,
        return_embeddings=args.output_bert_embeddings and post_process,
        vp_stage=vp_stage,
        rotary_base=args.rotary_base,
    )


def bert_dataset_class(args: Namespace) -> type[BERTMaskedWordPieceDataset]:
    """The class of the data sets over one corpus, made-up ones too."""
    return BERTMaskedWordPieceDataset


def bert_dataset_config(args: Namespace, tokenizer: Any) -> BERTMaskedWordPieceDatasetConfig:
    """Options of the data sets: whole words, in runs of up to three."""
    return BERTMaskedWordPieceDatasetConfig(
        **masked_options(args, tokenizer),
        masking_max_ngram=3,
        masking_use_geometric_distribution=False,
        classification_head=args.bert_binary_head,
    )
