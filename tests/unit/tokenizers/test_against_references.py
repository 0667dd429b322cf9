"""Ids and texts equal those of the tokenizers' own libraries, of transformers, and of a BPE written out."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_lite.errors import ConfigError, DataError
from megatron_lite.tokenizers.bert_wordpiece import BertWordPieceCase, BertWordPieceLowerCase
from megatron_lite.tokenizers.build_tokenizer import build_tokenizer
from megatron_lite.tokenizers.gpt2_bpe import GPT2BPETokenizer
from megatron_lite.tokenizers.tiktoken import PATTERNS, TikTokenizer
from megatron_lite.tokenizers.tokenizer_config import TokenizerConfig
from tests.unit.tokenizers import files
from tests.unit.tokenizers.files import TEXTS

transformers = pytest.importorskip("transformers", reason="needs the extra 'hf'")
ANY_TEXT = st.text(st.sampled_from("the cat Playing12 .,!'\n\t\u00eb\u00c9\u20ac\u6f22\u0130\x00"), max_size=40)
QUICK = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


# -- GPT-2 ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpt2_pair(tmp_path_factory):
    """GPT2BPETokenizer and transformers' over the same files."""
    vocab, merges = files.gpt2(tmp_path_factory.mktemp("gpt2"))
    theirs = transformers.GPT2Tokenizer(vocab=vocab, merges=merges)
    return GPT2BPETokenizer(vocab, merges), theirs


def test_gpt2_ids_equal_transformers(gpt2_pair):
    ours, theirs = gpt2_pair
    assert ours.vocab_size == len(theirs) == 330 and ours.eod == theirs.eos_token_id == 329
    for text in TEXTS:
        ids = ours.tokenize(text)
        assert ids == theirs.encode(text) and len(ids) < len(text.encode())
        assert ours.detokenize(ids) == text == theirs.decode(ids, clean_up_tokenization_spaces=False)
        assert ours.offsets(ids, text) == [
            start for start, _ in theirs(text, return_offsets_mapping=True).offset_mapping
        ]
    assert ours.vocab == theirs.get_vocab()


@QUICK
@given(text=ANY_TEXT)
def test_gpt2_returns_any_text(gpt2_pair, text):
    ours, theirs = gpt2_pair
    assert ours.tokenize(text) == theirs.encode(text) and ours.detokenize(ours.tokenize(text)) == text


def test_gpt2_end_of_document_comes_from_no_text(gpt2_pair):
    """transformers takes it for the token: a page that shows the string would end the document."""
    ours, theirs = gpt2_pair
    text = "a <|endoftext|> b"
    assert ours.eod not in ours.tokenize(text) and ours.eod in theirs.encode(text)
    assert ours.detokenize(ours.tokenize(text)) == text and ours.detokenize([ours.eod]) == "<|endoftext|>"


def test_gpt2_takes_special_tokens_of_the_user(tmp_path):
    vocab, merges = files.gpt2(tmp_path)
    config = TokenizerConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)
    config.tokenizer_special_tokens, config.vocab_extra_ids = ["<think>", "the"], 2
    tokenizer = build_tokenizer(config)
    added = tokenizer.vocab["<think>"]
    assert added >= 330 and tokenizer.additional_special_tokens_ids == [
        tokenizer.vocab_size - 2,
        tokenizer.vocab_size - 1,
    ]
    assert tokenizer.tokenize("<think>x<think>")[::2] == [added, added]
    assert "special_tokens" in tokenizer.unique_identifiers and tokenizer.unique_identifiers["vocab_extra_ids"] == "2"


@pytest.mark.parametrize(
    ("vocab", "merges", "message"),
    [
        ("{", "", "is not JSON"),
        ("[]", "", "is no vocabulary"),
        ('{"a": 0, "b": 2}', "", "is no vocabulary"),
        ('{"a": "0"}', "", "is no vocabulary"),
        ('{"a": 0, "b": 1}', "#version: 0.2\na b\n", "merges a and b, but ab is not in"),
        ('{"a": 0, "b": 1, "ab": 2}', "#version: 0.2\na b\nab\n", "line 3: 'ab' is no merge"),
    ],
)
def test_gpt2_files_that_cannot_be_used_are_named(tmp_path, vocab, merges, message):
    (tmp_path / "v").write_text(vocab)
    (tmp_path / "m").write_text(merges)
    with pytest.raises(DataError, match=message):
        GPT2BPETokenizer(str(tmp_path / "v"), str(tmp_path / "m"))
    with pytest.raises(DataError, match="cannot read --merge-file .*nothere"):
        files.write_gpt2(tmp_path, {"a": 0}, [])
        GPT2BPETokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "nothere"))


