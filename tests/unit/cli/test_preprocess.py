"""JSONL to pairs: order, bytes and failures do not depend on the number of workers, and nothing is lost silently."""

import gzip
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.cli import encoder, train_tokenizer
from megatron_lite.cli import main as cli
from megatron_lite.cli import preprocess as verb
from megatron_lite.cli.jsonl import read_blocks
from megatron_lite.datasets.indexed_dataset import IndexedDataset
from megatron_lite.errors import ConfigError, DataError
from megatron_lite.tokenizers.byte_level import ByteTokenizer
from megatron_lite.tokenizers.sentencepiece import SentencePieceTokenizer
from tests.unit.tokenizers.test_tokenizers import write_hf

NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]
BYTES = ["--tokenizer-type", "ByteTokenizer"]


def write(path, records):
    lines = [record if isinstance(record, bytes) else json.dumps(record).encode() for record in records]
    (gzip.open if path.suffix == ".gz" else open)(path, "wb").write(b"\n".join(lines) + b"\n")
    return str(path)


def run(tmp_path, *words, output="out"):
    return verb.main(["--output-prefix", str(tmp_path / output), *words])


def sequences(tmp_path, key="text", output="out"):
    return [part.tolist() for part in IndexedDataset(str(tmp_path / f"{output}_{key}_document"))[:]]


def outputs(tmp_path):
    return sorted(path.name for path in tmp_path.iterdir() if "json" not in path.name)


def in_blocks_of(size, monkeypatch):
    """Blocks so small that workers overtake each other."""
    monkeypatch.setattr(verb, "read_blocks", lambda files, **options: read_blocks(files, size, **options))


def pair_bytes(tmp_path, output, key="text", level="document"):
    return [(tmp_path / f"{output}_{key}_{level}.{ending}").read_bytes() for ending in ("bin", "idx")]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("workers", ["1", "2"])
def test_C001_empty_text_is_counted_and_disturbs_nothing(tmp_path, capsys, place, workers):
    records = [{"text": "1 2"}, {"text": "3"}]
    records.insert(place, {"text": ""})
    source = write(tmp_path / "in.jsonl", records)
    assert run(tmp_path, "--input", source, "--append-eod", "--workers", workers, *NULL) == 0
    assert sequences(tmp_path) == [[1, 2, 100], [3, 100]]
    marks = [0, 1, 2]
    marks.insert(place + 1, marks[place])  # as Megatron has it: the document is there, without a sequence
    assert IndexedDataset(str(tmp_path / "out_text_document")).document_indices.tolist() == marks
    assert "1 empty record," in capsys.readouterr().out


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b'{"txt": "5"}', "no key 'text'"),
        (b'{"text": "5', "not JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"text": 5}', "neither a text nor a list"),
        (b'{"text": "\xff"}', "not JSON"),
        (b'{"text": "101"}', "'101' is not an id"),
        (b'{"text": "\\ud800"}', "surrogate"),
    ],
)
def test_C005_bad_line_stops_with_file_number_and_reason_or_is_counted(tmp_path, capsys, bad, reason, workers):
    good = [{"text": str(i)} for i in range(4)]
    source = write(tmp_path / "in.jsonl", [*good[:2], bad, *good[2:]])
    with pytest.raises(DataError, match=f"in.jsonl, line 3: .*{reason}"):
        run(tmp_path, "--input", source, "--workers", workers, *NULL)
    assert outputs(tmp_path) == []
    assert run(tmp_path, "--input", source, "--workers", workers, "--skip-bad-lines", *NULL) == 0
    assert sequences(tmp_path) == [[0], [1], [2], [3]]
    said = capsys.readouterr()
    assert "1 skipped" in said.out and "line 3" in said.err


def test_what_a_tokenizer_refuses_is_one_reason_in_one_line(tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", [{"text": "1"}, {"text": "x"}])
    with pytest.raises(DataError, match="line 2: 'x' is not an id") as error:
        run(tmp_path, "--input", source, *NULL)
    assert str(error.value).count("  fix: ") == str(error.value).count("  why: ") == 1
    assert run(tmp_path, "--input", source, "--skip-bad-lines", *NULL) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "skipped" in line]
    assert "line 2: 'x' is not an id for NullTokenizer (" in line


