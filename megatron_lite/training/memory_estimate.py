"""The memory of a rank that is known ahead: weights, gradients, optimizer state. Not activations.

Bytes per parameter, with d the ranks that share the optimizer's state (ZeRO-1: Rajbhandari et al. 2020):

    fp32          4 + 4 + 8/d                 weights, gradients, Adam's moments
    bf16, fp16    2 + 4 (or 2) + (4 + 8)/d    the optimizer keeps weights in fp32 besides
    fully sharded 4/d + 4/d + 8/d             in any format; layers that run have whole weights besides
    nothing moves weights alone               --freeze-all-layers; --skip-train, which shards none either
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.optimizer

    def __str__(self) -> str:
        parts = (("weights", self.weights), ("gradients", self.gradients), ("optimizer state", self.optimizer))
        return " + ".join(f"{name} {as_size(size)}" for name, size in parts) + f" = {as_size(self.total)}"


def memory_of(args: Namespace, dense: int, experts: int = 0) -> Memory:
    """What `dense` parameters of a rank, and `experts` parameters of its experts, take.

    Args:
        args: validated.
    """
    params = dense + experts
    item = {"torch.float32": 4}.get(str(args.params_dtype), 2)
    grad_item = 4 if args.accumulate_allreduce_grads_in_fp32 or item == 4 else 2
    state = _moment_bytes(args) + (0 if item == 4 else 4)
    instances = args.num_distributed_optimizer_instances if args.use_distributed_optimizer else None
    shares = [1, 1]
    if instances is not None:
        ranks = args.world_size // args.pipeline_model_parallel_size
        shares = [
            max(1, ranks // model // instances)
            for model in (
                args.tensor_model_parallel_size,
                args.expert_model_parallel_size * (args.expert_tensor_parallel_size or args.tensor_model_parallel_size),
            )
        ]
    held = params // shares[0]
    if args.skip_train or args.freeze_all_layers:
        is_cut = args.is_fully_sharded and not args.skip_train
        return Memory(held * 4 if is_cut else params * item, 0, 0)
    if args.is_fully_sharded:
        return Memory(held * 4, held * 4, held * _moment_bytes(args))
    optimizer = dense * state // shares[0] + experts * state // shares[1]
    return Memory(params * item, params * grad_item, optimizer)


def _moment_bytes(args: Namespace) -> int:
    """Bytes per parameter of the optimizer's moments; of muon those of a matrix, which most parameters are in."""
    widths = {"fp32": 4, "bf16": 2}
    adam = widths[args.exp_avg_dtype] + widths[args.exp_avg_sq_dtype]
    return {"adam": adam, "sgd": 4 if args.sgd_momentum else 0, "lion": 4, "muon": 4}[args.optimizer]


def as_size(size: float) -> str:
    """`1536` -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")
