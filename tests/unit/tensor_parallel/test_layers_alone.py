"""Layers of a rank that is alone: plain torch, with Megatron's arguments and attributes."""

import pytest
import torch
import torch.nn.functional as F

from megatron_lite import collectives
from megatron_lite.errors import ConfigError, DataError
from megatron_lite.initialization import init_method_normal
from megatron_lite.model_parallel_config import ModelParallelConfig
from megatron_lite.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabUtility,
    broadcast_data,
    copy_to_tensor_model_parallel_region,
    divide,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    split_tensor_along_last_dim,
)

CONFIG = ModelParallelConfig()
INIT = init_method_normal(0.5)


def test_column_and_row_equal_f_linear_and_say_where_they_lie():
    x = torch.randn(3, 2, 8)
    column = ColumnParallelLinear(8, 12, config=CONFIG, init_method=INIT, skip_bias_add=True, stride=2)
    row = RowParallelLinear(
        8, 5, config=CONFIG, init_method=INIT, bias=True, input_is_parallel=True, skip_bias_add=False
    )
    torch.nn.init.normal_(row.bias)
    y, bias = column(x)
    assert bias is column.bias and torch.equal(y, F.linear(x, column.weight))
    y, bias = row(x)
    assert bias is None and torch.equal(y, F.linear(x, row.weight, row.bias))
    assert (column.weight.tensor_model_parallel, column.weight.partition_dim, column.weight.partition_stride) == (
        True,
        0,
        2,
    )
    assert (row.weight.partition_dim, row.bias.tensor_model_parallel, row.weight.allreduce) == (1, False, True)
    assert column.weight.shard.is_whole and row.weight.shard.global_shape == (5, 8)
    assert column.weight.std() > 0.1 and not column.bias.any()


def test_a_lone_column_layer_adds_no_node_to_the_graph():
    """Size 1 costs what F.linear costs."""
    column = ColumnParallelLinear(8, 12, config=CONFIG, init_method=INIT)
    x = torch.randn(3, 2, 8, requires_grad=True)
    assert type(column(x)[0].grad_fn) is type(F.linear(x, column.weight, column.bias).grad_fn)


def test_a_weight_can_come_with_the_call():
    column = ColumnParallelLinear(8, 12, config=CONFIG, init_method=INIT, bias=False, skip_weight_param_allocation=True)
    assert list(column.parameters()) == []
    weight = torch.randn(12, 8)
    assert torch.equal(column(torch.ones(1, 1, 8), weight)[0], F.linear(torch.ones(1, 1, 8), weight))


def test_operators_of_a_lone_rank_return_their_input_and_call_nothing():
    x = torch.randn(2, 2)
    before = {key: list(value) for key, value in collectives.COUNTERS.items()}
    for operator in (
        copy_to_tensor_model_parallel_region,
        reduce_from_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
    ):
        assert operator(x) is x
    assert before == {key: list(value) for key, value in collectives.COUNTERS.items()}


@pytest.mark.parametrize("fused", [False, True])
def test_embedding_looks_up_rows_and_adds_gradients_of_repeats(fused):
    table = VocabParallelEmbedding(
        6, 4, init_method=INIT, config=ModelParallelConfig(gradient_accumulation_fusion=fused)
    )
    ids = torch.tensor([[1, 5, 1]])
    if fused:
        table.weight.main_grad = torch.zeros(6, 4)
    assert torch.equal(table(ids), table.weight[ids])
    table(ids).sum().backward()
    grad = table.weight.main_grad if fused else table.weight.grad
    assert torch.equal(grad[:, 0], torch.tensor([0.0, 2, 0, 0, 0, 1]))
    assert not fused or table.weight.grad is None


def test_a_half_that_expects_another_layout_is_refused():
    with pytest.raises(ConfigError, match="7 cannot be shared by 2"):
        divide(7, 2)
    with pytest.raises(ConfigError, match="buffer"):
        ColumnParallelLinear(8, 8, config=CONFIG, init_method=INIT, embedding_activation_buffer=[])
    assert [p.shape[-1] for p in split_tensor_along_last_dim(torch.zeros(2, 6), 3)] == [2, 2, 2]
    assert VocabUtility.vocab_range_from_global_vocab_size(12, 2, 3) == (8, 12)


def test_broadcast_data_names_what_is_wrong_with_a_batch():
    batch = {"tokens": torch.arange(4), "labels": torch.ones(2)}
    assert broadcast_data(["tokens"], batch, torch.int64)["tokens"] is batch["tokens"]
    with pytest.raises(DataError, match="labels"):
        broadcast_data(["tokens", "labels"], batch, torch.int64)
    with pytest.raises(DataError, match="missing"):
        broadcast_data(["loss_mask"], batch, torch.int64)
