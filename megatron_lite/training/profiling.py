"""`--profile`: a range of steps, as a trace of torch's profiler, or marked for nsys on CUDA; CUDA's memory over time.

                     on CUDA                                              on a CPU, or with --use-pytorch-profiler
    --profile        cudaProfilerStart/Stop, operators as NVTX ranges     trace_rank0.json (Chrome's format)
    --nvtx-ranges    iterations and parts of the model, by name: ranges of NVTX, or of the trace
    --record-shapes  shapes of inputs, in either

    --record-memory-history      on CUDA a pickle for torch's memory viewer, written anew at each log interval;
                                 on a CPU what operators allocate, in the trace

torch has one kind of range: `emit_nvtx` makes NVTX of it, the profiler writes it into its trace.
"""

from __future__ import annotations

import pickle
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_lite.log import once, rank_and_world_size, say

_ALLOCATIONS_KEPT = 100_000
_OF_THE_TRACE = (
    "pytorch_profiler_collect_shapes",
    "pytorch_profiler_collect_callstack",
    "pytorch_profiler_collect_chakra",
)


class Profiler:
    """Starts before iteration `--profile-step-start` and ends before `--profile-step-end`, on `--profile-ranks`.

    On CUDA without `--use-pytorch-profiler` the range is for `nsys profile --capture-range=cudaProfilerApi`.

    Args:
        model: this rank's chunks, whose parts `--nvtx-ranges` names.
    """

    def __init__(self, args: Namespace, model: Sequence[nn.Module]):
        self.rank, _ = rank_and_world_size()
        self.args, self._model = args, model
        chosen = not args.profile_ranks or self.rank in args.profile_ranks
        self.chosen = args.profile and chosen
        self.running: Any = None
        self._nvtx: Any = None
        self._ranges = Ranges(model) if args.nvtx_ranges else None
        on_cuda = args.device.type == "cuda"
        self._snapshots = args.record_memory_history and on_cuda and chosen
        if self._snapshots:
            torch.cuda.memory._record_memory_history("all", stacks="all", max_entries=_ALLOCATIONS_KEPT)
        elif args.record_memory_history and not on_cuda:
            where = "--profile's trace shows what operators allocate" if args.profile else "add --profile for a trace"
            once(f"--record-memory-history: torch keeps a history of allocations on CUDA alone; {where}")

        collected = [name for name in _OF_THE_TRACE if getattr(args, name)]
        if self.chosen and on_cuda and not args.use_pytorch_profiler and collected:
            flags = ", ".join("--" + name.replace("_", "-") for name in collected)
            once(f"{flags}: no effect without --use-pytorch-profiler: on CUDA the profile is nsys'")

    def before_step(self, iteration: int) -> None:
        """Called with the number of the iteration that is about to run."""
        if not self.chosen:
            return
        if self.running is not None and iteration >= self.args.profile_step_end:
            self.stop()
        if self.running is None and self.args.profile_step_start <= iteration < self.args.profile_step_end:
            self._start()
        if self.running is not None and self._ranges is not None:
            self._ranges.begin_iteration(iteration)

    def after_step(self, iteration: int) -> None:
        """Called when the iteration is done."""
        if self._ranges is not None:
            self._ranges.end_iteration()
        args = self.args
        if self._snapshots and (iteration % args.log_interval == 0 or iteration == args.train_iters):
            self._write_snapshot()

    def _start(self) -> None:
        args = self.args
        if self._ranges is not None:
            self._ranges.attach()
        if args.device.type == "cuda" and not args.use_pytorch_profiler:
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStart()
            self._nvtx = torch.autograd.profiler.emit_nvtx(record_shapes=args.record_shapes)
            self._nvtx.__enter__()
            self.running = "nsys"
            return
        observer: Any = None
        if args.pytorch_profiler_collect_chakra:
            observer = torch.profiler.ExecutionTraceObserver()
            observer.register_callback(str(self._file("execution_trace")))
        self.running = torch.profiler.profile(
            record_shapes=args.pytorch_profiler_collect_shapes or args.record_shapes,
            with_stack=args.pytorch_profiler_collect_callstack,
            profile_memory=args.record_memory_history,
            execution_trace_observer=observer,
        )
        self.running.start()

    def stop(self) -> None:
        """End the range and write the trace; harmless when nothing runs."""
        running, self.running = self.running, None
        if self._ranges is not None:
            self._ranges.detach()
        if running is None:
            return
        if running == "nsys":
            torch.cuda.synchronize()
            self._nvtx.__exit__(None, None, None)
            torch.cuda.cudart().cudaProfilerStop()
            return
        running.stop()
        path = self._file("trace")
        partial = path.with_name(f"{path.name}.tmp")  # torch's own: where the disk does not take it, it stays, unsaid
        try:
            path.unlink(missing_ok=True)  # a former run's is not to be taken for this one's
            running.export_chrome_trace(str(path))
            if not path.is_file():
                raise OSError("the disk did not take the whole file")
        except OSError as error:
            partial.unlink(missing_ok=True)
            say(f"WARNING: rank {self.rank}: no profile written to {path}, training goes on: {error}", sys.stderr)
        else:
            say(f"profile of rank {self.rank} written to {path} (open it in a browser's trace viewer)")
        if self.args.pytorch_profiler_collect_chakra:
            say(f"execution trace of rank {self.rank} written to {self._file('execution_trace')}")

    def close(self) -> None:
        """The run ends."""
        self.stop()
        if self._snapshots:
            torch.cuda.memory._record_memory_history(None)

    def _file(self, name: str) -> Path:
        folder = Path(self.args.tensorboard_dir or self.args.save or ".")
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{name}_rank{self.rank}.json"

    def _write_snapshot(self) -> None:
        """`snapshot.pickle` of rank 0, `snapshot_rank3.pickle` of rank 3: for https://pytorch.org/memory_viz."""
        path = Path(self.args.memory_snapshot_path)
        if self.rank:
            path = path.with_name(f"{path.stem}_rank{self.rank}{path.suffix}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as file:
                pickle.dump(torch.cuda.memory._snapshot(), file)
        except OSError as error:
            say(f"WARNING: rank {self.rank}: no snapshot written to {path}, training goes on: {error}", sys.stderr)


class Ranges:
    """Named ranges around iterations and the forward of the model's parts, while attached.

    Args:
        model: chunks; parts are named as in the first one's `named_modules`, without what wraps it.
    """

    def __init__(self, model: Sequence[nn.Module]):
        self._model = model
        self._hooks: list[Any] = []
        self._open: list[Any] = []
        self._iteration: Any = None

    def attach(self) -> None:
        """Parts get ranges from now on."""
        for chunk in self._model:
            for name, module in chunk.named_modules():
                title = name.removeprefix("module.").removeprefix("module.")
                if title and title != "module":
                    self._hooks.append(module.register_forward_pre_hook(self._begin(title)))
                    self._hooks.append(module.register_forward_hook(self._end, always_call=True))

    def detach(self) -> None:
        """No more ranges."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.end_iteration()

    def begin_iteration(self, iteration: int) -> None:
        """A range that all others lie in."""
        self._iteration = torch.profiler.record_function(f"iteration {iteration}")
        self._iteration.__enter__()

    def end_iteration(self) -> None:
        """Close what is open."""
        while self._open:
            self._open.pop().__exit__(None, None, None)
        if self._iteration is not None:
            self._iteration.__exit__(None, None, None)
            self._iteration = None

    def _begin(self, title: str) -> Any:
        def hook(module: nn.Module, inputs: Any) -> None:
            part = torch.profiler.record_function(title)
            part.__enter__()
            self._open.append(part)

        return hook

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)
