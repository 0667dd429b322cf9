"""ZeRO-1: every rank keeps and updates its part of the optimizer's state, and all ranks gather the weights.

    gradients      | bucket 0          | bucket 1                    |      reduce-scatter, bucket by bucket (DDP)
    shard of r     |    |==|           |       |======|              |      rank r's equal part of each
    main, moments       |==|                   |======|                     fp32, this rank's alone: 12 bytes / dp
    parameters     | gathered          | gathered                    |      after the step, or by the next forward

It is the plain optimizer on smaller ranges (flat_shard.py). What is different: gradients of one model copy are spread
over its data-parallel ranks as well, so norms add up over `intra_dist_opt`; parameters are gathered after an update;
and a parameter may be cut between ranks, which checkpoints see as boxes (`sharding.flat_range`).

With several instances (`--num-distributed-optimizer-instances N`) dp / N neighbouring ranks share one state, and N such
sets keep equal ones: gathers stay inside a set, which is meant to be a machine.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", stage 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron_lite.distributed.buffer_layout import ParamRanges, Range, param_ranges_of_shard
from megatron_lite.distributed.data_parallel_base import DataParallelBase
from megatron_lite.distributed.param_and_grad_buffer import ParamAndGradBuffer
from megatron_lite.optimizer.flat_shard import FlatShard
from megatron_lite.optimizer.grad_scaler import MegatronGradScaler
from megatron_lite.optimizer.optimizer import MegatronOptimizer
from megatron_lite.optimizer.optimizer_config import OptimizerConfig


class DistributedOptimizer(MegatronOptimizer):
    """Steps on this rank's part of every bucket.

    Args:
        optimizers, config, grad_scaler, device: see `MegatronOptimizer`.
        shards: this rank's part of every bucket that holds parameters (`owned_ranges`).
        grad_stats_group: ranks whose shards together are the gradients of one model copy.
        model_chunks: whose parameters are gathered after an update.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        config: OptimizerConfig,
        shards: Sequence[FlatShard],
        grad_scaler: MegatronGradScaler | None,
        grad_stats_group: ProcessGroup | None,
        device: torch.device,
        model_chunks: Sequence[DataParallelBase],
    ):
        super().__init__(optimizers, config, shards, grad_scaler, grad_stats_group, device)
        self.gathered_chunks = list(model_chunks)

    @property
    def gbuf_ranges(self) -> list[list[dict[str, ParamRanges]]]:
        """By buffer, bucket and parameter: what this rank owns, in the four systems of coordinates."""
        buffers: dict[int, Any] = {id(shard.buffer): shard.buffer for shard in self.shards}
        return [range_map(buffer) for buffer in buffers.values()]


def range_map(buffer: ParamAndGradBuffer) -> list[dict[str, ParamRanges]]:
    """By bucket and parameter: this rank's part (empty where its part of a bucket is padding)."""
    return [param_ranges_of_shard(buffer.layout, number, shard) for number, shard in enumerate(buffer.shards)]


def owned_ranges(buffer: ParamAndGradBuffer) -> list[Range]:
    """What the optimizer of this rank owns of a buffer: a range in each bucket, without padding at its ends; none for a
    bucket of whose part nothing is a parameter's."""
    ranges = []
    for bucket in range_map(buffer):
        if bucket:
            parts = [part.gbuf_world for part in bucket.values()]
            ranges.append(Range(parts[0].start, parts[-1].end))
    return ranges


def whole_range(buffer: ParamAndGradBuffer) -> Range:
    """What an optimizer that is not sharded owns: everything."""
    return Range(0, buffer.layout.numel)
