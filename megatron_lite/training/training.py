"""A run from its arguments to its end.

    start-up -> model, optimizer, schedule -> checkpoint -> data -> loop -> last save, evaluation, report

One iteration: batch-size ramp, step, log line, evaluation, save, reasons to stop.
"""

from __future__ import annotations

import gc
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import nn

from megatron_lite import collectives
from megatron_lite.checkpointing import check_save_folder
from megatron_lite.checkpointing.checkpoint import on_rank_0
from megatron_lite.enums import ModelType
from megatron_lite.errors import DataError, PeerLost
from megatron_lite.log import print_rank_0, rank_and_world_size, say, warn_rank_0
from megatron_lite.num_microbatches_calculator import (
    get_num_microbatches,
    init_num_microbatches_calculator,
    update_num_microbatches,
)
from megatron_lite.optimizer import MegatronOptimizer
from megatron_lite.optimizer_param_scheduler import OptimizerParamScheduler
from megatron_lite.pipeline_parallel.executor import ForwardStep
from megatron_lite.process_groups import set_timeout
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.timers import Timers
from megatron_lite.training import global_vars, hang_watch
from megatron_lite.training.arguments import print_args, save_config
from megatron_lite.training.batch import skip_batch
from megatron_lite.training.checkpointing import load_checkpoint, save_checkpoint, will_load_checkpoint
from megatron_lite.training.data_loading import DatasetsProvider, RunData, build_train_valid_test_data_iterators
from megatron_lite.training.diagnostics import Diagnostics
from megatron_lite.training.evaluation import EvaluationSet, collect_non_loss_data, evaluate
from megatron_lite.training.fault_guard import FaultGuard
from megatron_lite.training.fault_handling import SignalWatch, agree, exit_reason
from megatron_lite.training.flops import num_floating_point_operations
from megatron_lite.training.heartbeat import DONE, Heartbeat
from megatron_lite.training.initialize import initialize_megatron
from megatron_lite.training.launch import program_start
from megatron_lite.training.model_setup import ModelProvider, print_datetime, setup_model_and_optimizer
from megatron_lite.training.output_paths import check_output_paths
from megatron_lite.training.profiling import Profiler
from megatron_lite.training.progress_file import append_progress
from megatron_lite.training.report import write_report
from megatron_lite.training.result_checks import ResultChecks
from megatron_lite.training.saving import Saves
from megatron_lite.training.stage_data import for_chunks
from megatron_lite.training.straggler import Straggler
from megatron_lite.training.train_step import StepResult, train_step
from megatron_lite.training.training_log import TrainingLog, describe_run
from megatron_lite.training.upcycling import upcycle
from megatron_lite.training.weight_hash import check_weight_hashes


def start(args: Namespace) -> None:
    """Process groups, seeds, tokenizer, timers and batch sizes, from validated arguments (`get_args()` from now on)."""
    init_num_microbatches_calculator(
        rank_and_world_size()[0],
        args.rampup_batch_size,
        args.global_batch_size,
        args.micro_batch_size,
        args.data_parallel_size,
        args.decrease_batch_size_if_needed,
        step_batch_size_schedule=args.step_batch_size_schedule,
        seq_length=args.seq_length,
    )
    print_args(args)
    global_vars.set_args(args)
    global_vars.set_tokenizer(global_vars.build_tokenizer(args))
    args.timers = Timers(args.timing_log_level, args.timing_log_option)
    global_vars.set_timers(args.timers)
    initialize_megatron(args)
    print_rank_0(f"time to initialize megatron (seconds): {time.time() - program_start():.3f}")
    print_datetime("after megatron is initialized")


def run(
    args: Namespace,
    datasets_provider: DatasetsProvider,
    model_provider: ModelProvider,
    model_type: ModelType,
    forward_step_func: ForwardStep,
    process_non_loss_data_func: Callable[..., None] | None = None,
) -> None:
    """The run, after `start`; the arguments are those of `pretrain`."""
    watch = hang_watch.start(args) if args.hang_report and not args.fake_process_group else None
    functions = (datasets_provider, model_provider, model_type, forward_step_func, process_non_loss_data_func)
    try:
        _run(args, watch, *functions)
    finally:
        if watch is not None:
            watch.close()


