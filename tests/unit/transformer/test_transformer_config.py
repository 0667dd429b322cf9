"""TransformerConfig and its neighbours by themselves, as a library's user builds them: derived values, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_lite.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron_lite.errors import ConfigError
from megatron_lite.initialization import Normal
from megatron_lite.optimizer.optimizer_config import OptimizerConfig
from megatron_lite.transformer.enums import AttnBackend
from megatron_lite.transformer.transformer_config import TransformerConfig

SHAPE: dict[str, Any] = {"num_layers": 8, "hidden_size": 32, "num_attention_heads": 4}


def test_what_the_shape_leaves_open_is_derived() -> None:
    config = TransformerConfig(**SHAPE)
    assert (config.ffn_hidden_size, config.kv_channels, config.num_query_groups) == (128, 8, 4)
    assert config.activation_func is F.gelu and config.attention_backend is AttnBackend.auto
    assert (config.params_dtype, config.expert_tensor_parallel_size) == (torch.float32, 1)
    assert config.attention_softmax_in_fp32 and not config.gradient_accumulation_fusion  # Megatron's class defaults


def test_given_values_are_kept() -> None:
    config = TransformerConfig(**SHAPE, ffn_hidden_size=40, kv_channels=10, num_query_groups=2, activation_func=F.silu)
    assert (config.ffn_hidden_size, config.kv_channels, config.num_query_groups) == (40, 10, 2)
    assert config.activation_func is F.silu


def test_projections_back_to_the_residual_start_smaller() -> None:
    """std / sqrt(2 * layers): 0.08 / 4 for 8 layers."""
    config = TransformerConfig(**SHAPE, init_method_std=0.08)
    assert config.init_method == Normal(0.08) and config.output_layer_init_method == Normal(0.02)
    assert config.embedding_init_method == Normal(0.08)
    assert TransformerConfig(**SHAPE, embedding_init_method_std=0.5).embedding_init_method == Normal(0.5)


def test_own_init_methods_and_xavier_are_used() -> None:
    own = TransformerConfig(**SHAPE, init_method=torch.nn.init.ones_)
    assert own.init_method is torch.nn.init.ones_ and own.embedding_init_method is torch.nn.init.ones_
    weight = torch.empty(30, 70)
    config = TransformerConfig(**SHAPE, init_method_xavier_uniform=True)
    for method in (config.init_method, config.output_layer_init_method, config.embedding_init_method):
        assert method is not None
        method(weight)
        bound = (6 / 100) ** 0.5
        assert 0.9 * bound < weight.abs().max().item() <= bound


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"num_layers": 0}, "--num-layers is 0"),
        ({"num_attention_heads": 5}, "--hidden-size 32 with --num-attention-heads 5"),
        ({"num_query_groups": 3}, "--num-query-groups 3"),
        ({"normalization": "rms"}, "--normalization rms"),
        ({"softmax_type": "hard"}, "--softmax-type hard"),
        ({"hidden_dropout": 1.5}, "--hidden-dropout 1.5"),
        ({"fp16": True, "bf16": True}, "--fp16 and --bf16"),
        ({"sequence_parallel": True}, "sequence_parallel with tensor_model_parallel_size 1"),
        ({"tensor_model_parallel_size": 3, "num_query_groups": 2}, "--num-attention-heads 4"),
        ({"no_rope_freq": [1, 0]}, "--no-rope-freq has 2 entries with --num-layers 8"),
        ({"no_rope_freq": 3}, "--no-rope-freq 3"),
        ({"window_attn_skip_freq": 0}, "--window-attn-skip-freq 0"),
        ({"recompute_granularity": "full"}, "--recompute-method uniform --recompute-num-layers 1"),
        ({"recompute_granularity": "some"}, "--recompute-granularity some"),
        ({"recompute_method": "block"}, "--recompute-granularity full"),
        ({"recompute_modules": ["mlp"]}, "--recompute-granularity selective"),
        ({"recompute_granularity": "selective", "recompute_modules": ["head"]}, "--recompute-modules head"),
    ],
)
def test_what_cannot_be_built_is_refused_with_reason_and_fix(given: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError) as error:
        TransformerConfig(**(SHAPE | given))
    assert found in str(error.value) and "why: " in str(error.value) and "fix: " in str(error.value)


def test_several_problems_are_told_together() -> None:
    with pytest.raises(ConfigError) as error:
        TransformerConfig(**SHAPE, hidden_dropout=2.0, softmax_type="hard", num_query_groups=3)
    assert all(word in str(error.value) for word in ("--hidden-dropout", "--softmax-type", "--num-query-groups"))


def test_a_subclass_may_have_more_fields() -> None:
    from dataclasses import dataclass

    @dataclass(kw_only=True)
    class Mine(TransformerConfig):
        extra: int = 3

    assert Mine(**SHAPE, extra=4).extra == 4 and Mine(**SHAPE).kv_channels == 8


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"bucket_size": 0}, "--ddp-bucket-size 0"),
        ({"bucket_size": 5, "num_buckets": 2}, "--ddp-num-buckets 2"),
        ({"overlap_param_gather": True}, "--use-distributed-optimizer"),
    ],
)
def test_buckets_that_contradict_are_refused(given: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        DistributedDataParallelConfig(**given)


@pytest.mark.parametrize(
    ("given", "found"),
    [({"optimizer": "adm"}, "adm"), ({"clip_grad": -1.0}, "--clip-grad"), ({"adam_beta1": 1.0}, "--adam-beta1 1.0")],
)
def test_numbers_that_no_optimizer_takes_are_refused(given: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        OptimizerConfig(**given)
