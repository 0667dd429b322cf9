"""`--profile`: a range of steps, recorded by torch's profiler (Chrome trace), or marked for nsys on CUDA."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from megatron_lite.log import rank_and_world_size, say


class Profiler:
    """Starts before iteration `--profile-step-start` and ends before `--profile-step-end`, on `--profile-ranks`.

    On CUDA without `--use-pytorch-profiler` the range is for `nsys profile --capture-range=cudaProfilerApi`.
    """

    def __init__(self, args: Namespace):
        rank, _ = rank_and_world_size()
        self.args, self.rank = args, rank
        self.chosen = args.profile and (not args.profile_ranks or rank in args.profile_ranks)
        self.running: Any = None

    def before_step(self, iteration: int) -> None:
        """Called with the number of the iteration that is about to run."""
        if not self.chosen:
            return
        if self.running is not None and iteration >= self.args.profile_step_end:
            self.stop()
        if self.running is None and self.args.profile_step_start <= iteration < self.args.profile_step_end:
            self._start()

    def _start(self) -> None:
        if self.args.device.type == "cuda" and not self.args.use_pytorch_profiler:
            torch.cuda.cudart().cudaProfilerStart()
            self.running = "nsys"
            return
        self.running = torch.profiler.profile(record_shapes=True)
        self.running.start()

    def stop(self) -> None:
        """End the range and write the trace; harmless when nothing runs."""
        running, self.running = self.running, None
        if running is None:
            return
        if running == "nsys":
            torch.cuda.cudart().cudaProfilerStop()
            return
        running.stop()
        folder = Path(self.args.tensorboard_dir or self.args.save or ".")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"trace_rank{self.rank}.json"
        running.export_chrome_trace(str(path))
        say(f"profile of rank {self.rank} written to {path} (open it in a browser's trace viewer)")
