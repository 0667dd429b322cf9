"""One sequence a sentence: C003, white space, languages, and the choice of the splitter."""

import importlib.util
import subprocess
import sys
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.cli import sentences as module
from megatron_lite.cli.sentences import SentenceSplitter
from megatron_lite.datasets.indexed_dataset import IndexedDataset
from megatron_lite.errors import ConfigError, DataError
from megatron_lite.tokenizers.byte_level import ByteTokenizer
from tests.unit.cli.test_preprocess import BYTES, in_blocks_of, run, write

sentencex = pytest.mark.skipif(importlib.util.find_spec("sentencex") is None, reason="sentencex is not installed")

THREE = "Dr. Smith paid 3.50 for it.  It was late!\nWas it raining? "


def texts(tmp_path, key="text", output="out"):
    pair = IndexedDataset(str(tmp_path / f"{output}_{key}_sentence"))
    return [ByteTokenizer().detokenize(ids) for ids in pair[:]], pair.document_indices.tolist()


@sentencex
def test_C003_sentences_in_one_call_whatever_the_partitions(tmp_path, monkeypatch):
    in_blocks_of(200, monkeypatch)
    records = [{"text": f"This is document {i}. It has a middle. Here it ends."} for i in range(20)]
    source = write(tmp_path / "in.jsonl", records)
    words = ["--input", source, "--split-sentences", "--sentence-splitter", "sentencex", *BYTES]
    assert run(tmp_path, *words, "--partitions", "1", "--workers", "2", output="one") == 0
    assert run(tmp_path, *words, "--partitions", "2", "--keep-sequential-samples", output="kept") == 0
    assert run(tmp_path, *words, "--partitions", "2", output="dealt") == 0
    expected = [[f"This is document {i}.", "It has a middle.", "Here it ends."] for i in range(20)]
    assert texts(tmp_path, output="one") == (sum(expected, []), [*range(0, 61, 3)])
    assert texts(tmp_path, output="dealt")[0] == sum(expected[::2] + expected[1::2], [])
    for ending in ("bin", "idx"):
        one, kept = ((tmp_path / f"{name}_text_sentence.{ending}").read_bytes() for name in ("one", "kept"))
        assert one == kept
    assert sorted(path.name for path in tmp_path.glob("*_ss*")) == []


@sentencex
def test_white_space_after_a_sentence_is_dropped_or_kept():
    assert SentenceSplitter("sentencex", "english", False)(THREE) == [
        "Dr. Smith paid 3.50 for it.",
        "It was late!",
        "Was it raining?",
    ]
    kept = SentenceSplitter("sentencex", "en", True)(THREE)
    assert "".join(kept) == THREE and kept[0] == "Dr. Smith paid 3.50 for it.  " and kept[1] == "It was late!\n"


@sentencex
@pytest.mark.parametrize("lang", ["german", "de", "German"])
def test_language_by_name_or_code(lang):
    assert SentenceSplitter("sentencex", lang, False)("Er kam z.B. gestern. Sie blieb.") == [
        "Er kam z.B. gestern.",
        "Sie blieb.",
    ]


@sentencex
def test_no_text_is_lost_and_long_texts_are_cut_first(monkeypatch):
    monkeypatch.setattr(module, "_LONGEST", 1000)
    text = "".join(f"Satz {i} über Äpfel 🍎 \u2028 und\tmehr.{' ' * (i % 3)}\n" for i in range(200))
    kept = SentenceSplitter("sentencex", "english", True)(text)
    assert "".join(kept) == text and max(map(len, kept)) <= 1000
    dropped = SentenceSplitter("sentencex", "english", False)(text)
    assert "".join("".join(dropped).split()) == "".join(text.split())


@sentencex
@settings(max_examples=200)
@given(
    st.lists(
        st.sampled_from(
            [*'abX.!?。！…\n\r\t\x00\u2028\u2029\u200b\ufeff\u00a0\u3000\x85 1()[]"«»’*-äИ中हि।🍎\u0301', "Dr. ", "J. "]
        ),
        max_size=60,
    ),
    st.sampled_from(["en", "de", "ru", "hi", "zh", "xx"]),
)
def test_any_text_comes_back_whole(parts, lang):
    """White space of several bytes after an initial once ended in a panic of the package."""
    text = "".join(parts)
    assert "".join("".join(SentenceSplitter("sentencex", lang, True)(text)).split()) == "".join(text.split())


