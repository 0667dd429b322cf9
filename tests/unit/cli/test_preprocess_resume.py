"""A run of `preprocess` that is stopped leaves nothing that loads, and the next one goes on where it was."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from megatron_lite.cli import encoder
from megatron_lite.cli import preprocess as verb
from megatron_lite.cli.jsonl import read_blocks
from megatron_lite.datasets.indexed_dataset import IndexedDataset
from megatron_lite.errors import DataError
from tests.unit.cli.test_preprocess import BYTES, NULL, in_blocks_of, pair_bytes, run, write


@pytest.fixture
def shards(tmp_path):
    """Five files of twenty records with two texts each."""
    return [
        write(tmp_path / f"s{f}.jsonl{'.gz' * (f % 2)}", [{"text": f"{f} {i}", "n": f"{i}"} for i in range(20)])
        for f in range(5)
    ]


class Seen:
    """Counts the lines that are tokenised."""

    def __init__(self, monkeypatch):
        self.lines = []
        monkeypatch.setattr(encoder, "parse", self)

    def __call__(self, line, *rest):
        self.lines.append(line)
        return read_record(line, *rest)


read_record = encoder.parse


def interrupt_at(monkeypatch, line):
    """Ctrl-C when a record is reached."""

    def reached(text, *rest):
        if isinstance(text, bytes) and text.strip() == line.encode():
            raise KeyboardInterrupt
        return read_record(text, *rest)

    monkeypatch.setattr(encoder, "parse", reached)


@pytest.mark.parametrize("partitions", ["1", "3"])
def test_interrupted_run_goes_on_and_the_bytes_are_those_of_an_uninterrupted_one(
    tmp_path, monkeypatch, capsys, shards, partitions
):
    in_blocks_of(60, monkeypatch)
    words = ["--input", *shards, "--json-keys", "text", "n", "--partitions", partitions, "--workers", "1", *NULL]
    assert run(tmp_path, *words, output="whole") == 0
    interrupt_at(monkeypatch, json.dumps({"text": "3 7", "n": "7"}))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, *words)
    assert not IndexedDataset.exists(str(tmp_path / "out_text_document"))
    assert not any(
        IndexedDataset.exists(str(path)[:-4]) for path in tmp_path.rglob("*.bin") if "whole" not in str(path)
    )
    seen = Seen(monkeypatch)
    assert run(tmp_path, *words) == 0
    assert len(seen.lines) < 40 and "Going on from" in capsys.readouterr().out
    for key in ("text", "n"):
        assert pair_bytes(tmp_path, "out", key) == pair_bytes(tmp_path, "whole", key)
    assert not (tmp_path / "out.preprocess").exists()


def test_torn_journal_and_what_was_written_behind_the_last_snapshot_do_no_harm(tmp_path, monkeypatch, shards):
    """As kill -9 in the middle of a write leaves them."""
    words = ["--input", *shards, "--workers", "1", *NULL]
    assert run(tmp_path, *words, output="whole") == 0
    interrupt_at(monkeypatch, json.dumps({"text": "3 7", "n": "7"}))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, *words)
    work = tmp_path / "out.preprocess"
    for path in (work / "0_0.bin", work / "0_0.lengths", work / "0_0.marks"):
        with open(path, "ab") as file:
            file.write(b"\x07\x07\x07")
    with open(work / "journal.jsonl", "a") as file:
        file.write('{"position": {"file": 4, "li')
    seen = Seen(monkeypatch)
    assert run(tmp_path, *words) == 0
    assert len(seen.lines) == 40  # the shards 3 and 4
    assert pair_bytes(tmp_path, "out") == pair_bytes(tmp_path, "whole")


def changed_flags(words, shards, tmp_path):
    return [*words, "--append-eod"], 100, "is dropped: append_eod differ"


def replaced_first_file(words, shards, tmp_path):
    write(tmp_path / "s0.jsonl", [{"text": "9 9"}])
    return words, 81, "is dropped: its files have changed"


def shortened_growing_file(words, shards, tmp_path):
    os.truncate(tmp_path / "out.preprocess" / "0_0.bin", 3)
    return words, 100, "is dropped: a file of it is gone"


def one_more_file(words, shards, tmp_path):
    return [*words, "--input", *shards, write(tmp_path / "new.jsonl", [{"text": "5"}])], 41, ""


def asked_to_begin_anew(words, shards, tmp_path):
    return [*words, "--no-resume"], 100, "is dropped: --no-resume"


@pytest.mark.parametrize(
    "change", [changed_flags, replaced_first_file, shortened_growing_file, one_more_file, asked_to_begin_anew]
)
def test_only_what_is_still_true_is_used_again(tmp_path, monkeypatch, capsys, shards, change):
    words = ["--input", *shards, "--workers", "1", *NULL]
    interrupt_at(monkeypatch, json.dumps({"text": "3 7", "n": "7"}))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, *words)
    words, lines, said = change(words, shards, tmp_path)
    seen = Seen(monkeypatch)
    capsys.readouterr()
    assert run(tmp_path, *words) == 0
    assert len(seen.lines) == lines and said in capsys.readouterr().err
    assert run(tmp_path, *words, output="whole") == 0
    assert pair_bytes(tmp_path, "out") == pair_bytes(tmp_path, "whole")


def test_a_mended_line_costs_its_file_and_not_those_before(tmp_path, monkeypatch, shards):
    in_blocks_of(60, monkeypatch)  # s2 is begun, and told in a snapshot, before its bad line is met
    good = (tmp_path / "s2.jsonl").read_bytes()
    (tmp_path / "s2.jsonl").write_bytes(good.replace(b'"2 9"', b'"2 x"'))
    words = ["--input", *shards, "--workers", "1", *NULL]
    with pytest.raises(DataError, match="s2.jsonl, line 10"):
        run(tmp_path, *words)
    (tmp_path / "s2.jsonl").write_bytes(good)
    seen = Seen(monkeypatch)
    assert run(tmp_path, *words) == 0
    assert len(seen.lines) == 60
    assert run(tmp_path, *words, output="whole") == 0
    assert pair_bytes(tmp_path, "out") == pair_bytes(tmp_path, "whole")


def test_lines_that_were_skipped_are_not_taken_over_by_a_run_that_skips_none(tmp_path, monkeypatch, shards):
    (tmp_path / "s1.jsonl.gz").unlink()
    write(tmp_path / "s1.jsonl.gz", [b"x"])
    words = ["--input", *shards, "--workers", "1", *NULL]
    interrupt_at(monkeypatch, json.dumps({"text": "3 7", "n": "7"}))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, *words, "--skip-bad-lines")
    monkeypatch.setattr(encoder, "parse", read_record)
    with pytest.raises(DataError, match="s1.jsonl.gz, line 1"):
        run(tmp_path, *words)


def test_snapshots_are_taken_inside_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(verb, "_SECONDS_BETWEEN_SNAPSHOTS", -1.0)
    in_blocks_of(100, monkeypatch)
    source = write(tmp_path / "in.jsonl", [{"text": str(i)} for i in range(90)])
    interrupt_at(monkeypatch, '{"text": "80"}')
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "--input", source, "--workers", "1", *NULL)
    journal = [json.loads(line) for line in (tmp_path / "out.preprocess" / "journal.jsonl").read_text().splitlines()]
    lines = [snapshot["position"]["line"] for snapshot in journal[1:]]
    assert len(lines) > 5 and lines == sorted(set(lines)) and lines[-1] <= 81
    blocks = list(read_blocks([source], 100))
    offsets = {block.next.line: block.next.offset for block in blocks}
    assert all(offsets[snapshot["position"]["line"]] == snapshot["position"]["offset"] for snapshot in journal[1:])


@pytest.mark.parametrize("workers", ["1", "2"])
def test_killed_run_leaves_nothing_that_loads_and_no_process_and_the_next_one_finishes(tmp_path, workers):
    source = write(tmp_path / "in.jsonl", [{"text": "abc " * 2000}] * 6000)
    command = [sys.executable, "-m", "megatron_lite", "preprocess", "--input", source, "--workers", workers]
    command += ["--output-prefix", str(tmp_path / "out"), *BYTES]
    growing = tmp_path / "out.preprocess" / "0_0.bin"
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while process.poll() is None and not (growing.exists() and growing.stat().st_size):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert process.returncode == -signal.SIGKILL
        process.stdout.read()  # ends when the last worker, which holds the pipe as well, is gone
    assert not list(tmp_path.rglob("*.idx"))
    write(tmp_path / "in.jsonl", [{"text": "abc"}] * 3)
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stderr
    assert len(IndexedDataset(str(tmp_path / "out_text_document"))) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in.jsonl",
        "out_text_document.bin",
        "out_text_document.idx",
    ]


def test_a_full_disk_is_said_and_the_next_run_goes_on(tmp_path):
    """The largest file that the process may write stands for the disk."""
    source = write(tmp_path / "in.jsonl", [{"text": "abc " * 1000}] * 1500)
    code = (
        "import resource, sys; from megatron_lite.cli import main, preprocess;"
        "preprocess._SECONDS_BETWEEN_SNAPSHOTS = -1;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), -1)); sys.exit(main.main(sys.argv[2:]))"
    )
    words = ["preprocess", "--input", source, "--output-prefix", str(tmp_path / "out"), "--workers", "1", *BYTES]
    full = subprocess.run([sys.executable, "-c", code, "5000000", *words], capture_output=True, text=True, timeout=60)
    assert full.returncode == 1 and "cannot write" in full.stderr and "goes on from there" in full.stderr
    assert not list(tmp_path.glob("*.idx"))
    rest = subprocess.run([sys.executable, "-c", code, "-1", *words], capture_output=True, text=True, timeout=60)
    assert rest.returncode == 0 and "Going on from" in rest.stdout
    assert run(tmp_path, *words[1:3], "--workers", "1", *BYTES, output="whole") == 0
    assert pair_bytes(tmp_path, "out") == pair_bytes(tmp_path, "whole")


def test_two_runs_at_once_do_not_write_into_each_other(tmp_path):
    source = write(tmp_path / "in.jsonl", [{"text": "1"}])
    (tmp_path / "out.preprocess").mkdir()
    code = (
        "import fcntl, sys; lock = open(sys.argv[1], 'w'); fcntl.lockf(lock, fcntl.LOCK_EX); print('held', flush=True);"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "out.preprocess" / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(DataError, match="another run"):
            run(tmp_path, "--input", source, *NULL)
        other.stdin.close()
    assert run(tmp_path, "--input", source, *NULL) == 0
