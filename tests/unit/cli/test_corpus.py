"""The corpus: nothing lost, nothing torn, the same order everywhere."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.cli import corpus
from megatron_lite.cli.main import main
from megatron_lite.errors import DataError


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@given(st.text(alphabet="ab\n \u00e9", max_size=400), st.integers(2, 50))
def test_pieces_join_to_the_text_and_none_is_too_long(text, longest):
    pieces = list(corpus.cut(text, longest))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= longest for piece in pieces)


def test_text_is_cut_at_a_blank_line_rather_than_inside_a_paragraph():
    paragraphs = [f"paragraph {n} of the text\n\n" for n in range(40)]
    pieces = list(corpus.cut("".join(paragraphs), 100))
    assert len(pieces) > 1 and all(piece.endswith("\n\n") for piece in pieces)


def test_the_standard_library_is_a_corpus_of_its_own_modules(tmp_path, capsys):
    output = tmp_path / "corpus.jsonl"
    assert main(["corpus", "--output", str(output)]) == 0
    rows = lines(output)
    paths = {row["path"] for row in rows}
    assert {"argparse.py", "json/decoder.py", "asyncio/events.py"} <= paths
    assert not any("site-packages" in path or "dist-packages" in path for path in paths)
    (argparse,) = (row["text"] for row in rows if row["path"] == "argparse.py")
    assert argparse == (corpus.standard_library().root / "argparse.py").read_text(encoding="utf-8")
    assert sum(len(row["text"]) for row in rows) > 8e6
    assert f"{len(rows):,} documents" in capsys.readouterr().out
    tail = [row["path"] for row in rows[-len(rows) // 20 :]]  # what a validation split of 5% would hold
    assert len({path[0] for path in tail}) > 5, "the last documents come from one corner of the alphabet"


def test_order_depends_on_names_alone(tmp_path):
    """Folders list their files in the order of creation or of a hash table: a corpus must not."""
    for folder, order in (("one", "abcdefgh"), ("two", "hgfedcba")):
        (tmp_path / folder).mkdir()
        for name in order:
            (tmp_path / folder / f"{name}.txt").write_text(name * 5)
    texts = [[text for _, text in corpus.documents(corpus.user_text(tmp_path / f))] for f in ("one", "two")]
    assert texts[0] == texts[1] and len(texts[0]) == 8
    assert texts[0] != sorted(texts[0])


def test_a_single_text_file_becomes_enough_documents_to_hold_some_out(tmp_path):
    book = tmp_path / "book.txt"
    text = "".join(f"line {n} of a longer book\n" for n in range(5000))
    book.write_text(text)
    pieces = [piece for _, piece in corpus.documents(corpus.user_text(book))]
    assert "".join(pieces) == text and 100 <= len(pieces) <= 210


def test_jsonl_documents_are_taken_as_they_are(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"text": "one\\n\\ntwo"}\n\n{"text": "  "}\n{"text": "\u00fc"}\n', encoding="utf-8")
    assert list(corpus.documents(corpus.user_text(file))) == [
        ("mine.jsonl:1", "one\n\ntwo"),
        ("mine.jsonl:4", "\u00fc"),
    ]


@pytest.mark.parametrize("line", ['{"text": 3}', '{"txt": "a"}', "[1]", "{torn"])
def test_a_bad_json_line_is_named_by_file_and_number(tmp_path, line):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=r"bad\.jsonl, line 2"):
        corpus.write_corpus(corpus.user_text(file), tmp_path / "out.jsonl")
    assert sorted(os.listdir(tmp_path)) == ["bad.jsonl"], "a torn output was left behind"


def test_hidden_and_binary_files_are_left_out(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "picture.bin").write_bytes(b"\x00\x01\xff")
    (tmp_path / "latin.txt").write_bytes("\u00fcber".encode("latin-1"))
    (tmp_path / "good.txt").write_text("good text")
    assert list(corpus.documents(corpus.user_text(tmp_path))) == [("good.txt", "good text")]


@pytest.mark.parametrize("make", ["missing", "empty folder", "empty file", "blank file", "binary"])
def test_a_source_without_text_is_refused(tmp_path, make, capsys):
    path = tmp_path / "source"
    if make == "empty folder":
        path.mkdir()
    elif make != "missing":
        path.write_bytes({"empty file": b"", "blank file": b" \n\n", "binary": b"\x00\xff"}[make])
    assert main(["corpus", "--text", str(path), "--output", str(tmp_path / "out.jsonl")]) == 1
    assert str(path) in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists() and not list(tmp_path.glob("*.partial"))


def test_a_fingerprint_tells_a_changed_file_from_the_same_one(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("one")
    before = corpus.user_text(tmp_path).fingerprint()
    assert corpus.user_text(tmp_path).fingerprint() == before
    file.write_text("three")
    assert corpus.user_text(tmp_path).fingerprint() != before


def test_an_unwritable_output_is_one_clear_error(tmp_path, capsys):
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "text.txt").write_text("text")
    output = tmp_path / "file" / "out.jsonl"
    assert main(["corpus", "--text", str(tmp_path / "text.txt"), "--output", str(output)]) == 1
    assert f"cannot write {output}" in capsys.readouterr().err
