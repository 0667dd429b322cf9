"""Loss on held-out data: no gradients, no dropout, every token counted once.

What is evaluated is an `EvaluationSet`: the data of one name, and how much of it one evaluation reads.

    --eval-iters N       N global batches, from where the last evaluation ended       the stream goes on over a resume
    --full-validation    every sample once                                            from the first one, each time

Batches are --eval-global-batch-size and --eval-micro-batch-size, which are training's where they are not given; the
ramp-up of the training batch has no part in them.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from megatron_lite.errors import DataError
from megatron_lite.log import print_rank_last
from megatron_lite.pipeline_parallel import get_forward_backward_func
from megatron_lite.pipeline_parallel.executor import ForwardStep
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.timers import Timers
from megatron_lite.training.stage_data import for_chunks
from megatron_lite.training.train_step import average_losses


@dataclass(frozen=True)
class EvaluationSet:
    """Held-out data, and how much of it one evaluation reads.

    name: of a validation set among several; empty for the only one.
    num_batches: global batches of an evaluation.
    num_samples: samples in them, without fillers.
    start: the iterator of micro-batches that the next evaluation reads from.
    advances: its samples count into `args.consumed_valid_samples`, where the next evaluation goes on after a resume.
    """

    name: str
    num_batches: int
    num_samples: int
    start: Callable[[], Iterator[Any]]
    advances: bool = False


def evaluate(
    forward_step_func: ForwardStep,
    data: EvaluationSet,
    model: list[nn.Module],
    args: Namespace,
    pg_collection: ProcessGroupCollection,
    *,
    verbose: bool = False,
    out_of_time: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Run `data.num_batches` global batches; `args.consumed_valid_samples` grows by their samples if `data.advances`.

    Args:
        verbose: say how far it is (the end of a run).
        out_of_time: asked after each batch.
    Returns: token-weighted losses by key, or None if time ran out.
    """
    timers = args.timers
    reports: list[dict[str, Any]] = []
    if verbose:
        print_rank_last(f"Evaluating on {data.num_samples} samples")
    with _evaluating(model), _timed(timers):
        iterator = for_chunks(data.start(), args, pg_collection)
        for i in range(1, data.num_batches + 1):
            if verbose and args.log_interval and i % args.log_interval == 0:
                print_rank_last(f"Evaluating iter {i}/{data.num_batches}")
            reports += _forward(forward_step_func, data, iterator, model, args, pg_collection)
            if out_of_time():
                print_rank_last("Exiting during evaluation, timelimit reached")
                return None
    timers.log(["evaluate"])
    return average_losses(reports, pg_collection, per_token=True)


def collect_non_loss_data(
    forward_step_func: ForwardStep,
    data: EvaluationSet,
    model: list[nn.Module],
    args: Namespace,
    pg_collection: ProcessGroupCollection,
) -> list[Any]:
    """What `loss_func(output, non_loss_data=True)` gives for each micro-batch of one more global batch.

    Collective, like `evaluate`; `args.consumed_valid_samples` grows as there.
    """
    with _evaluating(model):
        iterator = for_chunks(data.start(), args, pg_collection)
        return _forward(forward_step_func, data, iterator, model, args, pg_collection, collect_non_loss_data=True)


def num_eval_microbatches(args: Namespace) -> int:
    """Micro-batches of each rank in a global batch of the evaluation."""
    return args.eval_global_batch_size // (args.eval_micro_batch_size * args.data_parallel_size)


def _forward(
    forward_step_func: ForwardStep,
    data: EvaluationSet,
    iterator: Iterator[Any] | list[Iterator[Any]],
    model: list[nn.Module],
    args: Namespace,
    pg_collection: ProcessGroupCollection,
    collect_non_loss_data: bool = False,
) -> list[Any]:
    """One global batch, forward only.

    Raises: DataError where the iterator of the user's data ends.
    """
    try:
        results = get_forward_backward_func(None, len(model))(
            forward_step_func=forward_step_func,
            data_iterator=iterator,
            model=model,
            num_microbatches=num_eval_microbatches(args),
            seq_length=args.seq_length,
            decoder_seq_length=args.decoder_seq_length,
            micro_batch_size=args.eval_micro_batch_size,
            forward_only=True,
            collect_non_loss_data=collect_non_loss_data,
            pg_collection=pg_collection,
        )
    except StopIteration:
        raise DataError(
            f"the evaluation data ended after {args.consumed_valid_samples} samples",
            why=f"an evaluation takes --eval-iters {args.eval_iters} batches of {args.eval_global_batch_size} samples",
            fix="fewer --eval-iters, or a loader that starts over",
        ) from None
    if data.advances:
        args.consumed_valid_samples += args.eval_global_batch_size
    return results


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


def result_line(prefix: str, losses: dict[str, float], name: str = "") -> str:
    """Megatron's line, between two dashed lines of its length.

    Args:
        prefix: what stands after "loss at".
        name: of the validation set, where there are several.
    """
    line = f" {validation_tag(name)} loss at {prefix} | "
    for key, value in losses.items():
        line += f"{key} value: {value:.6E} | {key} PPL: {perplexity(value):.6E} | "
    rule = "-" * len(line)
    return f"{rule}\n{line}\n{rule}"


def validation_tag(name: str) -> str:
    """ "validation", or "validation-NAME" for a set among several: in lines and tags."""
    return f"validation-{name}" if name else "validation"
