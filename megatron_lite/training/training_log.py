"""What a run says while it runs: Megatron's log line, TensorBoard, `metrics.jsonl`, and the summary before the start.

    every step           TensorBoard scalars, sums for the next line
    every log interval   the line (last rank), timers, one object in metrics.jsonl; the last iteration ends one too
    an evaluation        the validation line, its scalars, one object in metrics.jsonl

The learning rate of line i is the one that update i used (Megatron prints the next one's).
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_lite import collectives
from megatron_lite.log import print_rank_0, print_rank_last, rank_and_world_size, say
from megatron_lite.num_microbatches_calculator import get_num_microbatches
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.timers import Timers
from megatron_lite.training import global_vars
from megatron_lite.training.communication_log import CommunicationLog, as_text
from megatron_lite.training.derived import tokens_per_sample
from megatron_lite.training.diagnostics import Measured
from megatron_lite.training.energy import EnergyMeter
from megatron_lite.training.evaluation import perplexity, result_line, validation_tag
from megatron_lite.training.event_files import forget_after
from megatron_lite.training.expert_log import ExpertLog, ExpertStatistics
from megatron_lite.training.flops import num_floating_point_operations
from megatron_lite.training.memory_estimate import memory_of
from megatron_lite.training.report_metrics import METRICS
from megatron_lite.training.run_logs import SparingWriter, append_line
from megatron_lite.training.train_step import StepResult
from megatron_lite.training.wandb_log import WandbLog
from megatron_lite.transformer.moe.moe_rules import moe_layers

# As in Megatron, without the levels; those that never ran are left out when printed.
_TIMERS = [
    "forward-backward",
    "forward-compute",
    "backward-compute",
    "batch-generator",
    "forward-recv",
    "forward-send",
    "backward-recv",
    "backward-send",
    "conditional-embedder-grads-all-reduce",
    "non-tensor-parallel-grads-all-reduce",
    "embedding-grads-all-reduce",
    "all-grads-sync",
    "params-all-gather",
    "optimizer-copy-to-main-grad",
    "optimizer-unscale-and-check-inf",
    "optimizer-clip-main-grad",
    "optimizer-count-zeros",
    "optimizer-inner-step",
    "optimizer-copy-main-to-model-params",
    "optimizer",
]


class TrainingLog:
    """Collects what steps report and writes it in Megatron's forms.

    Args:
        args: resolved arguments; `args.iteration` is where the run starts.
        timers: the run's timers; `interval-time` is started and read here.
    """

    def __init__(self, args: Namespace, timers: Timers, pg_collection: ProcessGroupCollection):
        self.args, self.timers, self.pg_collection = args, timers, pg_collection
        rank, world_size = rank_and_world_size()
        self.is_last_rank, self.world_size = rank == world_size - 1, world_size
        self.writer = _tensorboard(args) if self.is_last_rank else None
        self.wandb = WandbLog(args) if self.is_last_rank and args.wandb_project else None
        global_vars.set_tensorboard_writer(self.writer)
        global_vars.set_wandb_writer(self.wandb.package if self.wandb else None)
        self.communication = CommunicationLog(args.log_communication)
        self.experts = ExpertLog(args)
        self.energy = EnergyMeter(args.log_energy, args.device)
        self._sums: dict[str, float] = {}
        self._counted = self._skipped = self._nan = 0
        self._iterations = self._tokens = 0
        self._report_memory = True
        self._progress_line = self.is_last_rank and sys.stdout.isatty()
        self._run_start = time.monotonic()
        self._first_iteration = args.iteration

    # -- a step --------------------------------------------------------------------------------------------------
    def step(
        self,
        iteration: int,
        result: StepResult,
        batch_size: int,
        measured: Measured,
    ) -> None:
        """Note a step; at the log interval print the line."""
        args = self.args
        self._iterations += 1
        self._tokens += batch_size * tokens_per_sample(args)
        if result.skipped:
            self._skipped += 1
            self._nan += any(not math.isfinite(loss) for loss in result.losses.values())
        else:
            self._counted += 1
            for key, loss in result.losses.items():
                self._sums[key] = self._sums.get(key, 0.0) + loss
        if measured.experts is not None:
            self._experts(iteration, measured.experts)
        if iteration % args.tensorboard_log_interval == 0:
            self._scalars(iteration, result, batch_size, measured)
        if args.log_memory_interval and iteration % args.log_memory_interval == 0:
            self._report_memory = True
        if iteration % args.log_interval == 0 or iteration == args.train_iters:
            self._line(iteration, result, batch_size, measured, ends=True)
            self.start_over()
        elif iteration == self._first_iteration + 1:  # so that a run shows at once that it learns; sums go on
            self._line(iteration, result, batch_size, measured, ends=False)
        elif self._progress_line:
            self._progress(iteration, result)
        self._memory(iteration)

    def _memory(self, iteration: int) -> None:
        """Memory, where it is to be told and was not yet."""
        if self._report_memory:
            self._report_memory = False
            self._clear_progress()
            whole_device = self.args.log_device_memory_used
            print_memory(iteration, self.args.device, self.pg_collection, whole_device=whole_device)

    def _experts(self, iteration: int, found: ExpertStatistics) -> None:
        args = self.args
        self.experts.step(found)
        if iteration % args.tensorboard_log_interval == 0:
            for tag, value in self.experts.scalars(found).items():
                self.add_scalar(tag, value, iteration)
        interval = args.save_tokens_per_expert_interval
        if interval and iteration % interval == 0 and self.is_last_rank:
            self.experts.write_counts(iteration, found)

    def _scalars(self, iteration: int, result: StepResult, batch_size: int, measured: Measured) -> None:
        args = self.args
        both: dict[str, float | int | None] = {
            "learning-rate": result.learning_rate,
            "batch-size": batch_size,
            **result.losses,
            "loss-scale": args.loss_scale_now if args.log_loss_scale_to_tensorboard else None,
            "world-size": self.world_size if args.log_world_size_to_tensorboard else None,
            "grad-norm": result.grad_norm,
            "num-zeros": result.num_zeros,
            "params-norm": measured.params_norm,
        }
        for tag, value in both.items():
            if value is not None:
                self.add_scalar(tag, value, iteration)
                if self.writer:
                    self.writer.add_scalar(f"{tag} vs samples", value, args.consumed_train_samples)
        if self.wandb:
            self.wandb.add_scalar("samples vs steps", args.consumed_train_samples, iteration)
        if measured.max_attention_logit is not None:
            self.add_scalar("max_attention_logit", measured.max_attention_logit, iteration)
        if args.skipped_train_samples > 0:
            self.add_scalar("skipped-train-samples", args.skipped_train_samples, iteration)
        if args.log_memory_to_tensorboard and args.device.type != "cuda":
            self.add_scalar("mem-max-resident-bytes", _max_resident_bytes(), iteration)
        elif args.log_memory_to_tensorboard:
            stats = torch.cuda.memory_stats()
            for tag, key in (
                ("mem-reserved-bytes", "reserved_bytes.all.current"),
                ("mem-allocated-bytes", "allocated_bytes.all.current"),
                ("mem-max-allocated-bytes", "allocated_bytes.all.peak"),
                ("mem-allocated-count", "allocation.all.current"),
            ):
                self.add_scalar(tag, stats[key], iteration)

    def add_scalar(self, tag: str, value: float, iteration: int) -> None:
        """One scalar to TensorBoard and W&B, on the last rank."""
        for writer in (self.writer, self.wandb):
            if writer:
                writer.add_scalar(tag, value, iteration)

    # -- the line ------------------------------------------------------------------------------------------------
    def _line(self, iteration: int, result: StepResult, batch_size: int, measured: Measured, ends: bool) -> None:
        """The line. `ends`: it closes its interval, whose iterations it averages."""
        args = self.args
        seconds = self.timers("interval-time").elapsed(reset=ends, barrier=True) / self._iterations
        throughput = num_floating_point_operations(args, batch_size) / (seconds * 1e12 * self.world_size)
        line = f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}]"
        line += f" iteration {iteration:8d}/{args.train_iters:8d} |"
        line += f" consumed samples: {args.consumed_train_samples:12d} |"
        if args.skipped_train_samples > 0:
            line += f" skipped samples: {args.skipped_train_samples:12d} |"
        line += f" elapsed time per iteration (ms): {seconds * 1000.0:.1f} |"
        if args.log_throughput:
            line += f" throughput per GPU (TFLOP/s/GPU): {throughput:.1f} |"
        energy = self.energy.read(reset=ends)
        if energy is not None:
            energy = energy[0] / self._iterations, energy[1]
            line += f" energy per GPU (J/iter/GPU): {energy[0]:.1f} | power per GPU (W/GPU): {energy[1]:.1f} |"
        line += f" learning rate: {result.learning_rate:.6E} |"
        line += f" global batch size: {batch_size:5d} |"
        means = {key: total / max(self._counted, 1) for key, total in self._sums.items()}
        if not means:  # every step of the interval was skipped: say what their loss was
            means = {key: (loss if math.isfinite(loss) else math.nan) for key, loss in result.losses.items()}
        of_experts, others = self.experts.means()
        means |= of_experts
        for key, mean in means.items():
            line += f" {key}: {mean:.6E} |"
        for key, mean in others.items():
            line += f" {key}: {mean:.2f} |"
        line += f" loss scale: {args.loss_scale_now:.1f} |"
        if result.grad_norm is not None:
            line += f" grad norm: {result.grad_norm:.3f} |"
        if result.num_zeros is not None:
            line += f" num zeros: {int(result.num_zeros)} |"
        if measured.params_norm is not None:
            line += f" params norm: {measured.params_norm:.3f} |"
        line += f" number of skipped iterations: {self._skipped:3d} |"
        line += f" number of nan iterations: {self._nan:3d} |"
        if measured.max_attention_logit is not None:
            line += f" max attention logit: {measured.max_attention_logit:.3f} |"
        self._clear_progress()
        print_rank_last(line)
        self.write_metrics(
            {
                "iteration": iteration,
                "consumed_samples": args.consumed_train_samples,
                **{key: _json_number(mean) for key, mean in {**means, **others}.items()},
                "learning_rate": result.learning_rate,
                "global_batch_size": batch_size,
                "grad_norm": _json_number(result.grad_norm),
                "loss_scale": args.loss_scale_now,
                "elapsed_ms": seconds * 1000.0,
                "tokens_per_s": self._tokens / self._iterations / seconds,
                "tflops_per_device": throughput,
                **({"joules_per_device": energy[0], "watts_per_device": energy[1]} if energy else {}),
                **({"max_attention_logit": logit} if (logit := measured.max_attention_logit) is not None else {}),
                "skipped_iterations": self._skipped,
                "nan_iterations": self._nan,
                **({"communication": self.communication.rows()} if self.communication.enabled else {}),
            }
        )
        if energy is not None:
            self.add_scalar("iter-energy/gpu", energy[0], iteration)
            self.add_scalar("power/gpu", energy[1], iteration)
        if args.log_timers_to_tensorboard:
            self.add_scalar("iteration-time", seconds, iteration)
            if args.log_throughput:
                self.add_scalar("throughput", throughput, iteration)
            if ends:
                everywhere = self if self.is_last_rank else None
                self.timers.write(_TIMERS, everywhere, iteration, normalizer=self._iterations, reset=False)
        self._memory(iteration)
        if self.communication.enabled:
            print_rank_last(as_text(self.communication.rows(), rank_and_world_size()[0]))
        if ends:
            self.timers.log(_TIMERS, normalizer=self._iterations)
        self.flush()

    def start_over(self) -> None:
        """Forget the sums of the next line."""
        self.communication.start_over()
        self._sums.clear()
        self.experts.start_over()
        self._counted = self._skipped = self._nan = self._iterations = self._tokens = 0

    def roll_back(self) -> None:
        """The run goes on from `args.iteration` again: what was logged behind it is undone. Collective."""
        args = self.args
        self.start_over()
        self.timers("interval-time").reset()
        self.energy.read(reset=True)  # was used, so it counts in the total
        self.write_metrics({"rolled_back_to": args.iteration})
        if self.writer:
            self.writer.close()  # the next event opens another file
            try:
                forget_after(args.tensorboard_dir, args.iteration, args.consumed_train_samples)
            except OSError as error:
                say(f"WARNING: {args.tensorboard_dir} shows steps that were undone: {error}", sys.stderr)

    def _progress(self, iteration: int, result: StepResult) -> None:
        """A line that overwrites itself between log lines, on a terminal only."""
        done = iteration - self._first_iteration
        rate = done / max(time.monotonic() - self._run_start, 1e-9)
        left = (self.args.train_iters - iteration) / rate
        loss = next(iter(result.losses.values()), math.nan)
        text = (
            f" iteration {iteration}/{self.args.train_iters} | loss {loss:.3f} | {rate:.2f} it/s | {_clock(left)} left"
        )
        sys.stdout.write(f"\r\x1b[2K{text}")
        sys.stdout.flush()

    def _clear_progress(self) -> None:
        if self._progress_line:
            sys.stdout.write("\r\x1b[2K")

    # -- evaluation, files ---------------------------------------------------------------------------------------
    def validation(
        self, prefix: str, iteration: int, losses: dict[str, float], *, name: str = "", record: bool = True
    ) -> None:
        """The validation line; with `record` also scalars and metrics.

        Args:
            prefix: what stands after "validation loss at".
            name: of the validation set, where there are several.
        """
        args, called = self.args, validation_tag(name)
        self._clear_progress()
        print_rank_last(result_line(prefix, losses, name))
        if not record:
            return
        for key, loss in losses.items():
            values = {f"{key} {called}": loss}
            if args.log_validation_ppl_to_tensorboard:
                values[f"{key} {called} ppl"] = perplexity(loss)
            for tag, value in values.items():
                self.add_scalar(tag, value, iteration)
                if self.writer:
                    self.writer.add_scalar(f"{tag} vs samples", value, args.consumed_train_samples)
        of_set = {f"{key} ({name})": loss for key, loss in losses.items()} if name else losses
        self.write_metrics({"iteration": iteration, "validation": of_set})
        self.flush()

    def write_metrics(self, row: dict[str, Any]) -> None:
        """Append one JSON object to `<save>/metrics.jsonl`. A resumed run repeats iterations: the last one counts."""
        if self.is_last_rank and self.args.save:
            append_line(Path(self.args.save) / METRICS, json.dumps(row))

    def start_interval(self) -> None:
        """Begin to time the iterations of the next line."""
        self.energy.start()
        self.timers("interval-time", log_level=0).start(barrier=True)

    def flush(self) -> None:
        """Make what was written visible to readers."""
        if self.writer:
            self.writer.flush()
        if self.wandb:
            self.wandb.register_checkpoint()

    def close(self) -> None:
        """End the files."""
        self._clear_progress()
        if self.writer:
            self.writer.close()
        if self.wandb:
            self.wandb.finish()


def _json_number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


# -- where it goes -----------------------------------------------------------------------------------------------
def _tensorboard(args: Namespace) -> Any:
    if not args.tensorboard_dir:
        return None
    from torch.utils.tensorboard import SummaryWriter  # a second of imports, only for those who want it

    say(f"> setting tensorboard ... ({args.tensorboard_dir})")
    if args.iteration:  # a run that was killed after its last save wrote steps that are now done again
        forget_after(args.tensorboard_dir, args.iteration, args.consumed_train_samples)
    writer = SparingWriter(SummaryWriter(log_dir=args.tensorboard_dir, max_queue=args.tensorboard_queue_size))
    for name, value in sorted(vars(args).items()):
        writer.add_text(name, str(value), global_step=args.iteration)
    return writer


# -- the summary before the start --------------------------------------------------------------------------------
def describe_run(args: Namespace, model: Sequence[nn.Module], pg_collection: ProcessGroupCollection) -> None:
    """Rank 0 says once what will be done: layout, parameters, memory that is known ahead, tokens per step."""
    sizes = {True: 0, False: 0}  # experts' parameters, all others
    for chunk in model:
        for param in chunk.parameters():
            sizes[not getattr(param, "allreduce", True)] += param.numel()
    params = sum(sizes.values())
    where = "on this rank"
    more = "activations"
    if args.is_fully_sharded:
        where, more = "of which this rank keeps its rows", "whole weights of layers that run, and activations"
    batch = get_num_microbatches() * args.micro_batch_size * args.data_parallel_size
    length = tokens_per_sample(args)
    lines = [
        "run:",
        f"  layout            {rank_and_world_size()[1]} rank(s) = tp {args.tensor_model_parallel_size} x cp "
        f"{args.context_parallel_size} x dp {args.data_parallel_size} x pp {args.pipeline_model_parallel_size}"
        f" on {args.device.type}",
        f"  parameters        {params:,} {where}, {str(args.params_dtype).removeprefix('torch.')}",
        *_experts_line(args),
        f"  memory per rank   {memory_of(args, sizes[False], sizes[True])}, and {more}",
        f"  a step            {batch} samples x {length} = {batch * length:,} tokens in "
        f"{get_num_microbatches()} micro-batch(es) a rank",
        f"  the run           {args.train_iters:,} iterations, of which {args.iteration:,} are done",
    ]
    for line in lines:
        print_rank_0(line)


def _experts_line(args: Namespace) -> list[str]:
    if not args.num_experts:
        return []
    layers, ep = (
        sum(moe_layers(args.num_layers, args.num_experts, args.moe_layer_freq)),
        args.expert_model_parallel_size,
    )
    return [
        f"  experts           {args.num_experts} in {layers} of {args.num_layers} layers, {args.moe_router_topk} for a "
        f"token; {args.num_experts // ep} of a layer on a rank (ep {ep}, expert tp {args.expert_tensor_parallel_size})"
    ]


def print_memory(
    iteration: int, device: torch.device, pg_collection: ProcessGroupCollection, *, whole_device: bool = False
) -> None:
    """Measured memory, by every rank that is the first of its data-parallel group.

    Args:
        whole_device: also what all processes use of the device, as its driver (or the system) sees it.
    """
    if collectives.group_rank(pg_collection.dp_cp) != 0 and not collectives.is_fake(pg_collection.dp_cp):
        return
    rank, _ = rank_and_world_size()
    mib = 1024.0 * 1024.0
    text = f"[Rank {rank}] (after {iteration} iterations) memory (MB)"
    if device.type == "cuda":
        text += (
            f" | allocated: {torch.cuda.memory_allocated() / mib:.1f}"
            f" | max allocated: {torch.cuda.max_memory_allocated() / mib:.1f}"
            f" | reserved: {torch.cuda.memory_reserved() / mib:.1f}"
            f" | max reserved: {torch.cuda.max_memory_reserved() / mib:.1f}"
        )
    else:
        resident = _resident_bytes()
        text += "" if resident is None else f" | resident: {resident / mib:.1f}"
        text += f" | max resident: {_max_resident_bytes() / mib:.1f}"
    if whole_device:
        used = _device_bytes_used(device)
        text += f" | total device memory used: {'unknown' if used is None else format(used / mib, '.1f')}"
    say(text)


def _device_bytes_used(device: torch.device) -> int | None:
    """By all processes together; of a CPU the machine's memory, where Linux tells it."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        return (kib["MemTotal"] - kib["MemAvailable"]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _resident_bytes() -> int | None:
    """This process's memory now, where Linux tells it."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return None


def _max_resident_bytes() -> int:
    """This process's memory at its largest."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
