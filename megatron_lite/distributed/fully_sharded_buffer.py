"""This rank's part of a fully sharded model: where it lies, and flat memory for its gradients.

    parameter      | rank 0 | rank 1 | ... |   by rows: ceil(n / ranks) each, the last ranks have fewer or none
    held_part               |========|         the memory that torch gathers from
    grad_data      | g7 | g6 | ... |           main_grad and grad of a parameter are views of it: torch adds into them

What a parameter says of itself (its place in the global tensor, its kind) is lost when torch replaces it by a DTensor;
here it is told again, of the part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from megatron_lite.collectives import group_rank, group_size
from megatron_lite.distributed.buffer_layout import BufferLayout, ParamSpec, Range, plan_buffer
from megatron_lite.sharding import ShardSpec, rows, rows_of, whole


def described(param: nn.Parameter, name: str) -> dict[str, Any]:
    """What a parameter says of itself, to be told again of its part."""
    shard: ShardSpec = getattr(param, "shard", None) or whole(name, tuple(param.shape))
    return {**vars(param), "shard": shard}


@torch.no_grad()
def tell(param: nn.Parameter, said: Mapping[str, Any], group: ProcessGroup | None) -> None:
    """Describe this rank's part of a parameter that torch has sharded by rows.

    Args:
        said: of `described`.
    """
    assert isinstance(param, DTensor), "a parameter of a fully sharded module"
    for key, value in said.items():
        setattr(param, key, value)
    part = param.to_local()
    begin, end = rows_of(param.shape[0], group_rank(group), group_size(group))
    assert part.shape[0] == end - begin, f"{said['shard'].name}: torch keeps {part.shape[0]} rows, not {end - begin}"
    param.held_part = part  # type: ignore[attr-defined]
    param.shard = rows(said["shard"], begin, end)  # type: ignore[attr-defined]


class FullyShardedBuffer:
    """Gradients of this rank's parts, in the order of backward.

    Args:
        params: (name, sharded parameter) in module order, all trainable.
        group: the ranks over which gradients are summed; shard_group: those that share one copy of the weights.
    """

    is_expert = False

    def __init__(
        self, params: Sequence[tuple[str, nn.Parameter]], group: ProcessGroup | None, shard_group: ProcessGroup | None
    ):
        parts: dict[str, Tensor] = {name: param.held_part for name, param in params}  # type: ignore[attr-defined]
        self.group, self.shard_group = group, shard_group
        self.layout: BufferLayout = plan_buffer([ParamSpec(name, p.numel()) for name, p in parts.items()], None, 1)
        by_name = dict(params)
        self.params = {name: by_name[name] for name in self.layout.ranges}
        first = next(iter(parts.values()))
        self.param_dtype = self.grad_dtype = first.dtype
        self.grad_data = torch.zeros(self.layout.numel, dtype=first.dtype, device=first.device)
        self._grads: dict[nn.Parameter, DTensor] = {}
        for name, param in self.params.items():
            assert isinstance(param, DTensor)
            place: Range = self.layout.ranges[name]
            grad = self.grad_data[place.start : place.end].view(parts[name].shape)
            param.main_grad = grad  # type: ignore[attr-defined]
            self._grads[param] = DTensor.from_local(
                grad, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
            )
        self.attach()

    def attach(self) -> None:
        """Make the flat memory what torch adds gradients into."""
        for param, grad in self._grads.items():
            if param.grad is not grad:
                param.grad = grad

    def zero(self) -> None:
        """All gradients to zero: one operation."""
        self.grad_data.zero_()
        self.attach()

    def scale(self, factor: float | Tensor) -> None:
        """All gradients times `factor`: one operation."""
        self.grad_data.mul_(factor)
