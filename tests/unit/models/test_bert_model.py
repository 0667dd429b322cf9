"""BertModel alone: padding, masks that hide everything, losses without a masked word, vectors of texts."""

from argparse import Namespace
from unittest import mock

import pytest
import torch

import pretrain_bert
from megatron_lite import training
from megatron_lite.errors import ConfigError
from megatron_lite.models.bert import BertModel, get_bert_layer_local_spec
from megatron_lite.transformer.transformer_config import TransformerConfig

BACKENDS = ["auto", "fused", "flash", "unfused", "local"]


def build(positions="learned_absolute", head=True, **more) -> BertModel:
    torch.manual_seed(2)
    options = {key: more.pop(key) for key in ("return_embeddings",) if key in more}
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.2,
        **more,
    )
    return BertModel(
        config,
        num_tokentypes=2 if head else 0,
        transformer_layer_spec=get_bert_layer_local_spec(),
        vocab_size=64,
        max_sequence_length=24,
        share_embeddings_and_output_weights=True,
        position_embedding_type=positions,
        add_binary_head=head,
        **options,
    )


def batch(s=12, real=9):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 64, (2, s), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, real:] = 0
    tokens[mask == 0] = 0
    return tokens, mask, (torch.arange(s).expand(2, s) > s // 2).long()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("positions", ["learned_absolute", "rope"])
def test_longer_padding_changes_nothing_that_is_real(backend, positions):
    """Logits, the other head's and gradients: padding is hidden from everybody."""
    model = build(positions, attention_backend=backend)
    tokens, mask, types = batch()
    longer = [torch.cat([x, x.new_zeros(2, 6)], dim=1) for x in (tokens, mask, types)]
    results = []
    for inputs in ((tokens, mask, types), longer):
        model.zero_grad()
        logits, binary = model(*inputs)
        real = logits[:, :12][mask.bool()]
        (real.square().mean() + binary.square().sum()).backward()
        results.append([real, binary, *(param.grad.clone() for param in model.parameters() if param.grad is not None)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_text_of_padding_alone_stays_finite(backend):
    model = build(attention_backend=backend)
    tokens, mask, types = batch()
    mask[1] = 0
    logits, binary = model(tokens, mask, types)
    (logits.sum() + binary.sum()).backward()
    assert all(torch.isfinite(x).all() for x in (logits, binary, *(param.grad for param in model.parameters())))


def test_attention_looks_both_ways():
    model = build()
    tokens, mask, types = batch(real=12)
    states = {}
    model.encoder.register_forward_hook(lambda module, args, out: states.update(out=out))
    model.embedding.register_forward_hook(lambda module, args, out: (out.retain_grad(), states.update(begin=out))[1])
    model(tokens, mask, types)
    states["out"][5, 0, 0].backward()
    assert (states["begin"].grad[:, 0].abs().sum(-1) > 0).all() and not states["begin"].grad[:, 1].any()


@pytest.mark.parametrize("per_token", [False, True])
def test_c130_a_batch_without_a_masked_position_has_a_loss_of_zero_and_finite_gradients(per_token):
    """Short samples may leave nothing to guess; the other head learns all the same."""
    model = build()
    tokens, mask, types = batch()
    labels, is_random = torch.full_like(tokens, -1), torch.tensor([0, 1])
    with mock.patch.object(training, "get_args", lambda: Namespace(calculate_per_token_loss=per_token)):
        output = model(tokens, mask, types, lm_labels=labels)
        loss, *count, reports = pretrain_bert.loss_func(torch.zeros_like(tokens), is_random, output)
        loss.backward()
        assert torch.isfinite(loss) and float(reports["lm loss"][0]) == 0 == float(reports["lm loss"][1])
        assert all(torch.isfinite(param.grad).all() for param in model.parameters())
        assert model.binary_head.weight.grad.abs().max() > 0 and (not per_token or float(count[0]) == 0)
        filler, *_, reports = pretrain_bert.loss_func(torch.zeros_like(tokens), is_random * 0 - 1, output)
        assert float(reports["sop loss"][1]) == 0 and filler.item() == 0


def test_without_the_head_there_are_no_segments_no_pooler_and_one_loss():
    model = build(head=False)
    assert not [name for name, _ in model.named_parameters() if "pooler" in name or "binary" in name or "type" in name]
    tokens, mask, _ = batch()
    output = model(tokens, mask, lm_labels=tokens)
    assert output[1] is None
    with mock.patch.object(training, "get_args", lambda: Namespace(calculate_per_token_loss=False)):
        _, reports = pretrain_bert.loss_func(mask, torch.tensor([0, 0]), output)
    assert list(reports) == ["lm loss"]


def test_vectors_are_means_without_the_first_and_last_token():
    model = build(return_embeddings=True)
    tokens, mask, types = batch()
    states = {}
    model.encoder.register_forward_hook(lambda module, args, out: states.update(out=out))
    vectors = model(tokens, mask, types)
    torch.testing.assert_close(vectors[0], states["out"][1:8, 0].mean(0))
    torch.testing.assert_close(vectors[1], states["out"][1:11, 1].mean(0))
    mask[0, 2:] = 0  # [CLS] and [SEP] alone
    assert not model(tokens, mask, types)[0].any()


def test_what_a_bert_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="--position-embedding-type none"):
        build("none")
    with pytest.raises(ConfigError, match="return_embeddings"):
        build(head=False, return_embeddings=True)