def test_gpt2_without_its_end_token_is_refused(tmp_path):
    tokenizer = GPT2BPETokenizer(*files.write_gpt2(tmp_path, {"a": 0}, []))
    with pytest.raises(ConfigError, match="vocab.json has no <|endoftext|>"):
        _ = tokenizer.eod


# -- WordPiece --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wordpiece_file(tmp_path_factory):
    return files.wordpiece(tmp_path_factory.mktemp("wordpiece"))


def their_wordpiece(file, lower_case):
    vocab = {token: id for id, token in enumerate(Path(file).read_text("utf-8").splitlines())}
    return transformers.BertTokenizer(vocab=vocab, do_lower_case=lower_case)


@pytest.mark.parametrize("kind", ["BertWordPieceLowerCase", "BertWordPieceCase"])
def test_wordpiece_ids_equal_transformers(wordpiece_file, kind):
    ours = build_tokenizer(TokenizerConfig(tokenizer_type=kind, vocab_file=wordpiece_file))
    theirs = their_wordpiece(wordpiece_file, kind == "BertWordPieceLowerCase")
    for text in TEXTS:
        assert ours.tokenize(text) == theirs.encode(text, add_special_tokens=False)
    assert (ours.pad, ours.unk, ours.cls, ours.sep, ours.mask) == (
        theirs.pad_token_id, theirs.unk_token_id, theirs.cls_token_id, theirs.sep_token_id, theirs.mask_token_id
    )  # fmt: skip
    assert ours.vocab_size == len(theirs) + 2 and (ours.bos, ours.eos) == (len(theirs), len(theirs) + 1)
    case = "playing" if kind == "BertWordPieceLowerCase" else "P l a y ing"
    assert ours.detokenize(ours.tokenize("Playing")).replace(" ", "") == case.replace(" ", "")


@QUICK
@given(text=ANY_TEXT)
def test_wordpiece_of_any_text_equals_transformers(wordpiece_file, text):
    for ours, lower in ((BertWordPieceLowerCase(wordpiece_file), True), (BertWordPieceCase(wordpiece_file), False)):
        theirs = their_wordpiece(wordpiece_file, lower)
        assert ours.tokenize(text) == theirs.encode(text, add_special_tokens=False)


def test_wordpiece_takes_brackets_of_a_text_for_punctuation(wordpiece_file):
    """A document about BERT must not be full of masks."""
    tokenizer = BertWordPieceLowerCase(wordpiece_file, vocab_extra_ids=2)
    text = "[MASK] [SEP] [CLS] [PAD] [BOS] [EOS] <extra_id_0>"
    special = {tokenizer.vocab[token] for token in text.split()}
    assert len(special) == 7 and not special & set(tokenizer.tokenize(text))
    assert tokenizer.special_tokens_dict == {
        "unk_token": 1, "bos_token": tokenizer.bos, "eos_token": tokenizer.eod, "pad_token": 0, "cls_token": 2,
        "sep_token": 3, "mask_token": 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[PAD]\n[UNK]\n", r"has no \[CLS\], \[SEP\], \[MASK\]"),
        ("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\na\n", "line 8: 'a' is on line 6 already"),
    ],
)
def test_wordpiece_file_that_cannot_be_used_is_named(tmp_path, content, message):
    (tmp_path / "vocab.txt").write_text(content)
    with pytest.raises(DataError, match=message):
        BertWordPieceCase(str(tmp_path / "vocab.txt"))
    with pytest.raises(DataError, match="cannot read --vocab-file"):
        BertWordPieceCase(str(tmp_path / "nothere"))


def test_wordpiece_file_of_another_system_has_the_same_ids(tmp_path, wordpiece_file):
    """Line ends of Windows, an empty line at the end."""
    content = Path(wordpiece_file).read_text("utf-8").replace("\n", "\r\n") + "\r\n"
    (tmp_path / "vocab.txt").write_bytes(content.encode())
    assert BertWordPieceCase(str(tmp_path / "vocab.txt")).vocab == BertWordPieceCase(wordpiece_file).vocab


# -- tiktoken ---------------------------------------------------------------------------------------------------------