def test_a_failure_leaves_no_process_and_no_complaint_behind(tmp_path):
    """Workers end before the error is told: Python's exit would meet their pipes half closed."""
    source = write(tmp_path / "in.jsonl", [{"text": "1"}] * 2000 + [b"{"])
    before = set(multiprocessing.active_children())  # worlds of other tests
    with pytest.raises(DataError, match="line 2001"):
        run(tmp_path, "--input", source, "--workers", "2", *NULL)
    assert set(multiprocessing.active_children()) <= before
    assert not [thread for thread in threading.enumerate() if "ExecutorManager" in type(thread).__name__]


@pytest.mark.parametrize("content", [b"", b"\n \n\n", b'{"text": ""}\n{"text": ""}\n', b'{"text": []}\n'])
def test_C006_nothing_written_is_a_failure(tmp_path, content):
    (tmp_path / "in.jsonl").write_bytes(content)
    with pytest.raises(DataError, match="nothing was written"):
        run(tmp_path, "--input", str(tmp_path / "in.jsonl"), *BYTES)
    assert outputs(tmp_path) == []


def test_C007_tokenizer_without_an_end_token_fails_before_the_first_record(tmp_path):
    source = write(tmp_path / "in.jsonl", [b"this line would fail"])
    folder = write_hf(tmp_path / "hf")
    with pytest.raises(ConfigError, match="hf has no eos token") as error:
        run(tmp_path, "--input", source, "--append-eod", "--tokenizer-type=HuggingFaceTokenizer",
            "--tokenizer-model", folder)  # fmt: skip
    assert "--append-eod" in error.value.why


@pytest.mark.parametrize(
    ("named", "adds", "ids"),
    [
        ({"eos_token": "</s>"}, None, [[0, 1, 2], [4, 2]]),
        ({"eos_token": "</s>"}, "$A </s>", [[0, 1, 2], [4, 2]]),  # C008: the tokenizer ends texts itself
        ({"eos_token": "</s>", "bos_token": "</s>"}, "</s> $A", [[2, 0, 1, 2], [2, 4, 2]]),  # C009: bos is eos
    ],
    ids=["plain", "C008", "C009"],
)
def test_C008_C009_every_document_ends_with_one_end_token(tmp_path, named, adds, ids):
    source = write(tmp_path / "in.jsonl", [{"text": "hello world"}, {"text": "a"}])
    folder = write_hf(tmp_path / "hf", named=named, adds=adds)
    flags = ["--tokenizer-type=HuggingFaceTokenizer", "--tokenizer-model", folder]
    assert run(tmp_path, "--input", source, "--append-eod", "--workers", "2", *flags) == 0
    assert sequences(tmp_path) == ids


@pytest.mark.parametrize("end", ["--append-eod", ""])
def test_C008_a_document_of_several_texts_ends_once(tmp_path, end):
    """The tokenizer ends every text by itself, also those inside a document, and one that is nothing but that end."""
    source = write(tmp_path / "in.jsonl", [{"text": ["hello", "", "world"]}, {"text": ["a"]}, {"text": [""]}])
    folder = write_hf(tmp_path / "hf", named={"eos_token": "</s>"}, adds="$A </s>")
    flags = ["--tokenizer-type=HuggingFaceTokenizer", "--tokenizer-model", folder, *end.split()]
    assert run(tmp_path, "--input", source, "--workers", "1", *flags) == 0
    assert sequences(tmp_path) == [[0], [1, 2], [4, 2]]


def test_C016_shards_gzipped_or_not_in_their_order(tmp_path):
    for i in range(5):
        write(tmp_path / f"s{i}.jsonl{'.gz' if i % 2 else ''}", [{"text": f"{i} {j}"} for j in range(3)])
    assert run(tmp_path, "--input", str(tmp_path / "s*"), "--workers", "2", *NULL) == 0
    assert sequences(tmp_path) == [[i, j] for i in range(5) for j in range(3)]
    swapped = [str(tmp_path / "s3.jsonl.gz"), str(tmp_path / "s0.jsonl")]
    assert run(tmp_path, "--input", *swapped, *NULL) == 0
    assert sequences(tmp_path) == [[i, j] for i in (3, 0) for j in range(3)]


