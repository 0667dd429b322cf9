"""T5: what sees what, positions, the head, encoding once, and buckets as Hugging Face has them."""

import copy
import math

import pytest
import torch

from megatron_lite.errors import ConfigError
from megatron_lite.models.common.embeddings.relative_pos_embedding import (
    RelativePositionEmbedding,
    relative_position_bucket,
)
from megatron_lite.models.T5 import (
    T5Model,
    get_t5_decoder_with_local_block_spec,
    get_t5_encoder_with_local_block_spec,
)
from megatron_lite.models.T5.t5_spec import get_t5_encoder_with_transformer_engine_block_spec
from megatron_lite.transformer import TransformerConfig
from megatron_lite.transformer.inference_context import InferenceContext

BASE = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.3,
}
VOCABULARY, POSITIONS = 32, 12


def make(positions="relative", encoder_layers=3, tied=True, decoder_layers=2, **more):
    config = TransformerConfig(**{**BASE, "num_layers": decoder_layers})
    encoder_config = copy.deepcopy(config)
    encoder_config.num_layers = encoder_layers
    specs = get_t5_encoder_with_local_block_spec(encoder_layers), get_t5_decoder_with_local_block_spec(decoder_layers)
    more = {"share_embeddings_and_output_weights": tied, "position_embedding_type": positions, **more}
    return T5Model(config, encoder_config, *specs, VOCABULARY, POSITIONS, **more)


def ids(length, seed=0):
    return torch.randint(1, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(seed))


POSITION_TYPES = ["learned_absolute", "rope", "relative"]


@pytest.mark.parametrize("positions", POSITION_TYPES)
def test_the_decoder_sees_no_future_and_the_encoder_sees_both_ways(positions):
    """Gradients show what a place depends on."""
    model = make(positions)
    streams = {}
    model.encoder.layers[0].register_forward_pre_hook(
        lambda _, args: streams.update(e=args[0].retain_grad() or args[0])
    )
    model.decoder.layers[0].register_forward_pre_hook(
        lambda _, args: streams.update(d=args[0].retain_grad() or args[0])
    )
    model(ids(7), ids(5, 1), None, None, None)[:, 2].square().sum().backward()
    touched = streams["d"].grad.abs().sum((1, 2)) > 0
    assert touched.tolist() == [True, True, True, False, False]
    assert (streams["e"].grad.abs().sum((1, 2)) > 0).all()
    model = make(positions)
    model.encoder.layers[0].register_forward_pre_hook(
        lambda _, args: streams.update(e=args[0].retain_grad() or args[0])
    )
    model(ids(7), None, None, None, None, output_encoder_hidden_only=True)[2].square().sum().backward()
    assert (streams["e"].grad.abs().sum((1, 2)) > 0).all()


@pytest.mark.parametrize("positions", POSITION_TYPES)
def test_c127_padded_tokens_of_the_encoder_move_no_logits(positions):
    """Also when they change, when there are more of them, and when there are none."""
    model, text, gaps = make(positions), ids(7), ids(5, 1)
    want = model(text, gaps, None, None, None)
    for filler in (0, 9):
        longer = torch.cat([text, torch.full((2, 3), filler)], 1)
        padded = (torch.arange(10) >= 7).view(1, 1, 1, 10).expand(2, 1, 1, 10)
        torch.testing.assert_close(model(longer, gaps, padded, None, padded), want)
        one = model(longer[:1], gaps[:1], padded[:1], None, padded[:1])  # a batch of one takes another path
        torch.testing.assert_close(one, want[:1])
    more_gaps = torch.cat([gaps, torch.zeros(2, 2, dtype=torch.int64)], 1)
    torch.testing.assert_close(model(text, more_gaps, None, None, None)[:, :5], want)


@pytest.mark.parametrize("positions", POSITION_TYPES)
def test_encoding_once_and_decoding_step_by_step_gives_the_same_logits(positions):
    """`output_encoder_hidden_only`, `encoder_hidden_states` and a cache of the decoder's keys."""
    model, text, gaps = make(positions).eval(), ids(7), ids(5, 1)
    want = model(text, gaps, None, None, None)
    encoded = model(text, None, None, None, None, output_encoder_hidden_only=True)
    assert encoded.shape == (7, 2, 16)
    torch.testing.assert_close(model(None, gaps, None, None, None, encoder_hidden_states=encoded), want)
    cache = InferenceContext(2, 5)
    for step in range(5):
        logits = model(
            None, gaps[:, step : step + 1], None, None, None, encoder_hidden_states=encoded, inference_context=cache
        )
        cache.increment_sequence_len_offset(1)
        torch.testing.assert_close(logits[:, 0], want[:, step])


