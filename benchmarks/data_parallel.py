"""One training step on two data-parallel ranks, beside what torch itself offers for it.

    python benchmarks/data_parallel.py                       fp32 and bf16, a table on standard output
    python benchmarks/data_parallel.py --dtypes fp32 --rounds 9 --no-memory

A step is forward, loss, backward with the sum of gradients over the ranks, clipping by the norm and AdamW, on shape A
of step_time.py, one thread a rank, gloo, every rank with a micro-batch of its own, of

    ours           GPTModel under DistributedDataParallel with the distributed optimizer (ZeRO-1), gradients and
                   parameters overlapped: the objects that pretrain_gpt.py builds
    ours, whole    the same, every rank with the whole optimizer state
    ddp            torch.nn.parallel.DistributedDataParallel and torch.optim.AdamW
    zero           the same with torch.distributed.optim.ZeroRedundancyOptimizer
    fsdp           torch.distributed.fsdp.fully_shard on every block and the whole

The last three train transformers' GPT-2 of that shape with its defaults, in bf16 by autocast over fp32 weights (fsdp:
by its own policy). In fp32 they also train our GPTModel ("on ours"): what is left of the difference then is the data
parallelism alone.

Each contestant has a pair of processes of its own, and they take turns; times are wall times between barriers and CPU
times, medians over the rounds. Memory is the growth of the resident peak of another pair over three steps, from after a
step of a tiny model.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from step_time import DTYPES, SHAPES, Shape, hugging_face_model, our_model, status

from megatron_lite.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron_lite.fusions.backends import describe
from megatron_lite.host_memory import keep_freed_memory
from megatron_lite.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron_lite.process_groups import make_process_groups
from megatron_lite.process_groups_config import register_process_groups
from megatron_lite.rank_grid import grids
from megatron_lite.training.local_world import World

Step = Callable[[], float]
RANKS = 2
TARGETS = {"fp32": 0.65, "bf16": 0.75}  # of the best peer's time
MEMORY_TARGET = 0.80  # of the best peer's memory
LR, DECAY = 1e-4, 0.01


# -- contestants -------------------------------------------------------------------------------------------------


def ours(shape: Shape, dtype: str, sharded: bool = True) -> Step:
    """Everything overlapped, the optimizer sharded."""
    groups = make_process_groups(*grids(dist.get_world_size()))
    register_process_groups(groups)
    config, model = our_model(shape, dtype)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=dtype == "bf16",
        use_distributed_optimizer=sharded,
        overlap_grad_reduce=True,
        overlap_param_gather=sharded,
    )
    ddp = DistributedDataParallel(config, ddp_config, model, pg_collection=groups)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=LR,
            weight_decay=DECAY,
            bf16=dtype == "bf16",
            use_distributed_optimizer=sharded,
            overlap_param_gather=sharded,
        ),
        [ddp],
        pg_collection=groups,
    )
    inputs, labels = shape.tokens(dist.get_rank())
    positions = torch.arange(shape.length).expand(shape.batch, -1)

    def step() -> float:
        ddp.zero_grad_buffer()
        loss = ddp(inputs, positions, None, labels=labels).mean()
        optimizer.scale_loss(loss).backward()
        finalize_model_grads([ddp], pg_collection=groups)
        optimizer.step()
        return loss.item()

    return step


def ours_whole(shape: Shape, dtype: str) -> Step:
    """Every rank with the whole optimizer state."""
    return ours(shape, dtype, sharded=False)


def _torchs(
    wrap: Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]], shape: Shape, dtype: str, autocast: bool
) -> Step:
    module, optimizer = wrap(hugging_face_model(shape).train())
    inputs, _ = shape.tokens(dist.get_rank())

    def step() -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and dtype == "bf16"):
            loss = module(input_ids=inputs, labels=inputs).loss
        return _finish(module, optimizer, loss)

    return step


def _torchs_on_ours(
    wrap: Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]], shape: Shape, dtype: str
) -> Step:
    assert dtype == "fp32", "our layers do not run under autocast"
    module, optimizer = wrap(our_model(shape, dtype)[1])
    inputs, labels = shape.tokens(dist.get_rank())
    positions = torch.arange(shape.length).expand(shape.batch, -1)

    def step() -> float:
        optimizer.zero_grad()
        return _finish(module, optimizer, module(inputs, positions, None, labels=labels).mean())

    return step


def _finish(module: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    loss.backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def _ddp(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = nn.parallel.DistributedDataParallel(model)
    return module, torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=DECAY)


def _zero(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    module = nn.parallel.DistributedDataParallel(model)
    return module, ZeroRedundancyOptimizer(
        module.parameters(), optimizer_class=torch.optim.AdamW, lr=LR, weight_decay=DECAY
    )


def _fsdp(dtype: str) -> Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]:
    def wrap(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        options: dict[str, Any] = {"mesh": mesh}
        if dtype == "bf16":
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        blocks: Any = model.transformer.h if hasattr(model, "transformer") else model.decoder.layers  # type: ignore[union-attr]
        for block in blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        return model, torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)

    return wrap


CONTESTANTS: dict[str, Callable[[Shape, str], Step]] = {
    "ours": ours,
    "ours, whole": ours_whole,
    "ddp": lambda shape, dtype: _torchs(_ddp, shape, dtype, autocast=True),
    "zero": lambda shape, dtype: _torchs(_zero, shape, dtype, autocast=True),
    "fsdp": lambda shape, dtype: _torchs(_fsdp(dtype), shape, dtype, autocast=False),
    "ddp on ours": lambda shape, dtype: _torchs_on_ours(_ddp, shape, dtype),
    "zero on ours": lambda shape, dtype: _torchs_on_ours(_zero, shape, dtype),
    "fsdp on ours": lambda shape, dtype: _torchs_on_ours(_fsdp(dtype), shape, dtype),
}
OURS = ("ours", "ours, whole")
PEERS = ("ddp", "zero", "fsdp")


# -- measuring, on the ranks -------------------------------------------------------------------------------------


_step: Step


def prepare(name: str, dtype: str) -> None:
    """Build a contestant in this process and let it warm up: allocation, and the order of gradients."""
    global _step
    if name in OURS:
        keep_freed_memory()
    _step = CONTESTANTS[name](SHAPES["A"], dtype)
    for _ in range(2):
        _step()


def time_step() -> tuple[float, float]:
    """(wall, CPU of this rank) seconds of a step."""
    gc.collect()
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    _step()
    cpu = time.process_time() - cpu
    dist.barrier()
    return time.perf_counter() - wall, cpu


def peak(name: str, dtype: str) -> float:
    """MiB by which the resident peak of this rank grows over three steps. To be run in a fresh process."""
    if name in OURS:
        keep_freed_memory()
    tiny = replace(SHAPES["A"], layers=1, hidden=96, ffn=64, length=16, batch=1, vocabulary=64)
    CONTESTANTS[name](tiny, dtype)()
    gc.collect()
    before = status("VmRSS")
    step = CONTESTANTS[name](SHAPES["A"], dtype)
    for _ in range(3):
        step()
    return status("VmHWM") - before


# -- the table ---------------------------------------------------------------------------------------------------


def _times_of_fresh_ranks(names: list[str], dtype: str, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Wall and CPU milliseconds by contestant: medians of the slower rank's. Contestants take turns."""
    with contextlib.ExitStack() as stack:
        worlds = {name: stack.enter_context(World(RANKS, timeout=1800)) for name in names}
        for name, world in worlds.items():
            world.run(prepare, name, dtype)
        taken: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in names}
        for _ in range(rounds):
            for name, world in worlds.items():
                taken[name].append(world.run(time_step))
    wall, cpu = (
        {
            name: 1e3 * max(statistics.median(ranks[rank][i] for ranks in taken[name]) for rank in range(RANKS))
            for name in names
        }
        for i in (0, 1)
    )
    return wall, cpu


