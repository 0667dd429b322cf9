"""GPTModel against numbers that Megatron's own model computed: logits, loss per token and every gradient."""

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron_lite.aux_loss import AuxLossAutoScaler
from megatron_lite.fusions.bias_activation import squared_relu
from megatron_lite.fusions.rope import rotate
from megatron_lite.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding
from megatron_lite.models.gpt import GPTModel, get_gpt_layer_local_spec
from megatron_lite.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron_lite.transformer import MLATransformerConfig, TransformerConfig
from tests.conftest import GOLDEN

VOCABULARY, POSITIONS = 64, 12
ACTIVATIONS = {"silu": F.silu, "<lambda>": squared_relu}
CASES = [
    "gpt_gelu_bias_fusion",
    "gpt_learned",
    "gpt_llama",
    "gpt_mla",
    "gpt_mla_yarn",
    "gpt_mqa_nope",
    "gpt_mtp",
    "gpt_no_rope_freq",
    "gpt_qk_layernorm_rms",
    "gpt_qkv_bias_kv_channels",
    "gpt_query_key_scaling",
    "gpt_reset_mask",
    "gpt_residual_post_ln",
    "gpt_rope_half_interleaved",
    "gpt_rope_scaling",
    "gpt_softmax_learnable",
    "gpt_softmax_offbyone",
    "gpt_squared_relu",
    "gpt_swiglu_bias_fusion",
    "gpt_window",
]
# The release that made the numbers reads this flag nowhere, so its model is the plain one. Ours does what the flag
# says (tests/unit/transformer/test_transformer_layer.py); the numbers are those of the flag left out.
IGNORED = {"gpt_residual_post_ln": "apply_residual_connection_post_layernorm"}


def build(golden, name: str, **override) -> tuple[GPTModel, dict[str, np.ndarray]]:
    """The case's model with its stored weights, and its arrays."""
    case, arrays = golden("models.json")[name], golden(f"model_{name}.npz")
    given = {key: value for key, value in case["config"].items() if key != IGNORED.get(name)}
    if "activation_func" in given:
        given["activation_func"] = ACTIVATIONS.get(given["activation_func"], F.gelu)
    if "window_size" in given:
        given["window_size"] = (4, 0)
    kind = MLATransformerConfig if given.get("multi_latent_attention") else TransformerConfig
    config, spec = kind(**given, **override), get_gpt_layer_local_spec(**case["spec_kwargs"])
    further = get_gpt_mtp_block_spec(config, spec)
    model = GPTModel(config, spec, VOCABULARY, POSITIONS, mtp_block_spec=further, **case["model_kwargs"])
    model.load_state_dict(
        {key.removeprefix("param/"): torch.from_numpy(value) for key, value in arrays.items() if key[:6] == "param/"}
    )
    return model, arrays


def tensor(arrays: dict[str, np.ndarray], name: str) -> torch.Tensor:
    return torch.from_numpy(arrays[name].astype(np.int64))


