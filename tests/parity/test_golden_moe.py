"""A layer of experts against Megatron's: routing, losses, dropping, outputs and every gradient, and models with it.

`golden/moe.npz` holds each array once; `golden/moe.json` says, for a case, which number each of its arrays has.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron_lite.aux_loss import AuxLossAutoScaler
from megatron_lite.models.gpt import GPTModel, get_gpt_layer_local_spec
from megatron_lite.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron_lite.models.gpt.moe_module_specs import get_moe_module_spec
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.transformer import TransformerConfig
from megatron_lite.transformer.moe import router
from megatron_lite.transformer.moe.moe_layer import MoELayer
from megatron_lite.transformer.moe.router import LOG_NAMES
from megatron_lite.transformer.spec_utils import build_module
from tests.parity.test_golden_gpt import POSITIONS, VOCABULARY, assert_equals_golden

close = functools.partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)
CASES = """softmax_post softmax_pre softmax_pre_scaled sigmoid sigmoid_bias sigmoid_top1 softmax_top1 sigmoid_groups
    softmax_groups aux aux_pre aux_sigmoid seq_aux seq_aux_sigmoid global_aux aux_and_seq z aux_z drop_probs
    drop_position drop_pad alltoall shared shared_gate fp32_router fp64_router sinkhorn sinkhorn2 probs_on_input
    gelu_bias gelu_bias_alltoall aux_per_token""".split()


@pytest.fixture(autouse=True)
def _loss_scale() -> None:
    AuxLossAutoScaler.set_loss_scale(1.0)


@pytest.fixture(scope="module")
def arrays_of(golden):
    """Case -> name -> array."""
    table, arrays = golden("moe.json"), golden("moe.npz")

    def of(case: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        return table[case], {name: arrays[str(number)] for name, number in table[case]["arrays"].items()}

    return of


def layer_of(case: dict[str, Any], arrays: dict[str, np.ndarray], **override: Any) -> MoELayer:
    """The case's layer with its stored weights."""
    given = {**case["config"], **override}
    given["activation_func"] = {"silu": F.silu, "gelu": F.gelu}[given["activation_func"]]
    config = TransformerConfig(**given)
    spec = get_moe_module_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm)
    layer = build_module(spec, config=config, layer_number=1, pg_collection=ProcessGroupCollection())
    layer.load_state_dict(
        {name.removeprefix("param/"): torch.from_numpy(a) for name, a in arrays.items() if name[:6] == "param/"}
    )
    return layer


def test_every_case_of_the_file_is_here(golden) -> None:
    assert sorted(golden("moe.json")) == sorted(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_layer_of_experts_equals_megatrons(arrays_of, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, arrays = arrays_of(name)
    layer = layer_of(case, arrays)
    x = torch.from_numpy(arrays["input"]).requires_grad_()
    wanted_map = torch.from_numpy(arrays["routing_map"])
    probs, routing_map = layer.router(x.detach())
    if name == "drop_position":
        # Megatron asks torch.topk for the first ones of equals, and gets any. Ours are the first; what is compared
        # from here on is the layer with the tokens that Megatron happened to keep.
        assert torch.equal(routing_map.sum(0), wanted_map.sum(0))
        monkeypatch.setattr(router, "apply_router_token_dropping", lambda probs, *_: (probs * wanted_map, wanted_map))
        probs, routing_map = layer.router(x.detach())
    elif name == "drop_pad":  # rows of weight 0 fill up: any will do
        assert torch.equal(routing_map.sum(0), wanted_map.sum(0))
        routing_map, wanted_map = routing_map & (probs > 0), wanted_map & torch.from_numpy(arrays["probs"] > 0)
    assert torch.equal(routing_map, wanted_map)
    close(probs, torch.from_numpy(arrays["probs"]))
    assert probs.dtype == torch.from_numpy(arrays["probs"]).dtype
    layer.router.reset_statistics()
    if layer.router.local_tokens_per_expert is not None:
        layer.router.local_tokens_per_expert.zero_()

    y, bias = layer(x)
    assert bias is None
    close(y, torch.from_numpy(arrays["output"]).to(y.dtype))
    (y * torch.from_numpy(arrays["cotangent"])).sum().backward()
    close(x.grad, torch.from_numpy(arrays["grad_input"]))
    for param_name, param in layer.named_parameters():
        wanted = arrays.get(f"grad/{param_name}")
        if wanted is None:  # an expert that no token chose
            assert param.grad is None or not param.grad.any(), param_name
        else:
            close(param.grad, torch.from_numpy(wanted), msg=lambda m, n=param_name: f"{n}: {m}")


@pytest.mark.parametrize("name", [name for name in CASES if "aux" in name or name in ("z", "drop_probs")])
def test_logged_losses_equal_megatrons(arrays_of, name: str) -> None:
    case, arrays = arrays_of(name)
    gate = layer_of(case, arrays).router
    gate(torch.from_numpy(arrays["input"]))
    wanted = {key: values[0] for key, values in case["aux_losses"].items() if values[0]}
    assert wanted and set(wanted) <= set(LOG_NAMES.values())
    assert {key: value.item() for key, value in gate.losses.items()} == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("name", ["sigmoid_bias", "sigmoid_groups"])
def test_expert_bias_moves_as_megatrons(arrays_of, name: str) -> None:
    case, arrays = arrays_of(name)
    gate = layer_of(case, arrays).router
    gate(torch.from_numpy(arrays["input"]))
    assert torch.equal(gate.local_tokens_per_expert, torch.from_numpy(arrays["local_tokens_per_expert"]))
    gate.after_grad_sync(ProcessGroupCollection())
    close(gate.expert_bias, torch.from_numpy(arrays["expert_bias_updated"]), atol=1e-7, rtol=0)
    assert not gate.local_tokens_per_expert.any()


@pytest.mark.parametrize("name", ["gpt_moe", "gpt_moe_layer_freq"])
def test_models_with_experts_equal_megatrons(golden, name: str) -> None:
    """`gpt_moe_shared` as well (run by hand: its file is large)."""
    model, arrays = build(golden("models_moe.json")[name], golden(f"model_{name}.npz"))
    assert_equals_golden(model, arrays, None)


def build(case: dict[str, Any], arrays: dict[str, np.ndarray]) -> tuple[GPTModel, dict[str, np.ndarray]]:
    """The model with its stored weights."""
    given = {**case["config"], "activation_func": F.silu}
    config = TransformerConfig(**given)
    every = get_gpt_layer_local_spec(**case["spec_kwargs"])
    spec = get_gpt_decoder_block_spec(config) if isinstance(config.moe_layer_freq, list) else every
    model = GPTModel(config, spec, VOCABULARY, POSITIONS, **case["model_kwargs"])
    model.load_state_dict(
        {key.removeprefix("param/"): torch.from_numpy(a) for key, a in arrays.items() if key[:6] == "param/"}
    )
    return model, arrays