def test_several_keys_and_lists_are_all_written(tmp_path):
    """Lists are sequences of one document; empty ones are left out; the end goes to the last."""
    source = write(
        tmp_path / "in.jsonl",
        [
            {"text": "1", "more": ["2 3", "", "4"]},
            {"text": ["5", "6", ""], "more": []},
            {"more": "7", "text": ""},
        ],
    )
    assert run(tmp_path, "--input", source, "--json-keys", "text", "more", "--append-eod", "--workers=2", *NULL) == 0
    assert sequences(tmp_path) == [[1, 100], [5], [6, 100]]
    assert sequences(tmp_path, "more") == [[2, 3], [4, 100], [7, 100]]
    marks = [
        IndexedDataset(str(tmp_path / f"out_{key}_document")).document_indices.tolist() for key in ("text", "more")
    ]
    assert marks == [[0, 1, 3, 3], [0, 2, 2, 3]]


def test_worker_count_does_not_change_a_byte(tmp_path, monkeypatch):
    """Also with a trained SentencePiece model, and with blocks so small that workers overtake each other."""
    in_blocks_of(500, monkeypatch)
    texts = [Path(verb.__file__).read_text("utf-8")[i * 37 :][: 40 * (i % 9)] for i in range(150)]
    source = write(tmp_path / "in.jsonl", [{"text": text} for text in texts])
    model = str(tmp_path / "code.model")
    assert train_tokenizer.main(["--input", source, "--output", model, "--vocab-size", "400"]) == 0
    written = []
    for workers in ("1", "2", "3"):
        flags = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", model, "--append-eod"]
        assert run(tmp_path, "--input", source, "--workers", workers, *flags, output=workers) == 0
        written.append(pair_bytes(tmp_path, workers))
    assert written[0] == written[1] == written[2]
    tokenizer = SentencePieceTokenizer(model)
    read = [tokenizer.detokenize(ids[:-1]) for ids in sequences(tmp_path, output="2")]
    assert read == [text for text in texts if text]


@pytest.mark.parametrize(("vocab_size", "itemsize"), [(10_000, 2), (65_499, 2), (65_500, 4), (65_536, 4), (131_072, 4)])
def test_C010_type_follows_the_size_of_the_vocabulary_and_every_id_returns(tmp_path, vocab_size, itemsize):
    """NullTokenizer's vocabulary is one more than its --vocab-size: the end-of-document token."""
    source = write(tmp_path / "in.jsonl", [{"text": f"0 {vocab_size - 2}"}])
    words = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocab_size - 1)]
    assert run(tmp_path, "--input", source, "--append-eod", *words) == 0
    pair = IndexedDataset(str(tmp_path / "out_text_document"))
    assert pair.index.dtype.itemsize == itemsize and pair[0].tolist() == [0, vocab_size - 2, vocab_size - 1]


def test_partitions_deal_lines_round_as_megatron_does(tmp_path, monkeypatch):
    """Part 0 has lines 0, P, 2P, ... of all files, blank ones counted, and comes first; each key is whole."""
    in_blocks_of(30, monkeypatch)
    first = write(tmp_path / "a.jsonl", [{"text": str(i), "n": f"{i} {i}"} for i in range(7)])
    write(tmp_path / "b.jsonl.gz", [b"", *({"text": str(i), "n": ["", str(i)]} for i in range(8, 11))])
    words = ["--input", first, str(tmp_path / "b*"), "--json-keys", "text", "n", *NULL]
    assert run(tmp_path, *words, "--partitions", "3", "--workers", "2") == 0
    order = [i for part in range(3) for i in range(part, 11, 3) if i != 7]
    assert sequences(tmp_path) == [[i] for i in order]
    assert sequences(tmp_path, "n") == [[i, i] if i < 7 else [i] for i in order]
    assert run(tmp_path, *words, "--partitions", "3", "--keep-sequential-samples", output="kept") == 0
    assert run(tmp_path, *words, output="one") == 0
    assert [i for [i] in sequences(tmp_path, output="kept")] == sorted(order)
    for key in ("text", "n"):
        assert pair_bytes(tmp_path, "kept", key) == pair_bytes(tmp_path, "one", key)
    assert not list(tmp_path.glob("*.preprocess"))


