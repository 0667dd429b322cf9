"""`megatron-lite data merge | inspect`: on pairs of ours, of Megatron's, and on damaged ones."""

import struct

import numpy as np
import pytest

from megatron_lite.cli import data_inspect, data_merge
from megatron_lite.cli import main as cli
from megatron_lite.cli.data import find_pairs
from megatron_lite.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron_lite.errors import ConfigError, DataError
from tests.unit.datasets.corpora import write_corpus

NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]


def documents(prefix):
    return [sequence.tolist() for sequence in IndexedDataset(str(prefix))[:]]


@pytest.fixture
def folder(tmp_path):
    """Three pairs, a file that is none, and a pair of an earlier merge."""
    for name, tokens in (("b", [[3, 4], [5]]), ("a", [[1], [2, 2]]), ("c", [[6]]), ("all", [[9]])):
        write_corpus(tmp_path / name, tokens)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "cache").mkdir()
    return tmp_path


def test_a_folder_is_merged_in_the_order_of_names_without_the_output(folder, capsys):
    words = ["--input", str(folder), "--output-prefix", str(folder / "all")]
    for _ in range(2):  # the second finds the first one's output
        assert cli.main(["data", "merge", *words]) == 0
        assert documents(folder / "all") == [[1], [2, 2], [3, 4], [5], [6]]
    assert "3 pairs, 5 documents, 5 sequences, 7 tokens of uint16" in capsys.readouterr().out


def test_prefixes_are_merged_in_the_order_given(folder):
    words = ["--input", str(folder / "c"), str(folder / "[ab]"), "--output-prefix", str(folder / "new" / "out")]
    assert data_merge.main(words) == 0
    assert documents(folder / "new" / "out") == [[6], [1], [2, 2], [3, 4], [5]]


def test_merged_equals_written_in_one_go(golden, tmp_path):
    """Megatron's own merge of two pairs, byte for byte."""
    data = golden("data")
    words = [str(data / name) for name in golden("indexed_dataset.json")["tiny_merged"]["of"]]
    assert data_merge.main(["--input", *words, "--output-prefix", str(tmp_path / "merged")]) == 0
    for ending in ("bin", "idx"):
        assert (tmp_path / f"merged.{ending}").read_bytes() == (data / f"tiny_merged.{ending}").read_bytes()


def test_multimodal_pairs_keep_their_modes(golden, tmp_path):
    source = str(golden("data") / "tiny_multimodal")
    words = ["--input", source, source, "--output-prefix", str(tmp_path / "twice"), "--multimodal"]
    assert data_merge.main(words) == 0
    once = IndexedDataset(source, multimodal=True)
    twice = IndexedDataset(str(tmp_path / "twice"), multimodal=True)
    assert twice.sequence_modes.tolist() == once.sequence_modes.tolist() * 2
    assert len(twice) == 2 * len(once)


def test_half_a_pair_another_type_and_the_output_itself_are_refused(folder):
    (folder / "b.idx").rename(folder / "b.idx.away")
    with pytest.raises(DataError, match="b.idx is missing"):
        data_merge.main(["--input", str(folder), "--output-prefix", str(folder / "out")])
    (folder / "b.idx.away").rename(folder / "b.idx")
    with pytest.raises(ConfigError, match="is one of the pairs"):
        data_merge.main(["--input", str(folder / "a"), "--output-prefix", str(folder / "a")])
    with pytest.raises(DataError, match="no pair"):
        find_pairs([str(folder / "nothere")])
    builder = IndexedDatasetBuilder(f"{folder}/wide.bin", np.int32)
    builder.add_document([1], [1])
    builder.finalize(f"{folder}/wide.idx")
    with pytest.raises(DataError, match="wide holds tokens of type int32"):
        data_merge.main(["--input", str(folder / "a"), str(folder / "wide"), "--output-prefix", str(folder / "out")])
    assert not list(folder.glob("out*"))


