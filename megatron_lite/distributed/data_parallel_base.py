"""What schedules, optimizers and checkpoints ask of a model whose gradients are summed over ranks.

DistributedDataParallel          whole parameters on every rank (and a sharded optimizer, if asked)
TorchFullyShardedDataParallel    a part of every parameter on every rank
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_lite import collectives
from megatron_lite.distributed.buffer_layout import BufferLayout
from megatron_lite.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron_lite.errors import ConfigError
from megatron_lite.model_parallel_config import ModelParallelConfig
from megatron_lite.process_groups_config import ProcessGroupCollection


class GradBuffer(Protocol):
    """Flat memory for gradients.

    layout: where each parameter's lie; params: by name, in that order; param_dtype: of what the optimizer steps on, if
    it keeps no copy; shard_group: the ranks that share one optimizer state.
    """

    layout: BufferLayout
    params: dict[str, nn.Parameter]
    param_dtype: torch.dtype
    grad_data: Tensor
    is_expert: bool
    shard_group: ProcessGroup | None

    def zero(self) -> None: ...

    def scale(self, factor: float | Tensor) -> None: ...


class DataParallelBase(nn.Module):
    """A wrapped model. Gradients gather in `main_grad` of its parameters, in flat memory (`grad_buffers`).

    Attributes: grad_buffers: the flat memory; force_all_reduce: bring gradients to every rank also with a distributed
        optimizer; modules_after_grad_sync: modules with a method `after_grad_sync(pg_collection)`, called by
        finalize_model_grads; copies_over_stages: the model's, if it has some: global name -> shape of parameters that
        several stages hold; is_fully_sharded: no rank keeps whole parameters; model_dtype: in which forward computes,
        where that is not the parameters' own.
    """

    grad_buffers: Sequence[GradBuffer]
    is_fully_sharded = False
    model_dtype = torch.float32

    def __init__(
        self,
        config: ModelParallelConfig,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        pg_collection: ProcessGroupCollection | None,
    ):
        super().__init__()
        self.config, self.ddp_config, self.module = config, ddp_config, module
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.per_token = bool(getattr(config, "calculate_per_token_loss", False))
        _check_averaging(ddp_config, self.per_token)
        self.force_all_reduce = False
        self.modules_after_grad_sync: list[Any] = [m for m in module.modules() if hasattr(m, "after_grad_sync")]
        stated = (getattr(m, "copies_over_stages", None) for m in module.modules())
        self.copies_over_stages: dict[str, tuple[int, ...]] = next((copies for copies in stated if copies), {})

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's own."""
        return self.module(*inputs, **kwargs)

    # -- a step --------------------------------------------------------------------------------------------------

    def zero_grad_buffer(self) -> None:
        """Start a step: gradients to zero."""
        for buffer in self.grad_buffers:
            buffer.zero()

    def no_sync(self) -> AbstractContextManager[None]:
        """For all micro-batches but the last: backward inside accumulates."""
        raise NotImplementedError

    def start_grad_sync(self, *unused: Any) -> None:
        """Start what is left of the reduction."""
        raise NotImplementedError

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Return when the gradients that this rank's optimizer reads are sums over all ranks."""
        raise NotImplementedError

    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        """All gradients times a number."""
        for buffer in self.grad_buffers:
            buffer.scale(scaling_factor)

    # -- parameters ------------------------------------------------------------------------------------------------

    def params_updated(self) -> None:
        """The optimizer has written its part of the parameters."""

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Gather what other ranks have updated, where that is not left to forward."""

    def finish_param_sync(self) -> None:
        """Return when parameters may be read other than by forward."""

    def broadcast_params(self) -> None:
        """Give every rank the weights of the first one that holds them."""
        raise NotImplementedError

    # -- the state is the model's ----------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The model's, under its own names."""
        self.finish_param_sync()
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """The model's."""
        assert not assign, "the optimizer knows the parameters' memory: values are copied in"
        self.finish_param_sync()  # a gather under way would overwrite what is loaded
        return self.module.load_state_dict(state_dict, strict=strict)


def whole_parameters(chunks: Iterable[nn.Module]) -> None:
    """Before parameters are read other than by forward (norms, checkpoints): gather those that forward would have.

    Args:
        chunks: wrapped or bare.
    """
    for chunk in chunks:
        if isinstance(chunk, DataParallelBase):
            chunk.finish_param_sync()


def held_part(param: Tensor) -> Tensor:
    """The elements of a parameter that this rank keeps, `[rows, ...]`: all of it, unless the model is fully sharded.

    Where they lie in the global tensor says `param.shard`.
    """
    part: Tensor = getattr(param, "held_part", param)
    return part


@torch.no_grad()
def broadcast_parameters(params: Iterable[nn.Parameter], pg_collection: ProcessGroupCollection) -> None:
    """Give every rank the values of the first one that holds the (whole) parameters."""
    for param in params:
        is_expert = not getattr(param, "allreduce", True)
        group = pg_collection.expt_dp if is_expert else pg_collection.dp_cp
        collectives.broadcast(param.data, group, purpose="initial weights")


def _check_averaging(ddp_config: DistributedDataParallelConfig, per_token: bool) -> None:
    """Raises: ConfigError for a mean inside the collective of a model whose gradients are sums."""
    if ddp_config.average_in_collective and per_token:
        raise ConfigError(
            "--ddp-average-in-collective with --calculate-per-token-loss",
            why="gradients are then sums over tokens and divided by the tokens of all ranks",
            fix="leave one of them out",
        )
