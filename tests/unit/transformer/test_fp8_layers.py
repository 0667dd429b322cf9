"""Which layers of a model cast to FP8, and that they do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_lite.errors import ConfigError
from megatron_lite.models.gpt import GPTModel, get_gpt_layer_local_spec
from megatron_lite.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron_lite.tensor_parallel import ColumnParallelLinear, RowParallelLinear, model_parallel_cuda_manual_seed
from megatron_lite.tensor_parallel.fp8 import DelayedScaling
from megatron_lite.transformer.transformer_config import MLATransformerConfig, TransformerConfig


def gpt(kind: type[TransformerConfig] = TransformerConfig, **settings: Any) -> GPTModel:
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    config = kind(**{"num_layers": 4, "hidden_size": 32, "num_attention_heads": 2, "add_bias_linear": False,
                     "hidden_dropout": 0.0, "attention_dropout": 0.0, "init_method_std": 0.2, **settings})  # fmt: skip
    spec: Any = get_gpt_layer_local_spec(multi_latent_attention=config.multi_latent_attention)
    if config.num_moe_experts:
        spec = get_gpt_decoder_block_spec(config)
    return GPTModel(config, spec, 64, 16, position_embedding_type="rope",
                    mtp_block_spec=get_gpt_mtp_block_spec(config, spec))  # fmt: skip


def casting(model: GPTModel) -> set[str]:
    return {name for name, module in model.named_modules() if getattr(module, "fp8", None) is not None}


def loss_and_grads(model: GPTModel) -> list[torch.Tensor]:
    tokens = torch.arange(32).view(2, 16)
    loss = model(tokens, torch.arange(16).expand(2, -1), None, labels=tokens.flip(1)).mean()
    loss.backward()
    return [loss.detach(), *(param.grad for param in model.parameters() if param.grad is not None)]


def test_all_linear_layers_of_the_stack_cast_and_the_output_layer_does_not() -> None:
    found = casting(gpt(fp8="e4m3"))
    names = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    assert found == {f"decoder.layers.{i}.{name}" for i in range(4) for name in names}
    assert casting(gpt()) == set()


def test_the_first_and_last_layers_can_be_left_alone() -> None:
    settings = {"fp8": "hybrid", "fp8_recipe": "tensorwise", "first_last_layers_bf16": True}
    layers = {name.split(".")[2] for name in casting(gpt(**settings))}
    assert layers == {"1", "2"}
    layers = {name.split(".")[2] for name in casting(gpt(**settings, num_layers_at_start_in_bf16=0,
                                                         num_layers_at_end_in_bf16=3))}  # fmt: skip
    assert layers == {"0"}
    settings.pop("first_last_layers_bf16")
    assert len({name.split(".")[2] for name in casting(gpt(**settings))}) == 4


def test_latent_attention_experts_and_further_predictions_cast_and_routers_do_not() -> None:
    latent = casting(gpt(MLATransformerConfig, fp8="e4m3", q_lora_rank=8, kv_lora_rank=8, qk_head_dim=8,
                         qk_pos_emb_head_dim=4, v_head_dim=8))  # fmt: skip
    assert {f"decoder.layers.0.self_attention.linear_{name}" for name in ("q_down_proj", "kv_up_proj")} <= latent
    experts = casting(gpt(fp8="e4m3", num_moe_experts=2, moe_router_topk=1, moe_router_pre_softmax=True,
                          moe_grouped_gemm=True))  # fmt: skip
    assert "decoder.layers.3.mlp.experts.local_experts.1.linear_fc2" in experts
    assert not any("router" in name for name in experts)
    further = casting(gpt(fp8="e4m3", mtp_num_layers=1))
    assert {"mtp.layers.0.eh_proj", "mtp.layers.0.transformer_layer.mlp.linear_fc1"} <= further


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise", "mxfp8"])
def test_grouped_and_sequential_experts_give_the_same_numbers(recipe: str) -> None:
    settings = {"fp8": "e4m3", "fp8_recipe": recipe, "num_moe_experts": 4, "moe_router_topk": 2, "num_layers": 1}
    grouped, one_by_one = (gpt(**settings, moe_grouped_gemm=grouped) for grouped in (True, False))
    for a, b in zip(loss_and_grads(grouped), loss_and_grads(one_by_one), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise", "mxfp8"])
def test_casts_change_numbers_a_little_and_not_at_all_when_recomputed(recipe: str, fused: bool) -> None:
    plain = loss_and_grads(gpt())
    settings = {"fp8": "e4m3", "fp8_recipe": recipe, "gradient_accumulation_fusion": fused}
    cast = loss_and_grads(gpt(**settings))
    again = loss_and_grads(
        gpt(**settings, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    )
    assert all(torch.equal(a, b) for a, b in zip(cast, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(cast, plain, strict=True))
    whole, other = (torch.cat([grad.flatten() for grad in found[1:]]) for found in (plain, cast))
    # A cast is off by 1/40 in the mean, and a first weight's gradient sees 32 of them: 1/40 sqrt(32) = 0.14.
    assert 0.05 < ((whole - other).norm() / whole.norm()).item() < 0.2
    assert abs(plain[0] - cast[0]) < 0.03 * plain[0]


def test_weight_gradients_can_be_left_alone() -> None:
    """Of a layer by itself: the gradient of its weight is that of operands which were not cast."""
    torch.manual_seed(0)
    with_wgrad, without = (gpt(fp8="e4m3", fp8_recipe="mxfp8", fp8_wgrad=wgrad) for wgrad in (True, False))
    x, g = torch.randn(16, 2, 32), torch.randn(16, 2, 64 * 2)
    for model, exact in ((with_wgrad, False), (without, True)):
        layer: Any = model.decoder.layers[0].mlp.linear_fc1
        layer(x)[0].backward(g)
        wanted = g.reshape(-1, 128).t() @ x.reshape(-1, 32)
        assert torch.allclose(layer.weight.grad, wanted, atol=1e-4) == exact


def test_evaluation_leaves_no_trace_in_the_history() -> None:
    model = gpt(fp8="hybrid")
    tokens = torch.arange(16).view(1, -1)
    layer: Any = model.decoder.layers[0].mlp.linear_fc2
    model.eval()(tokens, tokens, None)
    assert not layer.fp8.amax.any()
    model.train()(tokens, tokens, None)
    assert layer.fp8.amax[:2].all() and not layer.fp8.amax_history.any()
    ends = model.decoder.fp8_scaling
    assert isinstance(ends, DelayedScaling)
    ends.after_grad_sync(model.pg_collection)
    assert layer.fp8.amax_history[0, :2].all() and not layer.fp8.amax.any()


def test_histories_stay_fp32_in_a_bf16_model_and_are_in_its_state() -> None:
    model = gpt(fp8="hybrid", bf16=True, fp8_amax_history_len=5).to(torch.bfloat16)
    layer: Any = model.decoder.layers[0].mlp.linear_fc2
    assert layer.fp8.amax_history.dtype == layer.fp8.amax.dtype == torch.float32
    state = model.state_dict()
    assert state["decoder.layers.0.mlp.linear_fc2.fp8.amax_history"].shape == (5, 3)
    assert not any(name.endswith("fp8.amax") for name in state)


def test_a_nan_is_not_hidden_by_a_cast() -> None:
    model = gpt(fp8="e4m3", num_layers=1)
    with torch.no_grad():
        model.decoder.layers[0].mlp.linear_fc1.weight[0, 0] = float("inf")
    assert not loss_and_grads(model)[0].isfinite()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"fp8_recipe": "custom"}, "--fp8-recipe custom"),
        ({"fp8_amax_history_len": 0}, "--fp8-amax-history-len 0"),
        ({"first_last_layers_bf16": True}, "--first-last-layers-bf16 with --fp8-recipe delayed"),
        ({"first_last_layers_bf16": True, "fp8_recipe": "mxfp8", "num_layers_at_end_in_bf16": 5}, "has 4 layers"),
        ({"first_last_layers_bf16": True, "fp8_recipe": "mxfp8", "num_layers_at_end_in_bf16": 3}, "no layer is left"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        gpt(fp8="hybrid", **settings)
    gpt(**settings)


def test_layers_alone_know_no_casts() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, fp8="e4m3")
    for kind in (ColumnParallelLinear, RowParallelLinear):
        more = {"input_is_parallel": True, "skip_bias_add": False} if kind is RowParallelLinear else {}
        assert kind(8, 8, config=config, init_method=config.init_method, bias=False, **more).fp8 is None


def test_a_step_that_is_repeated_finds_the_history_that_it_found_before() -> None:
    """Also the first one, which finds none: its scales are those of its own tensors both times."""
    model = gpt(fp8="hybrid", num_layers=1)
    ends = model.decoder.fp8_scaling
    assert isinstance(ends, DelayedScaling)

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        found = loss_and_grads(model)
        ends.after_grad_sync(model.pg_collection)
        return found

    for _ in range(2):
        before = ends.snapshot()
        first = step()
        ends.restore(before)
        assert all(torch.equal(a, b) for a, b in zip(first, step(), strict=True))
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.3)
    one, other = step(), step()
    assert not torch.equal(one[0], other[0])  # the second finds another history
