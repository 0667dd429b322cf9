"""A rank that fails in the middle of a step ends the job, soon, and its own error is the one that is read."""

import re
import time

import pytest

from tests.e2e.launch import TINY, torchrun

pytestmark = pytest.mark.slow

FAULTY = "tests/e2e/faulty_gpt.py"
LAYOUTS = {
    "data parallel": ["--overlap-grad-reduce"],
    "tensor parallel": ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
}


def lost(fault: str, rank: int, layout: str) -> str:
    """Standard error of a job of two whose `rank` fails in its third forward pass. It must not take long to end."""
    flags = [*TINY, *"--train-iters 1000 --log-interval 1000".split(), *LAYOUTS[layout]]
    flags += ["--fault", fault, "--fault-call", "3", "--fault-rank", str(rank)]
    start = time.monotonic()
    done = torchrun(2, *flags, script=FAULTY, timeout=120)
    assert done.status != 0
    assert time.monotonic() - start < 90  # far below --distributed-timeout-minutes 10; most of it is start-up
    return done.err


@pytest.mark.parametrize(
    ("fault", "rank", "layout"),
    [("raise", 1, "data parallel"), ("raise-in-backward", 0, "tensor parallel")],
)
def test_a_rank_that_raises_is_heard_before_those_that_lost_it(fault, rank, layout):
    """The witness's "connection closed by peer" above the cause sends people to the wrong rank."""
    err = lost(fault, rank, layout)
    assert err.count("Traceback (most recent call last)") >= 1
    assert "ValueError: this rank has had enough" in err
    before = err[: err.index("ValueError: this rank has had enough")]
    assert "PeerLost" not in before and "losed by peer" not in before
    assert before.count("Traceback (most recent call last)") == 1, before
    assert re.search(rf"Root Cause.*?rank +: {rank} ", err, re.S)


@pytest.mark.parametrize(
    ("fault", "rank", "layout", "status"),
    [("exit", 1, "data parallel", "17"), ("kill", 0, "tensor parallel", "-9")],
)
def test_a_rank_that_vanishes_is_named_as_the_cause(fault, rank, layout, status):
    """It cannot say a word itself; the others must not be taken for the cause."""
    err = lost(fault, rank, layout)
    cause = re.search(r"Root Cause.*?rank +: (\d+) .*?exitcode +: (-?\d+) ", err, re.S)
    assert cause and (int(cause[1]), cause[2]) == (rank, status), err
    # The other rank holds its message back until the launcher ends it; on a busy machine it may come to say it.
    assert "losed by peer" not in err or "why: another rank of the group has ended" in err, err


def test_a_rank_that_sleeps_is_named_before_the_timeout_ends_the_run_in_bounded_time():
    """Ten minutes of silence, then "timed out" on every rank but the one that sleeps, told nobody where to look."""
    flags = [*TINY, *"--train-iters 1000 --log-interval 1000 --distributed-timeout-seconds-after-init 4".split()]
    start = time.monotonic()
    done = torchrun(2, *flags, *"--fault sleep --fault-call 5 --fault-rank 1".split(), script=FAULTY, timeout=120)
    assert done.status != 0 and time.monotonic() - start < 60  # 4 s, 5 s for the backend to end it, start-up
    assert re.search(
        r"HANG REPORT: rank 0 has waited \d s of at most 4 in all_reduce for gradients over dp_cp "
        r"\(ranks 0-1; call \d+ of it\)\n"
        r"  not there: rank 1\n"
        r"  rank 0: iteration 3, waits in all_reduce for gradients .*\n"
        r"  rank 1: iteration 3, in no call for \d s; .* now in forward_step \(faulty_gpt\.py:\d+\)\n"
        r"  waited for, and waiting for nobody: rank 1\.",
        done.err,
    ), done.err
    assert done.err.count("HANG REPORT:") == 1
    assert "RankFailure: rank 0: all_reduce for gradients" in done.err or "PeerLost: rank 0: all_red" in done.err
