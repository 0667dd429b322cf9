"""Megatron's entry to the schedules: `get_forward_backward_func()(...)` runs all micro-batches of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from megatron_lite.collectives import group_size
from megatron_lite.errors import ConfigError
from megatron_lite.pipeline_parallel.actions import no_pipelining
from megatron_lite.pipeline_parallel.executor import Executor, ForwardStep
from megatron_lite.process_groups_config import ProcessGroupCollection


def get_forward_backward_func(pp_size: int | None = None, vp_size: int | None = None) -> Callable[..., list[Any]]:
    """The function that runs a step's micro-batches under this layout.

    Args:
        pp_size: pipeline stages; None asks the registered process groups.
        vp_size: model chunks per stage.
    """
    stages = group_size(ProcessGroupCollection.use_mpu_process_groups().pp) if pp_size is None else pp_size
    if stages > 1:
        raise ConfigError(
            f"--pipeline-model-parallel-size {stages}",
            why="pipeline schedules have not landed in this version",
            fix="--pipeline-model-parallel-size 1",
        )
    return forward_backward_no_pipelining


def forward_backward_no_pipelining(
    *,
    forward_step_func: ForwardStep,
    data_iterator: Iterator[Any] | list[Iterator[Any]] | None,
    model: nn.Module | list[nn.Module],
    num_microbatches: int,
    seq_length: int | None = None,
    micro_batch_size: int | None = None,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> list[Any]:
    """All micro-batches of a step on one stage; gradients are synchronised with the last backward.

    Args:
        forward_step_func, data_iterator, model, num_microbatches: see `executor`.
        seq_length, micro_batch_size, decoder_seq_length, first_val_step: shapes of messages between stages; here
            there are none.
    Returns: the loss function's reports, one per micro-batch.
    """
    chunks = model if isinstance(model, list) else [model]
    data = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    assert len(chunks) == len(data) == 1, f"one stage has one chunk, not {len(chunks)} with {len(data)} iterators"
    pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    config: Any = chunks[0].config
    executor = Executor(
        config=config,
        chunks=chunks,
        data=data,
        forward_step_func=forward_step_func,
        num_microbatches=num_microbatches,
        forward_only=forward_only,
        collect_non_loss_data=collect_non_loss_data,
        context_parallel_size=group_size(pg_collection.cp),
    )
    timers = config.timers
    if timers is not None:
        timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    reports = executor.run(no_pipelining(num_microbatches, forward_only))
    if not forward_only and config.finalize_model_grads_func is not None:
        per_token = getattr(config, "calculate_per_token_loss", False)
        config.finalize_model_grads_func(
            chunks, executor.num_tokens if per_token else None, pg_collection=pg_collection
        )
    if timers is not None:
        timers("forward-backward").stop()
    return reports
