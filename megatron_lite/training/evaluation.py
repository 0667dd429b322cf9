"""Loss on held-out data: no gradients, no dropout, every token counted once."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from megatron_lite.errors import DataError
from megatron_lite.log import print_rank_last
from megatron_lite.pipeline_parallel import get_forward_backward_func
from megatron_lite.pipeline_parallel.executor import ForwardStep
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.timers import Timers
from megatron_lite.training.train_step import average_losses


def evaluate(
    forward_step_func: ForwardStep,
    data_iterator: Iterator[Any],
    model: list[nn.Module],
    args: Namespace,
    pg_collection: ProcessGroupCollection,
    *,
    verbose: bool = False,
    out_of_time: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Run `args.eval_iters` global batches; `args.consumed_valid_samples` grows by their samples.

    Args:
        verbose: say how far it is (the end of a run).
        out_of_time: asked after each batch.
    Returns: token-weighted losses by key, or None if time ran out.
    """
    timers = args.timers
    num_microbatches = _num_microbatches(args)
    samples = num_microbatches * args.micro_batch_size * args.data_parallel_size
    reports: list[dict[str, Any]] = []
    if verbose:
        print_rank_last(f"Evaluating on {args.eval_iters * samples} samples")
    with _evaluating(model), _timed(timers):
        for i in range(1, args.eval_iters + 1):
            if verbose and args.log_interval and i % args.log_interval == 0:
                print_rank_last(f"Evaluating iter {i}/{args.eval_iters}")
            reports += _forward(forward_step_func, data_iterator, model, args, pg_collection, num_microbatches)
            args.consumed_valid_samples += samples
            if out_of_time():
                print_rank_last("Exiting during evaluation, timelimit reached")
                return None
    timers.log(["evaluate"])
    return average_losses(reports, pg_collection, per_token=True)


def collect_non_loss_data(
    forward_step_func: ForwardStep,
    data_iterator: Iterator[Any],
    model: list[nn.Module],
    args: Namespace,
    pg_collection: ProcessGroupCollection,
) -> list[Any]:
    """What `loss_func(output, non_loss_data=True)` gives for each micro-batch of one more global batch.

    Collective, like `evaluate`; `args.consumed_valid_samples` grows as there.
    """
    num_microbatches = _num_microbatches(args)
    with _evaluating(model):
        collected = _forward(forward_step_func, data_iterator, model, args, pg_collection, num_microbatches, True)
    args.consumed_valid_samples += num_microbatches * args.micro_batch_size * args.data_parallel_size
    return collected


def _num_microbatches(args: Namespace) -> int:
    """The full batch, whatever the ramp-up says of training, in micro-batches of the training size."""
    return max(args.global_batch_size // (args.micro_batch_size * args.data_parallel_size), 1)


def _forward(
    forward_step_func: ForwardStep,
    data_iterator: Iterator[Any],
    model: list[nn.Module],
    args: Namespace,
    pg_collection: ProcessGroupCollection,
    num_microbatches: int,
    collect_non_loss_data: bool = False,
) -> list[Any]:
    """One global batch, forward only.

    Raises: DataError where the iterator of the user's data ends.
    """
    try:
        return get_forward_backward_func()(
            forward_step_func=forward_step_func,
            data_iterator=data_iterator,
            model=model,
            num_microbatches=num_microbatches,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=True,
            collect_non_loss_data=collect_non_loss_data,
            pg_collection=pg_collection,
        )
    except StopIteration:
        raise DataError(
            f"the evaluation data ended after {args.consumed_valid_samples} samples",
            why=f"an evaluation takes --eval-iters {args.eval_iters} batches of {args.global_batch_size} samples",
            fix="fewer --eval-iters, or a loader that starts over",
        ) from None


@contextmanager
def _evaluating(model: list[nn.Module]) -> Iterator[None]:
    """No dropout inside; afterwards every chunk is as it was."""
    was_training = [chunk.training for chunk in model]
    for chunk in model:
        chunk.eval()
    try:
        yield
    finally:
        for chunk, training in zip(model, was_training):
            chunk.train(training)


@contextmanager
def _timed(timers: Timers) -> Iterator[None]:
    timers("evaluate", log_level=0).start(barrier=True)
    try:
        yield
    finally:
        timers("evaluate").stop()


def perplexity(loss: float) -> float:
    """exp(loss), with the loss capped at 20 so that an untrained model gives a number."""
    return math.exp(min(20.0, loss))


def result_line(prefix: str, losses: dict[str, float]) -> str:
    """Megatron's line, between two dashed lines of its length."""
    line = f" validation loss at {prefix} | "
    for key, value in losses.items():
        line += f"{key} value: {value:.6E} | {key} PPL: {perplexity(value):.6E} | "
    rule = "-" * len(line)
    return f"{rule}\n{line}\n{rule}"