def test_C012_merged_pairs_of_more_than_2_GiB_keep_their_last_document(tmp_path, monkeypatch):
    """The .bin files are holes on the disk; only their ends hold something."""

    def sparse(source, target, *rest):
        target.flush()
        begin, size = target.tell(), source.seek(0, 2)
        source.seek(size - 40)
        target.seek(begin + size - 40)
        target.write(source.read())

    monkeypatch.setattr("megatron_lite.datasets.indexed_dataset.shutil.copyfileobj", sparse)
    monkeypatch.setattr(data_merge.shutil, "disk_usage", lambda folder: type("", (), {"free": 1 << 40}))
    length = 100_000_000
    for name, last in (("a", 1), ("b", 2), ("c", 3)):
        builder = IndexedDatasetBuilder(f"{tmp_path}/{name}.bin", np.int32)
        for _ in range(3):
            builder.sequence_lengths.append(length)
            builder.end_document()
        builder._file.truncate(3 * length * 4 - 40)
        builder._file.seek(3 * length * 4 - 40)
        builder._file.write(np.full(10, last, np.int32).tobytes())
        builder.finalize(f"{tmp_path}/{name}.idx")
    merged = data_merge.merge([str(tmp_path / name) for name in "abc"], str(tmp_path / "all"))
    pointers = merged.index.sequence_pointers
    assert pointers.tolist() == [i * length * 4 for i in range(9)] and pointers[-1] > 2**31
    assert merged.get(8, length - 10).tolist() == [3] * 10
    assert merged.get(5, length - 10).tolist() == [2] * 10


def test_inspect_tells_counts_samples_and_text(tmp_path, capsys):
    prefix = write_corpus(tmp_path / "p", [[5, 100], [*range(20), 100], [7]])
    assert cli.main(["data", "inspect", prefix, "--documents", "2", "--tokens", "4", *NULL]) == 0
    said = capsys.readouterr().out
    assert "tokens of uint16, 48 bytes" in said and "3 documents (0 empty), 3 sequences, 24 tokens" in said
    assert "1 to 21, mean 8.0, median 2" in said
    assert "2 of 3 documents end with the end-of-document token" in said and "checks: fine" in said
    assert "document 1: 1 sequences, 21 tokens\n  0 1 2 3 ...\n  '0 1 2 3'" in said and "document 2" not in said


def test_inspect_of_documents_of_several_sequences(golden, capsys):
    assert data_inspect.main([str(golden("data") / "tiny_adddoc")]) == 0
    assert "checks: fine (ids are checked with a tokenizer" in capsys.readouterr().out
    assert data_inspect.main([str(golden("data") / "tiny_multimodal"), "--multimodal"]) == 0


def moved_pointer(data):
    at = 34 + 4 * 3 + 8  # of the second of three sequences
    return data[:at] + struct.pack("<q", 2) + data[at + 8 :]


def falling_marks(data):
    at = 34 + 12 * 3 + 8
    return data[:at] + struct.pack("<qqq", 2, 1, 3)


@pytest.mark.parametrize(
    ("damage", "message"),
    [(moved_pointer, "sequence 1 is said to begin at byte 2, not at 4"), (falling_marks, "document 1 ends before")],
)
def test_inspect_finds_damage_that_loads(tmp_path, capsys, damage, message):
    prefix = write_corpus(tmp_path / "p", [[1, 2], [3], [4]])
    path = tmp_path / "p.idx"
    path.write_bytes(damage(path.read_bytes()))
    assert cli.main(["data", "inspect", prefix, "--documents", "0"]) == 1
    assert f"FAULT: {message}" in capsys.readouterr().out


def test_inspect_finds_ids_outside_the_vocabulary(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(data_inspect, "_TOKENS_AT_ONCE", 3)
    prefix = write_corpus(tmp_path / "p", [[1, 2], [3, 4, 5, 101]])
    assert cli.main(["data", "inspect", prefix, *NULL]) == 1
    assert "FAULT: token 5 is 101, the tokenizer has ids from 0 to 100" in capsys.readouterr().out
    assert cli.main(["data", "inspect", prefix, "--quick", *NULL]) == 0


def test_unknown_verb_of_data_names_the_nearest(capsys):
    assert cli.main(["data", "inspct"]) == 2
    assert "did you mean 'inspect'" in capsys.readouterr().err
    assert cli.main(["data"]) == 2 and "merge" in capsys.readouterr().out
