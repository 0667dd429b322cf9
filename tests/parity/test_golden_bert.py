"""BertModel against numbers that Megatron's own model computed: logits of both heads, losses and every gradient."""

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron_lite.models.bert import BertModel, get_bert_layer_local_spec
from megatron_lite.transformer import TransformerConfig

VOCABULARY, POSITIONS = 64, 12
CASES = ["bert", "bert_no_head"]
close = functools.partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)


def build(golden, name: str, **override) -> tuple[BertModel, dict[str, np.ndarray]]:
    """The case's model with its stored weights, and its arrays."""
    case, arrays = golden("models_bert.json")[name], golden(f"model_{name}.npz")
    model = BertModel(
        TransformerConfig(**case["config"], **override),
        transformer_layer_spec=get_bert_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=POSITIONS,
        **case["model_kwargs"],
    )
    model.load_state_dict(
        {key.removeprefix("param/"): torch.from_numpy(value) for key, value in arrays.items() if key[:6] == "param/"}
    )
    return model, arrays


def tensor(arrays: dict[str, np.ndarray], name: str) -> torch.Tensor | None:
    return torch.from_numpy(arrays[name].astype(np.int64)) if name in arrays else None


def losses(model, arrays, mask):
    """Loss per token and the sum of both losses."""
    loss, binary = model(
        tensor(arrays, "tokens"), mask, tensor(arrays, "tokentype_ids"), lm_labels=tensor(arrays, "labels")
    )
    loss_mask = torch.from_numpy(arrays["loss_mask"].astype(np.float32))
    total = (loss * loss_mask).sum() / loss_mask.sum()
    if binary is not None:
        total = total + F.cross_entropy(binary, tensor(arrays, "is_random"))
    return loss, total


@pytest.mark.parametrize("backend", ["auto", "flash", "fused", "unfused", "local"])
@pytest.mark.parametrize("name", CASES)
def test_logits_losses_and_gradients_equal_megatrons(golden, name, backend):
    """Padding is hidden as a key alone, so rows of padding differ, and nothing that is trained on does."""
    model, arrays = build(golden, name, attention_backend=backend)
    mask, real = tensor(arrays, "padding_mask"), torch.from_numpy(arrays["padding_mask"] > 0)
    assert not real.all(), "without padding the mask is not tested"
    logits, binary = model(tensor(arrays, "tokens"), mask, tensor(arrays, "tokentype_ids"))
    close(logits[real], torch.from_numpy(arrays["logits"])[real])
    assert (binary is None) == (name == "bert_no_head")
    if binary is not None:
        close(binary, torch.from_numpy(arrays["binary_logits"]))
    loss, total = losses(model, arrays, mask)
    close(loss[real], torch.from_numpy(arrays["loss_per_token"])[real])
    close(total.detach(), torch.tensor(float(golden("models_bert.json")[name]["loss"])))
    total.backward()
    for key, param in model.named_parameters():
        close(param.grad, torch.from_numpy(arrays[f"grad/{key}"]), rtol=0, msg=lambda m, n=key: f"{n}: {m}")


@pytest.mark.parametrize("backend", ["auto", "unfused", "local"])
@pytest.mark.parametrize("name", CASES)
def test_with_megatrons_mask_padding_is_equal_too(golden, name, backend):
    """A 4-dimensional mask is taken as it is; rows that may see nothing are finite."""
    model, arrays = build(golden, name, attention_backend=backend)
    real = torch.from_numpy(arrays["padding_mask"] > 0)
    mask = ~(real[:, None, :, None] & real[:, None, None, :])
    logits, _ = model(tensor(arrays, "tokens"), mask, tensor(arrays, "tokentype_ids"))
    close(logits, torch.from_numpy(arrays["logits"]))


@pytest.mark.parametrize("name", CASES)
def test_parameters_have_megatrons_names_shapes_and_order(golden, name):
    """The order is the order of the gradient buffer."""
    model, _ = build(golden, name)
    wanted = golden("models_bert.json")[name]["parameters"]
    assert [(n, list(p.shape)) for n, p in model.named_parameters()] == list(wanted.items())
