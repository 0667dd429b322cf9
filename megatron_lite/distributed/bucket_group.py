"""The unit of communication: buckets whose gradients are reduced, and whose parameters are gathered, together.

    a step                  hooks ----> register_grad_ready ... the last one: start_grad_sync
                            after backward: finish_grad_sync
                              all-reduce        every rank has every sum
                              reduce-scatter    with a distributed optimizer: every rank has the sums of its shard,
                                                elsewhere lie leftovers; copies of the optimizer add their shards up
    the optimizer's step    shards of the parameters are new:   params_updated
    the next forward        hooks ----> finish_param_sync: wait for this group's parameters, start the next group's

With overlap a group launches its collective inside backward, when the last gradient of the last micro-batch has
arrived. How often a parameter's hook fires in a backward depends on the model (recomputation splits backward into
several), so the first step only counts, and launches when it is asked to finish; these counts are what later steps
wait for. At most one reduction of a group is under way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from torch import nn
from torch.distributed import ProcessGroup
from torch.profiler import record_function

from megatron_lite import collectives
from megatron_lite.collectives import Handle, group_size
from megatron_lite.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron_lite.distributed.grad_checks import LargeGradients, check_for_nan, some
from megatron_lite.distributed.param_and_grad_buffer import Bucket
from megatron_lite.errors import RankFailure


class BucketGroup:
    """Buckets that travel together, and the count of gradients that are there.

    Args:
        group: the ranks over which gradients are reduced.
        shard_group: the ranks that share one optimizer state.
        instance_group: the ranks that own the same shard in other copies of the optimizer state.
        name: in a profiler's trace.
    Attributes:
        before: the group launched before this one in backward; it is also the next whose parameters forward needs.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        ddp_config: DistributedDataParallelConfig,
        group: ProcessGroup | None,
        shard_group: ProcessGroup | None = None,
        instance_group: ProcessGroup | None = None,
        name: str = "bucket",
    ):
        self.buckets, self.ddp_config = list(buckets), ddp_config
        self.group, self.shard_group, self.instance_group = group, shard_group, instance_group
        self.name = name
        self.before: BucketGroup | None = None
        self.is_last_microbatch = True
        self._names = {param: name for bucket in buckets for name, param in bucket.params.items()}
        self._expected: dict[nn.Parameter, int] | None = None  # hooks per parameter and step, after the first step
        self._arrived: Counter[nn.Parameter] = Counter()
        self._missing = 0  # parameters that have not arrived as often as expected
        self._grads: Handle | None = None  # None: nothing is under way
        self._large = [LargeGradients() for _ in buckets] if ddp_config.check_for_large_grads else []
        self._params: Handle | None = None  # a gather under way
        self._params_are_old = False  # other ranks have updated their shards, and they have not been asked for

    # -- gradients -------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Ready for the next step."""
        self.is_last_microbatch = True
        self._arrived.clear()
        self._missing = len(self._expected) if self._expected is not None else 0

    def register_grad_ready(self, param: nn.Parameter, force_all_reduce: bool = False) -> None:
        """A hook says that `param`'s gradient of this backward is in `main_grad`. Counts in the last micro-batch only.

        Raises: RankFailure when the bucket has been reduced already.
        """
        if not self.is_last_microbatch:
            return
        if self._grads is not None:
            raise RankFailure(
                f"the gradient of {self._names[param]} came after its bucket had been sent",
                why="in the first step its backward ran less often; with --overlap-grad-reduce every step must use "
                "each parameter equally often",
                fix="run without --overlap-grad-reduce",
            )
        self._arrived[param] += 1
        if self._expected is None:
            return
        if self._arrived[param] == self._expected[param]:
            self._missing -= 1
            if self._missing == 0:
                self.start_grad_sync(force_all_reduce)

    def start_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Check, scale, and start the collective; without overlap it is done on return.

        Args:
            force_all_reduce: bring the sums to every rank, also with a distributed optimizer.
        """
        assert self._grads is None, "the last reduction of these buckets has not been finished"
        config = self.ddp_config
        for number, bucket in enumerate(self.buckets):
            bucket.take_local_grads()
            if config.check_for_nan_in_grad:
                check_for_nan(bucket, config.on_bad_grads)
            if config.check_for_large_grads:
                self._large[number].check(bucket.grad_data, bucket.params, bucket.number, listener=config.on_bad_grads)
            if not config.gradient_reduce_div_fusion and bucket.gradient_scaling_factor != 1.0:
                bucket.grad_data.mul_(bucket.gradient_scaling_factor)
        sharded = config.use_distributed_optimizer and not force_all_reduce
        if sharded and config.reduce_scatter_with_fp32_accumulation and self.before is not None:
            self.before.drain()  # it holds a copy of its bucket until then
        with record_function(f"reduce {self.name}"):
            handle = self._reduce(sharded)
        if sharded and group_size(self.instance_group) > 1:
            handle = _Then(handle, self._add_up_instances)
        if not config.overlap_grad_reduce:
            handle.wait()
        self._grads = handle

    def _reduce(self, sharded: bool) -> Handle:
        config = self.ddp_config
        group = self.shard_group if sharded else self.group
        alone = sharded and config.reduce_scatter_with_fp32_accumulation  # an exchange of parts, which does not join
        with collectives.coalesced(group, self.buckets[0].grad_data, 1 if alone else len(self.buckets)) as batch:
            for bucket in self.buckets:
                scale = bucket.gradient_scaling_factor if config.gradient_reduce_div_fusion else 1.0
                if sharded:
                    handle = collectives.reduce_scatter(
                        bucket.grad_shard,
                        bucket.grad_data,
                        group,
                        op="avg" if config.average_in_collective else "sum",
                        scale=scale,
                        accumulate_in_fp32=config.reduce_scatter_with_fp32_accumulation,
                        purpose="gradients",
                        async_op=True,
                    )
                else:
                    handle = collectives.all_reduce(
                        bucket.grad_data,
                        group,
                        op="avg" if config.average_in_collective else "sum",
                        scale=scale,
                        purpose="gradients",
                        async_op=True,
                    )
                batch.add(handle)
        return batch

    def _add_up_instances(self) -> None:
        for bucket in self.buckets:
            collectives.all_reduce(
                bucket.grad_shard,
                self.instance_group,
                op="avg" if self.ddp_config.average_in_collective else "sum",
                purpose="gradients of optimizer instances",
            )

    def drain(self) -> None:
        """Wait for the reduction under way, if one is; `finish_grad_sync` is still to come."""
        if self._grads is not None:
            self._grads.wait()
            self._grads = collectives.DONE

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Return when the gradients of all ranks are summed.

        Raises: RankFailure naming parameters whose gradient never came (with overlap).
        """
        if self._grads is None:  # nobody has started it: the hooks in backward, or a schedule
            if self.ddp_config.overlap_grad_reduce:
                self._check_complete(self._expected or dict.fromkeys(self._names, 1))
                self._expected = dict(self._arrived)
            self.start_grad_sync(force_all_reduce)
        assert self._grads is not None
        self._grads.wait()
        self._grads = None

    def _check_complete(self, expected: dict[nn.Parameter, int]) -> None:
        missing = [self._names[param] for param, count in expected.items() if self._arrived[param] < count]
        if missing:
            raise RankFailure(
                f"no gradient came for {some(missing)} ({len(expected) - len(missing)} of {len(expected)} parameters "
                f"of bucket {self.buckets[0].number} are ready)",
                why="with --overlap-grad-reduce a bucket is sent when every parameter in it has its gradient",
                fix="use the parameter in forward, freeze it (requires_grad=False), or run without "
                "--overlap-grad-reduce, where it trains with gradient 0",
            )

    # -- parameters ------------------------------------------------------------------------------------------------

    def params_updated(self) -> None:
        """The ranks have new values in their shards; until they are gathered the parameters are a mixture."""
        assert self._params is None, "the last gather of these buckets has not been finished"
        self._params_are_old = group_size(self.shard_group) > 1

    def start_param_sync(self, force_sync: bool = False) -> None:
        """Start to gather the ranks' shards, unless that is under way.

        Args:
            force_sync: return when it is done, also with overlap.
        """
        if self._params is None:
            with record_function(f"gather {self.name}"):
                self._params = self._gather()
            self._params_are_old = False
        if force_sync or not self.ddp_config.overlap_param_gather:
            self._wait_for_params()

    def _gather(self) -> Handle:
        with collectives.coalesced(self.shard_group, self.buckets[0].param_data, len(self.buckets)) as batch:
            for bucket in self.buckets:
                handle = collectives.all_gather(
                    bucket.param_data, bucket.param_shard, self.shard_group, purpose="parameters", async_op=True
                )
                batch.add(handle)
        return batch

    def finish_param_sync(self, skip_next_bucket_dispatch: bool = False) -> None:
        """Return when this group's parameters are whole, and start the gather of those that forward needs next.

        Args:
            skip_next_bucket_dispatch: start nothing: somebody else will.
        """
        if self._params_are_old:
            self.start_param_sync()
        if self._params is None:
            return
        self._wait_for_params()
        if not skip_next_bucket_dispatch and self.before is not None and self.before._params_are_old:
            self.before.start_param_sync()

    def _wait_for_params(self) -> None:
        handle, self._params = self._params, None
        if handle is not None:
            handle.wait()


class _Then:
    """A handle whose wait does one thing more."""

    def __init__(self, first: Handle, then: Callable[[], None]):
        self._first, self._then = first, then

    def wait(self) -> None:
        self._first.wait()
        then, self._then = self._then, lambda: None
        then()
