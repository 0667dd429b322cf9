"""The f and g operators of tensor parallelism (Shoeybi et al. 2019) and their sequence-parallel twins.

    operator                                   forward                      backward
    copy_to_tensor_model_parallel_region       identity                     all-reduce
    reduce_from_tensor_model_parallel_region   all-reduce                   identity
    scatter_to_tensor_model_parallel_region    own slice of the last dim    all-gather the last dim
    gather_from_tensor_model_parallel_region   all-gather the last dim      own slice of the last dim
    scatter_to_sequence_parallel_region        own slice of the first dim   all-gather the first dim
    gather_from_sequence_parallel_region       all-gather the first dim     reduce-scatter the first dim, or own slice
    reduce_scatter_to_sequence_parallel_region reduce-scatter first dim     all-gather the first dim

Each is the identity, without an autograd node, where the rank is alone. `group` None means the registered tensor-
parallel group; a layer passes its own.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite import collectives
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.tensor_parallel.utils import divide


def default_group(group: ProcessGroup | None) -> ProcessGroup | None:
    """The group itself, or the registered tensor-parallel group (None: this rank is alone)."""
    return group if group is not None else ProcessGroupCollection.use_mpu_process_groups().tp


# -- what is done, without autograd ------------------------------------------------------------------------------


def all_reduced(x: Tensor, group: ProcessGroup, purpose: str) -> Tensor:
    """The sum over the group, as a new tensor."""
    total = x.clone(memory_format=torch.contiguous_format)
    collectives.all_reduce(total, group, purpose=purpose)
    return total


def gathered_first(x: Tensor, group: ProcessGroup, purpose: str) -> Tensor:
    """`[n, ...]` -> `[n * size, ...]`."""
    out = torch.empty(x.shape[0] * group.size(), *x.shape[1:], dtype=x.dtype, device=x.device)
    collectives.all_gather(out, x.contiguous(), group, purpose=purpose)
    return out


def reduce_scattered_first(x: Tensor, group: ProcessGroup, purpose: str) -> Tensor:
    """`[n * size, ...]` -> `[n, ...]`: this rank's part of the sum."""
    out = torch.empty(divide(x.shape[0], group.size()), *x.shape[1:], dtype=x.dtype, device=x.device)
    collectives.reduce_scatter(out, x.contiguous(), group, purpose=purpose)
    return out


def _own_first(x: Tensor, group: ProcessGroup) -> Tensor:
    divide(x.shape[0], group.size())
    return x.chunk(group.size(), dim=0)[group.rank()].contiguous()


def _gathered_last(x: Tensor, group: ProcessGroup, purpose: str) -> Tensor:
    parts = gathered_first(x.unsqueeze(0), group, purpose)  # [size, ..., n]
    return torch.cat(parts.unbind(0), dim=-1)


def _own_last(x: Tensor, group: ProcessGroup) -> Tensor:
    divide(x.shape[-1], group.size())
    return x.chunk(group.size(), dim=-1)[group.rank()].contiguous()


# -- operators ---------------------------------------------------------------------------------------------------


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return all_reduced(g, ctx.group, "copy_to backward"), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return all_reduced(x, group, "reduce_from forward")

    @staticmethod
    def backward(ctx, g):
        return g, None


class _ScatterLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _own_last(x, group)

    @staticmethod
    def backward(ctx, g):
        return _gathered_last(g, ctx.group, "scatter_to backward"), None


class _GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _gathered_last(x, group, "gather_from forward")

    @staticmethod
    def backward(ctx, g):
        return _own_last(g, ctx.group), None


class _ScatterFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _own_first(x, group)

    @staticmethod
    def backward(ctx, g):
        return gathered_first(g, ctx.group, "scatter_to_sequence backward"), None


class _GatherFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, output_grad_is_split):
        ctx.group, ctx.output_grad_is_split = group, output_grad_is_split
        return gathered_first(x, group, "gather_from_sequence forward")

    @staticmethod
    def backward(ctx, g):
        if ctx.output_grad_is_split:
            return reduce_scattered_first(g, ctx.group, "gather_from_sequence backward"), None, None
        return _own_first(g, ctx.group), None, None


class _ReduceScatterFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return reduce_scattered_first(x, group, "reduce_scatter_to_sequence forward")

    @staticmethod
    def backward(ctx, g):
        return gathered_first(g, ctx.group, "reduce_scatter_to_sequence backward"), None


def _apply(operator: type[torch.autograd.Function], x: Tensor, group: ProcessGroup | None, *args: object) -> Tensor:
    group = default_group(group)
    return x if collectives.group_size(group) == 1 else operator.apply(x, group, *args)


def copy_to_tensor_model_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Forward: identity. Backward: all-reduce. (Shoeybi's f.)"""
    return _apply(_Copy, input_, group)


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Forward: all-reduce. Backward: identity. (Shoeybi's g.)"""
    return _apply(_Reduce, input_, group)


def scatter_to_tensor_model_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Forward: own slice of the last dim. Backward: all-gather of it."""
    return _apply(_ScatterLast, input_, group)


def gather_from_tensor_model_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Forward: all-gather of the last dim. Backward: own slice of it."""
    return _apply(_GatherLast, input_, group)


def scatter_to_sequence_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Forward: own slice of the first dim. Backward: all-gather of it."""
    return _apply(_ScatterFirst, input_, group)


def gather_from_sequence_parallel_region(
    input_: Tensor, tensor_parallel_output_grad: bool = True, group: ProcessGroup | None = None
) -> Tensor:
    """Forward: all-gather of the first dim. Backward: reduce-scatter of it.

    Args:
        tensor_parallel_output_grad: False where every rank computes the same from the gathered tensor (a router, a
            pooler): then backward takes the own slice.
    """
    return _apply(_GatherFirst, input_, group, tensor_parallel_output_grad)


def reduce_scatter_to_sequence_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Forward: reduce-scatter of the first dim. Backward: all-gather of it."""
    return _apply(_ReduceScatterFirst, input_, group)
