"""Experts one by one, grouped, and as a loop over tokens that is written down here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite.errors import ConfigError
from megatron_lite.transformer import TransformerConfig
from megatron_lite.transformer.moe import GroupedMLP, MoELayer, MoESubmodules, SequentialMLP, SharedExpertMLP

E, H, N = 4, 16, [3, 0, 5, 2]


def config_of(**fields: Any) -> TransformerConfig:
    given = {
        "num_layers": 1,
        "hidden_size": H,
        "num_attention_heads": 4,
        "num_moe_experts": E,
        "moe_ffn_hidden_size": 24,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "init_method_std": 0.5,
        "moe_grouped_gemm": True,
        "add_bias_linear": False,
    }
    return TransformerConfig(**{**given, **fields})


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(sum(N), H, generator=generator).to(dtype).requires_grad_()
    return (
        rows,
        torch.rand(sum(N), generator=generator).to(dtype).requires_grad_(),
        torch.randn(sum(N), H, generator=generator).to(dtype),
    )


def run(experts: torch.nn.Module, counts: Any = N) -> list[Tensor]:
    """Outputs and all gradients."""
    rows, probs, g = inputs(experts.config.params_dtype)
    y, bias = experts(rows, counts, probs)
    assert bias is None
    return [y, *torch.autograd.grad(y, (rows, probs, *experts.parameters()), g)]


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("activation, is_gated", [(F.silu, True), (F.gelu, False)])
def test_c111_one_by_one_and_grouped_are_the_same_experts(activation, is_gated, biases):
    """C111: the two kinds had other weights under other names. Here each loads the other's, bit by bit, and computes
    the same; and both equal a loop over the rows."""
    config = config_of(gated_linear_unit=is_gated, activation_func=activation, add_bias_linear=biases)
    torch.manual_seed(0)
    one, many = SequentialMLP(E, config), GroupedMLP(E, config)
    if biases:
        for param in one.parameters():
            torch.nn.init.normal_(param)
    many.load_state_dict(one.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), many.state_dict().values()))
    for a, b in zip(run(one), run(many), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    rows, probs, _ = inputs()
    owners = [e for e, n in enumerate(N) for _ in range(n)]
    want = []
    for x, p, e in zip(rows, probs, owners):
        fc1, fc2 = one.local_experts[e].linear_fc1, one.local_experts[e].linear_fc2
        inner = F.linear(x, fc1.weight, fc1.bias)
        inner = F.silu(inner[:24]) * inner[24:] if is_gated else F.gelu(inner)
        want.append(p * F.linear(inner, fc2.weight, fc2.bias))
    torch.testing.assert_close(run(many, torch.tensor(N))[0], torch.stack(want), rtol=1e-5, atol=1e-5)


def test_activations_that_are_forgotten_come_back_equal():
    """--recompute-modules moe_act."""
    torch.manual_seed(0)
    plain = GroupedMLP(E, config_of())
    keep = GroupedMLP(E, config_of(recompute_granularity="selective", recompute_modules=["moe_act"]))
    keep.load_state_dict(plain.state_dict())
    assert keep.recompute_activation
    assert all(torch.equal(a, b) for a, b in zip(run(plain), run(keep), strict=True))


def test_weights_on_the_input_reach_the_expert_before_its_activation():
    """--moe-apply-probs-on-input: f(p x), not p f(x), and the weight's gradient comes by that way."""
    torch.manual_seed(0)
    config = config_of(moe_apply_probs_on_input=True, moe_router_topk=1, moe_router_pre_softmax=True)
    experts = GroupedMLP(E, config)
    plain = GroupedMLP(E, config_of())
    plain.load_state_dict(experts.state_dict())
    rows, probs, g = inputs()
    y, _ = experts(rows, N, probs)
    want, _ = plain(rows * probs.unsqueeze(1), N, torch.ones_like(probs))
    assert torch.equal(y, want)
    for a, b in zip(torch.autograd.grad(y, (rows, probs), g), torch.autograd.grad(want, (rows, probs), g)):
        torch.testing.assert_close(a, b)


def test_a_dispatcher_of_a_missing_library_is_refused():
    with pytest.raises(ConfigError, match=r"(?s)flex.*not installed.*alltoall"):
        config_of(moe_token_dispatcher_type="flex")


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_no_rank_to_speak_to_costs_no_collective_and_no_token_is_no_error(dispatcher):
    """An empty batch, as the last rank of an uneven split may have it."""
    layer = MoELayer(config_of(moe_token_dispatcher_type=dispatcher), MoESubmodules(GroupedMLP, SharedExpertMLP), 1)
    x = torch.empty(0, 2, H, requires_grad=True)
    y, _ = layer(x)
    y.sum().backward()
    assert y.shape == x.shape and all(p.grad is not None for p in layer.experts.parameters())
