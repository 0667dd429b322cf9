"""The bubble of a pipeline: how long stages wait for each other, measured on two of them and simulated for eight.

    python benchmarks/pipeline.py           two stages whose passes take a fixed time; exit status 1 if a measured
                                            bubble is over 15 % off its formula, or a simulated one off at all
    python benchmarks/pipeline.py --real    two stages of a small GPT as well (nothing is required of it)

The bubble is idle over busy time: a step's time, from the first stage's start to the last one's end, over the time that
the busiest stage computes, less 1. Formulas, for p stages of v chunks and m micro-batches:

    1F1B, interleaved     (p - 1) / (v m)                 Narayanan et al. 2021, section 2.2
    ZB-H1                 (p - 1) (F + I - W) / (m (F + I + W))     Qi et al. 2023, table 2; here F = I = W

Measured is what trains: the executor, its messages over gloo, autograd, each stage a process of its own. A pass of a
stage sleeps, so that other programs on the machine take little from it; what lies between passes (Python, messages) is
counted as waiting. Simulated time is `schedule_check`'s, where messages take none.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import statistics
import sys
import time
from collections import defaultdict, deque
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite import collectives
from megatron_lite.fusions.wgrad import WeightGradStore
from megatron_lite.model_parallel_config import ModelParallelConfig
from megatron_lite.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron_lite.models.gpt.gpt_model import GPTModel
from megatron_lite.pipeline_parallel import get_forward_backward_func
from megatron_lite.pipeline_parallel.actions import Kind, make_schedule
from megatron_lite.pipeline_parallel.schedule_check import check_schedule
from megatron_lite.process_groups import make_process_groups
from megatron_lite.process_groups_config import ProcessGroupCollection, register_process_groups
from megatron_lite.rank_grid import grids
from megatron_lite.training.local_world import World
from megatron_lite.transformer.transformer_config import TransformerConfig

STAGES, MICROBATCHES = 2, 4
FORWARD_S, BACKWARD_S = 0.1, 0.2  # of a micro-batch on a whole stage
TOLERANCE = 0.15  # of the formula's value
CASES = {"1F1B": (1, False), "interleaved, 2 chunks": (2, False), "zero bubble (ZB-H1)": (1, True)}
LENGTH, HIDDEN, VOCABULARY = 128, 256, 8192  # of the small GPT


# -- stages whose passes take a fixed time -----------------------------------------------------------------------


class _SleepingStore(WeightGradStore):
    """Weight gradients that were put off, as times."""

    def __init__(self) -> None:
        self.waiting: deque[float] = deque()

    def end_pass(self) -> None:
        """One `append` a pass: nothing to close."""

    def run_oldest(self) -> None:
        time.sleep(self.waiting.popleft())


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, times: tuple[float, float], store: _SleepingStore | None
    ) -> Tensor:
        ctx.times, ctx.store = times, store
        time.sleep(times[0])
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        if ctx.store is None:
            time.sleep(ctx.times[1])
        else:
            time.sleep(ctx.times[1] / 2)
            ctx.store.waiting.append(ctx.times[1] / 2)
        return g, None, None, None


class _SleepingStage(nn.Module):
    """A chunk whose forward and backward passes take `times`."""

    def __init__(self, config: ModelParallelConfig, times: tuple[float, float]):
        super().__init__()
        self.config, self.times = config, times
        self.weight = nn.Parameter(torch.zeros(1))
        self.received: Tensor | None = None

    def set_input_tensor(self, x: Tensor | None) -> None:
        self.received = x

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.received is None else self.received
        return _Sleep.apply(x, self.weight, self.times, self.config.weight_grad_store)


class _Watch:
    """Stands for a run's timers: adds up the seconds of each name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def __call__(self, name: str, log_level: int = 0) -> _Watch:
        self.name = name
        return self

    def start(self, barrier: bool = False) -> None:
        self.begin = time.perf_counter()

    def stop(self) -> None:
        if self.name in ("forward-compute", "backward-compute"):
            self.seconds[self.name] += time.perf_counter() - self.begin


def _sleeping(chunks: int, zero_bubble: bool, forward_s: float, backward_s: float) -> tuple[list[nn.Module], Any]:
    config = ModelParallelConfig(delay_wgrad_compute=zero_bubble, overlap_p2p_comm=chunks > 1)
    config.hidden_size = 4  # type: ignore[attr-defined]
    config.weight_grad_store = _SleepingStore() if zero_bubble else None
    times = (forward_s / chunks, backward_s / chunks)
    model = [_SleepingStage(config, times) for _ in range(chunks)]

    def forward_step(iterator: Any, model: nn.Module) -> Any:
        return model(torch.ones(1, 1, 4, requires_grad=True)), lambda output: (output.mean(), {})

    return list(model), forward_step


