"""`progress.txt`: Megatron's lines, and the throughput over restarts that is computed from them."""

import datetime
from argparse import Namespace

import pytest

from megatron_lite.training import progress_file
from megatron_lite.training.progress_file import append_progress, saved_message


@pytest.fixture
def clock(monkeypatch):
    """The time of day, which a test moves."""

    class Clock(datetime.datetime):
        seconds = 0

        @classmethod
        def now(cls):
            return datetime.datetime(2026, 1, 1) + datetime.timedelta(seconds=cls.seconds)

    monkeypatch.setattr(progress_file, "datetime", Clock)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    return Clock


@pytest.fixture
def ranks(monkeypatch):
    """The number of ranks, which a test changes."""
    size = [2]
    monkeypatch.setattr(progress_file, "rank_and_world_size", lambda: (0, size[0]))
    return size


def arguments(tmp_path, samples=0):
    return Namespace(
        save=str(tmp_path), log_progress=True, consumed_train_samples=samples, seq_length=1000, decoder_seq_length=None
    )


def save(tmp_path, clock, seconds, operations, samples=0):
    clock.seconds = seconds
    message = saved_message(arguments(tmp_path, samples), 5, operations)
    append_progress(arguments(tmp_path), f"Saved checkpoint\t{message}")
    return dict(field.split(": ") for field in message.split("\t"))


def test_throughput_is_that_of_this_job_and_of_all_of_its_size(clock, ranks, tmp_path):
    """Two starts and three saves: operations since the start that counts, by its seconds and ranks. Time between jobs
    counts in the second number alone; a start with other ranks begins it anew."""
    append_progress(arguments(tmp_path), "Starting job")
    first = save(tmp_path, clock, 10, 40e12, samples=3_000_000)
    assert first["Job throughput"] == first["Cumulative throughput"] == "2.0 TFLOP/s/GPU"  # 40 / 10 s / 2 ranks
    assert first["Tokens (in billions)"] == "3.00" and first["Floating-point operations"] == "4.00e+13"
    clock.seconds = 30
    append_progress(arguments(tmp_path), "Starting job")
    second = save(tmp_path, clock, 40, 100e12)
    assert second["Job throughput"] == "3.0 TFLOP/s/GPU"  # 60 / 10 s / 2
    assert second["Cumulative throughput"] == "1.2 TFLOP/s/GPU"  # 100 / 40 s / 2
    ranks[0] = 4
    append_progress(arguments(tmp_path), "Starting job")
    third = save(tmp_path, clock, 50, 500e12)
    assert third["Job throughput"] == third["Cumulative throughput"] == "10.0 TFLOP/s/GPU"  # 400 / 10 s / 4
    lines = [line.split("\t") for line in (tmp_path / "progress.txt").read_text().splitlines()]
    assert lines[0] == ["2026-01-01 00:00:00", "Job ID: 77", "# GPUs: 2", "Starting job"]
    assert [line[3] for line in lines] == ["Starting job", "Saved checkpoint"] * 3


def test_nothing_is_written_without_the_flag(clock, ranks, tmp_path):
    append_progress(Namespace(save=str(tmp_path), log_progress=False), "Starting job")
    assert list(tmp_path.iterdir()) == []