def test_the_head_has_a_bias_where_it_is_tied_and_its_own_weight_where_it_is_not():
    tied, untied = make(tied=True), make(tied=False)
    names = {n for n, _ in tied.named_parameters()} ^ {n for n, _ in untied.named_parameters()}
    assert names == {"lm_head.output_layer.bias", "lm_head.output_layer.weight"}
    assert tied.shared_embedding_or_output_weight() is tied.embedding.word_embeddings.weight
    torch.nn.init.normal_(tied.lm_head.output_layer.bias)
    tied(ids(7), ids(5), None, None, None).sum().backward()
    torch.testing.assert_close(tied.lm_head.output_layer.bias.grad, torch.full((VOCABULARY,), 10.0))


def test_one_table_of_relative_positions_serves_all_layers_of_a_stack():
    """Not the cross attention: with a single key in the encoder, and a single query, nothing depends on them."""
    model = make()
    tables = [n for n, _ in model.named_parameters() if "relative" in n]
    assert tables == [f"{stack}_relative_pos_emb.relative_attention_bias.weight" for stack in ("encoder", "decoder")]
    model(ids(1), ids(1), None, None, None).square().sum().backward()
    for name in tables:  # a softmax over one key is 1 whatever its score
        assert model.get_parameter(name).grad.abs().max() < 1e-6
    assert len(model.encoder.layers) == 3 and len(model.decoder.layers) == 2


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("buckets, distance", [(32, 128), (8, 10), (64, 200)])
def test_buckets_equal_hugging_faces(bidirectional, buckets, distance):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    relative = torch.arange(-1024, 1025)
    want = t5.T5Attention._relative_position_bucket(relative, bidirectional, buckets, distance)
    assert torch.equal(relative_position_bucket(relative, bidirectional, buckets, distance), want)


def test_bucket_thresholds():
    """The first distance of each bucket that several share; all in fp64 as in fp32."""
    two_way = [relative_position_bucket(torch.tensor(-d), True).item() for d in range(4097)]
    starts = {two_way.index(b): b for b in range(8, 16)}
    assert starts == {8: 8, 12: 9, 16: 10, 23: 11, 32: 12, 46: 13, 64: 14, 91: 15} and two_way[-1] == 15
    causal = [relative_position_bucket(torch.tensor(-d), False).item() for d in range(4097)]
    begins = [16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
    assert [causal.index(b) for b in range(16, 32)] == begins and causal[-1] == 31
    for d in range(16, 4097):
        assert causal[d] == min(31, 16 + math.floor(math.log(d / 16) / math.log(8) * 16))
    assert [relative_position_bucket(torch.tensor(d), True).item() for d in (1, 8, 128)] == [17, 24, 31]
    assert relative_position_bucket(torch.tensor(5), False) == 0


def test_the_bias_of_later_queries_is_a_part_of_the_whole():
    table = RelativePositionEmbedding(False, torch.nn.init.normal_, 3)
    whole = table(6, 6)
    assert whole.shape == (1, 3, 6, 6) and torch.equal(table(1, 6, 5), whole[:, :, 5:])


def test_what_is_refused():
    with pytest.raises(ConfigError, match="learned, rotary or relative"):
        make("none")
    with pytest.raises(ConfigError, match="without encoder and decoder"):
        make(add_encoder=False, add_decoder=False)
    with pytest.raises(ConfigError, match="--fp16"):
        make(fp16_lm_cross_entropy=True)
    with pytest.raises(ConfigError, match="--relative-attention-max-distance 8"):
        make(relative_attention_max_distance=8)
    with pytest.raises(ConfigError, match="--transformer-impl local"):
        get_t5_encoder_with_transformer_engine_block_spec(2)
    with pytest.raises(ConfigError, match="a stack of 3 layers with specs of 2"):
        config = TransformerConfig(**{**BASE, "num_layers": 3})
        specs = get_t5_encoder_with_local_block_spec(2), get_t5_decoder_with_local_block_spec(3)
        T5Model(config, config, *specs, VOCABULARY, POSITIONS)


def test_a_stack_can_be_left_out():
    """An encoder alone, or a decoder over what another model encoded."""
    encoder, decoder = make(add_decoder=False), make(add_encoder=False)
    encoded = encoder(ids(7), None, None, None, None)
    assert encoded.shape == (7, 2, 16) and encoder.decoder is None
    logits = decoder(None, ids(5), None, None, None, encoder_hidden_states=encoded)
    assert logits.shape == (2, 5, VOCABULARY) and decoder.encoder is None