def _small_gpt(chunks: int, zero_bubble: bool, groups: ProcessGroupCollection) -> tuple[list[nn.Module], Any]:
    register_process_groups(groups)
    config = TransformerConfig(
        num_layers=8,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        pipeline_model_parallel_size=STAGES,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_dtype=torch.float32,
        overlap_p2p_comm=chunks > 1,
        deallocate_pipeline_outputs=True,
        delay_wgrad_compute=zero_bubble,
        gradient_accumulation_fusion=True,
    )
    stage = collectives.group_rank(groups.pp)
    model = [
        GPTModel(
            config,
            get_gpt_layer_local_spec(),
            VOCABULARY,
            LENGTH,
            pre_process=stage == 0 and chunk == 0,
            post_process=stage == STAGES - 1 and chunk == chunks - 1,
            pg_collection=groups,
            vp_stage=chunk if chunks > 1 else None,
        )
        for chunk in range(chunks)
    ]
    for part in model:
        for weight in part.parameters():
            weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
    tokens = torch.randint(VOCABULARY, (1, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(LENGTH).unsqueeze(0)

    def forward_step(iterator: Any, model: nn.Module) -> Any:
        return model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]), lambda loss: (loss.mean(), {})

    return list(model), forward_step


def _measure(
    real: bool, chunks: int, zero_bubble: bool, microbatches: int, rounds: int, times: tuple[float, float]
) -> list[tuple[float, float, float]]:
    """(start, end, busy seconds) of each round's step on this rank."""
    groups = make_process_groups(*grids(STAGES, pp=STAGES))
    if real:
        model, forward_step = _small_gpt(chunks, zero_bubble, groups)
    else:
        model, forward_step = _sleeping(chunks, zero_bubble, *times)
    config: Any = model[0].config
    length, batch = (LENGTH, 1) if real else (1, 1)
    step = get_forward_backward_func(STAGES, chunks)
    found = []
    for _ in range(rounds + 1):
        config.timers = watch = _Watch()
        collectives.barrier(groups.pp, purpose="benchmark")
        begin = time.perf_counter()  # one clock for all processes of a machine
        step(
            forward_step_func=forward_step,
            data_iterator=[None] * chunks,
            model=model,
            num_microbatches=microbatches,
            seq_length=length,
            micro_batch_size=batch,
            pg_collection=groups,
        )
        found.append((begin, time.perf_counter(), sum(watch.seconds.values())))
    return found[1:]  # the first step warms up


def measured_bubble(
    world: World, real: bool, chunks: int, zero_bubble: bool, microbatches: int, rounds: int, times: tuple[float, float]
) -> float:
    """Idle over busy time of the busiest stage, the median over the rounds."""
    stages = world.run(_measure, real, chunks, zero_bubble, microbatches, rounds, times)
    bubbles = []
    for passes in zip(*stages):
        span = max(end for _, end, _ in passes) - min(begin for begin, _, _ in passes)
        bubbles.append(span / max(busy for _, _, busy in passes) - 1)
    return statistics.median(bubbles)


# -- what is expected --------------------------------------------------------------------------------------------


def formula(stages: int, chunks: int, microbatches: int, zero_bubble: bool) -> float:
    """As above; F = I = W for zero bubble."""
    return (stages - 1) / (3 * microbatches if zero_bubble else chunks * microbatches)


def simulated_bubble(stages: int, chunks: int, microbatches: int, zero_bubble: bool) -> float:
    """Idle over busy in simulated time, with a backward pass of two forward passes."""
    lists = make_schedule(stages, microbatches, chunks, zero_bubble=zero_bubble)
    unit = 1.0 / chunks
    durations = {Kind.FORWARD: unit, Kind.BACKWARD: 2 * unit, Kind.INPUT_GRAD: unit, Kind.WEIGHT_GRAD: unit}
    return check_schedule(lists, chunks, durations).bubble


def main() -> int:
    """The tables; status 1 if something that is required does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-microbatches", type=int, default=MICROBATCHES)
    parser.add_argument("--forward-seconds", type=float, default=FORWARD_S, help="a stage's; backward takes twice that")
    parser.add_argument("--real", action="store_true", help="a small GPT too")
    args = parser.parse_args()
    times, microbatches, good = (args.forward_seconds, 2 * args.forward_seconds), args.num_microbatches, True

    print("simulated, 8 stages\n\n| schedule | micro-batches | bubble | formula |\n|---|---|---|---|")
    for chunks, zero_bubble in ((1, False), (2, False), (4, False), (1, True)):
        for count in (8, 16, 64):
            found, wanted = simulated_bubble(8, chunks, count, zero_bubble), formula(8, chunks, count, zero_bubble)
            good = good and abs(found - wanted) < 1e-9
            name = "ZB-H1" if zero_bubble else f"{chunks} chunk{'s' * (chunks > 1)}"
            print(f"| {name} | {count} | {found:.5f} | {wanted:.5f} |")

    for real in (False, True)[: 1 + args.real]:
        what = "a small GPT" if real else f"passes of {times[0]:g} and {times[1]:g} s"
        print(f"\nmeasured, 2 stages, {microbatches} micro-batches, {what}\n")
        print("| schedule | bubble | formula | bubble / formula |\n|---|---|---|---|")
        for name, (chunks, zero_bubble) in CASES.items():
            with World(STAGES) as world:
                found = measured_bubble(world, real, chunks, zero_bubble, microbatches, args.rounds, times)
            wanted = formula(STAGES, chunks, microbatches, zero_bubble)
            good = good and (real or abs(found / wanted - 1) <= TOLERANCE)
            print(f"| {name} | {found:.4f} | {wanted:.4f} | {found / wanted:.3f} |", flush=True)
    print("\nas required" if good else "\nNOT as required")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
