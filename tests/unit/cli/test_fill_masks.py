"""What a BERT puts in the place of masks, and texts as vectors, on a small random model."""

import json

import pytest
import torch

from megatron_lite.cli import fill_masks, generate
from megatron_lite.cli.fill_masks import Filler
from megatron_lite.cli.sampling import Sampling
from megatron_lite.errors import ConfigError
from megatron_lite.models.bert import BertModel, get_bert_layer_local_spec
from megatron_lite.tokenizers.bert_wordpiece import BertWordPieceLowerCase
from megatron_lite.transformer.transformer_config import TransformerConfig

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the cat sat on mat ##s a dog ran big red".split()
GREEDY = Sampling(temperature=0.0)


@pytest.fixture
def filler(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    torch.manual_seed(5)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.5,  # large, so that the likeliest token stands out
    )
    model = BertModel(
        config,
        num_tokentypes=2,
        transformer_layer_spec=get_bert_layer_local_spec(),
        vocab_size=24,
        max_sequence_length=16,
        share_embeddings_and_output_weights=True,
    ).eval()
    return Filler(model, BertWordPieceLowerCase(str(tmp_path / "vocab.txt")), 16, torch.device("cpu"), True)


def test_masks_of_a_text_become_one_token_each_and_brackets_elsewhere_stay_words(filler):
    assert filler.encode("the [MASK] sat") == [2, 5, 4, 7, 3]
    assert filler.encode("[MASK] on [MASK]") == [2, 4, 8, 4, 3]


def test_the_surest_mask_comes_first_and_the_others_see_it(filler):
    ids = filler.encode("the [MASK] sat on [MASK] [MASK]")
    filled, likely = filler.fill(ids, GREEDY, 1)
    expected = list(ids)
    while 4 in expected:  # the plain meaning of it
        logits = filler.logits(expected)
        shares = {place: logits[place].softmax(0).max() for place, id in enumerate(expected) if id == 4}
        place = max(shares, key=shares.get)
        expected[place] = int(logits[place].argmax())
    assert filled == expected and len(likely) == 3
    for tokens in likely:
        assert all(id >= 5 for id, _ in tokens) and tokens[0][1] >= tokens[-1][1]
    assert [new for old, new in zip(ids, filled) if old != 4] == [id for id in ids if id != 4]


def test_the_text_keeps_its_own_letters_and_pieces_join_their_word(filler):
    text = "The [MASK], SAT on the mat [MASK]!"
    ids = filler.encode(text)
    places = [place for place, id in enumerate(ids) if id == 4]
    filled = list(ids)
    filled[places[0]], filled[places[1]] = WORDS.index("dog"), WORDS.index("##s")
    assert filler.text(text, ids, filled) == "The dog, SAT on the mats!"


def test_the_same_seed_draws_the_same_words(filler):
    ids = filler.encode("[MASK] [MASK] [MASK] [MASK]")
    wild = Sampling(temperature=50.0)
    first, second, third = (filler.fill(ids, wild, seed)[0] for seed in (3, 3, 4))
    assert first == second != third


def test_a_text_is_the_mean_of_its_tokens_and_padding_has_no_part(filler):
    """Without [CLS] and [SEP], as Retro's chunks are embedded."""
    ids = filler.encode("the cat sat")
    vector = torch.tensor(filler.embedding(ids))
    tokens, mask, types = filler._inputs([*ids, 0, 0])
    mask[:, len(ids) :] = 0
    hidden = {}
    handle = filler.model.encoder.register_forward_hook(lambda module, args, out: hidden.update(out=out))
    filler.model(tokens, mask, types)
    handle.remove()
    torch.testing.assert_close(vector, hidden["out"][1 : len(ids) - 1, 0].mean(0), atol=1e-5, rtol=1e-5)


def test_lines_come_out_and_what_cannot_be_filled_is_told(filler, capsys):
    fill_masks.write_filled(filler, ["the [MASK] sat", "a [MASK]"], GREEDY, 1)
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0].startswith("the") and lines[0].endswith(" sat") and lines[1] == "-" * 40
    assert printed.err.count("[mask 1: ") == 2
    fill_masks.write_embeddings(filler, ["the cat"])
    assert len(json.loads(capsys.readouterr().out)["embedding"]) == 32
    with pytest.raises(ConfigError, match=r"has no \[MASK\]"):
        fill_masks.write_filled(filler, ["the cat"], GREEDY, 1)
    with pytest.raises(ConfigError, match="17 tokens"):
        filler.encode("the " * 15)


def test_flags_that_only_one_kind_of_model_reads_are_refused(filler):
    args = generate.build_parser().parse_args(["--load", "x", "--num-tokens-to-generate", "3"])
    with pytest.raises(ConfigError, match="--num-tokens-to-generate 3 with a checkpoint of BERT"):
        generate.fill_masks(None, args, [])
    args = generate.build_parser().parse_args(["--load", "x", "--output-bert-embeddings"])
    with pytest.raises(ConfigError, match="checkpoint of GPT"):
        generate.write_texts(None, args, [])
