"""T5Model against numbers that Megatron's own model computed: logits, loss per token and every gradient."""

import functools

import numpy as np
import pytest
import torch

from megatron_lite.models.T5 import (
    T5Model,
    get_t5_decoder_with_local_block_spec,
    get_t5_encoder_with_local_block_spec,
)
from megatron_lite.transformer import TransformerConfig
from tests.conftest import GOLDEN

CASES = ["t5_learned", "t5_relative", "t5_rms_geglu", "t5_rope_untied"]
TWICE = ("param/output_layer.", "param/position_embeddings.")  # the same tensors under a second name


def build(golden, name: str, **override) -> tuple[T5Model, dict[str, np.ndarray]]:
    """The case's model with its stored weights, and its arrays. The release that made them had no final norms."""
    case, arrays = golden("models_t5.json")[name], golden(f"model_{name}.npz")
    config = TransformerConfig(**case["config"], **override)
    specs = get_t5_encoder_with_local_block_spec(2, False), get_t5_decoder_with_local_block_spec(2, False)
    model = T5Model(config, config, *specs, 64, 12, **case["model_kwargs"])
    model.load_state_dict(
        {
            key.removeprefix("param/"): torch.from_numpy(value)
            for key, value in arrays.items()
            if key.startswith("param/") and not key.startswith(TWICE)
        }
    )
    return model, arrays


def inputs(arrays: dict[str, np.ndarray], keys_only: bool = False) -> list[torch.Tensor | None]:
    """Ids and masks; `keys_only` hides padded keys and not padded queries, as a run does."""
    ids = [torch.from_numpy(arrays[name].astype(np.int64)) for name in ("enc_tokens", "dec_tokens")]
    if not keys_only:
        return [*ids, *(torch.from_numpy(arrays[name]) for name in ("enc_mask", "dec_mask", "enc_dec_mask"))]
    padded = ~torch.from_numpy(arrays["enc_pad"]).bool()[:, None, None]
    return [*ids, padded, None, padded]


@pytest.mark.parametrize("keys_only", [False, True], ids=["full masks", "keys only"])
@pytest.mark.parametrize("name", CASES)
def test_logits_losses_and_gradients_equal_megatrons(golden, name, keys_only):
    """A wrong formula is off by 1e-4 or more; rounding by less than 2e-6. Padded queries count nowhere."""
    model, arrays = build(golden, name)
    close = functools.partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)
    real = torch.from_numpy(arrays["dec_pad"]).bool()
    logits = model(*inputs(arrays, keys_only))
    close(logits[real], torch.from_numpy(arrays["logits"])[real])
    if not keys_only:
        close(logits, torch.from_numpy(arrays["logits"]))
    loss = model(*inputs(arrays, keys_only), lm_labels=torch.from_numpy(arrays["labels"].astype(np.int64)))
    close(loss[real], torch.from_numpy(arrays["loss_per_token"])[real])
    (loss[real].sum() / real.sum()).backward()
    for param_name, param in model.named_parameters():
        assert param.grad is not None and param.grad.abs().max() > 0, f"{param_name} has no gradient"
        want = torch.from_numpy(arrays[f"grad/{param_name}"])
        torch.testing.assert_close(param.grad, want, atol=1e-5, rtol=0, msg=lambda m, n=param_name: f"{n}: {m}")


@pytest.mark.parametrize("name", CASES)
def test_parameters_have_megatrons_names_shapes_and_order(golden, name):
    """The order is the order of the gradient buffer."""
    model, _ = build(golden, name)
    assert {n: list(p.shape) for n, p in model.named_parameters()} == golden("models_t5.json")[name]["parameters"]
    assert [n for n, _ in model.named_parameters()] == list(golden("models_t5.json")[name]["parameters"])


@pytest.mark.parametrize(
    "more",
    [
        {"attention_backend": "local"},
        {"attention_backend": "unfused"},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm", "mlp"]},
    ],
    ids=str,
)
def test_backends_and_recomputation_equal_megatrons_numbers(golden, more):
    """The table of relative positions gets its gradient from every layer, recomputed or not."""
    model, arrays = build(golden, "t5_relative", **more)
    real = torch.from_numpy(arrays["dec_pad"]).bool()
    loss = model(*inputs(arrays), lm_labels=torch.from_numpy(arrays["labels"].astype(np.int64)))
    (loss[real].sum() / real.sum()).backward()
    for name, param in model.named_parameters():
        want = torch.from_numpy(arrays[f"grad/{name}"])
        torch.testing.assert_close(param.grad, want, atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_every_t5_case_that_was_made_is_tested(golden):
    """So that no file lies there unread."""
    assert sorted(golden("models_t5.json")) == CASES == sorted(p.stem[6:] for p in GOLDEN.glob("model_t5_*.npz"))
