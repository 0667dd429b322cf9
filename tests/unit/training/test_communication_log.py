"""`--log-communication`: means over the steps of an interval, and nothing but steps."""

import pytest

from megatron_lite import collectives
from megatron_lite.training.communication_log import CommunicationLog, as_text


@pytest.fixture(autouse=True)
def counters(monkeypatch):
    """Counters of this test alone, of groups that do not exist."""
    monkeypatch.setattr(collectives, "COUNTERS", {("tp", "all_reduce", "column backward"): [7, 700]})
    monkeypatch.setattr(collectives, "group_sizes", lambda: {"tp": 4, "dp_cp": 2})
    return collectives.COUNTERS


def move(counters, key, calls, size):
    before = counters.get(key, [0, 0])
    counters[key] = [before[0] + calls, before[1] + size]


def test_rows_are_means_of_steps_without_what_was_moved_before_and_between(counters):
    log = CommunicationLog(True)
    for size in (1000, 3000):
        with log.step():
            move(counters, ("tp", "all_reduce", "column backward"), 2, size)
        move(counters, ("dp_cp", "all_gather", "evaluation"), 1, 10**6)
    with log.step():
        move(counters, ("dp_cp", "all_gather", "parameters"), 3, 600)
    assert log.rows() == [
        {
            "group": "dp_cp",
            "ranks": 2,
            "kind": "all_gather",
            "purpose": "parameters",
            "calls": 1.0,
            "bytes": 200.0,
            "sent_bytes": 100.0,
        },
        {
            "group": "tp",
            "ranks": 4,
            "kind": "all_reduce",
            "purpose": "column backward",
            "calls": 4 / 3,
            "bytes": 4000 / 3,
            "sent_bytes": pytest.approx(2 * 3 / 4 * 4000 / 3),
        },
    ]
    log.start_over()
    assert log.rows() == []


def test_the_table_has_a_line_for_each_purpose_and_a_sum(counters):
    log = CommunicationLog(True)
    with log.step():
        move(counters, ("tp", "all_reduce", "column backward"), 2, 2**20)
        move(counters, ("dp_cp", "all_reduce", "gradients"), 1, 2**20)
    lines = as_text(log.rows(), rank=3).splitlines()
    assert lines[0] == "communication of an iteration on rank 3, calls and MiB sent:"
    assert [line.split()[-2:] for line in lines[1:]] == [["1.0", "1.000"], ["2.0", "1.500"], ["3.0", "2.500"]]
    assert "tp, 4 ranks" in lines[2] and "column backward" in lines[2]


def test_switched_off_it_counts_nothing(counters):
    log = CommunicationLog(False)
    with log.step():
        move(counters, ("tp", "all_reduce", "column backward"), 2, 1000)
    assert log.rows() == []


def test_one_rank_moves_nothing_and_says_so():
    assert as_text([], rank=0) == "communication of an iteration on rank 0: none"