@settings(max_examples=30)
@given(
    files=st.lists(
        st.lists(
            st.one_of(
                st.none(),  # a blank line
                st.lists(st.integers(0, 99), max_size=3),  # a text
                st.lists(st.lists(st.integers(0, 99), max_size=2), max_size=3),  # a list of texts
            ),
            max_size=7,
        ),
        min_size=1,
        max_size=3,
    ),
    partitions=st.integers(1, 4),
    append_eod=st.booleans(),
    block=st.integers(1, 80),
)
def test_every_corpus_is_what_its_records_say(files, partitions, append_eod, block):
    """Against the rules of a record, written out: any records, files, parts and blocks."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as monkeypatch:
        folder = Path(name)
        in_blocks_of(block, monkeypatch)
        sources, parts, at = [], [[] for _ in range(partitions)], 0
        for number, file in enumerate(files):
            lines = []
            for value in file or [None]:  # `write` ends an empty file with a line end: a blank line
                part, at = at % partitions, at + 1
                if value is None:
                    lines.append(b" ")
                    continue
                texts = value if value and isinstance(value[0], list) else [value]
                said = [" ".join(map(str, text)) for text in texts]
                lines.append({"text": said if texts is value else said[0]})
                document = [text for text in texts if text]
                if document and append_eod:
                    document[-1] = [*document[-1], 100]
                parts[part].append(document)
            sources.append(write(folder / f"{number}.jsonl", lines))
        documents = sum(parts, [])
        words = ["--input", *sources, "--partitions", str(partitions), *["--append-eod"] * append_eod, *NULL]
        if not any(documents):
            with pytest.raises(DataError, match="nothing was written"):
                run(folder, *words, "--workers", "1")
            return
        assert run(folder, *words, "--workers", "1") == 0
        assert sequences(folder) == sum(documents, [])
        marks = IndexedDataset(str(folder / "out_text_document")).document_indices
        assert np.diff(marks).tolist() == [len(document) for document in documents]


def test_every_flag_of_megatrons_script_is_known():
    """Of preprocess_data, its faster variant and older scripts; those of the tokenizer are TokenizerConfig's."""
    known = {spelling for action in verb._parser()._actions for spelling in action.option_strings}
    assert known >= set(
        "--input --json-keys --split-sentences --keep-newlines --append-eod --lang --output-prefix --workers "
        "--partitions --log-interval --keep-sequential-samples --find-optimal-num-workers --workers-to-check "
        "--max-documents --dataset-impl --chunk-size --tokenizer-type --tokenizer-model --vocab-file --merge-file "
        "--vocab-size --vocab-extra-ids --make-vocab-size-divisible-by".split()
    )
    words = ["--input", "x", "--output-prefix", "y"]
    assert verb._parser().parse_args([*words, "--vocab", "v.txt"]).vocab_file == "v.txt"
    assert verb._parser().parse_args(words).vocab_file is None