def _peak_of_fresh_ranks(name: str, dtype: str) -> float:
    world = World(RANKS, timeout=600)
    try:
        return max(world.run(peak, name, dtype))
    finally:
        world.close()


def main() -> None:
    """Measure what was asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--contestants", nargs="+", default=list(CONTESTANTS), choices=list(CONTESTANTS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-memory", action="store_true", help="times only")
    parser.add_argument("--no-times", action="store_true", help="memory only")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {RANKS} ranks of one thread")
    for dtype in options.dtypes:
        print(f"{dtype}: {describe(DTYPES[dtype], 'cpu')}")
    print("\n| dtype | contestant | wall, ms | CPU, ms a rank | peak, MiB a rank |\n|---|---|---|---|---|")
    for dtype in options.dtypes:
        names = [name for name in options.contestants if dtype == "fp32" or not name.endswith("on ours")]
        wall, cpu = ({}, {}) if options.no_times else _times_of_fresh_ranks(names, dtype, options.rounds)
        memory: dict[str, float] = {}
        for name in names:
            if not options.no_memory:
                memory[name] = _peak_of_fresh_ranks(name, dtype)
            shown = " | ".join(f"{column[name]:.0f}" if column else "-" for column in (wall, cpu, memory))
            print(f"| {dtype} | {name} | {shown} |", flush=True)
        if {"ours", *PEERS} <= set(names):
            shown = " | ".join(
                f"{column['ours'] / min(column[peer] for peer in PEERS):.2f}{target}" if column else "-"
                for column, target in (
                    (wall, f" (at most {TARGETS[dtype]:.2f})"),
                    (cpu, ""),
                    (memory, f" (at most {MEMORY_TARGET:.2f})"),
                )
            )
            print(f"| {dtype} | **ours / best of the peers** | {shown} |", flush=True)


if __name__ == "__main__":
    main()
