"""GPTModel as a whole: start, ends, decoding."""

import pytest
import torch
import torch.nn.functional as F

from megatron_lite.errors import ConfigError
from megatron_lite.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron_lite.models.gpt import GPTModel, get_gpt_layer_local_spec
from megatron_lite.transformer import InferenceContext, TransformerConfig


def build(seed=1, vocabulary=64, model=None, **more):
    torch.manual_seed(seed)
    config = TransformerConfig(
        **{
            "num_layers": 3,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "init_method_std": 0.1,
            **more,
        }
    )
    return GPTModel(config, get_gpt_layer_local_spec(), vocabulary, 16, **(model or {}))


def test_initial_values_follow_from_seed_and_name():
    """Equal seeds give equal models, whatever was drawn before; layers and seeds differ; projections back are small."""
    first = build()
    torch.rand(100)
    again, other = build(), build(seed=2)
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters()):
        assert torch.equal(a, b)
        assert a.dim() == 1 or not torch.equal(a, c), name
        assert a.shard.name == name and a.shard.is_whole
    layers = [first.get_parameter(f"decoder.layers.{i}.mlp.linear_fc1.weight") for i in range(3)]
    assert not torch.equal(layers[0], layers[1])
    assert layers[0].std().item() == pytest.approx(0.1, rel=0.1)
    assert first.decoder.layers[0].mlp.linear_fc2.weight.std().item() == pytest.approx(0.1 / 6**0.5, rel=0.1)


@pytest.mark.parametrize("tied", [False, True])
def test_tied_weights_are_one_parameter_with_both_gradients(tied):
    model = build(model={"share_embeddings_and_output_weights": tied})
    names = [name for name, _ in model.named_parameters()]
    assert ("output_layer.weight" in names) != tied
    tokens = torch.tensor([[1, 2, 3, 4]])
    model(tokens, tokens, None, labels=tokens).sum().backward()
    rows = model.embedding.word_embeddings.weight.grad.abs().sum(1)
    assert rows[1:5].min() > 0 and (rows[10:].max() > 0) == tied, (
        "an unused row gets a gradient through the output only"
    )


def test_loss_is_the_cross_entropy_of_the_logits_with_labels_in_batch_order():
    """A transposed label would still train, on noise."""
    model = build()
    tokens, labels = torch.randint(0, 64, (3, 8)), torch.randint(0, 64, (3, 8))
    positions = torch.arange(8).expand(3, -1)
    logits, loss = model(tokens, positions, None), model(tokens, positions, None, labels=labels)
    assert logits.shape == (3, 8, 64) and loss.shape == (3, 8)
    torch.testing.assert_close(loss, F.cross_entropy(logits.transpose(1, 2), labels, reduction="none"))


@pytest.mark.parametrize("batch", [1, 2])
def test_the_loss_is_no_view_of_another_tensor(batch):
    """Of a fully sharded model torch warns about a view, once on every rank."""
    tokens, positions = torch.randint(0, 64, (batch, 8)), torch.arange(8).expand(batch, -1)
    loss = build()(tokens, positions, None, labels=tokens)
    assert loss.is_contiguous() and not loss._is_view()


def test_a_padded_vocabulary_takes_part_but_is_never_predicted():
    model = build(vocabulary=128)
    tokens = torch.randint(0, 100, (1, 8))
    assert model(tokens, tokens.new_zeros(1, 8), None).shape[-1] == 128


def test_stages_in_sequence_equal_the_whole_model():
    """pre_process and post_process: first and last stage of one rank, joined by hand."""
    whole = build(num_layers=2)
    first, last = (build(num_layers=2, model={"pre_process": p, "post_process": not p}) for p in (True, False))
    assert not hasattr(first, "output_layer") and not hasattr(last, "embedding")
    for stage in (first, last):
        stage.load_state_dict({k: v for k, v in whole.state_dict().items() if k in stage.state_dict()})
    first.decoder.layers, last.decoder.layers = whole.decoder.layers[:1], whole.decoder.layers[1:]
    tokens = torch.randint(0, 64, (2, 8))
    positions = torch.arange(8).expand(2, -1)
    last.set_input_tensor([first(tokens, positions, None)])
    torch.testing.assert_close(last(None, None, None), whole(tokens, positions, None))


@pytest.mark.parametrize(
    ("more", "model"),
    [
        ({}, {}),
        ({"num_query_groups": 2, "normalization": "RMSNorm"}, {"position_embedding_type": "rope"}),
        (
            {"window_size": (3, 0), "rotary_interleaved": True},
            {"position_embedding_type": "rope", "rotary_percent": 0.5},
        ),
        ({"attention_backend": "local"}, {"position_embedding_type": "none"}),
        ({"softmax_type": "learnable"}, {}),
    ],
)
@torch.no_grad()
def test_decoding_one_token_at_a_time_gives_the_logits_of_the_whole_sequence(more, model):
    """A position, a mask or a cache row that is off by one shows in the first token."""
    gpt = build(model=model, **more).eval()
    tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(12).expand(2, -1)
    want = gpt(tokens, positions, None)
    context = InferenceContext(max_batch_size=2, max_sequence_length=12)
    got = []
    for begin, end in [(0, 5), (5, 7), *((i, i + 1) for i in range(7, 12))]:
        got.append(gpt(tokens[:, begin:end], positions[:, begin:end], None, inference_context=context))
        context.increment_sequence_len_offset(end - begin)
    torch.testing.assert_close(torch.cat(got, dim=1), want, atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match="cache of 12 tokens"):
        gpt(tokens[:, :1], positions[:, :1], None, inference_context=context)
    context.reset()
    torch.testing.assert_close(gpt(tokens, positions, None, inference_context=context), want, atol=1e-5, rtol=1e-5)


def test_a_few_steps_learn_a_sequence_by_heart():
    """All parts together move the loss, and every weight."""
    model = build(model={"position_embedding_type": "rope"}, activation_func=F.silu, gated_linear_unit=True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(0, 64, (2, 13), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(15):
        loss = model(tokens[:, :-1], None, None, labels=tokens[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 3.5 and losses[-1] < 0.5 * losses[0]
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_the_loss_may_be_returned_in_half_precision():
    """`--fp16-lm-cross-entropy` rounds the loss, and is refused where nothing is fp16."""
    tokens, positions = torch.randint(0, 64, (1, 8)), torch.arange(8).view(1, 8)
    losses = [
        build(model={"fp16_lm_cross_entropy": half}, fp16=True)(tokens, positions, None, labels=tokens)
        for half in (True, False)
    ]
    assert losses[0].dtype is torch.float16 and losses[1].dtype is torch.float32
    assert torch.equal(losses[0], losses[1].half())
    with pytest.raises(ConfigError, match="--fp16-lm-cross-entropy in an fp32 model"):
        build(model={"fp16_lm_cross_entropy": True})


def test_what_cannot_be_built_is_said():
    with pytest.raises(ConfigError, match="--position-embedding-type relative"):
        build(model={"position_embedding_type": "relative"})
    with pytest.raises(ConfigError, match="--rotary-percent 1.5"):
        RotaryEmbedding(8, 1.5)
    with pytest.raises(ConfigError, match="3 rotated channels"):
        RotaryEmbedding(8, 0.4)
