"""Evaluations as a user sees them: several sets, whole sets, other batches, and data that change with the phase."""

import re

import pytest

from tests.e2e.launch import TINY, run, torchrun
from tests.e2e.test_log_and_exit import scalars
from tests.unit.datasets.corpora import numbered, write_corpus

pytestmark = pytest.mark.slow
CORPUS = [word for word in TINY if word != "--mock-data"]


def evaluations(out: str) -> list[tuple[str, str, float]]:
    """(set, where, loss) of each validation line."""
    found = re.findall(r" validation-?(\S*) loss at (.*?) \| lm loss value: (\S+) ", out)
    return [(name, where, float(loss)) for name, where, loss in found]


def test_C042_C043_two_named_sets_in_a_run_counted_in_samples(tmp_path):
    """The second set is shorter than one batch. The twin is counted in iterations, has two ranks and another batch for
    evaluation: the same evaluations, the same losses."""
    train, long, short = (
        write_corpus(tmp_path / name, numbered(count, 9, first))
        for name, count, first in (("train", 40, 1), ("long", 44, 2), ("short", 11, 100))
    )
    flags = ["--train-data-path", train, "--valid-data-path", long, short, "--vocab-size", 400]
    flags += "--eval-interval 1 --start-eval-at-iter 3 --full-validation --multiple-validation-sets".split()
    flags += ["--num-workers", 1, "--seq-length", 16]
    named = "--validation-set-names long short --save-interval 100".split()
    named += ["--tensorboard-dir", tmp_path / "tb", "--save", tmp_path / "save"]
    one = run(*CORPUS, *flags, *named, *"--train-samples 32 --lr-warmup-iters 0".split()).ok()
    two = torchrun(
        2,
        *CORPUS,
        *flags,
        *"--train-iters 4 --lr-warmup-iters 0 --eval-micro-batch-size 1 --eval-global-batch-size 6".split(),
    ).ok()
    found, twin = evaluations(one.out), evaluations(two.out)
    wheres = ["iteration 3", "iteration 4", "iteration 4 on validation set"]
    assert [(name, where) for name, where, _ in found] == [(n, w) for w in wheres for n in ("long", "short")]
    assert [(name, where) for name, where, _ in twin] == [(name, where) for name, where, _ in found]  # ends of paths
    assert [loss for *_, loss in twin] == pytest.approx([loss for *_, loss in found], rel=1e-5)
    long_loss, short_loss = found[0][2], found[1][2]
    assert abs(long_loss - short_loss) > 1e-3  # two sets, not one of them twice
    assert "Evaluating on 24 samples" in one.out and "Evaluating on 6 samples" in one.out

    tags = scalars(tmp_path / "tb")
    assert tags["lm loss validation-long"] == pytest.approx({3: long_loss, 4: found[2][2]}, rel=1e-5)
    assert tags["lm loss validation-short"] == pytest.approx({3: short_loss, 4: found[3][2]}, rel=1e-5)
    assert "lm loss validation" not in tags
    report = (tmp_path / "save" / "report.html").read_text()
    assert "lm loss (long), validation" in report and "lm loss (short), validation" in report


def test_a_phase_ends_the_run_and_the_next_reads_its_own_data(tmp_path):
    """Phases change the data of a long run; the second phase starts at the first of its samples, not at sample 16."""
    flags = [*CORPUS, *"--train-iters 4 --phase-transition-iterations 2 --save-interval 100 --split 1,0,0".split()]
    flags += ["--save", tmp_path / "save", "--load", tmp_path / "save"]
    first, second = (write_corpus(tmp_path / name, numbered(70, 9, at)) for name, at in (("a", 1), ("b", 5)))
    flags += ["--vocab-size", 600]
    one = run(*flags, "--data-path", first).ok()
    assert "[exiting program at iteration 2] datetime: " in one.out and one.values("iteration") == [1, 2]
    two = run(*flags, "--data-path", second).ok()
    assert two.values("iteration") == [3, 4] and two.values("consumed samples") == [24, 32]
    assert one.out.count("    train:      16\n") == two.out.count("    train:      16\n") == 1
