"""Linear layers and the embedding, split over the tensor-parallel ranks.

    ColumnParallelLinear   Y_i = X A_i         A = [A_1 ... A_t]       input whole, output split
    RowParallelLinear      Y = sum_i X_i A_i   A = [A_1; ...; A_t]     input split, output whole
    DuplicatedLinear       Y = X A             A on every rank
    VocabParallelEmbedding rank r holds rows [r v/t, (r + 1) v/t)

A column layer followed by a row layer needs one all-reduce forward and one backward (Shoeybi et al. 2019, section 3);
with sequence parallelism each becomes an all-gather and a reduce-scatter (Korthikanti et al. 2022, section 4.2).
Backward overlaps them with the weight gradient. A rank that is alone runs `F.linear` and nothing else.

Weights are `[out, in]`, as F.linear has them. Every parameter says how it starts (`set_init`) and which part of the
global tensor it is (`shard`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_lite import collectives
from megatron_lite.errors import ConfigError
from megatron_lite.fusions.wgrad import accumulate_rows, takes_main_grad
from megatron_lite.initialization import Constant, InitMethod, set_init
from megatron_lite.model_parallel_config import ModelParallelConfig
from megatron_lite.sharding import split, whole
from megatron_lite.tensor_parallel.mappings import (
    default_group,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from megatron_lite.tensor_parallel.overlap import RowInTurn, overlap_of
from megatron_lite.tensor_parallel.product import linear_with_grad_accumulation_and_async_allreduce
from megatron_lite.tensor_parallel.utils import VocabUtility, divide

# -- what a parameter says about its place -----------------------------------------------------------------------

_ATTRIBUTES: dict[str, Any] = {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1}


def set_tensor_model_parallel_attributes(tensor: Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Mark a parameter as split along `dim` (Megatron's attributes, which users' scripts read)."""
    for name, value in zip(_ATTRIBUTES, (is_parallel, dim, stride)):
        setattr(tensor, name, value)


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: Tensor) -> None:
    """Mark a parameter that says nothing as held completely by every rank."""
    for name, value in _ATTRIBUTES.items():
        if not hasattr(tensor, name):
            setattr(tensor, name, value)


def copy_tensor_model_parallel_attributes(destination_tensor: Tensor, source_tensor: Tensor) -> None:
    """Hand the marks on, for example to a main parameter."""
    for name in _ATTRIBUTES:
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))


def param_is_not_tensor_parallel_duplicate(param: Tensor, tp_group: ProcessGroup | None = None) -> bool:
    """Whether this rank counts the parameter in norms: split parameters on every rank, copies on rank 0."""
    return getattr(param, "tensor_model_parallel", False) or collectives.group_rank(default_group(tp_group)) == 0


def _parameter(
    shape: tuple[int, ...],
    name: str,
    method: InitMethod,
    config: ModelParallelConfig,
    group: ProcessGroup | None,
    dim: int | None,
    stride: int = 1,
) -> nn.Parameter:
    """Allocate a parameter that is split along `dim` (None: whole on every rank), on torch's default device."""
    param = nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
    rank, size = collectives.group_rank(group), collectives.group_size(group)
    shard = whole(name, shape) if dim is None else split(name, shape, dim, rank, size, stride)
    set_tensor_model_parallel_attributes(param, dim is not None, -1 if dim is None else dim, stride)
    param.shard = shard  # type: ignore[attr-defined]
    # `--no-initialization`: a checkpoint fills the model, drawing numbers would be for nothing.
    set_init(param, method if config.perform_initialization else Constant(0.0), name, shard)
    return param


