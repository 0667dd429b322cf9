"""Starts the entry scripts as a user does, and reads what they print.

`TINY` is a model that trains in a second; `run(...)` one process, `torchrun(...)` several. Iteration lines come back
as dictionaries of the fields of Megatron's log line.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_lite.checkpointing import folders, sharded
from megatron_lite.sharding import whole

ROOT = Path(__file__).parents[2]

TINY = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --min-lr 1e-4 --lr-warmup-iters 1 --lr-decay-style cosine
    --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --num-workers 0 --log-interval 1 --eval-iters 0
    --attention-dropout 0 --hidden-dropout 0""".split()


@dataclass
class Finished:
    """A run that has ended."""

    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[dict[str, str]]:
        """The iteration lines, as field -> text."""
        return [iteration_line(line) for line in self.out.splitlines() if re.match(r" \[.*\] iteration ", line)]

    def values(self, field: str) -> list[float]:
        """One field of every iteration line."""
        return [float(line[field]) for line in self.lines]

    def ok(self) -> Finished:
        """This run, if it ended well."""
        assert self.status == 0, f"status {self.status}\n{self.out[-3000:]}\n{self.err[-3000:]}"
        return self


def iteration_line(line: str) -> dict[str, str]:
    """` [time] iteration 1/ 2 | lm loss: 3.0 |` -> {"iteration": "1", "lm loss": "3.0"}."""
    _, rest = line.split("] ", 1)
    fields = [part.strip() for part in rest.split(" |") if part.strip()]
    first = re.fullmatch(r"iteration\s+(\d+)/\s*(\d+)", fields[0])
    assert first, line
    found = {"iteration": first[1], "of": first[2]}
    for field in fields[1:]:
        name, value = field.rsplit(":", 1)
        found[name.strip()] = value.strip()
    return found


def environment(**more: str) -> dict[str, str]:
    """This process's environment without a launcher's variables; one thread a process."""
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    return {**clean, "OMP_NUM_THREADS": "1", **more}


def command(*flags: object, script: str = "pretrain_gpt.py") -> list[str]:
    """The words that start `script` in one process."""
    return [sys.executable, str(ROOT / script), *map(str, flags)]


def run(*flags: object, script: str = "pretrain_gpt.py", timeout: float = 240, **env: str) -> Finished:
    """One process to its end."""
    done = subprocess.run(
        command(*flags, script=script),
        cwd=ROOT,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def torchrun(ranks: int, *flags: object, script: str = "pretrain_gpt.py", timeout: float = 240) -> Finished:
    """`ranks` processes under torchrun, on a port that it chooses."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    done = subprocess.run(
        [*words, str(ROOT / script), *map(str, flags)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def checkpoint_tensors(root: Path, iteration: int | None = None) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by its global name; None: the newest."""
    which = folders.read_tracker(root) if iteration is None else iteration
    folder = folders.find(root, which)
    tensors = {}
    for name, saved in sharded.saved_tensors(folder).items():
        tensors[name] = (torch.empty(saved.shape, dtype=saved.dtype), whole(name, saved.shape))
    sharded.read(folder, tensors)
    return {name: tensor for name, (tensor, _) in tensors.items()}
