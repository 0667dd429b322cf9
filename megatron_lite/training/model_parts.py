"""What a model family is made of when it runs: its model, its data sets. One table, for scripts and verbs alike."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from megatron_lite.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron_lite.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron_lite.datasets.megatron_dataset import MegatronDataset
from megatron_lite.log import print_rank_0
from megatron_lite.training import global_vars
from megatron_lite.training.bert_parts import bert_builder, bert_dataset_class, bert_dataset_config
from megatron_lite.training.data_loading import is_dataset_built_on_rank
from megatron_lite.training.families import FAMILIES, family_of
from megatron_lite.training.gpt_builder import gpt_builder
from megatron_lite.training.gpt_data import gpt_dataset_class, gpt_dataset_config
from megatron_lite.training.retro_builder import (
    retro_builder,
    retro_dataset_class,
    retro_dataset_config,
    retro_sizes,
    with_neighbors,
)
from megatron_lite.training.t5_builder import t5_builder
from megatron_lite.training.t5_data import t5_dataset_class, t5_dataset_config


@dataclass(frozen=True)
class Parts:
    """The functions of a family.

    build: (args, pre_process, post_process, vp_stage) -> the model, or a pipeline stage's part of it.
    dataset_class: args -> class of the data sets over one corpus. dataset_config: (args, tokenizer) -> their options.
    sizes: (args, samples that the run asks for) -> samples to build for. complete: (args, tokenizer, data sets, whether
    this rank reads) -> data sets with what else their items have.
    """

    build: Callable[..., nn.Module]
    dataset_class: Callable[[Namespace], type[MegatronDataset]]
    dataset_config: Callable[[Namespace, Any], BlendedMegatronDatasetConfig]
    sizes: Callable[[Namespace, list[int | None]], list[int | None]] = lambda args, sizes: sizes
    complete: Callable[[Namespace, Any, Sequence[Any], Callable[[], bool]], Sequence[Any]] = lambda a, t, built, r: (
        built
    )


_PARTS: dict[str, Parts] = {
    "gpt": Parts(gpt_builder, gpt_dataset_class, gpt_dataset_config),
    "bert": Parts(bert_builder, bert_dataset_class, bert_dataset_config),
    "t5": Parts(t5_builder, t5_dataset_class, t5_dataset_config),
    "retro": Parts(
        retro_builder, retro_dataset_class, retro_dataset_config, sizes=retro_sizes, complete=with_neighbors
    ),
}


def parts_of(args: Namespace) -> Parts:
    """The parts of the run's family."""
    return _PARTS[family_of(args)]


def build_model(
    args: Namespace, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
) -> nn.Module:
    """The model that the arguments describe, or this pipeline stage's part of it."""
    print_rank_0(f"building {FAMILIES[family_of(args)].title} model ...")
    return parts_of(args).build(args, pre_process, post_process, vp_stage)


def dataset_builder(
    args: Namespace, tokenizer: Any, sizes: list[int | None], is_built_on_rank: Callable[[], bool]
) -> BlendedMegatronDatasetBuilder:
    """Builds the data sets of train, valid and test.

    Args:
        sizes: samples asked for each of them; None: one epoch.
        is_built_on_rank: does this rank read?
    """
    parts = parts_of(args)
    return BlendedMegatronDatasetBuilder(
        parts.dataset_class(args), parts.sizes(args, sizes), is_built_on_rank, parts.dataset_config(args, tokenizer)
    )


def build_datasets(sizes: list[int | None]) -> tuple[Any, Any, Any]:
    """The data sets of this run: what a script's provider returns."""
    args, title = global_vars.get_args(), FAMILIES[family_of(global_vars.get_args())].title
    print_rank_0(f"> building train, validation, and test datasets for {title} ...")
    tokenizer = global_vars.get_tokenizer()
    built = dataset_builder(args, tokenizer, sizes, is_dataset_built_on_rank).build()
    built = list(parts_of(args).complete(args, tokenizer, built, is_dataset_built_on_rank))
    print_rank_0(f"> finished creating {title} datasets ...")
    train, valid, test = built
    return train, valid, test
