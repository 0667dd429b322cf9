"""Bytes of parameters, gradients and optimizer state that a rank holds, measured, beside the formula.

    python benchmarks/memory.py                     a table for 1, 2, 4 and 8 data-parallel ranks
    python benchmarks/memory.py --hidden-size 256   another size

What is measured is the memory of the flat buffers and of the optimizer's tensors after a step, each storage counted
once; the script checks that the parameters lie in it and that nothing else of their size is alive on the rank.
"""

from __future__ import annotations

import argparse
import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from megatron_lite.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron_lite.models.gpt import GPTModel
from megatron_lite.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron_lite.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron_lite.process_groups import make_process_groups
from megatron_lite.process_groups_config import register_process_groups
from megatron_lite.rank_grid import grids
from megatron_lite.training.local_world import World
from megatron_lite.transformer import TransformerConfig

# name: model's number format, gradients' format, sharded, moments in bf16, bytes per parameter that every rank holds,
# bytes that the ranks share
KINDS: dict[str, tuple[str, str, bool, bool, int, int]] = {
    "fp32": ("fp32", "fp32", False, False, 16, 0),
    "fp32, sharded": ("fp32", "fp32", True, False, 8, 8),
    "bf16": ("bf16", "fp32", False, False, 18, 0),
    "bf16, sharded": ("bf16", "fp32", True, False, 6, 12),
    "bf16 and gradients": ("bf16", "bf16", False, False, 20, 0),
    "bf16 and gradients, sharded": ("bf16", "bf16", True, False, 4, 16),
    "bf16, sharded, moments in bf16": ("bf16", "fp32", True, True, 6, 8),
}


def measure(kind: str, hidden_size: int, num_layers: int) -> tuple[int, int]:
    """Bytes held and parameters, on this rank of a world of data-parallel ranks."""
    model_format, grad_format, sharded, small_moments, _, _ = KINDS[kind]
    bf16 = model_format == "bf16"
    groups = make_process_groups(*grids(torch.distributed.get_world_size()))
    register_process_groups(groups)
    config = TransformerConfig(num_layers=num_layers, hidden_size=hidden_size, num_attention_heads=8, bf16=bf16)
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=4096, max_sequence_length=64)
    model.to(torch.bfloat16 if bf16 else torch.float32)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=grad_format == "fp32", use_distributed_optimizer=sharded
    )
    ddp = DistributedDataParallel(config, ddp_config, model, pg_collection=groups)
    formats = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"} if small_moments else {}
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=1e-3,
            bf16=bf16,
            use_distributed_optimizer=sharded,
            use_precision_aware_optimizer=small_moments,
            **formats,  # type: ignore[arg-type]
        ),
        [ddp],
        pg_collection=groups,
    )
    ddp.zero_grad_buffer()
    for param in model.parameters():
        param.main_grad.fill_(1e-3)  # type: ignore[attr-defined]
    ddp.finish_grad_sync()
    optimizer.step()
    known = {id(t) for b in ddp.grad_buffers for t in (b.param_data, b.grad_data)}
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors() if id(t) in known}
    for shard in optimizer.shards:
        for tensor in shard.memory():
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    assert all(param.untyped_storage().data_ptr() in held for param in model.parameters())
    alive = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors()}
    rest = sum(size for place, size in alive.items() if place not in held)
    numel = sum(param.numel() for param in model.parameters())
    # Kernels that work in blocks keep 2 MiB of scratch, whatever the model.
    assert rest < 0.02 * sum(held.values()) + 2**22, f"{rest} bytes of other tensors are alive"
    register_process_groups(None)
    return sum(held.values()), numel


def _tensors() -> list[torch.Tensor]:
    gc.collect()
    return [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and o.device.type == "cpu"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=192)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    args = parser.parse_args()
    print("| bytes per parameter: measured (formula) | " + " | ".join(f"dp {dp}" for dp in args.ranks) + " |")
    print("|---" * (len(args.ranks) + 1) + "|")
    rows: dict[str, list[str]] = {kind: [] for kind in KINDS}
    worst = 0.0
    for dp in args.ranks:
        world = World(dp)
        for kind, (*_, whole, shared) in KINDS.items():
            formula = whole + shared / dp
            measured = [held / numel for held, numel in world.run(measure, kind, args.hidden_size, args.num_layers)]
            worst = max(worst, *(abs(value / formula - 1) for value in measured))
            rows[kind].append(f"{max(measured):.3f} ({formula:g})")
        world.close()
    for kind, cells in rows.items():
        print(f"| {kind} | " + " | ".join(cells) + " |")
    print(f"largest deviation of any rank: {worst:.2%}")


if __name__ == "__main__":
    main()