class ColumnParallelLinear(nn.Module):
    """Y_i = X A_i + b_i: rank i computes the i-th share of the outputs.

        A = [A_1 ... A_t]    Y = [Y_1 ... Y_t]    rank i keeps A_i transposed, [out/t, in]

    Args:
        input_size, output_size: of the whole layer.
        config, init_method: dtype and layout; how the weight starts.
        bias: whether there is one.
        gather_output: give every rank all of Y.
        stride: stacked parts of the output that are cut one by one: 2 for [gate; up].
        keep_master_weight_for_test: accepted, as Megatron has it; nothing depends on it.
        skip_bias_add: return the bias instead of adding it.
        skip_weight_param_allocation: the weight comes with each call (tied embeddings).
        embedding_activation_buffer, grad_output_buffer: refused: an output layer that sets `defers_weight_grads` puts
            its weight gradients into `config.embedding_grad_store`.
        is_expert: the weight belongs to an expert: tokens are brought and results summed around it, so the layer moves
            nothing by itself. `allreduce` is False if experts are spread over ranks.
        tp_comm_buffer_name: accepted; names a buffer of Transformer Engine.
        disable_grad_reduce: leave the input gradient as this rank's part of the sum.
        tp_group: None = the registered tensor-parallel group; for an expert, that this rank holds all of it.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: Callable[[Tensor], Any],
        bias: bool = True,
        gather_output: bool = False,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        embedding_activation_buffer: list[Tensor] | None = None,
        grad_output_buffer: list[Tensor] | None = None,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        disable_grad_reduce: bool = False,
        tp_group: ProcessGroup | None = None,
    ):
        super().__init__()
        if embedding_activation_buffer is not None or grad_output_buffer is not None:
            raise ConfigError(
                "ColumnParallelLinear with an activation or gradient buffer",
                why="weight gradients that are put off wait in config.embedding_grad_store",
                fix="leave the buffers None, and set config.defer_embedding_wgrad_compute",
            )
        self.config, self.input_size, self.output_size = config, input_size, output_size
        self.gather_output, self.skip_bias_add, self.is_expert = gather_output, skip_bias_add, is_expert
        self.tp_group = tp_group if is_expert else default_group(tp_group)
        size = collectives.group_size(self.tp_group)
        self.output_size_per_partition = divide(output_size, size)
        alone = size == 1 or is_expert
        self.sequence_parallel = config.sequence_parallel and not alone
        self.allreduce_dgrad = not alone and not self.sequence_parallel and not disable_grad_reduce
        self.gradient_accumulation_fusion = config.gradient_accumulation_fusion
        self.overlap = overlap_of(config)
        self.defers_weight_grads = False
        self.fp8: nn.Module | None = None  # see tensor_parallel/fp8
        self.output_dtype: torch.dtype | None = None  # of logits that are wider than the model, or narrower

        self.weight: nn.Parameter | None = None
        if not skip_weight_param_allocation:
            shape = (self.output_size_per_partition, input_size)
            self.weight = _parameter(shape, "weight", init_method, config, self.tp_group, 0, stride)
            _mark_expert(self.weight, config, is_expert)
        self.register_parameter("bias", None)
        if bias:
            shape_1d = (self.output_size_per_partition,)
            self.bias = _parameter(shape_1d, "bias", Constant(0.0), config, self.tp_group, 0, stride)
            _mark_expert(self.bias, config, is_expert)

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """x `[s, b, in]` (`[s/t, b, in]` with sequence parallelism) -> (y `[s, b, out/t]`, the bias if skipped)."""
        if weight is None:
            weight = self.weight
            assert weight is not None, "this layer has no weight of its own: hand one to forward"
        y = linear_with_grad_accumulation_and_async_allreduce(
            input_,
            weight,
            None if self.skip_bias_add else self.bias,
            self.gradient_accumulation_fusion,
            self.allreduce_dgrad,
            self.sequence_parallel,
            self.tp_group,
            self.overlap,
            weight_grad_store=(
                self.config.embedding_grad_store if self.defers_weight_grads else self.config.weight_grad_store
            ),
            output_dtype=self.output_dtype,
            fp8=self.fp8,
        )
        if self.gather_output if runtime_gather_output is None else runtime_gather_output:
            y = gather_from_tensor_model_parallel_region(y, self.tp_group)
        return y, self.bias if self.skip_bias_add else None


class RowParallelLinear(nn.Module):
    """Y = X A + b with A split by rows over tp.

            | A_1 |
        A = | ... |    X = [X_1 ... X_t]    =>    Y = sum_i X_i A_i + b
            | A_t |

    Rank i keeps A_i transposed, `[out, in/t]`, and the whole bias, which is added once, after the sum.

    Args: as ColumnParallelLinear's, and
        input_is_parallel: the input is this rank's share already; else it is cut here.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: ProcessGroup | None = None,
    ):
        super().__init__()
        self.config, self.input_size, self.output_size = config, input_size, output_size
        self.input_is_parallel, self.skip_bias_add, self.is_expert = input_is_parallel, skip_bias_add, is_expert
        self.tp_group = tp_group if is_expert else default_group(tp_group)
        size = collectives.group_size(self.tp_group)
        self.input_size_per_partition = divide(input_size, size)
        self.sequence_parallel = config.sequence_parallel and size > 1 and not is_expert
        if self.sequence_parallel and not input_is_parallel:
            raise ConfigError(
                "a row-parallel layer with a whole input under --sequence-parallel",
                why="its output would be cut along the sequence while its input is not",
                fix="input_is_parallel=True, behind a column-parallel layer",
            )
        self.gradient_accumulation_fusion = config.gradient_accumulation_fusion
        self.overlap = overlap_of(config)
        self.fp8: nn.Module | None = None

        shape = (output_size, self.input_size_per_partition)
        self.weight = _parameter(shape, "weight", init_method, config, self.tp_group, 1, stride)
        _mark_expert(self.weight, config, is_expert)
        self.register_parameter("bias", None)
        if bias:
            self.bias = _parameter((output_size,), "bias", Constant(0.0), config, self.tp_group, None)
            # Under sequence parallelism its gradient is a part, to be summed over tp.
            self.bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
            _mark_expert(self.bias, config, is_expert)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """x `[s, b, in/t]` -> (y `[s, b, out]`, or `[s/t, b, out]` with sequence parallelism; the bias if skipped).

        Of an expert y is this rank's part of the sum over its ranks.
        """
        x = input_ if self.input_is_parallel else scatter_to_tensor_model_parallel_region(input_, self.tp_group)
        alone = self.is_expert or collectives.group_size(self.tp_group) == 1
        bias = None if self.skip_bias_add else self.bias
        if self.sequence_parallel and self.overlap.reduce and self.fp8 is None:
            store = self.config.weight_grad_store
            y = RowInTurn.apply(x, self.weight, self.tp_group, self.gradient_accumulation_fusion, store, self.overlap)
            y = y if bias is None else y + bias
            return y, self.bias if self.skip_bias_add else None
        y = linear_with_grad_accumulation_and_async_allreduce(
            x,
            self.weight,
            bias if alone else None,
            self.gradient_accumulation_fusion,
            False,
            False,
            self.tp_group,
            weight_grad_store=self.config.weight_grad_store,
            fp8=self.fp8,
        )
        if not alone:
            if self.sequence_parallel:
                y = reduce_scatter_to_sequence_parallel_region(y, self.tp_group)
            else:
                y = reduce_from_tensor_model_parallel_region(y, self.tp_group)
            y = y if bias is None else y + bias
        return y, self.bias if self.skip_bias_add else None


