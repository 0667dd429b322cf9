"""SentencePiece with the special tokens of Megatron's first versions, with further tokens, and with blanks kept."""

import pytest
from sentencepiece import SentencePieceProcessor

from megatron_lite.errors import ConfigError
from megatron_lite.tokenizers.build_tokenizer import build_tokenizer
from megatron_lite.tokenizers.sentencepiece import GPTSentencePieceTokenizer, Llama2Tokenizer, SentencePieceTokenizer
from megatron_lite.tokenizers.tokenizer_config import TokenizerConfig
from tests.unit.tokenizers import files
from tests.unit.tokenizers.files import TEXTS


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return files.sentencepiece(tmp_path_factory.mktemp("sp") / "llama.model")


def test_plain_ids_equal_the_library(model):
    library = SentencePieceProcessor(model_file=model)
    for cls in (SentencePieceTokenizer, GPTSentencePieceTokenizer, Llama2Tokenizer):
        tokenizer = cls(model)
        for text in [*TEXTS, "a </s> b <EOD>"]:
            assert tokenizer.tokenize(text) == library.encode(text)
            assert tokenizer.detokenize(tokenizer.tokenize(text)) == library.decode(library.encode(text))


@pytest.mark.parametrize(
    ("ids", "appended"),
    [
        # the model's own, by its options: pad -1, bos 1, eos 2; none; all
        ({}, ["<CLS>", "<SEP>", "<EOD>", "<MASK>", "<PAD>"]),
        ({"bos_id": -1, "eos_id": -1}, ["<CLS>", "<SEP>", "<EOD>", "<MASK>", "<PAD>", "<BOS>", "<EOS>"]),
        ({"pad_id": 3}, ["<CLS>", "<SEP>", "<EOD>", "<MASK>"]),
        ({"user_defined_symbols": ["<SEP>", "<extra_id_0>"]}, ["<CLS>", "<EOD>", "<MASK>", "<PAD>"]),
    ],
)
def test_legacy_appends_what_the_model_lacks(tmp_path, ids, appended):
    path = files.sentencepiece(tmp_path / "m.model", **ids)
    pieces = SentencePieceProcessor(model_file=path).get_piece_size()
    config = TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=path, vocab_extra_ids=2)
    config.tokenizer_sentencepiece_legacy = True
    config.tokenizer_special_tokens = ["<think>"]
    tokenizer = build_tokenizer(config)
    found = [tokenizer.inv_vocab[id] for id in range(pieces, tokenizer.vocab_size)]
    sentinels = ["<extra_id_1>"] if "user_defined_symbols" in ids else ["<extra_id_0>", "<extra_id_1>"]
    assert found == [*appended, "<think>", *sentinels]
    assert tokenizer.eod == tokenizer.vocab["<EOD>"]
    names = {name: token for token, name in (("<CLS>", "cls"), ("<SEP>", "sep"), ("<MASK>", "mask"))}
    for name, token in names.items():
        assert getattr(tokenizer, name) == tokenizer.vocab[token]
    assert tokenizer.pad == (3 if ids.get("pad_id") == 3 else tokenizer.vocab["<PAD>"])
    assert tokenizer.bos == (tokenizer.vocab["<BOS>"] if ids.get("bos_id") == -1 else 1)
    assert tokenizer.eos == (tokenizer.vocab["<EOS>"] if ids.get("eos_id") == -1 else 2)
    assert [tokenizer.inv_vocab[id] for id in tokenizer.additional_special_tokens_ids] == [
        "<extra_id_0>",
        "<extra_id_1>",
    ]


def test_legacy_finds_special_tokens_in_texts(model):
    tokenizer = SentencePieceTokenizer(model, 12, legacy=True, special_tokens=["<think>"])
    cat, mat = tokenizer.tokenizer.encode("the cat"), tokenizer.tokenizer.encode(" mat")
    found = tokenizer.tokenize("the cat<MASK> mat<extra_id_11><think>")
    sentinel = tokenizer.additional_special_tokens_ids[11]
    assert found == [*cat, tokenizer.mask, *mat, sentinel, tokenizer.vocab["<think>"]]
    assert tokenizer.detokenize(found) == "the cat <MASK> mat <extra_id_11> <think>"
    assert tokenizer.tokenize_batch(["<EOD>", "the cat"]) == [[tokenizer.eod], cat]
    assert tokenizer.tokenize("a</s>b")[1:-1].count(tokenizer.eos) == 1  # the model's own as well


def test_legacy_of_the_others_adds_what_is_given_alone(model):
    tokenizer = GPTSentencePieceTokenizer(model, legacy=True, special_tokens=["<think>"])
    assert tokenizer.vocab_size == 341 and tokenizer.tokenize("<think>") == [340] and tokenizer.eod == 2
    llama = Llama2Tokenizer(model, legacy=True)
    assert llama.tokenize("the cat") == [1, *llama.tokenizer.encode("the cat")]
    assert llama.adds_tokens and not tokenizer.adds_tokens
    assert llama.tokenize_batch(["the", ""]) == [llama.tokenize("the"), []]


def test_special_tokens_need_the_switch(model):
    with pytest.raises(ConfigError, match="special tokens <think>") as error:
        SentencePieceTokenizer(model, special_tokens=["<think>"])
    assert "--tokenizer-sentencepiece-legacy" in error.value.fix


def test_blanks_are_kept_on_request(model):
    """The model was trained to drop them; its pieces and their ids stay."""
    config = TokenizerConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=model)
    dropping = build_tokenizer(config)
    config.tokenizer_sentencepiece_ignore_extra_whitespaces = False
    keeping = build_tokenizer(config)
    assert keeping.vocab == dropping.vocab
    text = "  the  cat   sat "
    assert dropping.detokenize(dropping.tokenize(text)) == "the cat sat"
    assert keeping.detokenize(keeping.tokenize(text)) == text
    assert keeping.tokenize("the cat sat") == dropping.tokenize("the cat sat") == dropping.tokenize(text)
    assert keeping.unique_description != dropping.unique_description