@pytest.mark.slow
def test_C015_memory_does_not_grow_with_the_corpus(tmp_path):
    """The peak of a run of four times the documents is the same, but for less than 40 bytes a document (noise)."""
    code = (
        "import resource, sys; from megatron_lite.cli import main; status = main.main(sys.argv[1:]);"
        "print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(status)"
    )
    peaks = []
    for count in (40_000, 160_000):
        (tmp_path / "in.jsonl").write_bytes(b'{"text": "7"}\n' * count)
        words = ["--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "out"), "--workers", "1"]
        done = subprocess.run([sys.executable, "-c", code, "preprocess", *words, *NULL], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        peaks.append(1024 * int(done.stdout.split("peak ")[1]))
    assert peaks[1] - peaks[0] < 40 * 120_000


def test_find_optimal_num_workers_times_and_writes_nothing(tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", [{"text": "1 2"}] * 50)
    words = ["--input", source, "--find-optimal-num-workers", "--workers-to-check", "1", "2", "--max-documents", "20"]
    assert verb.main([*words, *NULL]) == 0
    said = capsys.readouterr().out
    assert said.count("docs/s") == 2 and "best: --workers" in said
    assert outputs(tmp_path) == []


def test_progress_and_summary_count(tmp_path, capsys, monkeypatch):
    in_blocks_of(100, monkeypatch)
    source = write(tmp_path / "in.jsonl", [{"text": "1 2"}] * 50)
    assert run(tmp_path, "--input", source, "--log-interval", "10", "--workers", "1", *NULL) == 0
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert len(lines) == 5 and all(line.startswith("Processed ") and line.endswith(" MB/s).") for line in lines)
    assert "50 documents, 50 sequences, 100 tokens, 200 bytes" in said.out
    assert [line.split() for line in said.out.splitlines() if "#" in line] == [["2-3", "50", "#" * 30]]
    assert f"Opening {source}" in said.out and "Time to startup: " in said.out


class _Dies(ByteTokenizer):
    """A tokenizer whose process is killed by one word."""

    def tokenize(self, text):
        if text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().tokenize(text)


def test_worker_that_dies_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(encoder, "build_tokenizer", lambda config: _Dies())  # the workers are forks: they have it, too
    source = write(tmp_path / "in.jsonl", [{"text": "a"}, {"text": "die"}])
    with pytest.raises(DataError, match="a worker process died"):
        run(tmp_path, "--input", source, "--workers", "2", *BYTES)
    assert outputs(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--partitions", "0"], "--partitions 0"),
        (["--workers-to-check", "4", "0"], "--workers-to-check"),
        (["--keep-newlines"], "--keep-newlines without --split-sentences"),
        (["--append-eos"], "did you mean --append-eod"),
        (["--workers", "0"], "--workers 0"),
        (["--workers", "x"], "invalid int value"),
        (["--json-keys", "text", "text"], "names a key twice"),
    ],
)
def test_flags_that_cannot_be_followed_stop_the_run(tmp_path, words, message):
    source = write(tmp_path / "in.jsonl", [{"text": "1"}])
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, "--input", source, *NULL, *words)
    assert outputs(tmp_path) == []


def test_obsolete_flag_says_that_it_has_no_effect(tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", [{"text": "1"}])
    assert run(tmp_path, "--input", source, "--dataset-impl", "mmap", *NULL) == 0
    assert "--dataset-impl has no effect" in capsys.readouterr().err


def test_input_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match="nothere.jsonl"):
        run(tmp_path, "--input", str(tmp_path / "nothere.jsonl"), *BYTES)
    with pytest.raises(DataError, match="a folder is no file") as error:
        run(tmp_path, "--input", str(tmp_path), *BYTES)
    assert f"{tmp_path}/*.jsonl" in error.value.fix


def test_torn_gzip_is_named(tmp_path):
    source = tmp_path / "in.jsonl.gz"
    write(source, [{"text": str(i)} for i in range(3000)])
    source.write_bytes(source.read_bytes()[:-2000])
    with pytest.raises(DataError, match="in.jsonl.gz"):
        run(tmp_path, "--input", str(source), *BYTES)
    assert outputs(tmp_path) == []


def test_verb_turns_errors_into_text_and_status(tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", [b"x"])
    words = ["preprocess", "--input", source, "--output-prefix", str(tmp_path / "o")]
    assert cli.main([*words, *BYTES]) == 1
    assert "line 1" in capsys.readouterr().err
    assert cli.main([*words, "--tokenizer-type", "GPT2BPETokenizer"]) == 2
    assert "GPT2BPETokenizer" in capsys.readouterr().err
    assert cli.main(["train-tokenizer", "--input", source, "--output", str(tmp_path / "m")]) == 1
    assert "line 1" in capsys.readouterr().err
