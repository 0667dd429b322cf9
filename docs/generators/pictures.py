"""Pictures of the concepts, drawn from the code that training runs: `python docs/generators/pictures.py` writes them.

    ranks.png     which ranks form a group             rank_grid
    buckets.png   the gradient buffer and its shards   distributed/buffer_layout
    context.png   who holds which positions            context_parallel/partition
    memory.png    bytes of a rank                      training/memory_estimate

The pipelines' timelines (schedules.png) are `megatron-lite plan`'s, and loss.png is that of the README's run.
"""

from __future__ import annotations

import contextlib
import io
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_lite.context_parallel.partition import held_runs, one_document
from megatron_lite.distributed.buffer_layout import ParamSpec, plan_buffer, shard_of_bucket
from megatron_lite.rank_grid import RankGrid
from megatron_lite.training.arguments import parse_args, validate_args
from megatron_lite.training.memory_estimate import memory_of

# apart without colours, too: dark, light, middle, lightest
COLOURS = ("#336bb8", "#a8cdf0", "#d98a2b", "#f5dcb8", "#388f52", "#b8e3b5", "#8a4f9e", "#e0c6ea")


def ranks() -> Figure:
    """The groups of 16 ranks along each axis, as a node of 8 would be numbered."""
    grid = RankGrid(tp=2, cp=2, dp=2, pp=2)
    axes = {"tp": "tensor parallel", "cp": "context parallel", "dp": "data parallel", "pp": "pipeline stages"}
    figure = Figure(figsize=(9.2, 3.9), dpi=120, layout="constrained")
    for plot, (axis, title) in zip(figure.subplots(2, 2).flat, axes.items()):
        groups = grid.groups(axis)
        for number, group in enumerate(groups):
            for rank in group:
                _cell(plot, rank % 8, rank // 8, COLOURS[number], str(rank))
        _bare(plot, title=f"{title}: {', '.join('-'.join(map(str, group)) for group in groups[:4])}, ...")
        plot.set_xlim(-0.05, 8.05)
        plot.set_ylim(2.0, -0.05)
        plot.set_yticks([0.45, 1.45], ["node 0", "node 1"], fontsize=8)
    return figure


def buckets() -> Figure:
    """Two layers of a small GPT in a buffer of three buckets, cut for four data-parallel ranks."""
    width = 64
    sizes = {"qkv": 3 * width**2, "proj": 2 * width**2, "fc1": 4 * width**2, "fc2": 4 * width**2}
    names = ["embedding", *(f"{layer} {name}" for layer in (1, 2) for name in sizes)]
    specs = [ParamSpec(name, sizes.get(name.split()[-1], 10 * width**2)) for name in names]
    plan = plan_buffer(specs, 13 * width**2, 4, use_distributed_optimizer=True)
    figure = Figure(figsize=(9.2, 2.6), dpi=120, layout="constrained")
    plot = figure.subplots()
    for number, (name, place) in enumerate(plan.ranges.items()):
        _bar(plot, 0, place.start, place.end, COLOURS[1 if number % 2 else 3], name)
    for number, bucket in enumerate(plan.buckets):
        _bar(
            plot,
            1,
            bucket.range.start,
            bucket.range.end,
            COLOURS[0],
            f"bucket {number}: one reduction, one gather",
        )
        for rank in range(4):
            shard = shard_of_bucket(bucket, rank, 4)
            _bar(plot, 2, shard.start, shard.end, COLOURS[2 + rank], f"rank {rank}")
    _bare(plot)
    plot.set_yticks([0.43, 1.43, 2.43], ["parameters, last layer first", "buckets", "who steps on what"], fontsize=8)
    plot.set_xlim(0, plan.numel)
    plot.set_ylim(2.95, -0.05)
    return figure


def context() -> Figure:
    """A sequence of 16 over two and four ranks, and the part of the causal triangle that each computes."""
    figure = Figure(figsize=(9.2, 3.4), dpi=120, layout="constrained")
    length = 16
    for plot, size in zip(figure.subplots(1, 3).flat, (1, 2, 4)):
        owner = {
            position: rank
            for rank in range(size)
            for runs in held_runs(rank, size, one_document(length))
            for run in runs
            for position in range(run.begin, run.begin + run.length)
        }
        for query in range(length):
            for key in range(query + 1):
                _cell(plot, key, query, COLOURS[2 * owner[query] % 8], "", gap=0.06)
        _bare(plot, title=f"{size} rank{'s' * (size > 1)}")
        plot.set_xlim(0, length)
        plot.set_ylim(length, 0)
        plot.set_aspect("equal")
        plot.set_xlabel("key", fontsize=8)
        plot.set_ylabel("query", fontsize=8)
        shares = [sum(query + 1 for query in owner if owner[query] == rank) for rank in range(size)]
        handles = [Patch(color=COLOURS[2 * rank % 8], label=f"rank {rank}: {shares[rank]}") for rank in range(size)]
        plot.legend(handles=handles, loc="upper right", fontsize=7, frameon=False)
    return figure


def memory() -> Figure:
    """Weights, gradients and optimizer state of a rank with seven billion parameters in bf16, whole and in parts."""
    figure = Figure(figsize=(9.2, 3.0), dpi=120, layout="constrained")
    plot = figure.subplots()
    copies = (1, 2, 4, 8, 16, 32, 64)
    for at, dp in enumerate(copies):
        for side, (flag, hatch) in zip((-0.28, 0.0, 0.28), _SHARDINGS.items()):
            bottom = 0.0
            parts = memory_of(_run(dp, flag), dense=7_000_000_000)
            for name, colour in (("weights", COLOURS[0]), ("gradients", COLOURS[1]), ("optimizer", COLOURS[2])):
                size = getattr(parts, name) / 2**30
                plot.bar(at + side, size, 0.26, bottom, color=colour, hatch=hatch, edgecolor="white", linewidth=0.4)
                bottom += size
            plot.text(at + side, bottom, f"{bottom:.0f}", ha="center", va="bottom", fontsize=7)
    plot.set_xticks(range(len(copies)), [str(dp) for dp in copies], fontsize=8)
    plot.set_xlabel(
        "data-parallel ranks; plain: a copy each, striped: --use-distributed-optimizer, crossed: --use-torch-fsdp2",
        fontsize=8,
    )
    plot.set_ylabel("GiB on a rank", fontsize=8)
    plot.tick_params(labelsize=8)
    plot.spines[["top", "right"]].set_visible(False)
    names = ("weights", "gradients", "optimizer state")
    handles = [Patch(color=c, label=n) for c, n in zip(COLOURS, names)]
    plot.legend(handles=handles, fontsize=8, ncols=3, frameon=False, loc="lower right", bbox_to_anchor=(1, 1))
    return figure


# flag -> how its bars are drawn
_SHARDINGS = {"": None, "--use-distributed-optimizer": "//", "--use-torch-fsdp2": "xx"}


def _run(dp: int, flag: str) -> Namespace:
    """The arguments of a run on `dp` ranks; the model's own size is given apart."""
    words = (
        "--num-layers 1 --hidden-size 64 --num-attention-heads 1 --seq-length 64 --max-position-embeddings 64 --bf16"
    )
    words += f" --micro-batch-size 1 --global-batch-size {dp} --train-iters 1 --lr 1 --mock-data"
    words += f" --tokenizer-type NullTokenizer --vocab-size 100 {flag}"
    with contextlib.redirect_stdout(io.StringIO()):
        return validate_args(parse_args(words.split()), dp)


def _cell(plot: Any, x: float, y: float, colour: str, text: str, gap: float = 0.1) -> None:
    plot.add_patch(Rectangle((x, y), 1 - gap, 1 - gap, color=colour, linewidth=0))
    if text:
        plot.text(x + 0.45, y + 0.45, text, ha="center", va="center", fontsize=9, color=_ink(colour))


def _bar(plot: Any, row: float, start: float, end: float, colour: str, text: str) -> None:
    plot.add_patch(Rectangle((start, row), end - start, 0.86, facecolor=colour, edgecolor="white", linewidth=1.5))
    plot.text((start + end) / 2, row + 0.43, text, ha="center", va="center", fontsize=7, color=_ink(colour))


def _ink(colour: str) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 140 else "0.1"


def _bare(plot: Any, title: str = "") -> None:
    plot.set_title(title, loc="left", fontsize=9)
    plot.set_xticks([])
    plot.set_yticks([])
    plot.spines[:].set_visible(False)
    plot.tick_params(length=0)


PICTURES: dict[str, Callable[[], Figure]] = {"ranks": ranks, "buckets": buckets, "context": context, "memory": memory}


def draw(folder: Path) -> Iterator[Path]:
    """Writes every picture; yields the paths."""
    for name, picture in PICTURES.items():
        path = folder / f"{name}.png"
        picture().savefig(path)
        yield path


if __name__ == "__main__":
    for written in draw(Path(__file__).resolve().parents[1]):
        print(written)
