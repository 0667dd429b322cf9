"""Flat memory for parameters and gradients.

    ParamAndGradBuffer    all trainable parameters of one (param dtype, grad dtype, dense or expert)
        param_data        | p7 | p6 | p5 | ... |      every param.data is a view of it
        grad_data         | g7 | g6 | g5 | ... |      every param.main_grad is a view of it
        buckets           |---- 0 ---|--- 1 ---|      the same ranges of both
        shards            |r0|r1|r2|r3|r0|r1|...      of every bucket one part a rank: what a sharded optimizer owns

Flat memory makes one operation of what would be one per parameter: zeroing, scaling, norm, the optimizer's update, the
copy of updated weights. Where a parameter lies is said by `buffer_layout`; `bucket_group` moves buckets between ranks.

Local accumulation in fp32: a 16-bit buffer halves what travels, but sums of many micro-batches lose digits in it.
Parameters that `param_name_patterns_for_fp32_local_accumulation` names have a `main_grad` of their own in fp32, which
is rounded into the buffer (`main_grad_copy_in_grad_buffer`) before it is reduced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_lite.collectives import group_rank, group_size
from megatron_lite.distributed.buffer_layout import BufferLayout, ParamSpec, Range, plan_buffer, shard_of_bucket
from megatron_lite.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron_lite.errors import ConfigError
from megatron_lite.user_buffers import user_buffers


@dataclass(eq=False)
class Bucket:
    """A range of a buffer that travels at once.

    params: by name, in buffer order; range, shard: in the buffer, all of it and this rank's part; param_data,
    grad_data: views `[range.size]` of the buffer's; gradient_scaling_factor: what the sum of the ranks' gradients is
    multiplied by; local_grads: (fp32 gradient accumulated apart, its place in grad_data).
    """

    number: int
    params: dict[str, nn.Parameter]
    range: Range
    shard: Range
    param_data: Tensor
    grad_data: Tensor
    gradient_scaling_factor: float
    local_grads: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def param_shard(self) -> Tensor:
        """This rank's part of the parameters: a view."""
        return self.param_data[self.shard.start - self.range.start : self.shard.end - self.range.start]

    @property
    def grad_shard(self) -> Tensor:
        """This rank's part of the gradients: a view."""
        return self.grad_data[self.shard.start - self.range.start : self.shard.end - self.range.start]

    def take_local_grads(self) -> None:
        """Round what was accumulated apart into the bucket."""
        for local, place in self.local_grads:
            place.copy_(local)