class PanicException(BaseException):
    """What Rust code raises."""


@pytest.mark.parametrize("answer", [PanicException("byte index"), ["another text"]])
def test_a_text_that_the_package_fails_on_is_a_bad_line(tmp_path, monkeypatch, capsys, answer):
    module_of_rust = types.ModuleType("sentencex")

    def segment(code, text):
        if "bad" in text:
            if isinstance(answer, BaseException):
                raise answer
            return answer
        return [text]

    module_of_rust.segment = segment
    monkeypatch.setitem(sys.modules, "sentencex", module_of_rust)
    monkeypatch.setattr(module, "installed", lambda name: True)
    monkeypatch.setattr(module, "version", lambda name: "1.0")
    source = write(tmp_path / "in.jsonl", [{"text": "Good."}, {"text": "bad"}])
    words = ["--input", source, "--split-sentences", "--sentence-splitter", "sentencex", "--workers", "1", *BYTES]
    with pytest.raises(DataError, match="in.jsonl, line 2: sentencex"):
        run(tmp_path, *words)
    assert run(tmp_path, *words, "--skip-bad-lines") == 0
    assert texts(tmp_path)[0] == ["Good."]


@sentencex
def test_lists_were_split_before_and_the_end_goes_to_the_last_sentence(tmp_path):
    records = [
        {"text": ["It rains. He goes.", "She stays."]},
        {"text": ["It rains. He goes."]},
        {"text": "It rains. He goes."},
    ]
    source = write(tmp_path / "in.jsonl", records)
    words = ["--split-sentences", "--sentence-splitter", "sentencex", "--append-eod", *BYTES]
    assert run(tmp_path, "--input", source, *words) == 0
    pair = IndexedDataset(str(tmp_path / "out_text_sentence"))
    eod = ByteTokenizer().eod
    assert [ids[-1] == eod for ids in pair[:]] == [False, True, True, False, True]
    assert pair.document_indices.tolist() == [0, 2, 3, 5]


class _Punkt:
    """nltk with its data, as far as we use it."""

    def __init__(self, language):
        if language != "english":
            raise LookupError(language)

    def span_tokenize(self, text):
        at = 0
        for part in text.split("|"):
            yield at, at + len(part)
            at += len(part) + 1


@pytest.fixture
def punkt(monkeypatch):
    """A machine with nltk and its English data, and nothing else."""
    fake = types.ModuleType("nltk.tokenize.punkt")
    fake.PunktTokenizer = _Punkt
    for name in ("nltk", "nltk.tokenize"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "nltk.tokenize.punkt", fake)
    monkeypatch.setattr(module, "installed", lambda name: name == "nltk")
    monkeypatch.setattr(module, "version", lambda name: "3.9")


def test_punkt_comes_first_where_its_data_are(punkt):
    splitter = SentenceSplitter("auto", "en", False)
    assert "punkt" in splitter.name and splitter("a.|b. |c") == ["a.", "b.", "c"]


def test_what_is_missing_is_named(punkt):
    with pytest.raises(ConfigError, match="--split-sentences") as error:
        SentenceSplitter("auto", "german", False)
    assert "no punkt_tab data for 'german'" in error.value.why
    assert "sentencex is not installed" in error.value.why


@pytest.mark.skipif(importlib.util.find_spec("nltk") is None, reason="nltk is not installed")
def test_nltk_without_its_data_is_no_splitter(monkeypatch, tmp_path):
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    with pytest.raises(ConfigError) as error:
        SentenceSplitter("punkt", "english", False)
    assert "no punkt_tab data for 'english'" in error.value.why


@sentencex
def test_the_splitter_is_said(tmp_path):
    source = write(tmp_path / "in.jsonl", [{"text": "One. Two."}])
    words = ["--input", source, "--output-prefix", str(tmp_path / "out"), "--split-sentences", *BYTES]
    done = subprocess.run(
        [sys.executable, "-m", "megatron_lite", "preprocess", *words], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "Sentences by " in done.stdout
    assert texts(tmp_path)[0] == ["One.", "Two."]
