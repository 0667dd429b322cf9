"""One training step beside Hugging Face's, and beside the products that no step can do without.

    python benchmarks/step_time.py                              both shapes, fp32 and bf16, a table on standard output
    python benchmarks/step_time.py --shapes A --dtypes fp32 --rounds 9

A step is forward, loss, backward, clipping by the norm and AdamW, on one thread, of

    ours           GPTModel under DistributedDataParallel, our optimizer: the objects that pretrain_gpt.py builds, with
                   the allocator set up as it does
    hugging face   transformers' GPT-2 or Llama of the same shape with what it takes by default: torch.optim.AdamW,
                   clip_grad_norm_; in bf16 autocast over fp32 weights, as its Trainer has it
    bound          the step's own matrix products and attention alone, each by the fastest kernel of this machine

Each contestant has a process of its own, and they take turns, so that other load meets all alike; times are CPU times
(medians over the rounds). Memory is the growth of the resident peak of another process, from after a step of a tiny
model (which loads the code, about 100 MiB for either) to the end of the model's third step.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import gc
import json
import platform
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron_lite.fusions.attention import attention
from megatron_lite.fusions.backends import describe, onednn_linear
from megatron_lite.host_memory import keep_freed_memory
from megatron_lite.models.gpt import GPTModel, get_gpt_layer_local_spec
from megatron_lite.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron_lite.transformer import Float16Module, TransformerConfig

Step = Callable[[], float]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TARGETS = {"fp32": (0.65, 1.20), "bf16": (0.80, 1.25)}  # of Hugging Face's time, of the bound
MEMORY_TARGET = 0.80


@dataclass(frozen=True)
class Shape:
    """A model and a micro-batch."""

    name: str
    ffn: int
    groups: int
    llama: bool
    layers: int = 6
    hidden: int = 384
    heads: int = 6
    length: int = 256
    batch: int = 8
    vocabulary: int = 8192

    def tokens(self, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Inputs and labels `[b, s]`."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, self.vocabulary, (self.batch, self.length + 1), generator=generator)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def products(self) -> Counter[tuple[int, int]]:
        """(inputs, outputs) of every linear layer, with how often it occurs."""
        size = self.hidden // self.heads
        count: Counter[tuple[int, int]] = Counter()
        count[self.hidden, (self.heads + 2 * self.groups) * size] += self.layers
        count[self.hidden, self.hidden] += self.layers
        count[self.hidden, self.ffn * (2 if self.llama else 1)] += self.layers
        count[self.ffn, self.hidden] += self.layers
        count[self.hidden, self.vocabulary] += 1
        return count


SHAPES = {
    "A": Shape("A", ffn=1536, groups=6, llama=False),
    "B": Shape("B", ffn=1024, groups=2, llama=True),
}


# -- contestants -------------------------------------------------------------------------------------------------


def our_model(shape: Shape, dtype: str) -> tuple[TransformerConfig, torch.nn.Module]:
    """GPTModel with its config, as pretrain_gpt.py builds it for these flags."""
    torch.manual_seed(0)
    llama = {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "num_query_groups": shape.groups,
    }
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        ffn_hidden_size=shape.ffn,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=True,
        gradient_accumulation_fusion=True,
        bf16=dtype == "bf16",
        **(llama if shape.llama else {}),
    )
    model: torch.nn.Module = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        shape.vocabulary,
        shape.length,
        position_embedding_type="rope" if shape.llama else "learned_absolute",
        share_embeddings_and_output_weights=not shape.llama,
    )
    if dtype == "bf16":
        model = Float16Module(config, model)
    return config, model


def ours(shape: Shape, dtype: str) -> Step:
    """What pretrain_gpt.py runs, without its log."""
    config, model = our_model(shape, dtype)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=dtype == "bf16"), model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=1e-4, weight_decay=0.01, clip_grad=1.0, bf16=dtype == "bf16"), [ddp]
    )
    inputs, labels = shape.tokens()
    positions = torch.arange(shape.length).expand(shape.batch, -1)

    def step() -> float:
        ddp.zero_grad_buffer()
        loss = ddp(inputs, positions, None, labels=labels).mean()
        optimizer.scale_loss(loss).backward()
        finalize_model_grads([ddp])
        optimizer.step()
        return loss.item()

    return step


def hugging_face_model(shape: Shape) -> Any:
    """transformers' model of the same shape."""
    import transformers

    torch.manual_seed(0)
    if shape.llama:
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=shape.vocabulary,
                hidden_size=shape.hidden,
                intermediate_size=shape.ffn,
                num_hidden_layers=shape.layers,
                num_attention_heads=shape.heads,
                num_key_value_heads=shape.groups,
                max_position_embeddings=shape.length,
            )
        )
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=shape.vocabulary,
            n_positions=shape.length,
            n_embd=shape.hidden,
            n_layer=shape.layers,
            n_head=shape.heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def hugging_face(shape: Shape, dtype: str) -> Step:
    """The same shape by transformers, everything else by default."""
    model = hugging_face_model(shape).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    inputs, _ = shape.tokens()

    def step() -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            loss = model(input_ids=inputs, labels=inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def bound(shape: Shape, dtype: str) -> Step:
    """Every product of forward and backward, and attention with its gradients; nothing else."""
    kind, rows = DTYPES[dtype], shape.batch * shape.length
    work: list[tuple[Callable[[], object], int]] = []
    for (width, out), times in shape.products().items():
        x, w, g = torch.randn(rows, width).to(kind), torch.randn(out, width).to(kind), torch.randn(rows, out).to(kind)
        for a, b in ((x, w), (g, w.t()), (g.t(), x.t())):  # forward, input gradient, weight gradient
            work.append((_fastest(_kernels(a, b)), times))
    size = shape.hidden // shape.heads
    q = torch.randn(shape.batch, shape.heads, shape.length, size).to(kind).requires_grad_()
    k, v = (torch.randn(shape.batch, shape.groups, shape.length, size).to(kind).requires_grad_() for _ in range(2))
    work.append((_fastest(_attentions(q, k, v)), shape.layers))

    def step() -> float:
        for function, times in work:
            for _ in range(times):
                function()
        return 0.0

    return step


def _kernels(a: Tensor, b: Tensor) -> list[Callable[[], object]]:
    """Ways to a b^T."""
    linear = onednn_linear()
    ways: list[Callable[[], object]] = [lambda: F.linear(a, b)]
    if a.dtype == torch.float32 and linear is not None:
        ways.append(lambda: linear(a, b))
    if a.dtype != torch.float32:
        ways.append(lambda: F.linear(a.float(), b.float()).to(a.dtype))
    return ways


def _attentions(q: Tensor, k: Tensor, v: Tensor) -> list[Callable[[], object]]:
    """Ways to causal attention with its gradients."""
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu_(1)[None, None]
    g = torch.randn_like(q)
    grouped = q.shape[1] != k.shape[1]

    def torchs(widen: bool) -> None:
        inputs = [x.float() for x in (q, k, v)] if widen else [q, k, v]
        y = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=grouped)
        torch.autograd.grad(y.to(q.dtype), (q, k, v), g)

    def products() -> None:
        torch.autograd.grad(attention(q, k, v, hidden), (q, k, v), g)

    return [lambda: torchs(False), lambda: torchs(q.dtype != torch.float32), products]


