"""Filling the gaps of a text: what goes into the encoder, what comes into which gap, and what is refused."""

import copy

import pytest
import torch

from megatron_lite.cli.fill_spans import SpanFiller, fill
from megatron_lite.cli.sampling import Sampling
from megatron_lite.errors import ConfigError
from megatron_lite.models.T5 import (
    T5Model,
    get_t5_decoder_with_local_block_spec,
    get_t5_encoder_with_local_block_spec,
)
from megatron_lite.tokenizers.byte_level import ByteTokenizer
from megatron_lite.transformer import TransformerConfig

GREEDY = Sampling(temperature=0.0)
TOKENIZER = ByteTokenizer(vocab_extra_ids=5)
SENTINELS = TOKENIZER.additional_special_tokens_ids


@pytest.fixture(scope="module")
def filler() -> SpanFiller:
    torch.manual_seed(2)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0,
        init_method_std=0.5,
    )  # fmt: skip
    specs = get_t5_encoder_with_local_block_spec(2), get_t5_decoder_with_local_block_spec(2)
    model = T5Model(config, copy.deepcopy(config), *specs, TOKENIZER.vocab_size, 64, position_embedding_type="relative")
    return SpanFiller(model.eval(), TOKENIZER, 40, 24, torch.device("cpu"))


def test_gaps_become_sentinels_between_the_texts_tokens(filler):
    ids = filler.encode("a <extra_id_0>b<extra_id_1>")
    plain = [token for token in ids if token not in SENTINELS]
    assert TOKENIZER.detokenize(plain) == "a b" and [t for t in ids if t in SENTINELS] == SENTINELS[:2]
    assert ids[2] == SENTINELS[0] and ids[-1] == SENTINELS[1]


@pytest.mark.parametrize("prompt", ["none", "<extra_id_1> x", "<extra_id_0> <extra_id_0>", "<extra_id_7>"])
def test_gaps_come_in_the_order_of_the_sentinels(filler, prompt):
    with pytest.raises(ConfigError, match="--prompt 'The <extra_id_0>"):
        filler.encode(prompt)


def test_a_text_that_is_too_long_is_refused(filler):
    with pytest.raises(ConfigError, match="the encoder was trained on 40"):
        filler.encode("x" * 60 + "<extra_id_0>")


@torch.no_grad()
def without_cache(filler: SpanFiller, ids: list[int], gaps: int, share: int) -> list[list[int]]:
    """The likeliest token of the whole decoder sequence, again and again from its beginning."""
    so_far, spans = [filler.begin], []
    for gap in range(gaps):
        so_far.append(SENTINELS[gap])
        spans.append([])
        while len(spans[-1]) < share and len(so_far) <= filler.decoder_length:
            logits = filler.model(torch.tensor([ids]), torch.tensor([so_far]), None, None, None)[0, -1]
            logits = logits[: TOKENIZER.vocab_size].clone()
            stops = [*SENTINELS, filler.end, filler.begin]
            if not spans[-1]:
                logits[stops] = -torch.inf
            token = int(logits.argmax())
            if token in stops:
                break
            spans[-1].append(token)
            so_far.append(token)
    return spans


@pytest.mark.parametrize(
    "prompt", ["def <extra_id_0>(self): <extra_id_1>", "<extra_id_0>", "a<extra_id_0>b<extra_id_1>c"]
)
def test_what_the_cache_finds_is_what_the_whole_sequence_finds(filler, prompt):
    ids = filler.encode(prompt)
    gaps = prompt.count("<extra")
    found = filler.spans(ids, gaps, 100, GREEDY, 1)
    assert found == without_cache(filler, ids, gaps, (24 - 1 - gaps) // gaps)
    assert all(found) and not set(sum(found, [])) & set(SENTINELS)


def test_the_limit_holds_for_all_gaps_together_and_the_seed_decides(filler):
    ids = filler.encode("<extra_id_0> and <extra_id_1>")
    assert sum(map(len, filler.spans(ids, 2, 3, GREEDY, 1))) == 3
    wild = Sampling(temperature=2.0)
    one, two, other = (filler.spans(ids, 2, 20, wild, seed) for seed in (1, 1, 2))
    assert one == two != other


def test_the_texts_stand_in_the_prompt():
    assert fill("The <extra_id_0> on the <extra_id_1>.", ["cat", ""]) == "The cat on the ...."