def _run(
    args: Namespace,
    watch: hang_watch.HangWatch | None,
    datasets_provider: DatasetsProvider,
    model_provider: ModelProvider,
    model_type: ModelType,
    forward_step_func: ForwardStep,
    process_non_loss_data_func: Callable[..., None] | None,
) -> None:
    pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    timers = args.timers
    if args.save:  # a run that cannot save should not begin
        on_rank_0(lambda: check_save_folder(Path(args.save)), collectives.world())
    check_output_paths(args)
    append_progress(args, "Starting job")

    timers("model-and-optimizer-setup", log_level=0).start(barrier=True)
    model, optimizer, scheduler = setup_model_and_optimizer(model_provider, model_type, args, pg_collection)
    args.iteration = args.num_floating_point_operations_so_far = 0
    args.consumed_train_samples = args.consumed_valid_samples = args.skipped_train_samples = 0
    args.rerun_state = None
    if args.moe_use_upcycling:
        upcycle(args, model, optimizer)
    elif will_load_checkpoint(args):
        timers("load-checkpoint", log_level=0).start(barrier=True)
        args.iteration, args.num_floating_point_operations_so_far = load_checkpoint(model, optimizer, scheduler)
        timers("load-checkpoint").stop(barrier=True)
        timers.log(["load-checkpoint"])
    if args.ckpt_convert_format is not None:
        state = (model, optimizer, scheduler, args.num_floating_point_operations_so_far)
        save_checkpoint(args.iteration, *state, root=args.ckpt_convert_save)
        print_rank_0(f"saved {args.ckpt_convert_save} in {args.ckpt_convert_format} format; nothing is trained")
        return
    update_num_microbatches(args.consumed_train_samples, consistency_check=True)
    timers("model-and-optimizer-setup").stop()
    print_datetime("after model, optimizer, and learning rate scheduler are built")

    timers("train/valid/test-data-iterators-setup", log_level=0).start(barrier=True)
    done = args.iteration >= args.train_iters and not args.skip_train

    def build_data() -> RunData:
        return build_train_valid_test_data_iterators(datasets_provider, args, pg_collection)

    data = RunData() if done else build_data()
    timers("train/valid/test-data-iterators-setup").stop()
    print_datetime("after dataloaders are built")
    print_rank_0("done with setup ...")
    timers.log(["model-and-optimizer-setup", "train/valid/test-data-iterators-setup"], barrier=True)
    describe_run(args, model, pg_collection)
    if done:
        print_rank_0(
            f"nothing left to train: the checkpoint is at iteration {args.iteration} of {args.train_iters} "
            "(more: a larger --train-iters, with --override-opt_param-scheduler where that makes the schedule longer)"
        )
        return

    loop = Loop(
        args,
        model,
        optimizer,
        scheduler,
        forward_step_func,
        data,
        pg_collection,
        process_non_loss_data_func,
        build_data,
    )
    loop.watch = watch
    try:
        loop.run()
    finally:
        loop.saves.close()
        loop.log.close()
        loop.profiler.close()
        if loop.straggler is not None:
            loop.straggler.close()
        loop.diagnostics.close()
    if args.save and rank_and_world_size()[0] == 0:
        _report(args)


def _report(args: Namespace) -> None:
    """Pictures are no reason to lose a run's exit status."""
    try:
        for path in write_report(args.save):
            say(f"wrote {path}")
    except Exception as error:
        warn_rank_0(f"no report of the run could be drawn: {error!r}")
        traceback.print_exc(limit=1)