def assert_equals_golden(model: GPTModel, arrays: dict[str, np.ndarray], mask: torch.Tensor | None) -> None:
    close = functools.partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)
    tokens, positions, labels = (tensor(arrays, name) for name in ("tokens", "position_ids", "labels"))
    AuxLossAutoScaler.set_loss_scale(1.0)  # of predictions of further tokens, whose loss rides along
    if "logits" in arrays:
        close(model(tokens, positions, mask), torch.from_numpy(arrays["logits"]))
    loss = model(tokens, positions, mask, labels=labels)
    close(loss, torch.from_numpy(arrays["loss_per_token"]))
    loss.mean().backward()
    for name, param in model.named_parameters():
        assert param.grad is not None and param.grad.abs().max() > 0, f"{name} has no gradient"
        torch.testing.assert_close(
            param.grad, torch.from_numpy(arrays[f"grad/{name}"]), atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("name", CASES)
def test_logits_losses_and_gradients_equal_megatrons(golden, name):
    """A wrong formula is off by 1e-4 or more; rounding by less than 2e-6."""
    model, arrays = build(golden, name)
    assert_equals_golden(model, arrays, torch.from_numpy(arrays["attention_mask"]))


@pytest.mark.parametrize("name", [name for name in CASES if name != "gpt_reset_mask"])
def test_no_mask_at_all_is_the_causal_mask(golden, name):
    """Without a mask the kernels hide the future themselves."""
    model, arrays = build(golden, name)
    assert_equals_golden(model, arrays, None)


@pytest.mark.parametrize("name", CASES)
def test_parameters_have_megatrons_names_shapes_and_order(golden, name):
    """The order is the order of the gradient buffer."""
    model, _ = build(golden, name)
    assert {n: list(p.shape) for n, p in model.named_parameters()} == golden("models.json")[name]["parameters"]
    assert [n for n, _ in model.named_parameters()] == list(golden("models.json")[name]["parameters"])


@pytest.mark.parametrize("backend", ["flash", "fused", "unfused", "local"])
@pytest.mark.parametrize("name", ["gpt_llama", "gpt_mla", "gpt_reset_mask", "gpt_window", "gpt_query_key_scaling"])
def test_every_attention_backend_equals_megatrons_numbers(golden, name, backend):
    """Each implementation goes through the whole model once."""
    model, arrays = build(golden, name, attention_backend=backend)
    assert_equals_golden(model, arrays, torch.from_numpy(arrays["attention_mask"]))


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm", "mlp"]},
    ],
)
@pytest.mark.parametrize("name", ["gpt_learned", "gpt_llama", "gpt_mla_yarn", "gpt_mtp"])
def test_recompute_equals_megatrons_numbers(golden, name, recompute):
    """Recomputation changes memory, not numbers."""
    model, arrays = build(golden, name, **recompute)
    assert_equals_golden(model, arrays, torch.from_numpy(arrays["attention_mask"]))


@pytest.mark.parametrize("case", ["plain", "half", "interleaved", "interp", "base500k", "llama31"])
def test_rotary_angles_and_rotation_equal_megatrons(golden, case):
    """Frequencies, angles and the rotated tensor."""
    given, arrays = dict(golden("rope.json")[f"rope/{case}"]), golden("rope.npz")
    rope = RotaryEmbedding(**{key: value for key, value in given.items() if key != "seq"})
    freqs = rope(given["seq"])
    want = {key.rsplit("/", 1)[1]: torch.from_numpy(value) for key, value in arrays.items() if f"rope/{case}/" in key}
    torch.testing.assert_close(rope.inv_freq, want["inv_freq"], atol=1e-7, rtol=1e-6)
    torch.testing.assert_close(freqs, want["freqs"], atol=1e-5, rtol=1e-5)
    out = rotate(want["t"], freqs, given.get("rotary_interleaved", False))
    torch.testing.assert_close(out, want["out"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", ["default", "mscale_all", "no_round", "beta"])
def test_yarn_angles_and_factor_equal_megatrons(golden, case):
    """A mixture that begins or ends a pair too early is off by several per cent in that pair."""
    given = dict(golden("rope.json")[f"yarn/{case}"])
    length, mscale = given.pop("seq"), given.pop("returned_mscale")
    freqs, factor = YarnRotaryEmbedding(**given)(length)
    torch.testing.assert_close(freqs, torch.from_numpy(golden("rope.npz")[f"yarn/{case}/freqs"]), atol=1e-5, rtol=1e-5)
    assert factor == pytest.approx(mscale, rel=1e-12)


def test_every_dense_case_that_was_made_is_tested(golden):
    """So that no file lies there unread."""
    made = {p.stem[6:] for p in GOLDEN.glob("model_gpt_*.npz")} - set(golden("models_moe.json"))
    assert sorted(golden("models.json")) == CASES == sorted(made)
