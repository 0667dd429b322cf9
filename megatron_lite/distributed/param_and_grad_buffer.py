"""Flat memory for parameters and gradients, and the groups of buckets that are reduced together.

    ParamAndGradBuffer    all trainable parameters of one (param dtype, grad dtype, dense or expert)
        param_data        | p7 | p6 | p5 | ... |      every param.data is a view of it
        grad_data         | g7 | g6 | g5 | ... |      every param.main_grad is a view of it
        buckets           |---- 0 ---|--- 1 ---|      the same ranges of both
    BucketGroup           one or several buckets: the unit of communication; launches when its last gradient is there

Flat memory makes one operation of what would be one per parameter: zeroing, scaling, norm, the optimizer's update, the
copy of updated weights. Where a parameter lies is said by `buffer_layout`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_lite import collectives
from megatron_lite.distributed.buffer_layout import BufferLayout, ParamSpec, plan_buffer
from megatron_lite.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron_lite.errors import ConfigError, RankFailure
from megatron_lite.log import rank_and_world_size


@dataclass(eq=False)
class Bucket:
    """A range of a buffer that is reduced at once.

    params: by name, in buffer order; grad_data: a view `[numel]` of the buffer's;
    gradient_scaling_factor: multiplied into the gradients before they are reduced.
    """

    number: int
    params: dict[str, nn.Parameter]
    grad_data: Tensor
    gradient_scaling_factor: float


class ParamAndGradBuffer:
    """Moves parameters into flat memory and gives each a `main_grad`.

    Args:
        params: (name, parameter) in module order, all trainable, of one dtype and device.
        bucket_size: elements; None: one bucket.
        group: the ranks over which gradients are reduced.
        gradient_scaling_factor: see `Bucket`.
        is_expert: parameters that live on one expert-parallel rank; they are reduced over other ranks.
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
    ):
        first = params[0][1]
        for name, param in params:
            if param.device != first.device:
                raise ConfigError(
                    f"parameter {name} is on {param.device}, {params[0][0]} on {first.device}",
                    why="a model's parameters share one flat buffer",
                    fix="move the whole model to one device before wrapping it",
                )
        self.ddp_config, self.group, self.is_expert = ddp_config, group, is_expert
        self.param_dtype, self.grad_dtype = first.dtype, grad_dtype
        self.layout: BufferLayout = plan_buffer(
            [ParamSpec(name, p.numel(), getattr(p, "shared_embedding", False)) for name, p in params],
            bucket_size,
            collectives.group_size(group),
            use_distributed_optimizer=ddp_config.use_distributed_optimizer,
            pad_buckets_for_high_nccl_busbw=ddp_config.pad_buckets_for_high_nccl_busbw,
        )
        by_name = dict(params)
        self.params = {name: by_name[name] for name in self.layout.ranges}  # buffer order
        # Zeros, also in the gaps: they must not disturb norms.
        self.param_data = torch.zeros(self.layout.numel, dtype=self.param_dtype, device=first.device)
        self.grad_data = torch.zeros(self.layout.numel, dtype=grad_dtype, device=first.device)
        for name, param in self.params.items():
            place = self.layout.ranges[name]
            data = self.param_data[place.start : place.end].view(param.shape)
            data.copy_(param.data)
            param.data = data  # the old memory is free from here on, one parameter at a time
            param.main_grad = self.grad_data[place.start : place.end].view(param.shape)  # type: ignore[attr-defined]
            param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        self.buckets = [
            Bucket(
                number,
                {name: self.params[name] for name in plan.params},
                self.grad_data[plan.range.start : plan.range.end],
                gradient_scaling_factor,
            )
            for number, plan in enumerate(self.layout.buckets)
        ]

    def zero(self) -> None:
        """All gradients to zero: one operation."""
        self.grad_data.zero_()
        for param in self.params.values():
            param.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def scale(self, factor: float | Tensor) -> None:
        """All gradients times `factor`: one operation."""
        self.grad_data.mul_(factor)


