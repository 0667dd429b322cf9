"""What a tensor-parallel layer costs where nothing is split: forward and backward of a lone layer, against F.linear.

    python benchmarks/parallel_layer.py [--rounds 100]

Both compute the same product on the same memory, with the same kernel (`fusions.matmul`), and take turns; a round times
each once, in changing order. CPU time, one thread. Printed is the median over the rounds of the ratio of the two.

`fused` adds the weight gradient into `main_grad` inside backward, which `F.linear` cannot; against it stands F.linear
followed by the addition that DDP would make.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_lite.fusions.matmul import linear
from megatron_lite.initialization import init_method_normal
from megatron_lite.model_parallel_config import ModelParallelConfig
from megatron_lite.tensor_parallel import ColumnParallelLinear, RowParallelLinear

# tokens, inputs, outputs: projections of a small model, of a larger one, and one that hardly computes anything
SHAPES = ((512, 384, 1536), (256, 1024, 1024), (64, 64, 64))


def main() -> None:
    """Measure every shape and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print("| layer | tokens x in x out | F.linear, CPU ms | layer, CPU ms | layer / F.linear | of the best of each |")
    print("|---|---|---|---|---|---|")
    for shape in SHAPES:
        for name, layer, plain in contestants(*shape):
            times = [turn(layer, plain, number) for number in range(rounds + 3)][3:]
            ours, theirs = (statistics.median(column) * 1e3 for column in zip(*times))
            ratio = statistics.median(a / b for a, b in times)
            best = min(a for a, _ in times) / min(b for _, b in times)  # what other load disturbs least
            row = f"{theirs:.3f} | {ours:.3f} | {ratio:.4f} | {best:.4f} |"
            print(f"| {name} | {' x '.join(map(str, shape))} | {row}", flush=True)


def contestants(tokens: int, inputs: int, outputs: int) -> list[tuple[str, Callable[[], None], Callable[[], None]]]:
    """(name, the layer's forward and backward, the plain ones') on common memory; a call takes a few ms at least."""
    x = torch.randn(tokens, 1, inputs, requires_grad=True)
    g = torch.randn(tokens, 1, outputs)
    repeats = max(1, 2**27 // (tokens * inputs * outputs))
    plain = ModelParallelConfig()
    init = init_method_normal(0.02)
    column = ColumnParallelLinear(inputs, outputs, config=plain, init_method=init, bias=True)
    row = RowParallelLinear(
        inputs, outputs, config=plain, init_method=init, bias=True, input_is_parallel=True, skip_bias_add=False
    )
    fused = ColumnParallelLinear(
        inputs, outputs, config=ModelParallelConfig(gradient_accumulation_fusion=True), init_method=init, bias=False
    )
    weight = fused.weight
    assert weight is not None
    weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]

    def step(forward: Callable[[Tensor], Tensor], params: list[Tensor], after: Callable[[], None] = lambda: None):
        def run() -> None:
            for _ in range(repeats):
                x.grad = None
                for param in params:
                    param.grad = None
                forward(x).backward(g)
                after()

        return run

    def add() -> None:
        weight.main_grad.add_(weight.grad)  # type: ignore[attr-defined]

    def pair(layer: torch.nn.Module) -> list[Callable[[], None]]:
        params = list(layer.parameters())
        return [step(lambda x: layer(x)[0], params), step(lambda x: linear(x, layer.weight, layer.bias), params)]

    return [
        ("column", *pair(column)),
        ("row", *pair(row)),
        ("fused column", step(lambda x: fused(x)[0], [weight]), step(lambda x: linear(x, weight), [weight], add)),
    ]


def turn(first: Callable[[], None], second: Callable[[], None], number: int) -> tuple[float, float]:
    """CPU seconds of both; which one goes first changes from turn to turn."""
    if number % 2:
        return cpu_seconds(first), cpu_seconds(second)
    later = cpu_seconds(second)
    return cpu_seconds(first), later


def cpu_seconds(action: Callable[[], None]) -> float:
    """CPU time of this process, all its threads."""
    begin = time.process_time()
    action()
    return time.process_time() - begin


if __name__ == "__main__":
    main()
