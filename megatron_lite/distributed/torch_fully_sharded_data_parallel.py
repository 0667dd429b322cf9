"""A model of which every rank keeps a part of every weight, by torch's `fully_shard` (ZeRO-3, and ZeRO-2).

    unit: a layer; the root: embeddings, output layer, last norm and what else no layer holds

    forward of a unit    gather its weights (16-bit models: in 16 bits), run, give them up
    backward             gather again, run, give up; scatter the sums of its gradients      every micro-batch
    finish_grad_sync     several instances (HSDP): add the copies' gradients up             once a step
    the optimizer steps on this rank's rows of every weight, in fp32; nothing is gathered after it

The optimizer's weights *are* the rank's parts, also of a 16-bit model, whose weights exist in 16 bits only while a unit
runs: 16 bytes / ranks per parameter with Adam and fp32 gradients, where ZeRO-1 has 2 + 4 + 12 / ranks.

What travels goes through `collectives`: it is counted there, and takes the quick forms on gloo.

Source: Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel".
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from megatron_lite import collectives
from megatron_lite.collectives import group_size
from megatron_lite.distributed.data_parallel_base import DataParallelBase
from megatron_lite.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron_lite.distributed.fully_sharded_buffer import FullyShardedBuffer, described, tell
from megatron_lite.distributed.grad_checks import LargeGradients, not_finite
from megatron_lite.errors import ConfigError
from megatron_lite.initialization import fill
from megatron_lite.model_parallel_config import ModelParallelConfig
from megatron_lite.process_groups_config import ProcessGroupCollection

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class TorchFullyShardedDataParallel(DataParallelBase):
    """A model whose weights, gradients and optimizer state are shared out over the data-parallel ranks.

    Args:
        config: the model's; see `DistributedDataParallel`.
        ddp_config: with `data_parallel_sharding_strategy="optim_grads"` a step gathers its weights once and keeps them
            until its last backward (ZeRO-2). A plain DistributedDataParallelConfig gives up what it gathers.
        module: the model, on its device, or on the meta device (`fill_parameters` then gives it values). Its
            parameters become DTensors; those of 16 bits are kept in fp32 from now on.
        sub_modules_to_wrap: classes of modules that are gathered together; None: those that say
            `fully_sharded_unit = True`, as all layers do. A unit's parameters must not be used by other modules.
        process_group: the ranks that share the weights; None: `dp_cp` of the groups, with several optimizer instances
            `intra_dp_cp`.
        disable_bucketing: accepted for scripts written for Megatron.
        pg_collection: None = the registered groups.
    Raises: ConfigError where there is one rank: there is nothing to shard (DistributedDataParallel does all that is
        left); for models of several number formats, and for experts that are spread over ranks.

    Attributes: units: the modules that are gathered, the root last; model_dtype: in which forward computes; is_empty:
        the module was on the meta device.
    """

    is_fully_sharded = True

    def __init__(
        self,
        config: ModelParallelConfig,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        sub_modules_to_wrap: Collection[type[nn.Module]] | None = None,
        process_group: ProcessGroup | None = None,
        disable_bucketing: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__(config, ddp_config, module, pg_collection)
        groups = self.pg_collection
        instances = ddp_config.num_distributed_optimizer_instances
        self._shard_group = process_group or (groups.intra_dp_cp if instances > 1 else groups.dp_cp)
        self._instance_group = groups.inter_dist_opt if instances > 1 and process_group is None else None
        if self._shard_group is None or group_size(self._shard_group) == 1:
            raise ConfigError(
                f"{type(self).__name__} over one rank",
                why="there is nothing to share out",
                fix="DistributedDataParallel",
            )
        self.model_dtype = _one_dtype(module)
        self._keeps_whole = ddp_config.data_parallel_sharding_strategy == "optim_grads"
        self._finite: list[tuple[str, Tensor]] = []
        self._large = LargeGradients() if ddp_config.check_for_large_grads else None
        said = {name: described(param, name) for name, param in module.named_parameters()}
        self.is_empty = any(param.is_meta for param in module.parameters())
        self.units = self._shard(sub_modules_to_wrap)
        if ddp_config.suggested_communication_unit_size is not None:
            self._gather_ahead(ddp_config.suggested_communication_unit_size)
        if self.is_empty:
            self._allocate()
        for name, param in module.named_parameters():
            tell(param, said[name], self._shard_group)
        trainable = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
        self.grad_buffers = [FullyShardedBuffer(trainable, groups.dp_cp, self._shard_group)] if trainable else []

    # -- cutting -------------------------------------------------------------------------------------------------

    def _shard(self, classes: Collection[type[nn.Module]] | None) -> list[FSDPModule]:
        """Cut every unit, inner ones first. A unit's weights are widened just before: never all of them at once."""
        options = self.ddp_config
        device = torch.device("cpu") if not torch.cuda.is_available() else torch.device("cuda")
        first = next(self.module.parameters(), None)
        device = first.device if first is not None and not first.is_meta else device
        assert self._shard_group is not None
        mesh = DeviceMesh.from_group(self._shard_group, device.type)
        policy = MixedPrecisionPolicy(
            param_dtype=self.model_dtype if self.model_dtype != torch.float32 else None,
            reduce_dtype=self._reduce_dtype(),
            cast_forward_inputs=False,  # the model casts its inputs, as without sharding
        )
        # None: yes, but for the root, whose backward begins where its forward ends.
        reshard = None if getattr(options, "reshard_after_forward", True) and not self._keeps_whole else False
        units = []
        for name, unit in reversed(list(self.module.named_modules())):
            chosen = getattr(unit, "fully_sharded_unit", False) if classes is None else isinstance(unit, tuple(classes))
            if not chosen and unit is not self.module:
                continue
            for param in unit.parameters():
                if param.dtype != torch.float32:  # those of inner units are wide already
                    param.data = param.data.float()
            sharded: Any = fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
            sharded.set_custom_all_gather(_Gather(self._shard_group))
            sharded.set_custom_reduce_scatter(_ReduceScatter(self, name or "the rest"))
            sharded.set_gradient_divide_factor(1.0)  # `_ReduceScatter` scales
            sharded.set_force_sum_reduction_for_comms(True)
            units.append(sharded)
        return units

    def _gather_ahead(self, numel: int) -> None:
        """Let a unit start the gathers of those that run next, until they have `numel` parameters.

        They run in the order of the module; where one does not, a gather comes early, and nothing else changes.
        """
        order: list[Any] = self.units[-2::-1]  # without the root, which gathers its own
        sizes = [sum(param.numel() for param in unit.parameters()) for unit in order]

        def next_of(place: int, step: int) -> list[Any]:
            ahead, size = [], 0
            while 0 <= (place := place + step) < len(order) and size < numel:
                ahead.append(order[place])
                size += sizes[place]
            return ahead

        for place, unit in enumerate(order):
            unit.set_modules_to_forward_prefetch(next_of(place, 1))
            unit.set_modules_to_backward_prefetch(next_of(place, -1))

    def _reduce_dtype(self) -> torch.dtype | None:
        wire = getattr(self.ddp_config, "grad_comm_dtype", "auto")
        if wire != "auto":
            return _DTYPES[wire]
        return torch.float32 if self.ddp_config.grad_reduce_in_fp32 else None

    def _allocate(self) -> None:
        """Memory for the parts of a model that was built without."""
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        self.module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)

    @torch.no_grad()
    def fill_parameters(self, seed: int) -> None:
        """Give this rank's parts the values that the whole model has from `seed`.

        Raises: ConfigError for a parameter or a buffer that does not say how it starts.
        """
        for name, buffer in self.module.named_buffers():
            if buffer.is_meta:
                raise ConfigError(
                    f"--init-model-with-meta-device: buffer {name} has no values",
                    why="it was made on the meta device",
                    fix="make it with torch.zeros or the like, not torch.empty; or build the model with memory",
                )
        for name, param in self.module.named_parameters():
            method = getattr(param, "init_method", None)
            if method is None:
                raise ConfigError(
                    f"--init-model-with-meta-device: parameter {name} does not say how it starts",
                    why="its values must depend on its name and shape alone",
                    fix="set_init(parameter, method, name), or build the model with memory",
                )
            part: Tensor = param.held_part  # type: ignore[attr-defined]
            fill(part, param.shard, method, seed)  # type: ignore[attr-defined]
            if self.model_dtype != torch.float32:  # as a model that was built in 16 bits starts
                part.copy_(part.to(self.model_dtype))

    # -- a step --------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's own. What an evaluation has gathered is given up."""
        output = super().forward(*inputs, **kwargs)
        if not torch.is_grad_enabled():
            self.finish_param_sync()
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """For all micro-batches but the last. Gradients are scattered in each; ZeRO-2 keeps the weights until the
        last one."""
        root: Any = self.module
        if self._keeps_whole:
            root.set_reshard_after_backward(False)
        try:
            yield
        finally:
            if self._keeps_whole:
                root.set_reshard_after_backward(True)

    def start_grad_sync(self, *unused: Any) -> None:
        """Nothing is left to start: every unit's gradients leave as its backward ends."""

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Return when this rank's parts of the gradients are sums over all ranks.

        Args:
            force_all_reduce: accepted for scripts written for Megatron; no rank has memory for whole gradients.
        Raises: RankFailure naming the units whose gradients were NaN or Inf on this rank, before they were summed,
            where nobody listens.
        """
        finite, self._finite = self._finite, []
        listener = self.ddp_config.on_bad_grads
        not_finite(finite, [buffer.grad_data for buffer in self.grad_buffers], listener)
        for buffer in self.grad_buffers:
            collectives.all_reduce(
                buffer.grad_data,
                self._instance_group,
                op="avg" if self.ddp_config.average_in_collective else "sum",
                purpose="gradients of optimizer instances",
            )
            if self._large is not None:
                self._large.check(buffer.grad_data, buffer.params, 0, when="summed over ranks", listener=listener)

    def reduce_unit(self, name: str, output: Tensor, input: Tensor) -> None:
        """Scatter the sums (or means) of a unit's gradients; for torch to call."""
        if self.ddp_config.check_for_nan_in_grad:
            self._finite.append((name, input.isfinite().all()))  # looked at once a step: a look waits for the device
        average = self.ddp_config.average_in_collective
        ranks = group_size(self._shard_group) * group_size(self._instance_group)
        scale = 1.0 if self.per_token or average else 1.0 / ranks
        if not self.ddp_config.gradient_reduce_div_fusion and scale != 1.0:
            input.mul_(scale)
            scale = 1.0
        collectives.reduce_scatter(
            output,
            input,
            self._shard_group,
            op="avg" if average else "sum",
            scale=scale,
            accumulate_in_fp32=self.ddp_config.reduce_scatter_with_fp32_accumulation,
            purpose="gradients",
        )

    # -- parameters ------------------------------------------------------------------------------------------------

    def finish_param_sync(self) -> None:
        """Return when the model's parameters are this rank's parts again."""
        for unit in self.units:
            unit.reshard()

    def broadcast_params(self) -> None:
        """Weights are equal on all ranks before they are cut (`broadcast_parameters`); afterwards each has its own."""


