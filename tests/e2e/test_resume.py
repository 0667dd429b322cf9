"""A run that is killed and resumed is the run that was not, bit for bit."""

import os
import signal
import subprocess
import time

import pytest
import torch

from megatron_lite.checkpointing import folders
from tests.e2e.launch import TINY, checkpoint_tensors, command, environment, run

pytestmark = pytest.mark.slow

# dropout, accumulation of 4, a warm-up that is still running at every stop, an evaluation in between
FLAGS = [
    *TINY,
    *"--train-iters 20 --lr-warmup-iters 15 --attention-dropout 0.1 --hidden-dropout 0.1".split(),
    *"--eval-interval 4 --eval-iters 2 --log-params-norm".split(),
]


def tensorboard_steps(folder, tag):
    """The steps of a scalar as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [event.step for event in events.Scalars(tag)]


def test_C040_C137_twenty_iterations_equal_seven_killed_seven_and_six(tmp_path):
    """Any state that a checkpoint forgets (dropout's generator, the sample position, the schedule's clock, moments)
    shows as another loss in the last digit."""
    whole = run(*FLAGS, "--save", tmp_path / "whole", "--save-interval", 20).ok()

    save = tmp_path / "parts"
    parts = [*FLAGS, "--save", save, "--load", save, "--tensorboard-dir", tmp_path / "tb"]
    killed = subprocess.Popen(
        command(*parts, "--save-interval", 7), stdout=subprocess.PIPE, text=True, cwd=os.getcwd(), env=environment()
    )
    printed = []
    for line in killed.stdout:  # dies somewhere after the save at 7, in the middle of whatever it does
        printed.append(line)
        if "iteration        9/" in line:
            killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    second = run(*parts, "--save-interval", 7, "--exit-interval", 14).ok()
    third = run(*parts, "--save-interval", 100).ok()

    seen = {}
    for text in ("".join(printed), second.out, third.out):
        for line in text.splitlines():
            if " iteration " in line and "lm loss:" in line:
                number = int(line.split(" iteration ")[1].split("/")[0])
                seen[number] = line.split("learning rate")[1]  # everything that is a number of the training
    expected = {
        int(line.split(" iteration ")[1].split("/")[0]): line.split("learning rate")[1]
        for line in whole.out.splitlines()
        if " iteration " in line and "lm loss:" in line
    }
    assert list(second.values("iteration"))[0] == 8 and list(third.values("iteration"))[0] == 15
    assert seen == expected
    steps = tensorboard_steps(tmp_path / "tb", "lm loss")  # C137: steps go on, and none is there twice
    assert steps == sorted(set(steps)) and set(range(8, 21)) <= set(steps)
    assert tensorboard_steps(tmp_path / "tb", "lm loss vs samples") == [8 * step for step in steps]

    losses = whole.values("lm loss")
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.1, "a dead model would pass the rest"

    one, other = checkpoint_tensors(tmp_path / "whole"), checkpoint_tensors(save)
    assert one.keys() == other.keys() and len(one) > 20
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different


def test_C037_evaluations_continue_where_they_stopped(tmp_path):
    """C037: an evaluation after a resume that starts over reads other samples than the uninterrupted run."""
    whole = run(*FLAGS, "--save", tmp_path / "a", "--save-interval", 20).ok()
    save = tmp_path / "b"
    flags = [*FLAGS, "--save", save, "--load", save, "--save-interval", 6]
    first = run(*flags, "--exit-interval", 6).ok()
    second = run(*flags).ok()

    def validations(out: str) -> list[str]:
        return [line for line in out.splitlines() if line.startswith(" validation loss at iteration")]

    assert validations(first.out) + validations(second.out) == validations(whole.out)
    assert len(validations(whole.out)) >= 5


def test_C053_a_run_stopped_inside_its_ramp_goes_on_inside_it(tmp_path):
    """Batch sizes, samples, losses and evaluations after the resume are the uninterrupted run's, and a batch size that
    changes is saved first."""
    flags = [*TINY, *"--train-iters 8 --rampup-batch-size 2 2 18 --hidden-dropout 0.1".split()]
    flags += "--eval-interval 3 --eval-iters 1".split()
    whole = run(*flags, "--save", tmp_path / "a", "--save-interval", 100).ok()
    sizes = [int(size) for size in whole.values("global batch size")]
    assert sizes == [2, 2, 2, 4, 4, 6, 8, 8]  # 2, 4, 6 up to 6, 12, 18 samples
    assert folders.complete_iterations(tmp_path / "a") == [3, 5, 6, 8]
    save = tmp_path / "b"
    parts = [*flags, "--save", save, "--load", save, "--save-interval", 4]
    lines = run(*parts, "--exit-interval", 4).ok().lines + run(*parts).ok().lines
    for one, other in zip(whole.lines, lines, strict=True):
        for field in ("iteration", "consumed samples", "global batch size", "lm loss", "grad norm", "learning rate"):
            assert one[field] == other[field], (field, one, other)


def test_a_finished_run_says_so(tmp_path):
    """Starting over, or training beyond the end, would destroy the result."""
    flags = [*TINY, "--train-iters", 2, "--save", tmp_path, "--load", tmp_path, "--save-interval", 2]
    run(*flags).ok()
    start = time.time()
    again = run(*flags).ok()
    assert "nothing left to train" in again.out and not again.lines
    assert time.time() - start < 60


def test_resumes_with_changed_flags_are_told_refused_and_forced(tmp_path):
    """Another layout and log are told; another seed and clipping are refused by name, before the first step; and
    with --force they go on from where the run was."""
    flags = [*TINY, "--train-iters", 6, "--save", tmp_path, "--load", tmp_path, "--save-interval", 3]
    run(*flags, "--exit-interval", 3).ok()
    other = ["--seed", 5, "--clip-grad", 0.5]
    refused = run(*flags, *other)
    assert refused.status == 1 and not refused.lines
    assert "seed: 1234 there, 5 here (other samples, or in another order)" in refused.err
    assert "clip_grad: 1.0 there, 0.5 here (weights are updated in another way)" in refused.err

    told = run(*flags, "--micro-batch-size", 4, "--log-interval", 3, "--exit-interval", 5).ok()
    assert "micro_batch_size: 2 there, 4 here" in told.out and "log_interval: 1 there, 3 here" in told.out
    assert "NOTE" not in told.out.split("other arguments than")[1].split("checkpoint version")[0]

    forced = run(*flags, *other, "--ckpt-step", 3, "--force", "seed", "clip-grad").ok()
    assert "NOTE: other samples, or in another order" in forced.out
    assert forced.values("iteration")[0] == 4 and forced.values("consumed samples")[0] == 32
    assert "# force" in (tmp_path / "config.yaml").read_text(), "a later start asks again"