class BucketGroup:
    """Buckets whose gradients are reduced together, and the count of gradients that are there.

    With overlap a group launches its collective inside backward, when the last gradient of the last micro-batch has
    arrived. How often a parameter's hook fires in a backward depends on the model (recomputation splits backward into
    several), so the first step only counts, and launches when it is asked to finish; these counts are what later steps
    wait for. At most one reduction of a group is under way.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        ddp_config: DistributedDataParallelConfig,
        group: ProcessGroup | None,
    ):
        self.buckets, self.ddp_config, self.group = list(buckets), ddp_config, group
        self.is_last_microbatch = True
        self._names = {param: name for bucket in buckets for name, param in bucket.params.items()}
        self._expected: dict[nn.Parameter, int] | None = None  # hooks per parameter and step, after the first step
        self._arrived: Counter[nn.Parameter] = Counter()
        self._missing = 0  # parameters that have not arrived as often as expected
        self._handles: list[collectives.Handle] | None = None  # None: nothing is under way

    def reset(self) -> None:
        """Ready for the next step."""
        self.is_last_microbatch = True
        self._arrived.clear()
        self._missing = len(self._expected) if self._expected is not None else 0

    def register_grad_ready(self, param: nn.Parameter) -> None:
        """A hook says that `param`'s gradient of this backward is in `main_grad`. Counts in the last micro-batch only.

        Raises: RankFailure when the bucket has been reduced already.
        """
        if not self.is_last_microbatch:
            return
        self._arrived[param] += 1
        if self._expected is None:
            return
        if self._handles is not None:
            raise RankFailure(
                f"the gradient of {self._names[param]} came after its bucket had been sent",
                why="in the first step its backward ran less often; with --overlap-grad-reduce every step must use "
                "each parameter equally often",
                fix="run without --overlap-grad-reduce",
            )
        if self._arrived[param] == self._expected[param]:
            self._missing -= 1
            if self._missing == 0:
                self.start_grad_sync()

    def start_grad_sync(self) -> None:
        """Check, scale, and start the collective; without overlap it is done on return."""
        assert self._handles is None, "the last reduction of these buckets has not been finished"
        if self.ddp_config.check_for_nan_in_grad:
            for bucket in self.buckets:
                check_for_nan(bucket)
        self._handles = []
        for bucket in self.buckets:
            if bucket.gradient_scaling_factor != 1.0:
                bucket.grad_data.mul_(bucket.gradient_scaling_factor)
            self._handles.append(
                collectives.all_reduce(
                    bucket.grad_data,
                    self.group,
                    op="avg" if self.ddp_config.average_in_collective else "sum",
                    purpose="gradients",
                    async_op=self.ddp_config.overlap_grad_reduce,
                )
            )

    def finish_grad_sync(self) -> None:
        """Return when the gradients of all ranks are summed.

        Raises: RankFailure naming parameters whose gradient never came (with overlap).
        """
        if not self.ddp_config.overlap_grad_reduce:
            if self._handles is None:
                self.start_grad_sync()
        elif self._expected is None:
            self._check_complete({param: 1 for param in self._names})
            self._expected = dict(self._arrived)
            if self._handles is None:
                self.start_grad_sync()
        elif self._handles is None:
            self._check_complete(self._expected)
        assert self._handles is not None
        for handle in self._handles:
            handle.wait()
        self._handles = None

    def _check_complete(self, expected: dict[nn.Parameter, int]) -> None:
        missing = [self._names[param] for param, count in expected.items() if self._arrived[param] < count]
        if missing:
            raise RankFailure(
                f"no gradient came for {_some(missing)} ({len(expected) - len(missing)} of {len(expected)} parameters "
                f"of bucket {self.buckets[0].number} are ready)",
                why="with --overlap-grad-reduce a bucket is sent when every parameter in it has its gradient",
                fix="use the parameter in forward, freeze it (requires_grad=False), or run without "
                "--overlap-grad-reduce, where it trains with gradient 0",
            )


def check_for_nan(bucket: Bucket) -> None:
    """Stop when a gradient of this rank is NaN or Inf, while it is still known whose it is.

    Waits for the device.

    Raises: RankFailure naming the rank, the bucket and the parameters.
    """
    # A sum is NaN or Inf if an element is. It may also overflow by itself; the parameters decide.
    if bool(torch.isfinite(bucket.grad_data.sum())):
        return
    bad = [
        name
        for name, param in bucket.params.items()
        if not bool(torch.isfinite(param.main_grad).all())  # type: ignore[attr-defined]
    ]
    if bad:
        rank, _ = rank_and_world_size()
        raise RankFailure(
            f"rank {rank}: NaN or Inf in the gradient of {_some(bad)} (bucket {bucket.number}, "
            f"before it is summed over ranks, on {bucket.grad_data.device})",
            why="the sum would carry it to every rank; no weight has been changed by this step",
            fix="look at this rank's batch, lower --lr, or skip such steps with --no-check-for-nan-in-loss-and-grad",
        )


def _some(names: Sequence[str], count: int = 5) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more