def _fastest(ways: list[Callable[[], object]]) -> Callable[[], object]:
    """The way with the smallest CPU time of three calls."""
    return min(ways, key=lambda way: min(_cpu_time(way) for _ in range(3)))


CONTESTANTS = {"ours": ours, "hugging face": hugging_face, "bound": bound}


# -- measuring ---------------------------------------------------------------------------------------------------


def _cpu_time(function: Callable[[], object]) -> float:
    begin = time.process_time()
    function()
    return time.process_time() - begin


class Contestant:
    """A process that takes one step at a time, when told to."""

    def __init__(self, name: str, shape: Shape, dtype: str) -> None:
        command = [sys.executable, __file__, "--serve", name, "--shapes", shape.name, "--dtypes", dtype]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def step(self) -> float:
        """CPU seconds of one step."""
        assert self._process.stdin and self._process.stdout
        print(file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """Let it end."""
        self._process.communicate()


def serve(name: str, shape: Shape, dtype: str) -> None:
    """A line in, a step, its CPU seconds out, until there are no more lines."""
    if name != "hugging face":  # the bound too takes what is fastest
        keep_freed_memory()
    step = CONTESTANTS[name](shape, dtype)
    for _ in sys.stdin:
        gc.collect()
        print(_cpu_time(step), flush=True)


def times(shape: Shape, dtype: str, rounds: int) -> dict[str, float]:
    """Median CPU seconds of a step per contestant; contestants take turns."""
    contestants = {name: Contestant(name, shape, dtype) for name in CONTESTANTS}
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds + 2):  # the first steps allocate
        for name, contestant in contestants.items():
            taken[name].append(contestant.step())
    for contestant in contestants.values():
        contestant.close()
    return {name: statistics.median(values[2:]) for name, values in taken.items()}


