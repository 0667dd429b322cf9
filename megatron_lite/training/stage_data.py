"""Which parts of the model read data, and an iterator for each.

first stage, first chunk    ids and positions
last stage, last chunk      labels and their mask
every other                 nothing, unless the mask of the attention is in the data, as with BERT
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from itertools import tee
from typing import Any

from megatron_lite.collectives import group_rank, group_size
from megatron_lite.pipeline_parallel.stage_layout import parse_layout
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.training.families import FAMILIES, family_of


class NotNeeded:
    """Stands for the micro-batches of a model chunk that needs none. Called, it gives itself: so it is also an
    `EvaluationSet`'s start."""

    def __call__(self) -> NotNeeded:
        return self

    def __iter__(self) -> NotNeeded:
        return self

    def __next__(self) -> None:
        return None


def chunk_reads(chunk: int, args: Namespace, groups: ProcessGroupCollection) -> bool:
    """Whether a chunk of this stage's model needs data."""
    if FAMILIES[family_of(args)].every_stage_reads:
        return True
    if args.reset_attention_mask or args.dataloader_inter_document_masking or args.sft:
        return True
    stage, stages = group_rank(groups.pp), group_size(groups.pp)
    last = (args.virtual_pipeline_model_parallel_size or 1) - 1
    if args.mtp_num_layers and "m" in (args.pipeline_model_parallel_layout or ""):
        # Predictions of further tokens embed them.
        with_mtp = [
            place for place, part in enumerate(parse_layout(args.pipeline_model_parallel_layout)) if "m" in part
        ]
        if chunk * stages + stage in with_mtp:
            return True
    return (stage == 0 and chunk == 0) or (stage == stages - 1 and chunk == last)


def stage_reads(args: Namespace, groups: ProcessGroupCollection) -> bool:
    """Whether any chunk of this stage's model needs data."""
    return any(chunk_reads(chunk, args, groups) for chunk in range(args.virtual_pipeline_model_parallel_size or 1))


def for_chunks(
    iterator: Iterator[Any], args: Namespace, groups: ProcessGroupCollection
) -> Iterator[Any] | list[Iterator[Any]]:
    """An iterator for each chunk of this stage's model, over the same micro-batches; itself if there is one."""
    chunks = args.virtual_pipeline_model_parallel_size or 1
    if chunks == 1:
        return iterator
    reading = [chunk for chunk in range(chunks) if chunk_reads(chunk, args, groups)]
    copies = dict(zip(reading, tee(iterator, len(reading))))
    return [copies.get(chunk, NotNeeded()) for chunk in range(chunks)]
