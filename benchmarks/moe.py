"""A layer of experts in one process: forward and backward, beside transformers' Mixtral block and the bare products.

    python benchmarks/moe.py [--rounds 15] [--dtype fp32 bf16]

Contestants have the same shape, weights, tokens and routing, and take turns in one process:

    grouped, sequential   MoELayer of this package with either kind of experts, gradients into `main_grad` as under DDP
    eager, grouped_mm     transformers' MixtralSparseMoeBlock with its two ways through the experts
    products              the experts' six products alone (two forward, four backward), on the rows that the
                          routing gives each expert; no router, no sorting, no activation

CPU time, one thread, medians over the rounds. Before it starts, outputs and input gradients of all are compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from megatron_lite.fusions.matmul import times, times_transposed, transposed_times
from megatron_lite.transformer import TransformerConfig
from megatron_lite.transformer.moe import GroupedMLP, MoELayer, MoESubmodules, SequentialMLP


@dataclass(frozen=True)
class Shape:
    """tokens, hidden size, width of an expert, experts, experts of a token."""

    tokens: int
    hidden: int
    width: int
    experts: int
    topk: int

    def __str__(self) -> str:
        return f"{self.tokens} x {self.hidden}, {self.experts} experts of {self.width}, top {self.topk}"


# As a small Mixtral has them, and as models of many narrow experts have them.
SHAPES = (Shape(2048, 384, 1024, 8, 2), Shape(2048, 384, 192, 64, 6))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Run = Callable[[], tuple[Tensor, Tensor]]


def main() -> None:
    """Measure every shape and dtype, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=["fp32"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = ["grouped", "sequential", "eager", "grouped_mm", "products"]
    print(f"| shape | dtype | {' | '.join(names)}, CPU ms | grouped / eager | / grouped_mm | / products |")
    print(f"|---|---|{'---|' * len(names)}---|---|---|")
    for shape in SHAPES:
        for dtype in args.dtype:
            runs = contestants(shape, DTYPES[dtype])
            check(runs, 1e-4 if dtype == "fp32" else 5e-2)
            seconds: dict[str, list[float]] = {name: [] for name in runs}
            for number in range(args.rounds + 2):
                order = list(runs) if number % 2 else list(runs)[::-1]
                for name in order:
                    begin = time.process_time()
                    runs[name]()
                    seconds[name].append(time.process_time() - begin)
            ms = {name: statistics.median(values[2:]) * 1e3 for name, values in seconds.items()}
            ratios = [f"{ms['grouped'] / ms[name]:.2f}" for name in ("eager", "grouped_mm", "products")]
            print(f"| {shape} | {dtype} | {' | '.join(f'{ms[name]:.0f}' for name in names)} | {' | '.join(ratios)} |")


def contestants(shape: Shape, dtype: torch.dtype) -> dict[str, Run]:
    """By name: a forward and backward, which returns the outputs and the gradient of the input."""
    torch.manual_seed(0)
    x = torch.randn(shape.tokens, 1, shape.hidden).to(dtype).requires_grad_()
    g = torch.randn(shape.tokens, 1, shape.hidden).to(dtype)
    runs: dict[str, Run] = {}
    first: MoELayer | None = None
    for name, kind in (("grouped", GroupedMLP), ("sequential", SequentialMLP)):
        layer = ours(shape, dtype, kind)
        if first is not None:
            layer.load_state_dict(first.state_dict())
        first = first or layer
        runs[name] = run_of(lambda x, layer=layer: layer(x)[0], layer, x, g)
    assert first is not None
    for name in ("eager", "grouped_mm"):
        block = theirs(shape, dtype, name, first)
        runs[name] = run_of(
            lambda x, block=block: block(x.transpose(0, 1)).transpose(0, 1), block, x, g, keeps_gradients=True
        )
    runs["products"] = products(shape, dtype, first, x)
    return runs


def ours(shape: Shape, dtype: torch.dtype, kind: type[nn.Module]) -> MoELayer:
    """Our layer, with places for gradients as DistributedDataParallel gives them."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=shape.hidden,
        num_attention_heads=1,
        num_moe_experts=shape.experts,
        moe_router_topk=shape.topk,
        moe_ffn_hidden_size=shape.width,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        init_method_std=0.05,
        bf16=dtype == torch.bfloat16,
        gradient_accumulation_fusion=True,
    )
    layer = MoELayer(config, MoESubmodules(kind), layer_number=1)
    for param in layer.parameters():
        param.main_grad = torch.zeros_like(param, dtype=torch.float32)  # type: ignore[attr-defined]
    return layer


def theirs(shape: Shape, dtype: torch.dtype, implementation: str, layer: MoELayer) -> nn.Module:
    """The Mixtral block with the layer's weights."""
    config = MixtralConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.width,
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.topk,
        router_jitter_noise=0.0,
    )
    config._experts_implementation = implementation
    block = MixtralSparseMoeBlock(config).to(dtype)
    experts = list(layer.experts.local_experts)
    with torch.no_grad():
        block.gate.weight.copy_(layer.router.weight)
        block.experts.gate_up_proj.copy_(torch.stack([expert.linear_fc1.weight for expert in experts]))
        block.experts.down_proj.copy_(torch.stack([expert.linear_fc2.weight for expert in experts]))
    return block


def run_of(
    forward: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor, g: Tensor, keeps_gradients: bool = False
) -> Run:
    """Forward and backward. Gradients accumulate over micro-batches, as in training; here over the rounds."""

    def run() -> tuple[Tensor, Tensor]:
        x.grad = None
        if not keeps_gradients:
            for param in module.parameters():
                param.grad = None
        y = forward(x)
        y.backward(g)
        assert x.grad is not None
        return y.detach(), x.grad

    return run


def products(shape: Shape, dtype: torch.dtype, layer: MoELayer, x: Tensor) -> Run:
    """The products of each expert on as many rows as it gets."""
    with torch.no_grad():
        counts = layer.router(x)[1].sum(0).tolist()
    weights = [(e.linear_fc1.weight.detach(), e.linear_fc2.weight.detach()) for e in layer.experts.local_experts]
    rows = [
        (torch.randn(n, shape.hidden).to(dtype), torch.randn(n, 2 * shape.width).to(dtype), torch.randn(n, shape.width))
        for n in counts
    ]

    def run() -> tuple[Tensor, Tensor]:
        for (w1, w2), (hidden, inner, narrow) in zip(weights, rows):
            narrow = narrow.to(dtype)
            times_transposed(hidden, w1)
            times_transposed(narrow, w2)
            times(hidden, w2)
            transposed_times(hidden, narrow)
            times(inner, w1)
            transposed_times(inner, hidden)
        return torch.empty(0), torch.empty(0)

    return run


def check(runs: dict[str, Run], tolerance: float) -> None:
    """All compute the same. Raises: AssertionError."""
    want = [t.float().clone() for t in runs["grouped"]()]
    for name, run in runs.items():
        if name != "products":
            for got, expected in zip(run(), want):
                difference = (got.float() - expected).norm() / expected.norm()
                assert difference < tolerance, f"{name} is off by {difference}"


if __name__ == "__main__":
    main()
