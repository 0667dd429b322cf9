"""Wraps a model so that its gradients gather in flat buffers and are summed over the data-parallel ranks.

    backward reaches a parameter                         (every micro-batch)
        hook: main_grad += grad, grad = None             fused layers have added theirs already and leave no grad
        last micro-batch, overlap: count; a full bucket group starts its collective
    finish_grad_sync()                                   (once a step: starts what was not started, waits)

What a layer that accumulates by itself must do: add into `weight.main_grad` inside backward and return None for the
weight. The hook fires all the same. (A layer may also return a stand-in and set `weight.grad_added_to_main_grad`, as
layers written for Megatron do; the stand-in is then dropped.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite import collectives
from megatron_lite.collectives import group_rank, group_size
from megatron_lite.distributed.buffer_layout import default_bucket_size
from megatron_lite.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron_lite.distributed.param_and_grad_buffer import BucketGroup, ParamAndGradBuffer
from megatron_lite.errors import ConfigError
from megatron_lite.model_parallel_config import ModelParallelConfig
from megatron_lite.process_groups_config import ProcessGroupCollection

# Fields whose capability has not landed, with the value that asks for nothing.
_NOT_YET = {
    "use_distributed_optimizer": False,
    "overlap_param_gather": False,
    "align_param_gather": False,
    "num_distributed_optimizer_instances": 1,
    "check_for_large_grads": False,
    "pad_buckets_for_high_nccl_busbw": False,
    "reduce_scatter_with_fp32_accumulation": False,
    "param_name_patterns_for_fp32_local_accumulation": [],
}


class DistributedDataParallel(nn.Module):
    """A model whose gradients are summed over the ranks that hold it.

    Args:
        config: the model's; `calculate_per_token_loss` there turns averaging off (gradients are sums over tokens).
        ddp_config: buckets, overlap, checks.
        module: the model, on its device and in its number format. Its parameters move into flat memory: write into
            them in place from now on.
        disable_bucketing: one bucket, also with overlap (model chunks after the first).
        pg_collection: None = the registered groups. Gradients are summed over `dp_cp`, those of experts over `expt_dp`.

    Attributes: grad_buffers: the flat buffers; bucket_groups: what is reduced together, in launching order;
        modules_after_grad_sync: modules with a method `after_grad_sync(pg_collection)`, called by finalize_model_grads.
    """

    def __init__(
        self,
        config: ModelParallelConfig,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        disable_bucketing: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__()
        self.config, self.ddp_config, self.module = config, ddp_config, module
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self._per_token = bool(getattr(config, "calculate_per_token_loss", False))
        _check(ddp_config, self._per_token)
        trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.bucket_size = self._bucket_size(disable_bucketing, sum(p.numel() for _, p in trainable))
        self.grad_buffers = self._make_buffers(trainable)
        self.bucket_groups: list[BucketGroup] = []
        group_of: dict[nn.Parameter, BucketGroup] = {}
        for buffer in self.grad_buffers:
            for bucket in buffer.buckets:
                self.bucket_groups.append(BucketGroup([bucket], ddp_config, buffer.group))
                group_of |= dict.fromkeys(bucket.params.values(), self.bucket_groups[-1])
        # The graph's accumulation node of a parameter lives as long as somebody holds it, and its hooks with it.
        self._accumulators = []
        for _, param in trainable:
            node = param.expand_as(param).grad_fn
            assert node is not None, "a trainable parameter has a graph"
            accumulator: Any = node.next_functions[0][0]
            accumulator.register_hook(self._hook(param, group_of[param]))
            self._accumulators.append(accumulator)
        self.modules_after_grad_sync: list[Any] = [m for m in module.modules() if hasattr(m, "after_grad_sync")]

    def _bucket_size(self, disable_bucketing: bool, numel: int) -> int | None:
        """Elements per bucket; None: one bucket. Only overlap has a use for several."""
        if not self.ddp_config.overlap_grad_reduce or disable_bucketing or group_rank(self.pg_collection.pp) > 0:
            return None
        if self.ddp_config.num_buckets is not None:
            return max(numel // self.ddp_config.num_buckets, 1)
        return self.ddp_config.bucket_size or default_bucket_size(group_size(self.pg_collection.dp_cp))

    def _make_buffers(self, trainable: list[tuple[str, nn.Parameter]]) -> list[ParamAndGradBuffer]:
        """One buffer for each (parameter dtype, dense or expert)."""
        kinds: dict[tuple[torch.dtype, bool], list[tuple[str, nn.Parameter]]] = {}
        for name, param in trainable:
            is_expert = not getattr(param, "allreduce", True)
            kinds.setdefault((param.dtype, is_expert), []).append((name, param))
        buffers = []
        for (dtype, is_expert), params in kinds.items():
            group = self.pg_collection.expt_dp if is_expert else self.pg_collection.dp_cp
            buffers.append(
                ParamAndGradBuffer(
                    self.ddp_config,
                    params,
                    torch.float32 if self.ddp_config.grad_reduce_in_fp32 else dtype,
                    self.bucket_size,
                    group,
                    self._scaling_factor(is_expert),
                    is_expert,
                )
            )
        return buffers

    def _scaling_factor(self, is_expert: bool) -> float:
        """What gradients are multiplied by before they are summed, so that the result is the mean over dp_cp.

        An expert has received the tokens of all expert-parallel ranks, which are a part of the data-parallel batch: its
        sum is divided by dp_cp as well, not by the smaller number of ranks that hold it.
        """
        if self._per_token:
            return 1.0
        dp_cp = group_size(self.pg_collection.dp_cp)
        if self.ddp_config.average_in_collective:
            return group_size(self.pg_collection.expt_dp) / dp_cp if is_expert else 1.0
        return 1.0 / dp_cp

    def _hook(self, param: nn.Parameter, group: BucketGroup) -> Callable[..., None]:
        """Called by autograd when a backward has computed all of `param`'s gradient."""
        overlap = self.ddp_config.overlap_grad_reduce

        def hook(*_: Any) -> None:
            grad = param.grad
            if grad is not None:
                if not param.grad_added_to_main_grad:  # type: ignore[attr-defined]
                    param.main_grad.add_(grad)  # type: ignore[attr-defined]
                param.grad = None
            if overlap:
                group.register_grad_ready(param)

        return hook

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's own."""
        return self.module(*inputs, **kwargs)

    # -- a step --------------------------------------------------------------------------------------------------

    def zero_grad_buffer(self) -> None:
        """Start a step: gradients to zero, counts to zero."""
        for buffer in self.grad_buffers:
            buffer.zero()
        for group in self.bucket_groups:
            group.reset()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside only accumulates: for all micro-batches but the last."""
        for group in self.bucket_groups:
            group.is_last_microbatch = False
        try:
            yield
        finally:
            for group in self.bucket_groups:
                group.is_last_microbatch = True

    def start_grad_sync(self, *unused: Any) -> None:
        """Start the reduction of every bucket group. Without overlap it is done on return."""
        for group in self.bucket_groups:
            group.start_grad_sync()

    def finish_grad_sync(self) -> None:
        """Return when every gradient is summed over the ranks, starting what has not been started.

        Raises: RankFailure; see `BucketGroup.finish_grad_sync`.
        """
        for group in self.bucket_groups:
            group.finish_grad_sync()

    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        """All gradients times a number."""
        for buffer in self.grad_buffers:
            buffer.scale(scaling_factor)

    @torch.no_grad()
    def broadcast_params(self) -> None:
        """Give every rank the weights of the first one that holds them."""
        for buffer in self.grad_buffers:
            collectives.broadcast(buffer.param_data, buffer.group, purpose="initial weights")
        for param in self.module.parameters():
            if not param.requires_grad:
                is_expert = not getattr(param, "allreduce", True)
                group = self.pg_collection.expt_dp if is_expert else self.pg_collection.dp_cp
                collectives.broadcast(param.data, group, purpose="initial weights")

    # -- the state is the model's --------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The model's, under its own names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """The model's."""
        assert not assign, "parameters live in flat memory: values are copied in"
        return self.module.load_state_dict(state_dict, strict=strict)


def _check(ddp_config: DistributedDataParallelConfig, per_token: bool) -> None:
    """Raises ConfigError for what cannot be done, or not yet."""
    asked = [name for name, value in _NOT_YET.items() if getattr(ddp_config, name) != value]
    if asked:
        raise ConfigError(
            f"DistributedDataParallelConfig: {', '.join(f'{n}={getattr(ddp_config, n)}' for n in asked)}",
            why="not built in this version",
            fix="leave it at its default",
        )
    if ddp_config.average_in_collective and per_token:
        raise ConfigError(
            "--ddp-average-in-collective with --calculate-per-token-loss",
            why="gradients are then sums over tokens and divided by the tokens of all ranks",
            fix="leave one of them out",
        )