class ParamAndGradBuffer:
    """Moves parameters into flat memory and gives each a `main_grad`.

    Args:
        params: (name, parameter) in module order, all trainable, of one dtype and device.
        bucket_size: elements; None: one bucket.
        group: the ranks over which gradients are reduced.
        gradient_scaling_factor: see `Bucket`.
        is_expert: parameters that live on one expert-parallel rank; they are reduced over other ranks.
        shard_group: the ranks that share one optimizer state, with a distributed optimizer of several instances a part
            of `group`; None: `group`. Each bucket is cut in as many parts.
    """

    def __init__(
        self,
        ddp_config: DistributedDataParallelConfig,
        params: Sequence[tuple[str, nn.Parameter]],
        grad_dtype: torch.dtype,
        bucket_size: int | None,
        group: ProcessGroup | None,
        gradient_scaling_factor: float,
        is_expert: bool = False,
        shard_group: ProcessGroup | None = None,
    ):
        first = params[0][1]
        for name, param in params:
            if param.device != first.device:
                raise ConfigError(
                    f"parameter {name} is on {param.device}, {params[0][0]} on {first.device}",
                    why="a model's parameters share one flat buffer",
                    fix="move the whole model to one device before wrapping it",
                )
        self.ddp_config, self.is_expert = ddp_config, is_expert
        sharded = ddp_config.use_distributed_optimizer
        self.group = group
        self.shard_group = shard_group if ddp_config.num_distributed_optimizer_instances > 1 else group
        self.param_dtype, self.grad_dtype = first.dtype, grad_dtype
        self.layout: BufferLayout = plan_buffer(
            [ParamSpec(name, p.numel(), _has_copies(p)) for name, p in params],
            bucket_size,
            group_size(self.shard_group),
            use_distributed_optimizer=sharded,
            pad_buckets_for_high_nccl_busbw=ddp_config.pad_buckets_for_high_nccl_busbw,
        )
        by_name = dict(params)
        self.params = {name: by_name[name] for name in self.layout.ranges}  # buffer order
        parts, part = (group_size(self.shard_group), group_rank(self.shard_group)) if sharded else (1, 0)
        self.shards = tuple(shard_of_bucket(bucket, part, parts) for bucket in self.layout.buckets)
        self._allocate(first.device)
        local = self._accumulate_apart()
        self.buckets = [
            Bucket(
                number,
                {name: self.params[name] for name in plan.params},
                plan.range,
                self.shards[number],
                self.param_data[plan.range.start : plan.range.end],
                self.grad_data[plan.range.start : plan.range.end],
                gradient_scaling_factor,
                [local[name] for name in plan.params if name in local],
            )
            for number, plan in enumerate(self.layout.buckets)
        ]

    def _allocate(self, device: torch.device) -> None:
        memory = (
            user_buffers(self.group, device, symmetric=not self.ddp_config.disable_symmetric_registration)
            if self.ddp_config.nccl_ub
            else nullcontext()
        )
        with memory:  # zeros, also in the gaps: they must not disturb norms
            self.param_data = torch.zeros(self.layout.numel, dtype=self.param_dtype, device=device)
            self.grad_data = torch.zeros(self.layout.numel, dtype=self.grad_dtype, device=device)
        for name, param in self.params.items():
            place = self.layout.ranges[name]
            data = self.param_data[place.start : place.end].view(param.shape)
            data.copy_(param.data)
            param.data = data  # the old memory is free from here on, one parameter at a time
            param.main_grad = self.grad_data[place.start : place.end].view(param.shape)  # type: ignore[attr-defined]
            param.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def _accumulate_apart(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Name -> (fp32 gradient, its place in the buffer) of the parameters that accumulate in fp32 on this rank."""
        patterns = self.ddp_config.param_name_patterns_for_fp32_local_accumulation
        names = [] if self.grad_dtype == torch.float32 else [n for n in self.params if matches(n, patterns)]
        sizes = [self.params[name].numel() for name in names]
        self._local_data = torch.zeros(sum(sizes), dtype=torch.float32, device=self.grad_data.device)
        local = {}
        for name, flat in zip(names, self._local_data.split(sizes) if names else ()):
            param = self.params[name]
            place = param.main_grad  # type: ignore[attr-defined]
            param.main_grad_copy_in_grad_buffer = place  # type: ignore[attr-defined]
            param.main_grad = flat.view(param.shape)  # type: ignore[attr-defined]
            local[name] = (flat.view(param.shape), place)
        return local

    def zero(self) -> None:
        """All gradients to zero: one operation."""
        self.grad_data.zero_()
        self._local_data.zero_()
        for param in self.params.values():
            param.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def scale(self, factor: float | Tensor) -> None:
        """All gradients in the buffer times `factor`: one operation."""
        self.grad_data.mul_(factor)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a parameter is meant: by a pattern as for file names (`*norm*`), or by `all`."""
    return any(pattern == "all" or fnmatchcase(name, pattern) for pattern in patterns)


def _has_copies(param: nn.Parameter) -> bool:
    """Whether other stages hold the parameter too. In a bucket of its own its shards are the same on all of them."""
    return getattr(param, "shared_embedding", False) or getattr(param, "on_several_stages", False)


def reduced_grad(param: nn.Parameter) -> Tensor:
    """The gradient that the ranks have summed: a view of the buffer, `[*param.shape]`."""
    holder: Any = param
    grad: Tensor = getattr(holder, "main_grad_copy_in_grad_buffer", holder.main_grad)
    return grad