def bpe_written_out(text: str, pattern: str, ranks: dict[bytes, int]) -> list[int]:
    """The definition: of a word's neighbours join the pair with the lowest rank until none is a token."""
    regex = pytest.importorskip("regex")
    ids = []
    for word in regex.findall(pattern, text):
        parts = [bytes([byte]) for byte in word.encode()]
        while True:
            pairs = [(ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
            if not pairs:
                break
            i = min(pairs)[1]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [ranks[part] for part in parts]
    return ids


@pytest.fixture(scope="module")
def rank_file(tmp_path_factory):
    return files.tiktoken(tmp_path_factory.mktemp("tiktoken") / "ranks.json")


@pytest.fixture(scope="module")
def ranks(rank_file):
    entries = json.loads(Path(rank_file).read_text())
    words = [bytes([byte]) for byte in range(256)] + [entry["token_str"].encode() for entry in entries[256:]]
    return {word: rank for rank, word in enumerate(words)}


@pytest.fixture(scope="module", params=["v1", "v2"])
def tiktoken(request, rank_file):
    """The pattern's name, and the tokenizer that cuts by it: its 131,072 ids take a while."""
    config = TokenizerConfig(tokenizer_type="TikTokenizer", tokenizer_model=rank_file, tiktoken_pattern=request.param)
    return request.param, build_tokenizer(config)


@QUICK
@given(text=ANY_TEXT)
def test_tiktoken_equals_the_definition(tiktoken, ranks, text):
    pattern, tokenizer = tiktoken
    for case in (text, "the St/St12 // //the"):
        ids = tokenizer.tokenize(case)
        assert [id - 1000 for id in ids] == bpe_written_out(case, PATTERNS[pattern], ranks)
        assert tokenizer.detokenize(ids) == case


def test_tiktoken_special_tokens_come_first_and_from_no_text(rank_file):
    tokenizer = TikTokenizer(rank_file)
    names = ("unk", "bos", "eod", "mask", "pad", "cls", "sep")
    assert [getattr(tokenizer, name) for name in names] == list(range(7))
    assert tokenizer.inv_vocab[7] == "<SPECIAL_7>" and tokenizer.inv_vocab[999] == "<SPECIAL_999>"
    assert tokenizer.inv_vocab[1000 + ord("a")] == "a" and tokenizer.inv_vocab[1000 + 255] == "\\xff"
    ids = tokenizer.tokenize("a</s>b<SPECIAL_9>")
    assert min(ids) >= 1000 and tokenizer.detokenize([2, *ids, 9, 130_000]) == "</s>a</s>b<SPECIAL_9><SPECIAL_9>"
    assert tokenizer.offsets(ids, "a</s>b")[:2] == [0, 1]


def test_tiktoken_vocabulary_is_cut_to_its_size(rank_file):
    """Of the file's words as many as there is room for: 256 bytes and `th`."""
    tokenizer = TikTokenizer(rank_file, vocab_size=267, num_special_tokens=10)
    assert tokenizer.vocab_size == 267 and tokenizer.tokenize("the") == [266, 10 + ord("e")]
    assert TikTokenizer(rank_file, num_special_tokens=10).tokenize("the") == [10 + 258]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"special_tokens": ["<unk>", "</s>"]}, "<s> is missing"),
        ({"special_tokens": ["<unk>", "<s>", "</s>", "<s>"]}, "a token is there twice"),
        ({"num_special_tokens": 5}, "--tiktoken-num-special-tokens 5 with 7 special tokens"),
        ({"vocab_size": 1100}, "--vocab-size 1100"),
    ],
)
def test_tiktoken_numbers_that_do_not_fit_are_refused(rank_file, options, message):
    with pytest.raises(ConfigError, match=message):
        TikTokenizer(rank_file, **options)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("x", "is no tiktoken vocabulary"),
        ('{"a": 1}', "is no tiktoken vocabulary"),
        ('[{"rank": 1, "token_bytes": "AA==", "token_str": ""}]', "its ranks are not 0, 1, 2"),
        ('[{"rank": 0, "token_bytes": "AA==", "token_str": ""}]', "does not begin with the 256 single bytes"),
    ],
)
def test_tiktoken_file_that_cannot_be_used_is_named(tmp_path, content, message):
    (tmp_path / "ranks.json").write_text(content)
    with pytest.raises(DataError, match=message):
        TikTokenizer(str(tmp_path / "ranks.json"))
