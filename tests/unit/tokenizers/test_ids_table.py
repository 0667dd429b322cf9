"""Megatron's table of tokenizers: size, end of document, padding, what is added to a text, rows of the embedding."""

import pytest

from megatron_lite.datasets.indexed_dataset import DType
from megatron_lite.tokenizers.build_tokenizer import build_tokenizer, vocab_size_with_padding
from megatron_lite.tokenizers.null import NullTokenizer
from megatron_lite.tokenizers.tokenizer_config import TokenizerConfig
from tests.unit.tokenizers import files

LLAMA = 340  # pieces of files.sentencepiece: unk 0, bos 1, eos 2


def config_of(kind: str, folder, **more) -> TokenizerConfig:
    """The configuration of a type, with its files written to the folder."""
    if kind == "GPT2BPETokenizer":
        vocab, merges = files.gpt2_of_full_size(folder)
        more |= {"vocab_file": vocab, "merge_file": merges}
    elif kind.startswith("BertWordPiece"):
        more["vocab_file"] = files.wordpiece_of_full_size(folder)
    elif kind == "TikTokenizer":
        more["tokenizer_model"] = files.tiktoken(folder / "ranks.json")
    elif kind == "HuggingFaceTokenizer":
        named = {"eos_token": "</s>", "bos_token": "<s>", "pad_token": "<pad>", "unk_token": "<unk>"}
        more["tokenizer_model"] = files.hugging_face(folder, named, "<s> $A")
    elif kind not in ("NullTokenizer", "ByteTokenizer"):
        more["tokenizer_model"] = files.sentencepiece(folder / "sp.model")
    return TokenizerConfig(tokenizer_type=kind, **more)


# type, flags, size, end of document, padding (None: none), what stands before a text, padded for tp 1, 2, 8
TABLE = [
    ("NullTokenizer", {"vocab_size": 100}, 101, 100, None, [], (128, 256, 1024)),
    ("GPT2BPETokenizer", {}, 50257, 50256, None, [], (50304, 50432, 51200)),
    ("HuggingFaceTokenizer", {}, 351, 2, 350, [1], (384, 512, 1024)),
    ("HuggingFaceTokenizer", {"tokenizer_hf_no_include_special_tokens": True}, 351, 2, 350, [], (384, 512, 1024)),
    ("SentencePieceTokenizer", {}, LLAMA, 2, None, [], (384, 512, 1024)),
    ("GPTSentencePieceTokenizer", {}, LLAMA, 2, None, [], (384, 512, 1024)),
    ("Llama2Tokenizer", {}, LLAMA, 2, None, [], (384, 512, 1024)),
    # <CLS> <SEP> <EOD> <MASK> <PAD>; begin and end are pieces of the model
    ("SentencePieceTokenizer", {"tokenizer_sentencepiece_legacy": True}, LLAMA + 5, LLAMA + 2, LLAMA + 4, [],
     (384, 512, 1024)),
    ("SentencePieceTokenizer", {"tokenizer_sentencepiece_legacy": True, "vocab_extra_ids": 100}, LLAMA + 105,
     LLAMA + 2, LLAMA + 4, [], (512, 512, 1024)),
    ("GPTSentencePieceTokenizer", {"tokenizer_sentencepiece_legacy": True}, LLAMA, 2, None, [], (384, 512, 1024)),
    ("Llama2Tokenizer", {"tokenizer_sentencepiece_legacy": True}, LLAMA, 2, None, [1], (384, 512, 1024)),
    ("TikTokenizer", {}, 131072, 2, 4, [], (131072, 131072, 131072)),
    ("TikTokenizer", {"vocab_size": 1300, "tokenizer_special_tokens": ["<unk>", "<s>", "</s>"]}, 1300, 2, None, [],
     (1408, 1536, 2048)),
    ("BertWordPieceLowerCase", {}, 30524, 30523, 0, [], (30592, 30720, 30720)),
    ("BertWordPieceCase", {"vocab_extra_ids": 100}, 30624, 30523, 0, [], (30720, 30720, 30720)),
    ("ByteTokenizer", {}, 512, 0, 1, [], (512, 512, 1024)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "flags", "size", "eod", "pad", "front", "padded"),
    TABLE,
    ids=lambda value: value if type(value) is str else "",
)
def test_table_of_ids(kind, flags, size, eod, pad, front, padded, tmp_path):
    config = config_of(kind, tmp_path, **flags)
    tokenizer = build_tokenizer(config)
    assert (tokenizer.vocab_size, tokenizer.eod) == (size, eod)
    if pad is None:
        with pytest.raises(NotImplementedError):
            _ = tokenizer.pad
    else:
        assert tokenizer.pad == pad
    assert tuple(vocab_size_with_padding(tokenizer, config, tp) for tp in (1, 2, 8)) == padded
    text = "7 1" if kind == "NullTokenizer" else "the cat"
    ids = tokenizer.tokenize(text)
    bos = tokenizer.special_tokens_dict.get("bos_token", -1)
    assert ids[: len(front)] == front and tokenizer.eod not in ids and bos not in ids[len(front) :]
    assert tokenizer.tokenize_batch([text, ""]) == [ids, []]


@pytest.mark.parametrize(("size", "bytes_"), [(10_000, 2), (65_499, 2), (65_500, 4), (65_536, 4), (131_072, 4)])
def test_C010_storage_follows_the_tokenizers_whole_size(size, bytes_):
    """Added tokens count: sentinels that pass the limit make tokens of four bytes."""
    assert NullTokenizer(size - 1).vocab_size == size
    dtype = DType.optimal_dtype(NullTokenizer(size - 1).vocab_size)
    assert dtype.itemsize == bytes_
    with_sentinels = NullTokenizer(size - 101, vocab_extra_ids=100)
    assert with_sentinels.vocab_size == size and with_sentinels.additional_special_tokens_ids[-1] == size - 1
    assert DType.optimal_dtype(with_sentinels.vocab_size) == dtype


@pytest.mark.parametrize("kind", ["NullTokenizer", "GPT2BPETokenizer", "HuggingFaceTokenizer", "Llama2Tokenizer",
                                  "TikTokenizer", "BertWordPieceCase", "ByteTokenizer"])  # fmt: skip
def test_sentinels_come_last_and_from_no_text(kind, tmp_path):
    plain = config_of(kind, tmp_path, **({"vocab_size": 100} if kind == "NullTokenizer" else {}))
    size = build_tokenizer(plain).vocab_size
    plain.vocab_extra_ids = 3
    tokenizer = build_tokenizer(plain)
    sentinels = tokenizer.additional_special_tokens_ids
    assert sentinels == [size, size + 1, size + 2] and tokenizer.vocab_size == size + 3
    assert [tokenizer.inv_vocab[id] for id in sentinels] == ["<extra_id_0>", "<extra_id_1>", "<extra_id_2>"]
    word = "7" if kind == "NullTokenizer" else "the"
    if kind != "NullTokenizer":
        assert not set(sentinels) & set(tokenizer.tokenize("<extra_id_0> the <extra_id_1>"))
    plain.tokenizer_hf_no_include_special_tokens = True
    ids = build_tokenizer(plain).tokenize(word)
    assert tokenizer.detokenize([sentinels[1], *ids, sentinels[0]]) == f"<extra_id_1> {word} <extra_id_0>"
    assert vocab_size_with_padding(tokenizer, plain) % 128 == 0
