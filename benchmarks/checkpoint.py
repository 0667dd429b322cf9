"""Saving and loading beside plain torch.save and torch's own distributed checkpoint (DCP), of the same bytes.

    python benchmarks/checkpoint.py                       512 MB, 5 rounds, tables on standard output
    python benchmarks/checkpoint.py --megabytes 2048 --folder /mnt/disk

The tensors are those of a GPT with two moments a weight. Contestants take turns in each round, so that other load meets
all alike; times are medians. Every save is on the disk (fsync) when its time ends; loads come from the page cache. Ours
also sums every file, which the others do not.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megatron_lite.checkpointing import sharded
from megatron_lite.checkpointing.async_save import AsyncSaver
from megatron_lite.checkpointing.checkpoint import Content, HowToWrite, write_checkpoint
from megatron_lite.sharding import whole

Times = dict[str, list[float]]


def model(megabytes: int) -> dict[str, Tensor]:
    """Weights of layers of hidden size 1024, each with two moments, of so many bytes about."""
    h, shapes = 1024, {"norm": (1024,), "qkv": (3072, 1024), "proj": (1024, 1024), "fc1": (4096, 1024)}
    layer = 4 * 3 * sum(torch.Size(shape).numel() for shape in (*shapes.values(), (h, 4 * h)))
    tensors = {}
    for number in range(max(1, round(megabytes * 1e6 / layer))):
        for kind in ("", "optimizer.exp_avg.", "optimizer.exp_avg_sq."):
            for name, shape in {**shapes, "fc2": (h, 4 * h)}.items():
                tensors[f"{kind}layers.{number}.{name}"] = torch.randn(shape)
    return tensors


def timed(times: Times, name: str, action: Callable[[], object]) -> None:
    start = time.perf_counter()
    action()
    times.setdefault(name, []).append(time.perf_counter() - start)


def save_whole(tensors: dict[str, Tensor], path: Path) -> None:
    with open(path, "wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def run_round(tensors: dict[str, Tensor], root: Path, beside: AsyncSaver, saves: Times, loads: Times) -> None:
    """Each contestant once."""
    boxes = {name: (tensor, whole(name, tuple(tensor.shape))) for name, tensor in tensors.items()}
    content = Content(tensors=boxes)

    timed(saves, "torch.save", lambda: save_whole(tensors, root / "whole.pt"))
    timed(saves, "DCP", lambda: dcp.save(dict(tensors), checkpoint_id=root / "dcp", no_dist=True))
    timed(saves, "ours", lambda: write_checkpoint(root / "ours", 1, content, None))
    timed(saves, "ours, 2 files", lambda: write_checkpoint(root / "ours", 2, content, None, HowToWrite(files=2)))
    timed(saves, "ours, --async-save: until the loop goes on", lambda: beside.start(root / "beside", 1, content))
    outcome = beside.wait()
    assert outcome is not None and outcome.error is None, outcome
    saves.setdefault("ours, --async-save: until it is there", []).append(outcome.total_s)
    future: list = []
    timed(
        saves,
        "DCP async_save: until the loop goes on",
        lambda: future.append(dcp.async_save(dict(tensors), checkpoint_id=root / "dcp_beside")),
    )
    timed(saves, "DCP async_save: the rest", lambda: future[0].result())

    empty = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    for tensor in empty.values():
        tensor.zero_()

    def load_whole() -> None:
        for name, tensor in torch.load(root / "whole.pt", weights_only=True).items():
            empty[name].copy_(tensor)

    def check() -> None:
        assert all(torch.equal(empty[name], tensor) for name, tensor in tensors.items())

    timed(loads, "torch.load, copied into the model", load_whole)
    check()
    timed(loads, "DCP", lambda: dcp.load(dict(empty), checkpoint_id=root / "dcp", no_dist=True))
    wanted = {name: (tensor.zero_(), whole(name, tuple(tensor.shape))) for name, tensor in empty.items()}
    timed(loads, "ours", lambda: sharded.read(root / "ours" / "iter_0000001", wanted))
    check()
    for name in ("dcp", "dcp_beside", "ours", "beside"):
        shutil.rmtree(root / name)


def table(title: str, times: Times, megabytes: float) -> None:
    """Medians, speeds, and times relative to the first contestant's, as the median over the rounds."""
    first = next(iter(times.values()))
    print(f"\n| {title} | s | MB/s | time, plain = 1 |\n| --- | --- | --- | --- |")
    for name, seconds in times.items():
        ratio = statistics.median(mine / base for mine, base in zip(seconds, first))
        median = statistics.median(seconds)
        print(f"| {name} | {median:.3f} | {megabytes / median:,.0f} | {ratio:.2f} |")


def main() -> None:
    """The tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: the temporary folder's)")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    torch.manual_seed(1)
    tensors = model(args.megabytes)
    size = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
    root = Path(tempfile.mkdtemp(prefix="checkpoint", dir=args.folder))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # DCP's async_save asks for one
    saves: Times = {}
    loads: Times = {}
    beside = AsyncSaver(None, None, HowToWrite(plans={}), persistent=True)
    try:
        for number in range(args.rounds + 1):
            run_round(tensors, root, beside, *((saves, loads) if number else ({}, {})))  # the first one warms up
    finally:
        beside.close()
        shutil.rmtree(root)
        dist.destroy_process_group()
    print(f"{size:,.0f} MB in {len(tensors)} tensors, {args.rounds} rounds, torch {torch.__version__}")
    table("save", saves, size)
    table("load", loads, size)


if __name__ == "__main__":
    main()
