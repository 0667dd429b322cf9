"""`megatron-lite train-tokenizer`: the files it writes are those that the tokenizers read, and preprocess uses."""

import json
from pathlib import Path

import pytest

from megatron_lite.cli import main as cli
from megatron_lite.cli import train_tokenizer
from megatron_lite.datasets.indexed_dataset import IndexedDataset
from megatron_lite.errors import ConfigError, DataError
from megatron_lite.tokenizers.bert_wordpiece import SPECIAL_TOKENS, BertWordPieceCase, BertWordPieceLowerCase
from megatron_lite.tokenizers.sentencepiece import SentencePieceTokenizer
from megatron_lite.tokenizers.train_wordpiece import train_wordpiece
from tests.unit.tokenizers.files import TEXTS

CORPUS = [*TEXTS, *Path(__file__).read_text("ascii").split("\n\n")]


@pytest.fixture
def corpus(tmp_path) -> str:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in CORPUS), "utf-8")
    return str(path)


@pytest.mark.parametrize(("cased", "cls"), [(False, BertWordPieceLowerCase), (True, BertWordPieceCase)])
def test_wordpiece_vocabulary_is_read_by_the_tokenizer_it_is_for(tmp_path, corpus, capsys, cased, cls):
    output = str(tmp_path / "out" / "vocab.txt")
    words = ["--input", corpus, "--output", output, "--model-type", "wordpiece", "--vocab-size", "260"]
    assert train_tokenizer.main([*words, *(["--cased"] if cased else [])]) == 0
    said = capsys.readouterr().out
    assert f"--tokenizer-type {cls.__name__} --vocab-file {output}" in said
    lines = Path(output).read_text("utf-8").splitlines()
    assert lines[:5] == list(SPECIAL_TOKENS) and len(lines) == 260 == len(set(lines))
    assert f"{output}: 260 pieces" in said
    tokenizer = cls(output)
    assert (tokenizer.pad, tokenizer.vocab_size) == (0, 262)
    for text in CORPUS:
        assert tokenizer.unk not in tokenizer.tokenize(text)
    the, The = tokenizer.tokenize("the"), tokenizer.tokenize("The")
    assert (the == The) != cased and len(the) < 3


def test_wordpiece_training_gives_the_same_file_every_time(tmp_path):
    """The library alone numbers the characters anew in every run, and the pieces follow."""
    read = []
    for i in range(3):
        output = tmp_path / f"vocab{i}.txt"
        assert train_wordpiece(CORPUS, str(output), vocab_size=260) == 260
        read.append(output.read_text("utf-8"))
    assert len(set(read)) == 1


def test_wordpiece_training_joins_the_commonest_pair_first(tmp_path):
    """By hand: of these words `##a ##b` is there 9 times, then `a ##ab` 5 times; `c ##ab` comes next."""
    output = tmp_path / "vocab.txt"
    assert train_wordpiece(["aab " * 5 + "cab " * 4 + "d"], str(output), vocab_size=16, lower_case=False) == 16
    letters = ["a", "b", "c", "d"]
    expected = [*SPECIAL_TOKENS, *letters, *(f"##{letter}" for letter in letters), "##ab", "aab", "cab"]
    assert output.read_text().split() == expected


def test_wordpiece_characters_beyond_a_thousand_are_unknown(tmp_path):
    """The rare ones: each of 1,000 twice, and two once, one of them a capital."""
    common = [chr(0x4E00 + i) for i in range(1000)]
    output = str(tmp_path / "vocab.txt")
    assert train_wordpiece(["".join(common) * 2 + "\u9000 \u0416"], output, vocab_size=2100) == 5 + 2 * 1000
    tokenizer = BertWordPieceLowerCase(output)
    assert tokenizer.tokenize("\u9000 \u0416") == [tokenizer.unk] * 2
    assert tokenizer.unk not in tokenizer.tokenize("".join(common))


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece_model_is_read_by_its_tokenizer(tmp_path, corpus, capsys, kind):
    output = str(tmp_path / "m.model")
    words = ["--input", corpus, "--output", output, "--model-type", kind, "--vocab-size", "400", "--workers", "1"]
    assert train_tokenizer.main(words) == 0
    tokenizer = SentencePieceTokenizer(output)
    assert f"{tokenizer.vocab_size} pieces, for --tokenizer-type SentencePieceTokenizer" in capsys.readouterr().out
    for text in CORPUS:
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


def test_a_trained_vocabulary_prepares_sentences_for_bert(tmp_path, corpus, capsys):
    """From JSONL to the pair that BERT and T5 read: every id below the tokenizer's size, no end of document."""
    vocab = str(tmp_path / "vocab.txt")
    assert cli.main(["train-tokenizer", "--input", corpus, "--output", vocab, "--model-type", "wordpiece",
                     "--vocab-size", "260"]) == 0  # fmt: skip
    assert cli.main(["preprocess", "--input", corpus, "--output-prefix", str(tmp_path / "bert"), "--workers", "1",
                     "--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", vocab,
                     "--vocab-extra-ids", "10", "--merge-file", "x"]) == 0  # fmt: skip
    assert "--merge-file has no effect: BertWordPieceLowerCase does not read it" in capsys.readouterr().err
    tokenizer = BertWordPieceLowerCase(vocab, vocab_extra_ids=10)
    pair = IndexedDataset(str(tmp_path / "bert_text_document"))
    assert [pair[i].tolist() for i in range(len(pair))] == [tokenizer.tokenize(text) for text in CORPUS]


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["--cased"], ConfigError, "--cased with --model-type bpe"),
        (["--character-coverage", "2"], ConfigError, "--character-coverage 2.0"),
        (["--character-coverage", "nan"], ConfigError, "--character-coverage nan"),
        (["--model-type", "wordpiece", "--character-coverage", "1"], ConfigError, "--character-coverage 1.0"),
        (["--vocab-size", "0"], ConfigError, "--vocab-size 0"),
        (["--model-type", "wordpiece", "--vocab-size", "20"], DataError, "--vocab-size 20 leaves nothing to learn"),
        (["--vocab-size", "100"], DataError, "--vocab-size 100 leaves nothing to learn"),
        (["--model-type", "words"], ConfigError, "invalid choice: 'words'"),
    ],
)
def test_training_that_cannot_work_is_refused_and_writes_nothing(tmp_path, corpus, words, error, message):
    with pytest.raises(error, match=message):
        train_tokenizer.main(["--input", corpus, "--output", str(tmp_path / "out"), *words])
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_a_line_that_is_no_record_is_named(tmp_path):
    (tmp_path / "c.jsonl").write_text('{"text": "a"}\n{"other": "b"}\n')
    with pytest.raises(DataError, match="c.jsonl, line 2: no key 'text'"):
        train_tokenizer.main(["--input", str(tmp_path / "c.jsonl"), "--output", str(tmp_path / "m")])
