"""Megatron's entry to the schedules: `get_forward_backward_func()(...)` runs all micro-batches of a step.

The three functions that it returns differ only in the schedule that they make: one executor runs them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from megatron_lite.collectives import group_rank, group_size
from megatron_lite.fusions.wgrad import WeightGradStore
from megatron_lite.model_parallel_config import ModelParallelConfig
from megatron_lite.pipeline_parallel.actions import Schedule, check_microbatch_groups, make_schedule, warmup_of
from megatron_lite.pipeline_parallel.executor import Executor, ForwardStep
from megatron_lite.pipeline_parallel.p2p_communication import Shape, StageLink
from megatron_lite.process_groups_config import ProcessGroupCollection

DataIterators = Iterator[Any] | list[Iterator[Any] | None] | None


def get_forward_backward_func(pp_size: int | None = None, vp_size: int | None = None) -> Callable[..., list[Any]]:
    """The function that runs a step's micro-batches under this layout.

    Args:
        pp_size: pipeline stages; None asks the registered process groups.
        vp_size: model chunks per stage; None or 1: not interleaved.
    """
    stages = group_size(ProcessGroupCollection.use_mpu_process_groups().pp) if pp_size is None else pp_size
    if stages == 1:
        return forward_backward_no_pipelining
    if vp_size is not None and vp_size > 1:
        return forward_backward_pipelining_with_interleaving
    return forward_backward_pipelining_without_interleaving


def forward_backward_no_pipelining(
    *,
    forward_step_func: ForwardStep,
    data_iterator: DataIterators,
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
        seq_length, micro_batch_size, decoder_seq_length: shapes of messages between stages; here there are none.
        first_val_step: accepted for Megatron's callers; nothing here depends on it.
    Returns: the loss function's reports, one per micro-batch.
    """
    chunks, data = _chunks_and_data(model, data_iterator)
    assert len(chunks) == len(data) == 1, f"one stage has one chunk, not {len(chunks)} with {len(data)} iterators"
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    schedule = make_schedule(1, num_microbatches, evaluate=forward_only)
    return _run(
        forward_step_func, data, chunks, num_microbatches, schedule, groups, None, forward_only, collect_non_loss_data
    )