def peak(shape: Shape, dtype: str, name: str) -> float:
    """MiB by which the resident peak grows over three steps. To be run in a process of its own."""
    if name == "ours":
        keep_freed_memory()
    CONTESTANTS[name](replace(shape, layers=1, hidden=96, ffn=64, length=16, batch=1, vocabulary=64), dtype)()
    before = status("VmRSS")
    step = CONTESTANTS[name](shape, dtype)
    for _ in range(3):
        step()
    return status("VmHWM") - before


def status(key: str) -> float:
    """MiB from Linux's account of this process. (getrusage's peak would include the parent's, from before exec.)"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) / 1024
    raise SystemExit(f"/proc/self/status has no {key}: memory is measured on Linux only (--no-memory)")


def _peak_in_subprocess(shape: Shape, dtype: str, name: str) -> float:
    command = [sys.executable, __file__, "--peak", name, "--shapes", shape.name, "--dtypes", dtype]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Measure what was asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-memory", action="store_true", help="times only")
    parser.add_argument("--peak", choices=list(CONTESTANTS), help="print one contestant's memory and exit")
    parser.add_argument("--serve", choices=list(CONTESTANTS), help="take one contestant's steps, each when told to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.serve:
        serve(options.serve, SHAPES[options.shapes[0]], options.dtypes[0])
        return
    if options.peak:
        print(json.dumps(peak(SHAPES[options.shapes[0]], options.dtypes[0], options.peak)))
        return
    capability = torch.backends.cpu.get_cpu_capability()
    print(f"torch {torch.__version__}, {platform.machine()} with {capability}, one thread, {options.rounds} rounds")
    for dtype in options.dtypes:
        print(f"{dtype}: {describe(DTYPES[dtype], 'cpu')}")
    print(
        "\n| shape | dtype | bound, CPU ms | hugging face | ours | ours / hugging face | ours / bound | theirs / bound"
        " | peak MiB, ours / hugging face |\n|---|---|---|---|---|---|---|---|---|"
    )
    for dtype in options.dtypes:
        for name in options.shapes:
            shape = SHAPES[name]
            ms = {who: 1e3 * t for who, t in times(shape, dtype, options.rounds).items()}
            mine, theirs, least = ms["ours"], ms["hugging face"], ms["bound"]
            memory = "-"
            if not options.no_memory:
                a, b = (_peak_in_subprocess(shape, dtype, who) for who in ("ours", "hugging face"))
                memory = f"{a:.0f} / {b:.0f} = {a / b:.2f} (at most {MEMORY_TARGET:.2f})"
            of_theirs, of_bound = TARGETS[dtype]
            print(
                f"| {name} | {dtype} | {least:.0f} | {theirs:.0f} | {mine:.0f} | {mine / theirs:.2f} (at most "
                f"{of_theirs:.2f}) | {mine / least:.2f} (at most {of_bound:.2f}) | {theirs / least:.2f} | {memory} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
