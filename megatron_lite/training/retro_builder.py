"""The Retro that arguments describe, and its samples; without --retro-add-retriever the GPT on the same samples."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from megatron_lite.datasets.retro_dataset import MultiSplitGPTDataset, MultiSplitGPTDatasetConfig, retro_datasets
from megatron_lite.datasets.retro_project import RetroProject
from megatron_lite.models.gpt import GPTModel
from megatron_lite.models.retro import RetroConfig, RetroModel, get_retro_decoder_block_spec
from megatron_lite.training.arguments import core_transformer_config_from_args
from megatron_lite.training.gpt_builder import gpt_builder, options_of
from megatron_lite.training.gpt_data import gpt_dataset_config


def retro_builder(
    args: Namespace, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
) -> GPTModel:
    """The whole model.

    Args:
        args: validated, with `padded_vocab_size` set.
        pre_process, post_process, vp_stage: as `gpt_builder` has them; there is one stage.
    """
    if not args.retro_add_retriever:
        return gpt_builder(args, pre_process, post_process, vp_stage)
    config = core_transformer_config_from_args(args, RetroConfig)
    assert isinstance(config, RetroConfig)
    return RetroModel(
        config=config,
        transformer_layer_spec=get_retro_decoder_block_spec(config),
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
        **options_of(args),
    )


def retro_dataset_class(args: Namespace) -> type[MultiSplitGPTDataset]:
    """The class of the data sets over one corpus."""
    return MultiSplitGPTDataset


def retro_dataset_config(args: Namespace, tokenizer: Any) -> MultiSplitGPTDatasetConfig:
    """Options of the GPT samples."""
    return MultiSplitGPTDatasetConfig.of(
        gpt_dataset_config(args, tokenizer), split_preprocessing=args.retro_split_preprocessing
    )


def retro_sizes(args: Namespace, sizes: list[int | None]) -> list[int | None]:
    """Samples that the project was prepared for: their order depends on how many they are."""
    return RetroProject.read(args.retro_project_dir).sizes


def with_neighbors(args: Namespace, tokenizer: Any, built: Sequence[Any], reads: Callable[[], bool]) -> Sequence[Any]:
    """The samples with the tokens of their neighbours.

    Args:
        built: GPT samples of train, valid and test.
    """
    if not args.retro_add_retriever or not reads():
        return built
    return retro_datasets(
        RetroProject.read(args.retro_project_dir),
        retro_dataset_config(args, tokenizer),
        built,
        num_neighbors=args.retro_num_neighbors,
        num_retrieved_chunks=args.retro_num_retrieved_chunks,
        verify_neighbor_count=args.retro_verify_neighbor_count,
        train_length=args.train_samples or args.train_iters * args.global_batch_size,
        missing=args.retro_missing_chunks,
    )
