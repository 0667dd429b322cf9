"""The f and g operators of tensor parallelism (Shoeybi et al. 2019) and their sequence-parallel twins.

    operator                                   forward                      backward
    copy_to_tensor_model_parallel_region       identity                     all-reduce
    reduce_from_tensor_model_parallel_region   all-reduce                   identity
    scatter_to_tensor_model_parallel_region    own slice of the last dim    all-gather the last dim
    gather_from_tensor_model_parallel_region   all-gather the last dim      own slice of the last dim
    scatter_to_sequence_parallel_region        own slice of the first dim   all-gather the first dim
    gather_from_sequence_parallel_region       all-gather the first dim     reduce-scatter the first dim, or own slice
    reduce_scatter_to_sequence_parallel_region reduce-scatter first dim     all-gather the first dim
    all_gather_last_dim_from_tensor_parallel_region       all-gather last dim       reduce-scatter last dim
    reduce_scatter_last_dim_to_tensor_parallel_region     reduce-scatter last dim   all-gather last dim
    all_to_all                                 slice r to rank r            the same, with the splits swapped
    all_to_all_sp2hp, all_to_all_hp2sp         [s/t, h] -> [s, h/t], back   each other

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


def gathered_first(x: Tensor, group: ProcessGroup, purpose: str, sizes: list[int] | None = None) -> Tensor:
    """`[n, ...]` -> `[n * size, ...]`; where ranks hold different numbers of rows, `sizes` are those."""
    if sizes is not None:
        return _exchanged(torch.cat([x] * len(sizes)), group, sizes, [x.shape[0]] * len(sizes), purpose)
    out = torch.empty(x.shape[0] * group.size(), *x.shape[1:], dtype=x.dtype, device=x.device)
    collectives.all_gather(out, x.contiguous(), group, purpose=purpose)
    return out


def reduce_scattered_first(x: Tensor, group: ProcessGroup, purpose: str, sizes: list[int] | None = None) -> Tensor:
    """`[n * size, ...]` -> `[n, ...]`: this rank's part of the sum; `sizes`: how many rows each rank gets."""
    if sizes is not None:
        own = sizes[group.rank()]
        parts = _exchanged(x, group, [own] * len(sizes), sizes, purpose)
        return parts.view(len(sizes), own, *x.shape[1:]).sum(0)
    out = torch.empty(divide(x.shape[0], group.size()), *x.shape[1:], dtype=x.dtype, device=x.device)
    collectives.reduce_scatter(out, x.contiguous(), group, purpose=purpose)
    return out


def _own_first(x: Tensor, group: ProcessGroup, sizes: list[int] | None = None) -> Tensor:
    if sizes is not None:
        return x.split(sizes)[group.rank()].contiguous()
    divide(x.shape[0], group.size())
    return x.chunk(group.size(), dim=0)[group.rank()].contiguous()


def _gathered_last(x: Tensor, group: ProcessGroup, purpose: str) -> Tensor:
    parts = gathered_first(x.unsqueeze(0), group, purpose)  # [size, ..., n]
    return torch.cat(parts.unbind(0), dim=-1)


def _reduce_scattered_last(x: Tensor, group: ProcessGroup, purpose: str) -> Tensor:
    divide(x.shape[-1], group.size())
    parts = torch.stack(x.chunk(group.size(), dim=-1))  # [size, ..., n]
    return reduce_scattered_first(parts, group, purpose).squeeze(0)


def _exchanged(
    x: Tensor, group: ProcessGroup, output_splits: list[int] | None, input_splits: list[int] | None, purpose: str
) -> Tensor:
    rows = x.shape[0] if output_splits is None else sum(output_splits)
    out = torch.empty(rows, *x.shape[1:], dtype=x.dtype, device=x.device)
    collectives.all_to_all(
        out, x.contiguous(), group, output_splits=output_splits, input_splits=input_splits, purpose=purpose
    )
    return out


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
    def forward(ctx, x, group, output_grad_is_split, sizes):
        ctx.group, ctx.output_grad_is_split, ctx.sizes = group, output_grad_is_split, sizes
        return gathered_first(x, group, "gather_from_sequence forward", sizes)

    @staticmethod
    def backward(ctx, g):
        if ctx.output_grad_is_split:
            dx = reduce_scattered_first(g, ctx.group, "gather_from_sequence backward", ctx.sizes)
        else:
            dx = _own_first(g, ctx.group, ctx.sizes)
        return dx, None, None, None


