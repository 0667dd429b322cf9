"""What happens to gradients between the last backward and the optimizer.

    1  every chunk          sum over data-parallel ranks (waits for what overlap has started)
    2  stages               parameters marked `pipeline_parallel`, where the config has `has_cond_embedder`: SUM
    3  tensor-parallel      parameters that all tp ranks hold, but whose gradients come from a part of the sequence: SUM
                            (norms under sequence parallelism, `average_gradients_across_tp_domain`: the mean)
    4  first, last stage    tied word embeddings: both copies' gradients are summed
    5  stages               learned positions that several stages hold; what a model says that stages have copies of
    6  modules              `after_grad_sync(pg_collection)`, where a module has one: expert biases move, what was
                            counted for this step is forgotten
    7  per-token loss       divide by the number of tokens of all ranks

With a distributed optimizer a rank's gradients are sums in its own shard alone. Steps 2 to 5 add whole gradients all
the same: the ranks that they join own the same shards, so each one's shard is right, and the rest is never read.

A step whose group is None costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_lite import collectives
from megatron_lite.collectives import group_size
from megatron_lite.distributed.data_parallel_base import DataParallelBase
from megatron_lite.distributed.param_and_grad_buffer import reduced_grad
from megatron_lite.process_groups_config import ProcessGroupCollection


@torch.no_grad()
def finalize_model_grads(
    model: list[DataParallelBase],
    num_tokens: Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> None:
    """Bring every `main_grad` to the gradient of the global batch.

    Args:
        model: this rank's chunks, under DDP.
        num_tokens: tokens in the loss of this rank's micro-batches, `[]` or `[1]`; given with per-token loss, where
            gradients are sums. On the last pipeline stage; the others' value is not read.
        pg_collection: None = the registered groups.
    """
    pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    config = model[0].config
    with _timed(config, "all-grads-sync"):
        for chunk in model:
            chunk.finish_grad_sync()
    with _timed(config, "conditional-embedder-grads-all-reduce"):
        _reduce_conditional_embedders(model, pg_collection.pp)
    with _timed(config, "non-tensor-parallel-grads-all-reduce"):
        _reduce_over_tensor_parallel_ranks(model, pg_collection.tp)
    with _timed(config, "embedding-grads-all-reduce"):
        _reduce_shared(model, pg_collection.embd, lambda p: getattr(p, "shared_embedding", False))
        _reduce_shared(model, pg_collection.pos_embd, lambda p: getattr(p, "shared_position_embedding", False))
        _reduce_copies(model, pg_collection.pp)
    for chunk in model:
        for module in chunk.modules_after_grad_sync:
            module.after_grad_sync(pg_collection)
    if num_tokens is not None:
        tokens = num_tokens.detach().clone().float()
        pp = pg_collection.pp
        collectives.broadcast(tokens, pp, source=group_size(pp) - 1, purpose="number of tokens")
        collectives.all_reduce(tokens, pg_collection.dp_cp, purpose="number of tokens")
        scale = 1.0 / tokens.clamp(min=1)
        for chunk in model:
            chunk.scale_gradients(scale)


def _reduce_conditional_embedders(model: list[DataParallelBase], pp: ProcessGroup | None) -> None:
    """Embedders of a diffusion model's condition: every stage holds a copy and uses it in its own layers."""
    if group_size(pp) == 1:
        return
    copies: dict[str, list[Tensor]] = {}
    for chunk in model:
        if getattr(chunk.config, "has_cond_embedder", False):
            for name, param in chunk.module.named_parameters():
                if param.requires_grad and getattr(param, "pipeline_parallel", False):
                    copies.setdefault(name, []).append(reduced_grad(param))
    for first, *others in copies.values():  # chunks of one rank hold copies too
        for other in others:
            first.add_(other)
    _all_reduce_together([grads[0] for grads in copies.values()], pp, "sum", "conditional embedder gradients")
    for first, *others in copies.values():
        for other in others:
            other.copy_(first)


def _reduce_over_tensor_parallel_ranks(model: list[DataParallelBase], tp: ProcessGroup | None) -> None:
    """One all-reduce for the sums, one for the means."""
    if group_size(tp) == 1:
        return
    sums, means = [], []
    for chunk in model:
        sequence_parallel = chunk.config.sequence_parallel
        for name, param in chunk.module.named_parameters():
            if not param.requires_grad:
                continue
            if getattr(param, "average_gradients_across_tp_domain", False):
                means.append(reduced_grad(param))
            elif (sequence_parallel and getattr(param, "sequence_parallel", False)) or _is_head_norm(name, param):
                sums.append(reduced_grad(param))
    _all_reduce_together(sums, tp, "sum", "non-tensor-parallel gradients")
    _all_reduce_together(means, tp, "avg", "non-tensor-parallel gradients")


def _all_reduce_together(grads: list[Tensor], group: ProcessGroup | None, op: collectives.Op, purpose: str) -> None:
    """One message for many small tensors."""
    if not grads:
        return
    flat = torch.cat([grad.view(-1) for grad in grads])
    collectives.all_reduce(flat, group, op=op, purpose=purpose)
    for grad, result in zip(grads, flat.split([grad.numel() for grad in grads])):
        grad.copy_(result.view_as(grad))


def _is_head_norm(name: str, param: nn.Parameter) -> bool:
    """Norms over a head are held by all tp ranks, each of which sees its own heads. A norm over a latent vector has
    such a name too, and sees all of it."""
    return ("q_layernorm" in name or "k_layernorm" in name) and not getattr(param, "sees_all_heads", False)


def _reduce_shared(
    model: list[DataParallelBase], group: ProcessGroup | None, is_shared: Callable[[nn.Parameter], bool]
) -> None:
    """Sum the gradients of copies of one parameter that live on several stages."""
    if group_size(group) == 1:
        return
    for chunk in model:
        for param in chunk.module.parameters():
            if param.requires_grad and is_shared(param):
                collectives.all_reduce(reduced_grad(param), group, purpose="shared embedding gradients")


def _reduce_copies(model: list[DataParallelBase], pp: ProcessGroup | None) -> None:
    """Sum the gradients of a model's `copies_over_stages`: global name -> shape of what some stages or chunks hold.

    Every stage takes part, with zeros for what it does not hold.
    """
    if group_size(pp) == 1 or not model[0].copies_over_stages:
        return
    shapes = model[0].copies_over_stages
    held: dict[str, list[Tensor]] = {name: [] for name in shapes}
    for chunk in model:
        for param in chunk.module.parameters():
            name = param.shard.name if hasattr(param, "shard") else ""
            if param.requires_grad and name in held:
                held[name].append(reduced_grad(param))
    device = next(model[0].parameters()).device
    sums = [
        torch.stack(held[name]).float().sum(0) if held[name] else torch.zeros(shape, device=device)
        for name, shape in shapes.items()
    ]
    _all_reduce_together(sums, pp, "sum", "gradients of copies on stages")
    for name, total in zip(shapes, sums):
        for grad in held[name]:
            grad.copy_(total)


class _timed:
    """Times a part of a step, if the run has timers."""

    def __init__(self, config: Any, name: str):
        self._timers, self._name, self._barrier = config.timers, name, config.barrier_with_L1_time

    def __enter__(self) -> None:
        if self._timers is not None:
            self._timers(self._name, log_level=1).start(barrier=self._barrier)

    def __exit__(self, *error: Any) -> None:
        if self._timers is not None:
            self._timers(self._name).stop()
