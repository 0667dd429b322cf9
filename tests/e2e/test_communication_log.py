"""`--log-communication` of real runs: the bytes of the formulas, in log and metrics."""

import json
import re

import pytest

from tests.e2e.launch import TINY, torchrun

pytestmark = pytest.mark.slow


def test_a_data_parallel_run_logs_the_bytes_of_its_gradients_and_nothing_of_its_evaluations(tmp_path):
    """An all-reduce of all parameters a step, whatever is evaluated in between."""
    flags = "--train-iters 4 --log-interval 2 --eval-interval 1 --eval-iters 1 --log-communication".split()
    done = torchrun(2, *TINY, *flags, "--save-interval", 9, "--save", tmp_path).ok()
    held = int(re.search(r"model parallel rank \(0, 0\): (\d+)", done.out)[1])
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    tables = [row["communication"] for row in rows if "communication" in row]
    assert len(tables) == 3
    for table in tables:
        by_purpose = {row["purpose"]: row for row in table}
        assert set(by_purpose) == {"gradients", "losses"}
        gradients = by_purpose["gradients"]
        assert (gradients["group"], gradients["ranks"], gradients["kind"]) == ("dp_cp", 2, "all_reduce")
        assert (gradients["calls"], gradients["bytes"], gradients["sent_bytes"]) == (1, 4 * held, 4 * held)
    assert done.out.count("communication of an iteration on rank 1, calls and MiB sent:") == 3
    sent = re.findall(r"dp_cp, 2 ranks +all_reduce +gradients \.+ +(\S+) +(\S+)\n", done.out)
    assert sent == [("1.0", f"{4 * held / 2**20:.3f}")] * 3