def forward_backward_pipelining_without_interleaving(
    *,
    forward_step_func: ForwardStep,
    data_iterator: DataIterators,
    model: nn.Module | list[nn.Module],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> list[Any]:
    """1F1B over the stages of the pipeline group (ZB-H1 with `delay_wgrad_compute`); one chunk a stage.

    Args:
        seq_length, micro_batch_size: of what stages send each other, before it is split over cp and tp.
        decoder_seq_length: of the decoder, where a model has an encoder of another length.
    Returns: the loss function's reports, one per micro-batch, on the last stage; elsewhere an empty list.
    """
    chunks, data = _chunks_and_data(model, data_iterator)
    assert len(chunks) == 1, f"without interleaving a stage has one chunk, not {len(chunks)}"
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    config: Any = chunks[0].config
    _prepare_stores(chunks)
    schedule = make_schedule(
        group_size(groups.pp), num_microbatches, evaluate=forward_only, zero_bubble=config.delay_wgrad_compute
    )
    shapes = _shapes(chunks[0], groups, seq_length, decoder_seq_length, micro_batch_size)
    link = _link(config, groups, schedule, 1, shapes, chunks[0])
    return _run(
        forward_step_func, data, chunks, num_microbatches, schedule, groups, link, forward_only, collect_non_loss_data
    )


def forward_backward_pipelining_with_interleaving(
    *,
    forward_step_func: ForwardStep,
    data_iterator: DataIterators,
    model: nn.Module | list[nn.Module],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> list[Any]:
    """Interleaved 1F1B: `model` and `data_iterator` are lists, one entry a chunk. The rest as without interleaving.

    Raises: ConfigError if the micro-batches do not go into groups (`check_microbatch_groups`).
    """
    chunks, data = _chunks_and_data(model, data_iterator)
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    config: Any = chunks[0].config
    stages = group_size(groups.pp)
    group = config.microbatch_group_size_per_vp_stage or stages
    _prepare_stores(chunks)
    if not forward_only:
        check_microbatch_groups(num_microbatches, stages, group)
    schedule = make_schedule(stages, num_microbatches, len(chunks), group, evaluate=forward_only)
    shapes = _shapes(chunks[0], groups, seq_length, decoder_seq_length, micro_batch_size)
    link = _link(config, groups, schedule, len(chunks), shapes, chunks[0])
    return _run(
        forward_step_func, data, chunks, num_microbatches, schedule, groups, link, forward_only, collect_non_loss_data
    )


def get_tensor_shapes(
    *,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None,
    config: ModelParallelConfig,
    tp_group: Any,
    cp_group: Any,
) -> list[Shape]:
    """Shapes of what stages send each other: `[s / cp (/ tp under sequence parallelism), b, h]`."""
    length = (decoder_seq_length or seq_length) // group_size(cp_group)
    if config.sequence_parallel:
        length //= group_size(tp_group)
    return [(length, micro_batch_size, config.hidden_size)]  # type: ignore[attr-defined]


def _shapes(
    chunk: nn.Module, groups: ProcessGroupCollection, length: int, decoder_length: int | None, micro_batch_size: int
) -> list[Shape] | None:
    """Of what stages send each other: one tensor, or the encoder's and the decoder's of a model that says
    `sends_encoder_output`."""
    config: Any = chunk.config
    if config.variable_seq_lengths:
        return None
    while not hasattr(chunk, "set_input_tensor"):  # under its wrappers
        chunk = chunk.module  # type: ignore[assignment]
    both = getattr(chunk, "sends_encoder_output", False)
    lengths = [length, decoder_length or length] if both else [decoder_length or length]
    return [
        shape
        for length in lengths
        for shape in get_tensor_shapes(
            seq_length=length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=None,
            config=config,
            tp_group=groups.tp,
            cp_group=groups.cp,
        )
    ]


def _prepare_stores(chunks: list[nn.Module]) -> None:
    """Where layers put weight gradients off, for as long as the model lives; one store, whosever config a layer has."""
    config: Any = chunks[0].config
    late, embedding = config.delay_wgrad_compute, config.defer_embedding_wgrad_compute
    if not (late and config.weight_grad_store is None) and not (embedding and config.embedding_grad_store is None):
        return
    if late:
        config.weight_grad_store = WeightGradStore()
    if embedding:
        config.embedding_grad_store = WeightGradStore(config.wgrad_deferral_limit)
    for module in (module for chunk in chunks for module in chunk.modules()):
        other: Any = getattr(module, "config", None)
        if isinstance(other, ModelParallelConfig):
            other.weight_grad_store, other.embedding_grad_store = config.weight_grad_store, config.embedding_grad_store


def _link(
    config: Any,
    groups: ProcessGroupCollection,
    schedule: Schedule,
    chunks: int,
    shapes: list[Shape] | None,
    chunk: nn.Module,
) -> StageLink:
    assert groups.pp is not None, "pipeline schedules need a pipeline group"
    dtype = config.pipeline_dtype or config.params_dtype
    if getattr(config, "fp32_residual_connection", False):
        dtype = torch.float32
    return StageLink(
        group=groups.pp,
        schedule=schedule,
        chunks=chunks,
        shapes=shapes,
        dtype=dtype,
        device=next(chunk.parameters()).device,
        ahead=1 if config.overlap_p2p_comm else 0,
        groups=groups.pp_channels,
    )


def _chunks_and_data(model: nn.Module | list[nn.Module], data_iterator: DataIterators) -> tuple[list[nn.Module], list]:
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    data = list(data_iterator) if isinstance(data_iterator, (list, tuple)) else [data_iterator] * len(chunks)
    return chunks, data


def _run(
    forward_step_func: ForwardStep,
    data: list,
    chunks: list[nn.Module],
    num_microbatches: int,
    schedule: Schedule,
    groups: ProcessGroupCollection,
    link: StageLink | None,
    forward_only: bool,
    collect_non_loss_data: bool,
) -> list[Any]:
    """Run this rank's list, then hand the gradients to `finalize_model_grads_func`."""
    config: Any = chunks[0].config
    rank = group_rank(groups.pp)
    group = config.microbatch_group_size_per_vp_stage
    executor = Executor(
        config=config,
        chunks=chunks,
        data=data,
        forward_step_func=forward_step_func,
        num_microbatches=num_microbatches,
        link=link,
        forward_only=forward_only,
        collect_non_loss_data=collect_non_loss_data,
        cp_group=groups.cp,
        recompute_window=1 + warmup_of(group_size(groups.pp), num_microbatches, rank, len(chunks), group),
    )
    timers = config.timers
    if timers is not None:
        timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    reports = executor.run(schedule[rank])
    if not forward_only and config.finalize_model_grads_func is not None:
        per_token = getattr(config, "calculate_per_token_loss", False)
        tokens = executor.num_tokens
        if per_token and tokens is None:  # a stage without the loss: finalize_model_grads asks the last one
            tokens = torch.zeros((), dtype=torch.int, device=next(chunks[0].parameters()).device)
        config.finalize_model_grads_func(chunks, tokens if per_token else None, pg_collection=groups)
    if timers is not None:
        timers("forward-backward").stop()
    return reports
