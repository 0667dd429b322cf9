"""Under torchrun: signals that end a run with and without a save, the clock, reports of stragglers, the heartbeat."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lite.checkpointing import folders
from tests.e2e.launch import ROOT, TINY, Finished, environment, torchrun

pytestmark = pytest.mark.slow
FAULTY = "tests/e2e/faulty_gpt.py"
LONG = "--train-iters 100000 --save-interval 100000".split()


def signalled(number: int, *flags: object) -> Finished:
    """Two ranks under torchrun, of which one gets the signal after a few iterations."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    words += [str(ROOT / "pretrain_gpt.py"), *TINY, *LONG, *map(str, flags)]
    process = subprocess.Popen(
        words, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    out, sent = [], False
    assert process.stdout is not None
    for line in process.stdout:
        out.append(line)
        if " iteration        4/" in line and not sent:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            subprocess.run(["kill", f"-{number}", children[0]], check=True)
            sent = True
    return Finished(process.wait(), "".join(out), "")


def test_leaving_in_order_on_a_signal_to_one_rank_ends_all_without_a_save(tmp_path):
    """Meanwhile the straggler report of each interval, and the heartbeat, which says that the run is not done."""
    flags = "--exit-signal-handler-for-training --log-straggler --straggler-ctrlr-port 0 --log-interval 2".split()
    beat = tmp_path / "beat.json"
    done = signalled(signal.SIGINT, *flags, "--heartbeat-file", beat, "--save", tmp_path / "save").ok()
    assert "Termination requested. Performing orderly shutdown." in done.out
    assert "exiting program after receiving SIGINT, without a save" in done.out
    assert folders.read_tracker(tmp_path / "save") is None and "saving checkpoint" not in done.out
    assert re.search(r" straggler report \| MnRtt/Rnk: [\d.]+ms/\d \| MxRtt/Rnk: [\d.]+ms/\d \| MnCpu/Rnk: ", done.out)
    content = json.loads(beat.read_text())
    assert content["doing"] == "has left before the end" and content["iteration"] >= 4


def test_another_exit_signal_to_one_rank_ends_all_after_a_save(tmp_path):
    """SIGHUP, by name; torchrun sees workers that end well."""
    flags = "--exit-signal-handler --exit-signal SIGHUP".split()
    done = signalled(signal.SIGHUP, *flags, "--save", tmp_path).ok()
    assert "exiting program after receiving SIGHUP." in done.out
    last = max(int(line["iteration"]) for line in done.lines)
    assert folders.read_tracker(tmp_path) == last >= 4


def test_the_clock_of_one_rank_ends_all_after_a_save(tmp_path):
    """Ranks start seconds apart; the limit must not leave one of them alone in the next step."""
    flags = "--exit-duration-in-mins 2 --started-minutes-ago 3".split()
    done = torchrun(2, *TINY, *LONG, *flags, "--save", tmp_path, script=FAULTY).ok()
    assert re.search(r"\[exiting program after 3\.\d+ minutes\] datetime: ", done.out)
    assert folders.read_tracker(tmp_path) == 1
