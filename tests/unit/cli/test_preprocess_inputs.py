"""Every kind of input gives the same corpus, can be gone on from at any place, and is refused with its name if torn."""

import bz2
import gzip
import importlib.util
import json
import lzma

import pytest

from megatron_lite.cli import jsonl
from megatron_lite.cli.jsonl import find_inputs, read_blocks
from megatron_lite.errors import ConfigError, DataError
from tests.unit.cli.test_preprocess import NULL, outputs, pair_bytes, run, sequences

RECORDS = [{"text": f"{i} {i % 7}", "more": [str(i)] * (i % 3), "other": i} for i in range(500)]
LINES = b"".join(json.dumps(record).encode() + b"\n" for record in RECORDS)


def package(name):
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


def zstandard_frames(data):
    """Two frames, as `cat a.zst b.zst` gives."""
    import zstandard

    return b"".join(zstandard.ZstdCompressor().compress(part) for part in (data[:5000], data[5000:]))


def parquet(data):
    import pyarrow
    import pyarrow.parquet

    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), sink, row_group_size=120)
    return sink.getvalue().to_pybytes()


KINDS = [
    pytest.param(".jsonl", bytes, id="plain"),
    pytest.param(".jsonl.gz", gzip.compress, id="gz"),
    pytest.param(".jsonl.gz", lambda data: gzip.compress(data[:5000]) + gzip.compress(data[5000:]), id="gz-members"),
    pytest.param(".jsonl.bz2", bz2.compress, id="bz2"),
    pytest.param(".jsonl.xz", lzma.compress, id="xz"),
    pytest.param(".jsonl.zst", zstandard_frames, id="zst", marks=package("zstandard")),
    pytest.param(".parquet", parquet, id="parquet", marks=package("pyarrow")),
]


@pytest.mark.parametrize(("ending", "pack"), KINDS)
def test_every_kind_of_file_gives_the_same_corpus(tmp_path, ending, pack):
    (tmp_path / f"in{ending}").write_bytes(pack(LINES))
    (tmp_path / "plain.json").write_bytes(LINES)
    words = [
        "--json-keys",
        "text",
        "more",
        "--workers",
        "2",
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        "999",
    ]
    assert run(tmp_path, "--input", str(tmp_path / f"in{ending}"), *words) == 0
    assert run(tmp_path, "--input", str(tmp_path / "plain.json"), *words, output="plain") == 0
    assert sequences(tmp_path) == [[i, i % 7] for i in range(500)]
    for key in ("text", "more"):
        assert pair_bytes(tmp_path, "out", key) == pair_bytes(tmp_path, "plain", key)


@pytest.mark.parametrize(("ending", "pack"), KINDS)
@pytest.mark.parametrize("size", [1, 700, 1 << 20])
def test_reading_goes_on_where_a_block_says(tmp_path, ending, pack, size):
    """Each record once, whichever block one goes on after, with the numbers it had."""
    files = []
    for name in "ab":
        (tmp_path / f"{name}{ending}").write_bytes(pack(LINES))
        files.append(str(tmp_path / f"{name}{ending}"))
    whole = list(read_blocks(files, size))
    numbered = [(block.file, block.first + i, line) for block in whole for i, line in enumerate(block.lines)]
    assert [number for _, number, _ in numbered] == [*range(1, 501)] * 2
    assert whole[-1].read == jsonl.size_of(files)
    done = 0
    for at, block in enumerate(whole):
        done += len(block.lines)
        if at % max(1, len(whole) // 10) == 0 or at == len(whole) - 1:
            rest = read_blocks(files, size, start=block.next)
            assert [
                (block.file, block.first + i, line) for block in rest for i, line in enumerate(block.lines)
            ] == numbered[done:]


@pytest.mark.parametrize(("ending", "pack"), KINDS[1:])
def test_torn_file_is_named_and_nothing_is_written(tmp_path, ending, pack):
    source = tmp_path / f"in{ending}"
    source.write_bytes(pack(LINES)[:-20])
    with pytest.raises(DataError, match=f"in{ending}"):
        run(tmp_path, "--input", str(source), "--tokenizer-type", "NullTokenizer", "--vocab-size", "999")
    assert not [name for name in outputs(tmp_path) if name.endswith((".bin", ".idx"))]


@pytest.mark.parametrize(("ending", "pack"), KINDS[1:])
def test_file_of_another_kind_is_named(tmp_path, ending, pack):
    source = tmp_path / f"in{ending}"
    source.write_bytes(LINES)
    with pytest.raises(DataError, match=f"in{ending}"):
        run(tmp_path, "--input", str(source), *NULL)


@pytest.mark.parametrize(("name", "needs"), [("in.jsonl.zst", "zstandard"), ("in.parquet", "pyarrow")])
def test_missing_package_is_named_before_anything_is_read(tmp_path, monkeypatch, name, needs):
    monkeypatch.setattr(jsonl, "installed", lambda package: False)
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ConfigError, match=f"{name} needs the package {needs}") as error:
        find_inputs([str(tmp_path / name)])
    assert error.value.fix == f"pip install {needs}"


@package("pyarrow")
def test_row_without_the_key_is_named_by_its_number(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"text": "1"}, {"text": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in.parquet")
    with pytest.raises(DataError, match="in.parquet, line 2: 'text' is neither"):
        run(tmp_path, "--input", str(tmp_path / "in.parquet"), *NULL)
    with pytest.raises(DataError, match="in.parquet, line 1: no key 'body', the record has 'text'"):
        run(tmp_path, "--input", str(tmp_path / "in.parquet"), "--json-keys", "body", *NULL)


def test_file_given_twice_is_said(tmp_path, capsys):
    (tmp_path / "in.json").write_bytes(b'{"text": "1"}\n')
    assert run(tmp_path, "--input", str(tmp_path / "in.json"), str(tmp_path / "*.json"), *NULL) == 0
    assert sequences(tmp_path) == [[1], [1]]
    assert "more than once" in capsys.readouterr().err