def _one_dtype(module: nn.Module) -> torch.dtype:
    """The number format of all parameters. Raises: ConfigError where there are several, or spread experts."""
    formats: dict[torch.dtype, str] = {}
    for name, param in module.named_parameters():
        formats.setdefault(param.dtype, name)
        if not getattr(param, "allreduce", True):
            raise ConfigError(
                f"fully sharded data parallelism of {name}, an expert that lives on some ranks only",
                why="it would have to be cut over other ranks than the rest",
                fix="--expert-model-parallel-size 1, or --use-distributed-optimizer instead",
            )
    if len(formats) > 1:
        raise ConfigError(
            f"fully sharded data parallelism of a model of {' and '.join(map(str, formats))}: "
            f"{', '.join(formats.values())}",
            why="the weights of a layer are gathered as one tensor",
            fix="one number format for all parameters",
        )
    return next(iter(formats), torch.float32)


class _Allocates:
    """Memory for what travels: torch asks its communication for it."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Allocates):
    """How torch gathers a unit's weights."""

    def __init__(self, group: ProcessGroup):
        self._group = group

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> None:
        collectives.all_gather(output_tensor, input_tensor, self._group, purpose="parameters")


class _ReduceScatter(_Allocates):
    """How torch sums a unit's gradients."""

    def __init__(self, owner: TorchFullyShardedDataParallel, name: str):
        self._reduce, self._name = owner.reduce_unit, name

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        self._reduce(self._name, output_tensor, input_tensor)


class FullyShardedDataParallel(TorchFullyShardedDataParallel):
    """The same, under the signature of Megatron's own implementation: what is sharded says
    `ddp_config.data_parallel_sharding_strategy`, of which `optim_grads` and `optim_grads_params` are this class's.

    Args:
        fsdp_unit_modules: see `sub_modules_to_wrap`.
        device: accepted for scripts written for Megatron: it is the module's.
    """

    def __init__(
        self,
        config: ModelParallelConfig,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        fsdp_unit_modules: Collection[type[nn.Module]] | None = None,
        disable_bucketing: bool = False,
        device: torch.device | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        strategy = ddp_config.data_parallel_sharding_strategy
        if strategy not in ("optim_grads", "optim_grads_params"):
            raise ConfigError(
                f'FullyShardedDataParallel with data_parallel_sharding_strategy="{strategy}"',
                why="weights and gradients are whole then",
                fix="DistributedDataParallel (with use_distributed_optimizer=True for optim)",
            )
        super().__init__(config, ddp_config, module, fsdp_unit_modules, pg_collection=pg_collection)
