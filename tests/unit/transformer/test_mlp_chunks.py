"""The MLP in parts of the sequence: the same numbers, and less memory at its highest point."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_lite.errors import ConfigError
from megatron_lite.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron_lite.transformer.spec_utils import build_module
from megatron_lite.transformer.transformer_config import TransformerConfig
from tests.live_memory import Live

S, B, H, F = 64, 2, 16, 256


def layer_of(**settings):
    torch.manual_seed(3)
    config = TransformerConfig(
        num_layers=1, hidden_size=H, num_attention_heads=2, ffn_hidden_size=F, init_method_std=0.3,
        hidden_dropout=0.0, attention_dropout=0.0, gated_linear_unit=True, **settings,
    )  # fmt: skip
    return build_module(get_gpt_layer_local_spec(), config=config, layer_number=1)


def trained(live: Live | None = None, training: bool = True, **settings) -> list[Tensor]:
    """Output, input gradient and weight gradients."""
    layer = layer_of(**settings).train(training)
    x = torch.randn(S, B, H, generator=torch.Generator().manual_seed(5)).requires_grad_()
    with live or torch.enable_grad():
        y, _ = layer(x)
        y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}


@pytest.mark.parametrize("chunks", [2, 3, 64, 100])
@pytest.mark.parametrize("recompute", [{}, RECOMPUTED], ids=["kept", "recomputed"])
def test_parts_give_the_numbers_of_the_whole(chunks, recompute):
    for got, wanted in zip(trained(mlp_chunks_for_training=chunks, **recompute), trained(**recompute), strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5 * wanted.abs().max().item())


@pytest.mark.parametrize(("recompute", "share"), [({}, 0.8), (RECOMPUTED, 0.4)], ids=["kept", "recomputed"])
def test_parts_need_less_memory_at_the_highest_point(recompute, share):
    whole, parts = Live(), Live()
    trained(whole, **recompute)
    trained(parts, mlp_chunks_for_training=8, **recompute)
    assert parts.peak < share * whole.peak, (parts.peak, whole.peak)


def test_evaluation_takes_the_whole():
    """It keeps nothing for backward, and each part costs a start."""
    layer = layer_of(mlp_chunks_for_training=4).eval()
    sizes = []
    layer.mlp.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].shape[0]))
    layer(torch.randn(S, B, H))
    layer.train()(torch.randn(S, B, H))
    assert sizes == [S, *[S // 4] * 4]


def test_a_model_of_experts_alone_refuses_parts():
    with pytest.raises(ConfigError, match="balances over all tokens"):
        TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=1, num_moe_experts=2,
                          mlp_chunks_for_training=2)  # fmt: skip
    TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=1, num_moe_experts=2, moe_layer_freq=[0, 1],
                      mlp_chunks_for_training=2)  # fmt: skip