class Loop:
    """The state of a running training: what is stepped, where it is, what it writes.

    Args:
        args: `args.iteration` is the last finished iteration.
        optimizer, scheduler: None where nothing is trained.
        data: what is trained and evaluated on.
        process_non_loss_data_func: see `pretrain`.
        build_data: makes `data` anew, from where the arguments' counters are.
    """

    def __init__(
        self,
        args: Namespace,
        model: list[nn.Module],
        optimizer: MegatronOptimizer | None,
        scheduler: OptimizerParamScheduler | None,
        forward_step_func: ForwardStep,
        data: RunData,
        pg_collection: ProcessGroupCollection,
        process_non_loss_data_func: Callable[..., None] | None = None,
        build_data: Callable[[], RunData] | None = None,
    ):
        self.args, self.model, self.optimizer, self.scheduler = args, model, optimizer, scheduler
        self.forward_step_func, self.pg_collection = forward_step_func, pg_collection
        train, self.valid_data, self.test_data = data
        self.build_data = build_data
        self.straggler = Straggler(args) if args.log_straggler else None
        self.train_step_func = forward_step_func
        if self.straggler is not None:
            self.train_step_func = self.straggler.around(forward_step_func)
        self.log = TrainingLog(args, args.timers, pg_collection)
        self.profiler = Profiler(args, model)
        self.diagnostics = Diagnostics(args, model, optimizer, pg_collection)
        self.process_non_loss_data_func = process_non_loss_data_func
        self.exit_signal = SignalWatch.of(args)
        self.saves = Saves(args, model, optimizer, scheduler)
        self.watch: hang_watch.HangWatch | None = None
        self.heartbeat: Heartbeat | None = None
        if args.heartbeat_file and rank_and_world_size()[0] == 0:
            self.heartbeat = Heartbeat(args.heartbeat_file, args)
        self.guard: FaultGuard | None = None
        if optimizer is not None and train is not None:
            watched = self._train_data(train)
            self.guard = FaultGuard(args, model, optimizer, watched, pg_collection, self.saves.save_again)
            self.saves.rerun_state = self.guard.state_dict
        self._timeout_after_init = args.distributed_timeout_seconds_after_init

    # -- the course of a run ---------------------------------------------------------------------------------------
    def run(self) -> None:
        """Train to the end or to a reason to stop; then save and evaluate."""
        args = self.args
        if args.save and rank_and_world_size()[0] == 0:
            save_config(args, str(Path(args.save) / "config.yaml"))
        if args.skip_train:
            print_rank_0("skipping training (--skip-train is on) ...")
        else:
            print_rank_0("training ...")
            if not self._train():
                return
        self.log.energy.report()
        print_datetime("after training is done")
        if not args.skip_train:
            self._save(final=True)
        for name, data in (("validation", self.valid_data), ("test", self.test_data)):
            self._evaluate(data, f"iteration {args.iteration} on {name} set", record=False, verbose=True)
        self._note(DONE)

    def _train(self) -> bool:
        """Iterations up to `--train-iters`. Returns: whether the run is to go on with its last evaluations."""
        args = self.args
        for chunk in self.model:
            chunk.train()
        if args.manual_gc:
            gc.disable()
            gc.collect()
        if args.eval_before_training and args.iteration == 0:
            self._evaluate(self.valid_data, "iteration 0")
        if args.check_weight_hash_across_dp_replicas_interval:
            check_weight_hashes(self.model, args.iteration, self.pg_collection)
        print_datetime("before the start of training step")
        self.log.start_interval()
        self._note("start of training")
        try:
            while args.iteration < args.train_iters:
                if not self._iterate():
                    continue  # a checkpoint's own iteration is no reason to leave behind it
                leave = exit_reason(args, args.iteration, self.exit_signal)
                if leave is not None and args.iteration < args.train_iters:
                    if leave.saves:
                        self._save(final=True)
                    print_datetime(leave.reason)
                    self._note("has left before the end")
                    return False
        except PeerLost:
            if self.exit_signal is not None:
                self.exit_signal.give_in()
            raise
        finally:
            if args.manual_gc:
                gc.enable()
            if self.exit_signal is not None:
                self.exit_signal.restore()
        return True

    def _iterate(self) -> bool:
        """An iteration and what is due behind it. Returns: False where the run went back to a checkpoint instead."""
        args = self.args
        done = True
        microbatches = get_num_microbatches()
        update_num_microbatches(args.consumed_train_samples, consistency_check=True)
        if get_num_microbatches() != microbatches and args.iteration and args.save:
            self._save()
        self.saves.poll()
        iteration = args.iteration + 1
        self._note(f"iteration {iteration}")
        batch = get_num_microbatches() * args.micro_batch_size * args.data_parallel_size
        self.profiler.before_step(iteration)
        assert self.guard is not None, "this run was set up without training"
        if iteration in args.iterations_to_skip:
            self._skip(batch, "--iterations-to-skip")
        elif iteration in self.guard.left_out:
            self._skip(batch, "its result was bad before")
        else:
            done = self._step(iteration, batch)
        self.profiler.after_step(iteration)
        if not done:
            return False
        hashes = args.check_weight_hash_across_dp_replicas_interval
        if hashes and iteration % hashes == 0:
            self._pause(lambda: check_weight_hashes(self.model, iteration, self.pg_collection))
        due = args.eval_interval and iteration % args.eval_interval == 0
        if due and iteration >= (args.start_eval_at_iter or 0) and self.valid_data:
            self._pause(lambda: self._evaluate(self.valid_data, f"iteration {iteration}"))
        if args.manual_gc and args.manual_gc_interval and iteration % args.manual_gc_interval == 0:
            gc.collect()
        rolling = args.non_persistent_save_interval
        if args.save and args.save_interval and iteration % args.save_interval == 0:
            self._save()
        elif args.save and rolling and iteration % rolling == 0:
            self._pause(self.saves.save_rolling)
        return True

    def _step(self, iteration: int, batch: int) -> bool:
        """Returns: whether the iteration is done; else the run is back at its last checkpoint."""
        args, guard = self.args, self.guard
        optimizer, scheduler = self.optimizer, self.scheduler
        assert optimizer is not None and scheduler is not None and guard is not None, "a run set up without training"
        self.diagnostics.before_step(iteration)

        def run(checks: ResultChecks | None, update: bool) -> StepResult:
            self.diagnostics.start_over()
            return train_step(
                self.train_step_func,
                guard.data,
                self.model,
                optimizer,
                scheduler,
                args,
                iteration,
                self.pg_collection,
                checks,
                update,
            )

        try:
            with self.log.communication.step(), self.straggler.step() if self.straggler else nullcontext():
                result = guard.step(iteration, run)
        except StopIteration:
            raise self._out_of_data(iteration) from None
        measured = self.diagnostics.after_step(iteration)
        if result is None:
            self._pause(self._roll_back)
            return False
        args.iteration = iteration
        args.consumed_train_samples += batch
        args.num_floating_point_operations_so_far += num_floating_point_operations(args, batch)
        args.loss_scale_now = float(optimizer.get_loss_scale())
        self.log.step(iteration, result, batch, measured)
        if self.straggler is not None and iteration % args.log_interval == 0:
            self.straggler.report(num_floating_point_operations(args, batch))
        if self._timeout_after_init is not None:  # the first iteration may take long: it makes NCCL's communicators
            set_timeout(self.pg_collection, timedelta(seconds=self._timeout_after_init))
            if self.watch is not None:
                self.watch.set_limit(self._timeout_after_init)
            self._timeout_after_init = None
        return True

    def _roll_back(self) -> None:
        """Go on from the last checkpoint, as a start with `--load` would."""
        assert self.build_data is not None and self.guard is not None, "data that can be read again"
        self.saves.load_last()
        update_num_microbatches(self.args.consumed_train_samples, consistency_check=True)
        train, self.valid_data, self.test_data = self.build_data()
        assert train is not None, "what was trained on before"
        self.guard.read_from(self._train_data(train))
        self.log.roll_back()

    def _train_data(self, train: Iterator[Any]) -> Iterator[Any] | list[Iterator[Any]]:
        """What steps read, for each chunk."""
        timed = train if self.straggler is None else self.straggler.timed(train)
        assert timed is not None, "there are data"
        return for_chunks(timed, self.args, self.pg_collection)

    def _skip(self, batch: int, why: str) -> None:
        """Read the batch of this iteration, and do not train on it."""
        args = self.args
        assert self.guard is not None, "a run set up without training"
        try:
            for _ in range(get_num_microbatches()):
                skip_batch(self.guard.data, self.pg_collection.tp)
        except StopIteration:
            raise self._out_of_data(args.iteration + 1) from None
        args.iteration += 1
        args.consumed_train_samples += batch
        args.skipped_train_samples += batch
        print_rank_0(f"skipped iteration {args.iteration} ({why})")

    def _out_of_data(self, iteration: int) -> DataError:
        return DataError(
            f"the training data ended in iteration {iteration} of {self.args.train_iters}",
            why=f"{self.args.consumed_train_samples} samples were used",
            fix="fewer --train-iters, or --dataloader-type cyclic",
        )

    # -- beside the steps ------------------------------------------------------------------------------------------
    def _note(self, doing: str) -> None:
        if self.watch is not None:
            self.watch.note(doing)
        if self.heartbeat is not None:
            self.heartbeat.beat(doing)

    def _pause(self, action: Callable[[], object]) -> None:
        """Do something that is not part of an iteration's time."""
        timer = self.args.timers("interval-time")
        timer.stop()
        self.log.energy.pause()
        if self.args.manual_gc and self.args.manual_gc_eval:
            gc.collect()
        action()
        if self.args.manual_gc and self.args.manual_gc_eval:
            gc.collect(generation=0)
        self.log.energy.start()
        timer.start(barrier=True)

    def _evaluate(
        self, data: Sequence[EvaluationSet], prefix: str, *, record: bool = True, verbose: bool = False
    ) -> None:
        args = self.args
        self._note(f"evaluation after iteration {args.iteration}")
        limit = args.exit_duration_in_mins

        def out_of_time() -> bool:
            if limit is None:
                return False
            return bool(agree(int((time.time() - program_start()) / 60.0 > limit), args.device))

        for held_out in data:
            losses = evaluate(
                self.forward_step_func,
                held_out,
                self.model,
                args,
                self.pg_collection,
                verbose=verbose,
                out_of_time=out_of_time,
            )
            if losses is None:
                return
            self.log.validation(prefix, args.iteration, losses, name=held_out.name, record=record)
            if self.process_non_loss_data_func is not None and args.tensorboard_dir:
                collected = collect_non_loss_data(
                    self.forward_step_func, held_out, self.model, args, self.pg_collection
                )
                if self.log.is_last_rank:
                    self.process_non_loss_data_func(collected, args.iteration, self.log.writer)

    def _save(self, final: bool = False) -> None:
        """Save once an iteration. A save that fails does not stop training, but it does fail the run's last one."""
        self._note(f"save after iteration {self.args.iteration}")
        if final:
            self.saves.save_last()
        elif self.saves.due():
            self._pause(self.saves.save)
