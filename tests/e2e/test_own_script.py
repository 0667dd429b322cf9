"""What a user's script may do beyond pretrain_gpt, and runs that only evaluate."""

import re

import pytest

from tests.e2e.launch import TINY, run

pytestmark = pytest.mark.slow

SCRIPT = "tests/e2e/own_script.py"


def evaluations(out):
    """What each validation line says: (where, loss)."""
    return re.findall(r"validation loss at (.*?) \| lm loss value: (\S+) ", out)


def test_what_is_no_loss_is_collected_after_each_evaluation(tmp_path):
    """The function was accepted and never called."""
    flags = "--train-iters 4 --eval-interval 2 --eval-iters 1".split()
    done = run(*TINY, *flags, "--tensorboard-dir", tmp_path / "tb", script=SCRIPT).ok()
    told = re.findall(r"collected (\d+) of shape \((\d+),\) at (\d+)", done.out)
    # 8 samples in micro-batches of 2: after iterations 2 and 4, and at the end on both held-out sets
    assert told == [("4", "2", "2"), ("4", "2", "4"), ("4", "2", "4"), ("4", "2", "4")]


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--train-batches 6 --train-iters 2", "the training data ended in iteration 2 of 2"),
        ("--train-batches 6 --train-iters 2 --iterations-to-skip 2", "the training data ended in iteration 2 of 2"),
        ("--train-iters 2 --eval-interval 1 --eval-iters 2 --valid-batches 6", "the evaluation data ended after 8"),
    ],
    ids=["training", "skipping", "evaluating"],
)
def test_a_loader_that_ends_too_early_is_named(flags, message):
    """Wherever the loop reads, the end of a user's loader is one sentence, not a bare StopIteration."""
    words = [*TINY, "--dataloader-type", "external", *flags.split()]
    done = run(*words, script=SCRIPT)
    assert done.status != 0, done.err
    assert "DataError" in done.err and message in done.err and "Traceback" not in done.err


def test_a_checkpoint_is_evaluated_without_the_flags_of_its_training(tmp_path):
    """--skip-train needs no length of a run, no learning rate and no optimizer; it ended in a TypeError. The loss is
    the one that the training run saw."""
    flags = "--eval-iters 2 --eval-interval 3".split()
    trained = run(*TINY, *flags, "--train-iters", 3, "--save", tmp_path / "c", "--save-interval", 3).ok()
    words = [word for word in TINY if word not in ("--lr", "1e-3", "--min-lr", "1e-4")]
    alone = run(*words, "--eval-iters", 2, "--skip-train", "--load", tmp_path / "c").ok()
    assert [where for where, _ in evaluations(alone.out)][-1] == "iteration 3 on test set"
    assert evaluations(alone.out)[-1] == evaluations(trained.out)[-1]
    assert not alone.lines
