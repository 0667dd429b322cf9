"""Loss on held-out data: no gradients, no dropout, every token counted once."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from megatron_lite.log import print_rank_last
from megatron_lite.num_microbatches_calculator import get_num_microbatches
from megatron_lite.pipeline_parallel import get_forward_backward_func
from megatron_lite.pipeline_parallel.executor import ForwardStep
from megatron_lite.process_groups_config import ProcessGroupCollection
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
    timers("evaluate", log_level=0).start(barrier=True)
    # The full batch, whatever the ramp-up says of training, in micro-batches of the training size.
    num_microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    num_microbatches = max(num_microbatches, 1) if args.global_batch_size else get_num_microbatches()
    samples = num_microbatches * args.micro_batch_size * args.data_parallel_size
    was_training = [chunk.training for chunk in model]
    for chunk in model:
        chunk.eval()
    reports: list[dict[str, Any]] = []
    if verbose:
        print_rank_last(f"Evaluating on {args.eval_iters * samples} samples")
    try:
        for i in range(1, args.eval_iters + 1):
            if verbose and args.log_interval and i % args.log_interval == 0:
                print_rank_last(f"Evaluating iter {i}/{args.eval_iters}")
            reports += get_forward_backward_func()(
                forward_step_func=forward_step_func,
                data_iterator=data_iterator,
                model=model,
                num_microbatches=num_microbatches,
                seq_length=args.seq_length,
                micro_batch_size=args.micro_batch_size,
                forward_only=True,
                pg_collection=pg_collection,
            )
            args.consumed_valid_samples += samples
            if out_of_time():
                print_rank_last("Exiting during evaluation, timelimit reached")
                return None
    finally:
        for chunk, training in zip(model, was_training):
            chunk.train(training)
        timers("evaluate").stop()
    timers.log(["evaluate"])
    return average_losses(reports, pg_collection, per_token=True)


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
