"""When a run saves, and what it does about saves that fail.

    due -> save: written at once, or (--async-save) copied and written beside the steps that follow
                                                     `--> poll, once a step: it is there, or it is not and why
    save_last, close: wait for what is under way

A save that fails costs that checkpoint and not the training: the next one comes at the next interval. The last save of
a run has no next one, so its failure is the run's.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn

from megatron_lite import collectives
from megatron_lite.checkpointing.async_save import AsyncSaver, Outcome
from megatron_lite.checkpointing.checkpoint import on_rank_0
from megatron_lite.errors import CheckpointError, ResultRejected
from megatron_lite.log import print_rank_0, warn_rank_0
from megatron_lite.optimizer import MegatronOptimizer
from megatron_lite.optimizer_param_scheduler import OptimizerParamScheduler
from megatron_lite.process_groups import side_group
from megatron_lite.training.checkpoint_search import find_checkpoint
from megatron_lite.training.checkpointing import how_to_write, load_checkpoint, save_checkpoint


class Saves:
    """The saves of a run, collective over all ranks but for `poll`.

    Args:
        args: `args.iteration` is the last finished iteration. Without `--save` nothing is ever saved.
    """

    def __init__(
        self,
        args: Namespace,
        model: list[nn.Module],
        optimizer: MegatronOptimizer | None,
        scheduler: OptimizerParamScheduler | None,
    ):
        self.args, self._run = args, (model, optimizer, scheduler)
        self._how = how_to_write(args)
        self._saved_at = args.iteration if args.iteration else -1
        self._failed_at = -1
        self.rerun_state: Callable[[], dict[str, Any] | None] = lambda: None  # asked at each save, on every rank
        self._beside: AsyncSaver | None = None
        self._side: dist.ProcessGroup | None = None

    def due(self) -> bool:
        """Whether a save would save anything new."""
        return bool(self.args.save) and self._saved_at != self.args.iteration

    def save(self) -> None:
        """Save the state after this iteration; a failure is said, and training goes on."""
        try:
            self._begin()
        except CheckpointError as error:
            self._failed(self.args.iteration, error)

    def save_rolling(self) -> None:
        """Replace the rolling checkpoint (`--non-persistent-save-interval`)."""
        try:
            self._begin(rolling=True)
        except CheckpointError as error:
            self._failed(self.args.iteration, error)

    def save_last(self) -> None:
        """Save what is not saved yet, and wait until it is complete.

        Raises: CheckpointError when the state after this iteration is not on the disk.
        """
        self._wait()
        if not self.due() and self._failed_at != self.args.iteration:
            return
        self._begin()
        last = self._beside.wait() if self._beside is not None else None
        if last is not None:
            self._report(last)
            if last.error is not None:
                raise last.error

    def save_again(self) -> None:
        """As `save_last`, also where this iteration has been saved: something has been found out since.

        Raises: as `save_last`.
        """
        self._saved_at = -1
        self.save_last()

    def load_last(self) -> None:
        """Go back to the newest checkpoint of `--save`, as a resumed run would, whatever this run was started from.

        Raises: ResultRejected, on every rank, where none is there yet.
        """
        args = self.args
        self._wait()
        with _as_a_resume(args):
            if on_rank_0(lambda: find_checkpoint(args, "save"), collectives.world()) is None:
                raise ResultRejected(
                    f"{args.save} holds no checkpoint to go back to",
                    why="the result of this step is bad, and --on-bad-loss is rollback",
                    fix="a smaller --save-interval, or --on-bad-loss skip",
                )
            args.iteration, args.num_floating_point_operations_so_far = load_checkpoint(*self._run, load_arg="save")
        self._saved_at = args.iteration

    def poll(self) -> None:
        """Say how a save beside the training has ended; once a step, without waiting."""
        outcome = self._beside.poll() if self._beside is not None else None
        if outcome is not None:
            self._report(outcome)

    def close(self) -> None:
        """Wait for what is under way."""
        if self._beside is not None:
            self._report(self._beside.close())
            self._beside = None
        if self._side is not None:
            dist.destroy_process_group(self._side)
            self._side = None

    # -- one save --------------------------------------------------------------------------------------------------

    def _begin(self, rolling: bool = False) -> None:
        args = self.args
        args.timers("save-checkpoint", log_level=0).start(barrier=True)
        try:
            before = save_checkpoint(
                args.iteration,
                *self._run,
                args.num_floating_point_operations_so_far,
                how=self._how,
                beside=self._writer_beside(),
                rerun_state=self.rerun_state(),
                rolling=rolling,
            )
            if not rolling:
                self._saved_at = args.iteration
            self._report(before)
        finally:
            args.timers("save-checkpoint").stop(barrier=True)
        args.timers.log(["save-checkpoint"])

    def _writer_beside(self) -> AsyncSaver | None:
        args = self.args
        if args.async_save and self._beside is None:
            self._side = side_group("checkpoints", timedelta(minutes=args.distributed_timeout_minutes))
            self._beside = AsyncSaver(
                collectives.world(),
                self._side,
                self._how,
                persistent=args.use_persistent_ckpt_worker,
                nice=args.async_ckpt_cpu_priority,
                io_class=args.async_ckpt_io_priority,
            )
        return self._beside

    def _wait(self) -> None:
        if self._beside is not None:
            self._report(self._beside.wait())

    def _report(self, outcome: Outcome | None) -> None:
        if outcome is None:
            return
        if outcome.error is not None:
            self._failed(int(outcome.which), outcome.error)
            return
        for line in outcome.lines:
            print_rank_0(line)
        print_rank_0(
            f"  (written beside the training in {outcome.total_s:.2f} s, for which it waited {outcome.blocked_s:.3f} s)"
        )

    def _failed(self, iteration: int, error: CheckpointError) -> None:
        self._failed_at = iteration
        warn_rank_0(f"the checkpoint of iteration {iteration} was NOT saved; training goes on.\n{error}")


@contextmanager
def _as_a_resume(args: Namespace) -> Iterator[None]:
    """Inside, the arguments are those of a start that takes up everything of the newest checkpoint."""
    plain: dict[str, Any] = {
        "ckpt_step": None,
        "finetune": False,
        "no_load_optim": False,
        "no_load_rng": False,
        "override_ckpt_iteration": None,
        "pretrained_checkpoint": None,
    }
    before = {name: getattr(args, name) for name in plain}
    vars(args).update(plain)
    try:
        yield
    finally:
        vars(args).update(before)