class _ReduceScatterFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, sizes):
        ctx.group, ctx.sizes = group, sizes
        return reduce_scattered_first(x, group, "reduce_scatter_to_sequence forward", sizes)

    @staticmethod
    def backward(ctx, g):
        return gathered_first(g, ctx.group, "reduce_scatter_to_sequence backward", ctx.sizes), None, None


class _AllGatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _gathered_last(x, group, "all_gather_last_dim forward")

    @staticmethod
    def backward(ctx, g):
        return _reduce_scattered_last(g, ctx.group, "all_gather_last_dim backward"), None


class _ReduceScatterLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _reduce_scattered_last(x, group, "reduce_scatter_last_dim forward")

    @staticmethod
    def backward(ctx, g):
        return _gathered_last(g, ctx.group, "reduce_scatter_last_dim backward"), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, output_splits, input_splits):
        ctx.group, ctx.splits = group, (output_splits, input_splits)
        return _exchanged(x, group, output_splits, input_splits, "all_to_all forward")

    @staticmethod
    def backward(ctx, g):
        output_splits, input_splits = ctx.splits
        return _exchanged(g, ctx.group, input_splits, output_splits, "all_to_all backward"), None, None, None


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
    input_: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: ProcessGroup | None = None,
    output_split_sizes: list[int] | None = None,
) -> Tensor:
    """Forward: all-gather of the first dim. Backward: reduce-scatter of it.

    Args:
        tensor_parallel_output_grad: False where every rank computes the same from the gathered tensor (a router, a
            pooler): then backward takes the own slice.
        output_split_sizes: rows of each rank, where they differ.
    """
    return _apply(_GatherFirst, input_, group, tensor_parallel_output_grad, output_split_sizes)


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor, group: ProcessGroup | None = None, input_split_sizes: list[int] | None = None
) -> Tensor:
    """Forward: reduce-scatter of the first dim. Backward: all-gather of it.

    Args:
        input_split_sizes: rows that each rank gets, where they differ.
    """
    return _apply(_ReduceScatterFirst, input_, group, input_split_sizes)


def all_gather_last_dim_from_tensor_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Forward: all-gather of the last dim. Backward: reduce-scatter of it.

    For ranks that go on with different parts of the gathered tensor; where all compute the same from it,
    `gather_from_tensor_model_parallel_region` is right.
    """
    return _apply(_AllGatherLast, input_, group)


def reduce_scatter_last_dim_to_tensor_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Forward: reduce-scatter of the last dim. Backward: all-gather of it."""
    return _apply(_ReduceScatterLast, input_, group)


def all_to_all(
    group: ProcessGroup | None,
    input_: Tensor,
    output_split_sizes_: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
) -> Tensor:
    """Slice r of the first dim goes to rank r; what arrives lies in rank order. Backward: the way back.

    Args:
        output_split_sizes_, input_split_sizes: rows from and to each rank; None: equal parts.
    """
    if collectives.group_size(group) == 1:  # None is no default here: experts may be alone where tp is not
        return input_
    return _AllToAll.apply(input_, group, output_split_sizes_, input_split_sizes)


def all_to_all_sp2hp(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """`[s/t, ..., h]` -> `[s, ..., h/t]`: a share of the sequence for a share of the hidden size."""
    group = default_group(group)
    size = collectives.group_size(group)
    if size == 1:
        return input_
    parts = torch.cat(input_.split(divide(input_.shape[-1], size), dim=-1))  # part r, for rank r, after part r - 1
    return all_to_all(group, parts)


def all_to_all_hp2sp(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """`[s, ..., h/t]` -> `[s/t, ..., h]`: what `all_to_all_sp2hp` undoes."""
    group = default_group(group)
    size = collectives.group_size(group)
    if size == 1:
        return input_
    return torch.cat(all_to_all(group, input_).split(divide(input_.shape[0], size)), dim=-1)
