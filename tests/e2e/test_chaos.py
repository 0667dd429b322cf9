"""A run under torchrun that everything happens to ends with the weights of the run that nothing happened to.

    torchrun --max-restarts (4 workers)    <- this test kills workers, sends SIGTERM, forbids large files
      `- a worker's loss turns NaN once    <- faulty_gpt.py, at a step of this test's choosing: it is repeated in place

MEGATRON_LITE_SEED chooses the moments.
"""

from __future__ import annotations

import os
import queue
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from megatron_lite.checkpointing import folders
from tests.e2e.launch import ROOT, checkpoint_tensors, environment, iteration_line, torchrun

resource = pytest.importorskip("resource")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="changes limits of running processes: Linux"),
]

RANKS, STEPS, KILLS = 4, 200, 5
FLAGS = f"""--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16
    --micro-batch-size 2 --global-batch-size 16 --lr 1e-2 --min-lr 1e-3 --lr-warmup-iters 5 --lr-decay-style cosine
    --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0 --log-interval 1 --eval-iters 0
    --hidden-dropout 0.1 --use-distributed-optimizer --train-iters {STEPS} --save-interval 5 --save-keep-last 3
    --exit-signal-handler""".split()
LARGEST_FILE = 4096  # bytes; a checkpoint's tensors are larger, and so is metrics.jsonl by then
PATIENCE_S = 120.0  # without a line of output


class Job:
    """One torchrun, whose output is read while it runs."""

    def __init__(self, *flags: object):
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
        words += [f"--max-restarts={KILLS + 5}", str(ROOT / "tests/e2e/faulty_gpt.py"), *map(str, flags)]
        self.process = subprocess.Popen(
            words, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.log: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def line(self) -> str | None:
        """The next line of output; None: the job has ended."""
        try:
            line = self._lines.get(timeout=PATIENCE_S)
        except queue.Empty:
            raise AssertionError(f"silent for {PATIENCE_S:.0f} s after\n{''.join(self.log[-60:])}") from None
        if line is not None:
            self.log.append(line)
        return line

    def workers(self) -> list[int]:
        """Process ids of the ranks that live."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(word) for word in path.read_text().split()]

    def limit_files(self, size: int) -> None:
        """From now on no worker may write a file larger than this many bytes."""
        for pid in self.workers():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def end(self) -> None:
        """Whatever happened: nothing of this job goes on."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                for pid in [*self.workers(), self.process.pid]:
                    os.kill(pid, signal.SIGKILL)
                self.process.wait()


def _plan(numbers: random.Random) -> list[tuple[int, str]]:
    """(iteration, event), at least 12 iterations apart."""
    events = ["kill"] * KILLS + ["term a worker", "term all", "full", "nan"]
    numbers.shuffle(events)
    width = (STEPS - 15) // len(events)
    return [(8 + place * width + numbers.randrange(width - 11), event) for place, event in enumerate(events)]


def test_killed_told_to_leave_out_of_space_and_with_a_nan_the_run_ends_with_the_weights_of_a_quiet_one(tmp_path):
    """Every start goes on by itself from the last complete checkpoint, with --save and --load on one folder."""
    numbers = random.Random(os.environ.get("MEGATRON_LITE_SEED", "11"))
    plan = _plan(numbers)
    nan_at = next(iteration for iteration, event in plan if event == "nan")
    save, cache = tmp_path / "save", ["--data-cache-path", tmp_path / "cache"]
    torchrun(RANKS, *FLAGS, *cache, "--save", tmp_path / "quiet").ok()

    flags = [*FLAGS, *cache, "--save", save, "--load", save, "--fault", "nan-loss", "--fault-iteration", nan_at]
    flags += ["--fault-rank", numbers.randrange(RANKS), "--fault-once", tmp_path / "nan"]
    waiting = [step for step in plan if step[1] != "nan"]
    happened: list[str] = []
    jobs = []
    while not jobs or jobs[-1].process.wait() != 0 or folders.read_tracker(save) != STEPS:
        assert len(jobs) < 4, "".join(jobs[-1].log[-60:])
        jobs.append(Job(*flags))
        try:
            _live_through(jobs[-1], waiting, happened, numbers)
        finally:
            jobs[-1].end()
    log = "".join(line for job in jobs for line in job.log)
    (tmp_path / "log").write_text(log)
    assert not waiting and (tmp_path / "nan").exists(), happened
    assert len(jobs) == 3  # restarts after kills are torchrun's own, those after SIGTERM are ours
    assert log.count("exiting program after receiving SIGTERM.") == 2
    assert log.count("NOT saved; training goes on") >= 1
    assert re.search(rf"lm loss is nan at iteration {nan_at}\b", log) and "transient error" in log
    assert log.count("successfully loaded checkpoint") >= KILLS + 2
    calm, wild = checkpoint_tensors(tmp_path / "quiet"), checkpoint_tensors(save)
    assert calm.keys() == wild.keys() and len(calm) > 10
    assert not [name for name in calm if not torch.equal(calm[name], wild[name])]


def _live_through(job: Job, waiting: list[tuple[int, str]], happened: list[str], numbers: random.Random) -> None:
    """Read the job's output to its end, and do what is due at the iterations that it reports."""
    limited = False
    while (line := job.line()) is not None:
        if limited and "NOT saved; training goes on" in line:
            job.limit_files(resource.RLIM_INFINITY)
            limited = False
        if " [" not in line or " iteration " not in line or "consumed samples" not in line:
            continue
        iteration = int(iteration_line(line)["iteration"])
        if not waiting or limited or iteration < waiting[0][0]:
            continue
        time.sleep(numbers.uniform(0.0, 0.1))
        workers = job.workers()
        if len(workers) < RANKS:  # the line is from before a restart
            continue
        _, event = waiting.pop(0)
        happened.append(f"{event} at {iteration}")
        if event == "kill":
            os.kill(numbers.choice(workers), signal.SIGKILL)
        elif event == "term a worker":
            os.kill(numbers.choice(workers), signal.SIGTERM)
        elif event == "term all":
            job.process.send_signal(signal.SIGTERM)
        elif event == "full":
            job.limit_files(LARGEST_FILE)
            limited = True
