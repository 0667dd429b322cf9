"""`--log-progress`: `<save>/progress.txt`, the life of a job over all its restarts, in Megatron's format.

The cumulative throughput of a line is computed by reading the file back, so the format is an input too.
"""

from __future__ import annotations

import os
from argparse import Namespace
from datetime import datetime
from pathlib import Path

from megatron_lite.log import rank_and_world_size
from megatron_lite.training.derived import tokens_per_sample
from megatron_lite.training.run_logs import append_line

_TIME = "%Y-%m-%d %H:%M:%S"


def append_progress(args: Namespace, message: str) -> None:
    """One line, by rank 0: time, job, number of ranks, message; separated by tabs."""
    rank, world_size = rank_and_world_size()
    if not args.log_progress or not args.save or rank != 0:
        return
    job = os.environ.get("SLURM_JOB_ID", "")
    append_line(_path(args), f"{datetime.now():{_TIME}}\tJob ID: {job}\t# GPUs: {world_size}\t{message}")


def saved_message(args: Namespace, iteration: int, floating_point_operations: float) -> str:
    """What the line of a save says behind its kind: throughput of this job, and of all jobs of this number of ranks."""
    world_size = rank_and_world_size()[1]
    tokens = args.consumed_train_samples * tokens_per_sample(args) / 1e9
    job = _throughput(args, floating_point_operations, world_size, this_job_only=True)
    cumulative = _throughput(args, floating_point_operations, world_size, this_job_only=False)
    return (
        f"Iteration: {iteration}\tJob throughput: {job:.1f} TFLOP/s/GPU\t"
        f"Cumulative throughput: {cumulative:.1f} TFLOP/s/GPU\t"
        f"Floating-point operations: {floating_point_operations:.2e}\tTokens (in billions): {tokens:.2f}"
    )


def _throughput(args: Namespace, operations: float, world_size: int, *, this_job_only: bool) -> float:
    """TFLOP/s a rank since a start: the last one, or the first of the starts that follow without a change of size."""
    start, before, last_saved = None, 0.0, 0.0
    lines = _path(args).read_text(encoding="utf-8").splitlines() if _path(args).exists() else []
    for line in lines:
        fields = line.split("\t")
        if len(fields) < 4:
            continue
        if "Floating-point operations: " in line:
            last_saved = float(line.split("Floating-point operations: ")[1].split("\t")[0])
        elif fields[3] == "Starting job":
            size = int(fields[2].removeprefix("# GPUs: "))
            if size != world_size:
                start = None
            elif start is None or this_job_only:
                start, before = datetime.strptime(fields[0], _TIME), last_saved
    if start is None:
        return 0.0
    seconds = max((datetime.now() - start).total_seconds(), 1.0)  # the file counts whole seconds
    return (operations - before) / seconds / 1e12 / world_size


def _path(args: Namespace) -> Path:
    return Path(args.save) / "progress.txt"
