"""One step: micro-batches forward and backward, then the optimizer, then the schedule.

What is printed is what was optimised. A loss function reports (sum, tokens) for a micro-batch; over micro-batches and
data-parallel ranks

    default                         mean of the micro-batches' means (all context-parallel parts of one together)
    --calculate-per-token-loss      all sums / all tokens

Evaluation always divides all sums by all tokens, so its number does not depend on how samples fall into micro-batches.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_lite import collectives
from megatron_lite.errors import RankFailure
from megatron_lite.num_microbatches_calculator import get_num_microbatches
from megatron_lite.optimizer import MegatronOptimizer
from megatron_lite.optimizer_param_scheduler import OptimizerParamScheduler
from megatron_lite.pipeline_parallel import get_forward_backward_func
from megatron_lite.pipeline_parallel.executor import ForwardStep
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.training.result_checks import Reports, ResultChecks, flat


@dataclass
class StepResult:
    """What a step did.

    losses: by key, fp32 scalars on the CPU; skipped: the update was left out (Inf or NaN in a gradient);
    learning_rate: the one that this update used (--decoupled-lr apart); grad_norm, num_zeros: None where they were not
    computed.
    """

    losses: dict[str, float]
    skipped: bool
    learning_rate: float
    grad_norm: float | None
    num_zeros: int | None


def train_step(
    forward_step_func: ForwardStep,
    data_iterator: Iterator[Any],
    model: list[nn.Module],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    args: Namespace,
    iteration: int,
    pg_collection: ProcessGroupCollection,
    checks: ResultChecks | None = None,
    update: bool = True,
) -> StepResult:
    """Run iteration number `iteration` (from 1).

    Args:
        checks: look at the results; what they reject is left out on all ranks together.
        update: False: forward, backward and the norm alone; weights, moments and schedule stay.
    Raises: RankFailure naming this rank when its loss is NaN or Inf, there are no `checks` and
        `--no-check-for-nan-in-loss-and-grad` is not given; nothing has changed then.
    """
    for chunk in model:
        chunk.zero_grad_buffer()  # type: ignore[operator]
    optimizer.zero_grad()
    if checks is None and args.check_for_nan_in_loss_and_grad:
        checks = ResultChecks(args, pg_collection, at_once=True)
        checks.begin(iteration)
    if checks is not None:
        forward_step_func = checks.watch(forward_step_func, get_num_microbatches())
    reports = _forward_backward(iteration)(
        forward_step_func=forward_step_func,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=get_num_microbatches(),
        seq_length=args.seq_length,
        decoder_seq_length=args.decoder_seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=args.freeze_all_layers,
        pg_collection=pg_collection,
    )
    if args.empty_unused_memory_level >= 1 and args.device.type == "cuda":
        torch.cuda.empty_cache()

    groups = [group for group in optimizer.param_groups if group["params"]]
    ordinary = [group for group in groups if not group["is_decoupled_lr"]] or groups
    learning_rate = max((group["lr"] for group in ordinary), default=0.0)
    if not update:
        for part in optimizer.parts:
            part.prepare_grads()
        losses = average_losses(reports, pg_collection, per_token=args.calculate_per_token_loss)
        return StepResult(losses, True, learning_rate, optimizer.get_grad_norm(), None)
    timers = args.timers
    timers("optimizer", log_level=1).start(barrier=args.barrier_with_L1_time)
    succeeded, grad_norm, num_zeros = optimizer.step()
    timers("optimizer").stop()
    if succeeded:
        scheduler.step(increment=get_num_microbatches() * args.micro_batch_size * args.data_parallel_size)
    if args.empty_unused_memory_level >= 2 and args.device.type == "cuda":
        torch.cuda.empty_cache()
    losses = average_losses(reports, pg_collection, per_token=args.calculate_per_token_loss)
    return StepResult(losses, not succeeded, learning_rate, grad_norm, num_zeros)


def _forward_backward(iteration: int) -> Callable[..., Reports]:
    """The schedule's function, whose failures name the iteration."""

    def run(**arguments: Any) -> Reports:
        try:
            return get_forward_backward_func(None, len(arguments["model"]))(**arguments)
        except RankFailure as failure:
            if "iteration" in failure.what:
                raise
            what = f"iteration {iteration}, {failure.what}"
            raise type(failure)(what, why=failure.why, fix=failure.fix) from failure  # a witness stays one

    return run


def average_losses(reports: Reports, pg_collection: ProcessGroupCollection, *, per_token: bool) -> dict[str, float]:
    """The losses of a step by key, over micro-batches and data-parallel ranks (see the top of this file).

    Args:
        reports: one dict per micro-batch: key -> (sum, tokens), as two scalars or `[2]`; or a scalar that is averaged.
    """
    if not reports:
        return {}
    tables = {key: torch.stack([flat(report[key]) for report in reports]) for key in reports[0]}  # [m, 2] or [m, 1]
    if not per_token:
        _join_sequences([table for table in tables.values() if table.shape[1] == 2], pg_collection.cp)
    rows = []
    for table in tables.values():
        if table.shape[1] == 2 and per_token:
            rows.append(table.sum(0))
            continue
        means = table[:, 0] / table[:, 1].clamp(min=1) if table.shape[1] == 2 else table[:, 0]
        rows.append(torch.stack([means.sum(), means.new_tensor(float(len(means)))]))
    sums = torch.stack(rows)  # [keys, 2]: one message for all keys
    collectives.all_reduce(sums, pg_collection.dp_cp, purpose="losses")
    means_of_keys = (sums[:, 0] / sums[:, 1].clamp(min=1)).tolist()
    return dict(zip(reports[0], means_of_keys))


def _join_sequences(tables: list[Tensor], cp: ProcessGroup | None) -> None:
    """Sums and tokens of whole micro-batches, from those of this rank's part of their sequences; in place."""
    if collectives.group_size(cp) == 1 or not tables:
        return
    joined = torch.cat(tables)
    collectives.all_reduce(joined, cp, purpose="losses of a micro-batch")
    for table, part in zip(tables, joined.split([len(table) for table in tables])):
        table.copy_(part)