class DuplicatedLinear(nn.Module):
    """Y = X A + b, computed by every rank: for a layer too narrow to be split, such as a projection to low rank.

    Inputs are equal on all ranks, or, with sequence parallelism, each rank's part of the sequence: then gradients of
    the weight are parts of a sum, which `finalize_model_grads` makes.

    Args: as ColumnParallelLinear's.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: Callable[[Tensor], Any],
        bias: bool = True,
        skip_bias_add: bool = False,
        tp_group: ProcessGroup | None = None,
    ):
        super().__init__()
        self.config, self.input_size, self.output_size = config, input_size, output_size
        self.skip_bias_add, self.tp_group = skip_bias_add, default_group(tp_group)
        self.gradient_accumulation_fusion = config.gradient_accumulation_fusion
        self.fp8: nn.Module | None = None
        self.weight = _parameter((output_size, input_size), "weight", init_method, config, None, None)
        self.register_parameter("bias", None)
        if bias:
            self.bias = _parameter((output_size,), "bias", Constant(0.0), config, None, None)
        for param in self.parameters():
            param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """x `[..., in]` -> (y `[..., out]`, the bias if skipped)."""
        y = linear_with_grad_accumulation_and_async_allreduce(
            input_,
            self.weight,
            None if self.skip_bias_add else self.bias,
            self.gradient_accumulation_fusion,
            False,
            False,
            self.tp_group,
            weight_grad_store=self.config.weight_grad_store,
            fp8=self.fp8,
        )
        return y, self.bias if self.skip_bias_add else None


def _mark_expert(param: nn.Parameter, config: ModelParallelConfig, is_expert: bool) -> None:
    """Expert parameters of a spread-out layer are not reduced with the dense ones."""
    expert_tp = config.expert_tensor_parallel_size or config.tensor_model_parallel_size
    spread = config.expert_model_parallel_size > 1 or expert_tp != config.tensor_model_parallel_size
    param.allreduce = not (is_expert and spread)  # type: ignore[attr-defined]


# -- embedding ---------------------------------------------------------------------------------------------------


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, rows, fuse_wgrad):
        ctx.weight_ref = weight
        ctx.save_for_backward(rows)
        ctx.fuse_wgrad = fuse_wgrad
        return torch.nn.functional.embedding(rows, weight)

    @staticmethod
    def backward(ctx, g):
        (rows,), weight = ctx.saved_tensors, ctx.weight_ref
        if ctx.fuse_wgrad and takes_main_grad(weight):
            accumulate_rows(weight, rows.reshape(-1), g.reshape(-1, g.shape[-1]))
            return None, None, None
        grad = torch.ops.aten.embedding_dense_backward(g.contiguous(), rows.contiguous(), weight.shape[0], -1, False)
        return grad, None, None


class VocabParallelEmbedding(nn.Module):
    """A table of which rank r holds rows [r v/t, (r + 1) v/t): ids outside give zeros, and a sum joins the ranks.

    Args:
        num_embeddings, embedding_dim: v and h of the whole table; t must divide v (the vocabulary is padded so).
        reduce_scatter_embeddings: give each rank its part of the sequence, as sequence parallelism wants it.
        tp_group: None = the registered tensor-parallel group.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: Callable[[Tensor], Any],
        reduce_scatter_embeddings: bool = False,
        config: ModelParallelConfig,
        tp_group: ProcessGroup | None = None,
    ):
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.config = num_embeddings, embedding_dim, config
        self.reduce_scatter_embeddings = reduce_scatter_embeddings
        self.tp_group = default_group(tp_group)
        size, rank = collectives.group_size(self.tp_group), collectives.group_rank(self.tp_group)
        self.vocab_start_index, self.vocab_end_index = VocabUtility.vocab_range_from_global_vocab_size(
            num_embeddings, rank, size
        )
        self.num_embeddings_per_partition = self.vocab_end_index - self.vocab_start_index
        # On a GPU adding rows by index is not deterministic; there autograd's own kernel makes the gradient.
        self.gradient_accumulation_fusion = config.gradient_accumulation_fusion
        shape = (self.num_embeddings_per_partition, embedding_dim)
        self.weight = _parameter(shape, "weight", init_method, config, self.tp_group, 0)

    def forward(self, input_: Tensor) -> Tensor:
        """ids of any shape -> `[*ids, h]`; with `reduce_scatter_embeddings` ids `[b, s]` -> `[s/t, b, h]`."""
        fuse = self.gradient_accumulation_fusion and input_.device.type == "cpu"
        if collectives.group_size(self.tp_group) == 1:
            y = _LookUp.apply(self.weight, input_, fuse)
            return y.transpose(0, 1).contiguous() if self.reduce_scatter_embeddings else y
        elsewhere = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
        rows = (input_ - self.vocab_start_index).masked_fill(elsewhere, 0)
        part = _LookUp.apply(self.weight, rows, fuse).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        if self.reduce_scatter_embeddings:
            part = part.transpose(0, 1).contiguous()
            return reduce_scatter_to_sequence_parallel_region(part, self.tp_group)
        return reduce_from_tensor_model_parallel_region(part, self.tp_group)
