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


def signalled(number: int, *flags: object, everyone: bool = False) -> Finished:
    """Two ranks under torchrun, of which one gets the signal after a few iterations.

    Args:
        everyone: the other rank and torchrun too, which is started as examples/slurm starts it.
    """
    words = ["env", "--ignore-signal=USR1"] if everyone else []
    words += [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
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
            targets = [str(process.pid), *children] if everyone else children[:1]
            subprocess.run(["kill", f"-{number}", *targets], check=True)
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


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_ends_all_ranks_after_a_save_and_torchrun_well(number, tmp_path):
    """One of one's choice to one rank; and USR1 to all processes of the job, as scancel sends it: torchrun died of it
    and SLURM did not queue the job again."""
    flags = "--exit-signal-handler --exit-signal SIGHUP".split()
    done = signalled(number, *flags, "--save", tmp_path, everyone=number == signal.SIGUSR1).ok()
    assert f"exiting program after receiving {number.name}." in done.out
    last = max(int(line["iteration"]) for line in done.lines)
    assert folders.read_tracker(tmp_path) == last >= 4


def test_the_clock_of_one_rank_ends_all_after_a_save(tmp_path):
    """Ranks start seconds apart; the limit must not leave one of them alone in the next step."""
    flags = "--exit-duration-in-mins 2 --started-minutes-ago 3".split()
    done = torchrun(2, *TINY, *LONG, *flags, "--save", tmp_path, script=FAULTY).ok()
    assert re.search(r"\[exiting program after 3\.\d+ minutes\] datetime: ", done.out)
    assert folders.read_tracker(tmp_path) == 1
