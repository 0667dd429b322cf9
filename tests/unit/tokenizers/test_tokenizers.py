"""Sizes, special tokens and round trips of the tokenizers, and what is said where one cannot be used."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from megatron_lite.errors import ConfigError, DataError
from megatron_lite.tokenizers.build_tokenizer import build_tokenizer, unread_flags, vocab_size_with_padding
from megatron_lite.tokenizers.byte_level import ByteTokenizer
from megatron_lite.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_lite.tokenizers.null import NullTokenizer
from megatron_lite.tokenizers.sentencepiece import GPTSentencePieceTokenizer, Llama2Tokenizer, SentencePieceTokenizer
from megatron_lite.tokenizers.tokenizer_config import TokenizerConfig
from megatron_lite.tokenizers.train_sentencepiece import train_sentencepiece

CODE = 'def f(x, *, y="a b"):\n\t"""Doc."""\n\n    if x:\n        return  x + 12345  # two  blanks \n\r\n\n\n'


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("model") / "code.model")
    train_sentencepiece([CODE, Path(__file__).read_text("utf-8")], path, vocab_size=500)
    return path


def write_hf(folder, *, named=None, adds=None):
    """A word-level Hugging Face tokenizer: hello 0, world 1, </s> 2, [PAD] 3, a 4; `adds` is its own template."""
    tokenizer = Tokenizer(models.WordLevel({"hello": 0, "world": 1, "</s>": 2, "[PAD]": 3, "a": 4}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["</s>", "[PAD]"])
    if adds:
        tokenizer.post_processor = processors.TemplateProcessing(single=adds, special_tokens=[("</s>", 2)])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if named is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return str(folder)


# -- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "tp", "padded"), [(50257, 1, 50304), (50257, 2, 50432), (50257, 8, 51200), (101, 1, 128), (128, 1, 128)]
)
def test_vocabulary_is_padded_to_the_multiple_times_tp(size, tp, padded):
    tokenizer = NullTokenizer(size - 1)
    assert tokenizer.vocab_size == size
    assert vocab_size_with_padding(tokenizer, TokenizerConfig(), tp) == padded


def test_other_sizes_of_the_vocabulary():
    tokenizer = ByteTokenizer()
    assert vocab_size_with_padding(tokenizer, TokenizerConfig(make_vocab_size_divisible_by=100)) == 600
    assert vocab_size_with_padding(tokenizer, TokenizerConfig(padded_vocab_size=513)) == 513
    assert vocab_size_with_padding(tokenizer, TokenizerConfig(pad_vocab_size=False)) == 512
    assert vocab_size_with_padding(tokenizer, TokenizerConfig(vocab_size=600)) == 640
    for wrong in ({"padded_vocab_size": 511}, {"vocab_size": 100}):
        with pytest.raises(ConfigError, match="less than the tokenizer's 512"):
            vocab_size_with_padding(tokenizer, TokenizerConfig(**wrong))
    with pytest.raises(ConfigError, match="--tensor-model-parallel-size 2"):
        vocab_size_with_padding(tokenizer, TokenizerConfig(padded_vocab_size=513), 2)


# -- null and bytes -------------------------------------------------------------------------------------------------


def test_null_tokenizer_takes_numbers():
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=100))
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert tokenizer.tokenize(" 5 0\n99 100") == [5, 0, 99, 100] and tokenizer.detokenize([5, 0]) == "5 0"
    with pytest.raises(NotImplementedError, match="pad"):
        _ = tokenizer.pad
    for text in ("101", "-1", "1.5", "x", "\u0663"):
        with pytest.raises(DataError, match="not an id"):
            tokenizer.tokenize(text)


def test_null_tokenizer_special_ids_are_checked():
    assert NullTokenizer(100, eod_id=7, pad_id=0).eod == 7 and NullTokenizer(100, pad_id=0).pad == 0
    with pytest.raises(ConfigError, match="--null-tokenizer-eod-id 101"):
        NullTokenizer(100, eod_id=101)
    with pytest.raises(ConfigError, match="--vocab-size"):
        build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer"))


@given(st.text())
def test_bytes_return_any_text_and_never_look_like_special_tokens(text):
    text = text.encode("utf-8", "ignore").decode("utf-8")
    tokenizer = ByteTokenizer()
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize(ids) == text and len(ids) == len(text.encode())
    assert not {tokenizer.eod, tokenizer.pad} & set(ids)


def test_byte_tokenizer_table():
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="ByteTokenizer"))
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (512, 0, 1)
    assert tokenizer.tokenize("a\u00e9") == [97, 0xC3, 0xA9]
    assert tokenizer.tokenize("\0\1") == [256, 257]
    assert tokenizer.detokenize([0, 97, 1, 400, 98]) == "ab"


# -- sentencepiece --------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.text(st.sampled_from("ab =():\n\t\r#\u00e9\u6f22\U0001f642\x00\x0c\u00a0"), max_size=30))
def test_trained_model_returns_code_as_it_was(model, text):
    tokenizer = SentencePieceTokenizer(model)
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert tokenizer.detokenize(tokenizer.tokenize(CODE)) == CODE


def test_trained_model_learns_words_and_spells_none_as_the_end(model):
    tokenizer = SentencePieceTokenizer(model)
    assert len(tokenizer.tokenize(CODE)) < 0.8 * len(CODE)
    assert tokenizer.eod == 1 and tokenizer.eod not in tokenizer.tokenize("<eod>")
    assert tokenizer.vocab_size == len(tokenizer.vocab) <= 500
    assert tokenizer.tokenize_batch(["def", "x y"]) == [tokenizer.tokenize("def"), tokenizer.tokenize("x y")]


def test_sentencepiece_types(model):
    for kind, cls in (
        ("SentencePieceTokenizer", SentencePieceTokenizer),
        ("GPTSentencePieceTokenizer", GPTSentencePieceTokenizer),
        ("Llama2Tokenizer", Llama2Tokenizer),
    ):
        tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=model))
        assert type(tokenizer) is cls and tokenizer.eos == tokenizer.eod == 1
        assert list(tokenizer.unique_identifiers.items())[:2] == [("class", kind), ("tokenizer_path", [model])]
        for name in ("pad", "bos", "cls", "sep", "mask"):
            with pytest.raises(NotImplementedError, match=name):
                getattr(tokenizer, name)
        assert tokenizer.special_tokens_dict == {"unk_token": 0, "eos_token": 1}


def test_file_that_is_no_model_is_named(tmp_path):
    (tmp_path / "x.model").write_bytes(b"not a model")
    with pytest.raises(DataError, match="x.model is not a SentencePiece model"):
        SentencePieceTokenizer(str(tmp_path / "x.model"))
    with pytest.raises(DataError, match="cannot read"):
        SentencePieceTokenizer(str(tmp_path / "nothere.model"))


def test_training_uses_a_bounded_sample_of_all_texts(tmp_path):
    said, read = [], []

    def texts():
        for i in range(400):
            read.append(i)
            yield f"word{i} " * 20 + "\n"

    train_sentencepiece(
        texts(), str(tmp_path / "m"), vocab_size=400, total_bytes=400 * 160, sample_bytes=8000, say=said.append
    )
    assert max(read) > 200  # not the beginning alone
    used = float(said[0].split(" on ")[1].split(" million")[0])
    assert used <= 0.02


@pytest.mark.parametrize(("texts", "size", "message"), [([], 500, "no text"), (["x"], 100, "leaves nothing to learn")])
def test_training_that_cannot_work_is_refused(tmp_path, texts, size, message):
    with pytest.raises(DataError, match=message):
        train_sentencepiece(texts, str(tmp_path / "m.model"), vocab_size=size)
    assert not list(tmp_path.iterdir())


# -- Hugging Face ---------------------------------------------------------------------------------------------------


def test_hugging_face_folder_or_file(tmp_path):
    named = {"eos_token": {"content": "</s>"}, "pad_token": "[PAD]", "bos_token": None}
    folder = write_hf(tmp_path / "t", named=named)
    for path in (folder, f"{folder}/tokenizer.json"):
        tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=path))
        assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (5, 2, 3)
        assert tokenizer.tokenize("hello world") == [0, 1] and not tokenizer.appends_eod
        assert tokenizer.tokenize_batch(["hello", "world a"]) == [[0], [1, 4]]
        assert tokenizer.special_tokens_dict == {"eos_token": 2, "pad_token": 3}
        with pytest.raises(NotImplementedError):
            _ = tokenizer.bos


def test_hugging_face_tokenizer_that_ends_texts_says_so(tmp_path):
    folder = write_hf(tmp_path / "t", named={"eos_token": "</s>"}, adds="$A </s>")
    assert HuggingFaceTokenizer(folder).appends_eod and HuggingFaceTokenizer(folder).tokenize("hello") == [0, 2]
    plain = HuggingFaceTokenizer(folder, include_special_tokens=False)
    assert not plain.appends_eod and plain.tokenize("hello") == [0]


def test_hugging_face_ids_equal_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the extra 'hf'")
    folder = write_hf(tmp_path / "t", named={"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"})
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), HuggingFaceTokenizer(folder)
    assert ours.vocab_size == len(theirs) and ours.eod == theirs.eos_token_id
    assert ours.tokenize("hello a world </s>") == theirs("hello a world </s>")["input_ids"]


def test_hugging_face_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(DataError, match="downloads nothing"):
        HuggingFaceTokenizer("gpt2")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="tokenizer.json cannot be read"):
        HuggingFaceTokenizer(str(tmp_path))
    folder = write_hf(tmp_path / "t")
    with pytest.raises(ConfigError, match="has no eos token"):
        _ = HuggingFaceTokenizer(folder).eod


# -- flags ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["MultimodalTokenizer", "NullMultimodalTokenizer"])
def test_tokenizers_of_images_are_refused_with_what_to_use(kind):
    with pytest.raises(ConfigError, match=f"{kind} is not supported: models here read text alone") as error:
        build_tokenizer(TokenizerConfig(tokenizer_type=kind))
    assert "--tokenizer-type" in error.value.fix


def test_flags_that_miss_are_named():
    with pytest.raises(ConfigError, match="--tokenizer-type was not given"):
        build_tokenizer(TokenizerConfig())
    with pytest.raises(ConfigError, match="--tokenizer-model"):
        build_tokenizer(TokenizerConfig(tokenizer_type="SentencePieceTokenizer"))
    with pytest.raises(ConfigError, match="without --vocab-file and --merge-file"):
        build_tokenizer(TokenizerConfig(tokenizer_type="GPT2BPETokenizer"))
    with pytest.raises(ConfigError, match="without --merge-file") as error:
        build_tokenizer(TokenizerConfig(tokenizer_type="GPT2BPETokenizer", vocab_file="x"))
    assert error.value.fix == "--merge-file PATH"


def test_flags_that_a_type_does_not_read_are_listed():
    """They would do nothing in silence: start-up says so. Megatron's example scripts give some of them."""
    config = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=9, tiktoken_pattern="v2", merge_file="x")
    assert unread_flags(config) == ["--merge-file", "--tiktoken-pattern"]
    assert unread_flags(TokenizerConfig(tokenizer_type="TikTokenizer", tiktoken_pattern="v2", vocab_size=9)) == []
    config = TokenizerConfig(tokenizer_sentencepiece_ignore_extra_whitespaces=False, tokenizer_type="ByteTokenizer")
    assert unread_flags(config) == ["--no-tokenizer-sentencepiece-ignore-extra-whitespaces"]


@pytest.mark.parametrize("kind", ["TikTokenizer", "HuggingFaceTokenizer", "SentencePieceTokenizer"])
def test_a_library_that_is_missing_is_named(kind, monkeypatch):
    """Each tokenizer's library is imported when the tokenizer is asked for, and not before."""
    package = {"TikTokenizer": "tiktoken", "HuggingFaceTokenizer": "tokenizers"}.get(kind, "sentencepiece")
    for name in [name for name in sys.modules if name.startswith("megatron_lite.tokenizers")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    build = importlib.import_module("megatron_lite.tokenizers.build_tokenizer").build_tokenizer
    with pytest.raises(ConfigError, match=f"needs the package {package}") as error:
        build(TokenizerConfig(tokenizer_type=kind, tokenizer_model="x"))
    assert error.value.fix == f"pip install {package}"
