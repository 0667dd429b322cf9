"""Wraps a model so that its gradients gather in flat buffers and are summed over the data-parallel ranks.

    backward reaches a parameter                         (every micro-batch)
        hook: main_grad += grad, grad = None             fused layers have added theirs already and leave no grad
        last micro-batch, overlap: count; a full bucket group starts its collective
    finish_grad_sync()                                   (once a step: starts what was not started, waits)
    the optimizer steps on its shard of every bucket, and calls params_updated()
    forward reaches a module with parameters             (overlap of the gather: the first micro-batch)
        hook: wait for the module's bucket group, start the gather of the next

What a layer that accumulates by itself must do: add into `weight.main_grad` inside backward and return None for the
weight. The hook fires all the same. (A layer may also return a stand-in and set `weight.grad_added_to_main_grad`, as
layers written for Megatron do; the stand-in is then dropped.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megatron_lite import collectives
from megatron_lite.collectives import group_rank, group_size
from megatron_lite.config_logger import log_config_to_disk
from megatron_lite.distributed.bucket_group import BucketGroup
from megatron_lite.distributed.buffer_layout import default_bucket_size
from megatron_lite.distributed.data_parallel_base import DataParallelBase, broadcast_parameters
from megatron_lite.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron_lite.distributed.param_and_grad_buffer import ParamAndGradBuffer
from megatron_lite.errors import ConfigError
from megatron_lite.model_parallel_config import ModelParallelConfig
from megatron_lite.process_groups_config import ProcessGroupCollection


class DistributedDataParallel(DataParallelBase):
    """A model whose gradients are summed over the ranks that hold it.

    Args:
        config: the model's; `calculate_per_token_loss` there turns averaging off (gradients are sums over tokens).
        ddp_config: buckets, overlap, checks.
        module: the model, on its device and in its number format. Its parameters move into flat memory: write into
            them in place from now on.
        disable_bucketing: one bucket, also with overlap (model chunks after the first).
        pg_collection: None = the registered groups. Gradients are summed over `dp_cp`, those of experts over `expt_dp`;
            with several instances of a distributed optimizer, first over `intra_dp_cp` (`intra_expt_dp`), then over
            `inter_dist_opt`.

    Attributes: bucket_groups: what is reduced together, in launching order; others: see `DataParallelBase`.
    """

    grad_buffers: list[ParamAndGradBuffer]

    def __init__(
        self,
        config: ModelParallelConfig,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        disable_bucketing: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        log_config_to_disk(config, locals())
        super().__init__(config, ddp_config, module, pg_collection)
        _check_instances(ddp_config, self.pg_collection)
        if ddp_config.use_megatron_fsdp and ddp_config.data_parallel_sharding_strategy not in ("no_shard", "optim"):
            raise ConfigError(
                f'DistributedDataParallel with use_megatron_fsdp=True and data_parallel_sharding_strategy="'
                f'{ddp_config.data_parallel_sharding_strategy}"',
                why="weights and gradients are whole here",
                fix="FullyShardedDataParallel, of the same package",
            )
        trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.bucket_size = self._bucket_size(disable_bucketing, sum(p.numel() for _, p in trainable))
        self.grad_buffers = self._make_buffers(trainable)
        self.bucket_groups = self._make_groups(disable_bucketing)
        self._group_of = {
            param: group for group in self.bucket_groups for bucket in group.buckets for param in bucket.params.values()
        }
        # The graph's accumulation node of a parameter lives as long as somebody holds it, and its hooks with it.
        self._accumulators = []
        for _, param in trainable:
            node = param.expand_as(param).grad_fn
            assert node is not None, "a trainable parameter has a graph"
            accumulator: Any = node.next_functions[0][0]
            accumulator.register_hook(self._hook(param, self._group_of[param]))
            self._accumulators.append(accumulator)
        self._pre_hooks: list[Any] = []
        if ddp_config.overlap_param_gather:
            self.enable_forward_pre_hook()

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
                    self.pg_collection.intra_expt_dp if is_expert else self.pg_collection.intra_dp_cp,
                )
            )
        return buffers

    def _make_groups(self, disable_bucketing: bool) -> list[BucketGroup]:
        """A group for each bucket; where bucketing is disabled one for all dense, and one for all expert buckets."""
        groups = []
        for is_expert in (False, True):
            buffers = [buffer for buffer in self.grad_buffers if buffer.is_expert == is_expert]
            buckets = [bucket for buffer in buffers for bucket in buffer.buckets]
            parts = [buckets] if disable_bucketing and buckets else [[bucket] for bucket in buckets]
            across = self.pg_collection.inter_expt_dp if is_expert else self.pg_collection.inter_dist_opt
            if self.ddp_config.num_distributed_optimizer_instances == 1:
                across = None
            kind = [
                BucketGroup(
                    part,
                    self.ddp_config,
                    buffers[0].group,
                    buffers[0].shard_group,
                    across,
                    name=f"{'expert ' if is_expert else ''}bucket group {number}",
                )
                for number, part in enumerate(parts)
            ]
            for group, before in zip(kind[1:], kind):
                group.before = before
            groups += kind
        return groups

    def _scaling_factor(self, is_expert: bool) -> float:
        """What gradients are multiplied by before they are summed, so that the result is the mean over dp_cp.

        An expert has received the tokens of all expert-parallel ranks, which are a part of the data-parallel batch: its
        sum is divided by dp_cp as well, not by the smaller number of ranks that hold it.
        """
        if self.per_token:
            return 1.0
        dp_cp = group_size(self.pg_collection.dp_cp)
        if self.ddp_config.average_in_collective:
            return group_size(self.pg_collection.expt_dp) / dp_cp if is_expert else 1.0
        return 1.0 / dp_cp

    def _hook(self, param: Any, group: BucketGroup) -> Callable[..., None]:
        """Called by autograd when a backward has computed all of `param`'s gradient."""
        overlap = self.ddp_config.overlap_grad_reduce

        def hook(*_: Any) -> None:
            grad = param.grad
            if grad is not None:
                # Transformer Engine marks a weight for which it returns zeros, so that other uses of it are added.
                if not param.grad_added_to_main_grad or getattr(param, "zero_out_wgrad", False):
                    param.main_grad.add_(grad)
                param.grad = None
            if overlap:
                group.register_grad_ready(param, self.force_all_reduce)

        return hook

    # -- a step --------------------------------------------------------------------------------------------------

    def zero_grad_buffer(self) -> None:
        """Start a step: gradients to zero, counts to zero."""
        super().zero_grad_buffer()
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
            group.start_grad_sync(self.force_all_reduce)

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Return when every gradient is summed over the ranks, starting what has not been started.

        With a distributed optimizer only this rank's shard of each bucket holds sums then.

        Args:
            force_all_reduce: bring all sums to every rank (what was started in backward goes by the attribute).
        Raises: RankFailure; see `BucketGroup.finish_grad_sync`.
        """
        for group in self.bucket_groups:
            group.finish_grad_sync(force_all_reduce or self.force_all_reduce)

    # -- parameters of a distributed optimizer ---------------------------------------------------------------------

    def params_updated(self) -> None:
        """The optimizer has written its shards of the parameters: gather them, or let the next forward do it."""
        if not self.ddp_config.use_distributed_optimizer:
            return
        for group in self.bucket_groups:
            group.params_updated()
        if not self._pre_hooks:
            self.start_param_sync(force_sync=True)

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Gather all parameters from the ranks' shards; with overlap it is only started.

        Args:
            force_sync: return when it is done, also with overlap.
            force_dispatch: accepted for scripts written for Megatron.
        """
        if not self.ddp_config.use_distributed_optimizer:
            return
        for group in reversed(self.bucket_groups):
            group.start_param_sync(force_sync)

    def finish_param_sync(self) -> None:
        """Return when all parameters are whole: gathers what has not been, and nothing else."""
        for group in reversed(self.bucket_groups):
            group.finish_param_sync()

    def enable_forward_pre_hook(self) -> None:
        """From now on forward gathers parameters as it reaches them.

        A module that uses the parameters of another one must run after it, as a tied output layer does.
        """
        assert self.ddp_config.overlap_param_gather and not self._pre_hooks, "with --overlap-param-gather, and once"
        for module in self.module.modules():
            params = [p for p in module.parameters(recurse=False) if p in self._group_of]
            groups = list(dict.fromkeys(self._group_of[param] for param in params))
            if groups:
                self._pre_hooks.append(module.register_forward_pre_hook(self._pre_hook(groups)))

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Forward gathers nothing any more.

        Args:
            param_sync: gather what is to be gathered now.
        """
        assert self._pre_hooks, "the hooks are not there"
        for hook in self._pre_hooks:
            hook.remove()
        self._pre_hooks = []
        if param_sync:
            self.finish_param_sync()

    def _pre_hook(self, groups: list[BucketGroup]) -> Callable[..., None]:
        """Called before a module's forward. `groups`: where its parameters are."""
        aligned = self.ddp_config.align_param_gather  # then the schedule starts gathers, on all stages at once

        def hook(*_: Any) -> None:
            for group in groups:
                group.finish_param_sync(skip_next_bucket_dispatch=aligned)

        return hook

    @torch.no_grad()
    def broadcast_params(self) -> None:
        """Give every rank the weights of the first one that holds them."""
        for buffer in self.grad_buffers:
            collectives.broadcast(buffer.param_data, buffer.group, purpose="initial weights")
        broadcast_parameters((p for p in self.module.parameters() if not p.requires_grad), self.pg_collection)


def _check_instances(ddp_config: DistributedDataParallelConfig, pg_collection: ProcessGroupCollection) -> None:
    """Raises: ConfigError for groups that are not the instances'."""
    instances = ddp_config.num_distributed_optimizer_instances
    if instances > 1:
        for whole, part in (("dp_cp", "intra_dp_cp"), ("expt_dp", "intra_expt_dp")):
            ranks, owners = (group_size(getattr(pg_collection, name)) for name in (whole, part))
            if owners * instances != ranks and not (whole == "expt_dp" and ranks == 1):
                raise ConfigError(
                    f"num_distributed_optimizer_instances={instances}: {owners} ranks in {part}, {ranks} in {whole}",
                    why="every instance of the optimizer is shared by an equal part of the data-parallel ranks",
                    fix="initialize_model_parallel(..., num_distributed_optimizer_instances=...) makes such groups",
                )
