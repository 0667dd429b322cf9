"""What every rank of a run would hold, found by building its model where no cluster is.

    validated arguments --for each kind of rank--> fake process groups --> model_provider on the meta device --> sizes

The groups are torch's own fake backend: this process is rank r of a world that nobody else is in. Tensors on the meta
device have shapes and no memory, so a stage of GPT-3 175B takes seconds. Ranks that differ only by their place in the
data- or context-parallel group hold the same; one of them stands for all.
"""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_lite import collectives, parallel_state
from megatron_lite.enums import ModelType
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.training import global_vars
from megatron_lite.training.initialize import init_fake_process_group, initialize_groups
from megatron_lite.training.memory_estimate import Memory, memory_of
from megatron_lite.training.model_setup import build_chunks
from megatron_lite.transformer.transformer_block import layout_of


@dataclass(frozen=True)
class StageSizes:
    """One pipeline stage, as each of its tensor-parallel (and expert-parallel) ranks sees it.

    parameters: on a rank. unique: of this stage over all ranks, each counted once.
    """

    stage: int
    holds: str
    parameters: int
    unique: int
    memory: Memory


def stage_sizes(args: Namespace, model_provider: Callable[..., nn.Module]) -> list[StageSizes]:
    """The stages of a run, one after the other.

    Args:
        args: validated for `args.world_size`, with `padded_vocab_size` set.
        model_provider: of the entry script.
    """
    ranks_of_a_stage = args.world_size // args.pipeline_model_parallel_size
    found = []
    for stage in range(args.pipeline_model_parallel_size):
        rank = stage * ranks_of_a_stage
        if args.use_tp_pp_dp_mapping:
            rank = stage * args.tensor_model_parallel_size * args.context_parallel_size
        with fake_rank(args, rank) as groups:
            assert collectives.group_rank(groups.pp) == stage, "the order of ranks is another one than assumed"
            with torch.device("meta"):
                chunks = build_chunks(model_provider, ModelType.encoder_or_decoder, args, groups)
            found.append(_sizes(args, stage, chunks, groups))
    return found


@contextlib.contextmanager
def fake_rank(args: Namespace, rank: int) -> Iterator[ProcessGroupCollection]:
    """This process as one rank of a world of `args.world_size`, its groups registered."""
    init_fake_process_group(rank, args.world_size)
    try:
        global_vars.set_args(args)
        yield initialize_groups(args)
    finally:
        parallel_state.destroy_model_parallel()
        collectives.forget_groups()
        global_vars.destroy_global_vars()
        dist.destroy_process_group()


def _sizes(args: Namespace, stage: int, chunks: list[nn.Module], groups: ProcessGroupCollection) -> StageSizes:
    dense = experts = unique = 0
    for chunk in chunks:
        for param in chunk.parameters():
            expert = not getattr(param, "allreduce", True)
            split = getattr(param, "tensor_model_parallel", False)
            tp = collectives.group_size(groups.expt_tp if expert else groups.tp) if split else 1
            if expert:
                experts += param.numel()
                unique += param.numel() * tp * collectives.group_size(groups.ep)
            else:
                dense += param.numel()
                # A tied table has a copy on the last stage, which is none of the model's own.
                unique += 0 if getattr(param, "shared", False) else param.numel() * tp
    config: Any = chunks[0].config
    holds = layout_of(config).describe(stage)
    return StageSizes(stage, holds, dense + experts, unique, memory_of(args, dense, experts))
