"""The real script meets batches and machines that are at fault: verdicts, exit statuses, reports, and how it goes on.

Document 61 of the corpus holds token 250, at which the model of `poisoned_gpt.py` gives NaN: in the 15th iteration.
"""

import re

import numpy as np
import pytest
import torch

from megatron_lite.checkpointing import folders
from megatron_lite.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron_lite.training.report_metrics import read_metrics
from tests.e2e.launch import TINY, Finished, checkpoint_tensors, run
from tests.e2e.test_log_and_exit import scalars

pytestmark = pytest.mark.slow
POISONED = "tests/e2e/poisoned_gpt.py"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("corpus") / "corpus"
    numbers = np.random.default_rng(0)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in range(200):
        tokens = numbers.integers(1, 200, size=33)
        if document == 61:
            tokens[5] = 250
        builder.add_document(torch.tensor(tokens.astype(np.int64)), [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.fixture
def train(corpus):
    """Runs the poisoned script: flags as one text, and further words."""

    def start(flags: str, *words) -> Finished:
        tiny = [word for word in TINY if word != "--mock-data"]
        data = ("--data-path", corpus, "--split", "1,0,0", "--data-cache-path", corpus.with_name("cache"))
        return run(*tiny, *data, *flags.split(), *words, script=POISONED)

    return start


def _same(one, other):
    one, other = checkpoint_tensors(one), checkpoint_tensors(other)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_poisoned_batch_ends_with_16_then_17_and_is_left_out_by_the_third_start(train, tmp_path):
    """Repeated, run again behind its checkpoint, named by layer, sample and document, and given up."""
    save, tracker = tmp_path / "save", tmp_path / "rejected.txt"
    words = ("--save", save, "--load", save, "--result-rejected-tracker-filename", tracker)
    flags = "--train-iters 16 --save-interval 10"
    first = train(flags, *words)
    assert first.status == 16, first.err[-2000:]
    assert "lm loss is nan at iteration 15 (micro-batch 2)" in first.err
    assert "repeated on the same device and gave the same result" in first.err
    assert len(first.lines) == 14 and folders.read_tracker(save) == 14
    report = (save / "faults" / "iteration_0000015.txt").read_text()
    assert str(save / "faults" / "iteration_0000015.txt") in first.err and "samples 116, 117" in first.err
    assert "micro-batch 2: the output of decoder.layers.0.mlp (MLP of layer 1) holds" in report
    (origin,) = [line for line in report.splitlines() if re.search(r"documents? [\d, ]*\b61\b", line)]
    assert "sample 117:" in origin
    assert "iteration       14   lm loss 5." in report

    second = train(flags, *words)
    assert second.status == 17 and "the same device as before gave the same result" in second.err
    assert [line.split("status=")[1].split()[0] for line in tracker.read_text().splitlines()] == [
        "reproduced",
        "undecided",
        "rejected",
    ]
    third = train(flags, *words).ok()
    assert "skipped iteration 15" in third.out and third.lines[-1]["skipped samples"] == "8"


def test_after_a_rollback_the_run_is_one_that_never_took_the_batches(train, tmp_path):
    """The window reaches to batches that had been trained on: they are left out from the checkpoint on."""
    back, never = tmp_path / "back", tmp_path / "never"
    flags = "--train-iters 16 --save-interval 10 --hidden-dropout 0.1"
    done = train(f"{flags} --on-bad-loss rollback --bad-loss-window 2", "--save", back).ok()
    assert "loaded checkpoint" in done.out and "at iteration 10" in done.out
    assert [line["iteration"] for line in done.lines].count("11") == 2
    train(f"{flags} --iterations-to-skip 14 15", "--save", never).ok()
    assert _same(back, never)


def test_a_spike_is_bad_with_the_check_for_spikes_and_its_report_shows_the_largest_outputs(train, tmp_path):
    flags = "--train-iters 16 --poison-where output_layer --poison-factor 1e4 --on-bad-loss skip"
    flags += " --check-for-spiky-loss --spiky-loss-factor 2 --spiky-loss-window 5 --save-interval 100"
    done = train(flags, "--save", tmp_path).ok()
    assert [number for number, count in enumerate(done.values("number of skipped iterations"), 1) if count] == [15]
    assert sum(done.values("number of nan iterations")) == 0
    report = (tmp_path / "faults" / "iteration_0000015.txt").read_text()
    assert "more than 2 times the largest before" in report and "in output_layer (ColumnParallelLinear)" in report


def test_deterministic_runs_are_equal_bit_for_bit_and_check_their_replicas(train, tmp_path):
    flags = "--train-iters 4 --hidden-dropout 0.1 --attention-dropout 0.1 --deterministic-mode"
    flags += " --check-weight-hash-across-dp-replicas-interval 2 --save-interval 100"
    for name in ("a", "b"):
        done = train(flags, "--save", tmp_path / name).ok()
        assert [line for line in done.out.splitlines() if line.startswith(">>> Weight hashes")] == [
            f">>> Weight hashes match after {n} iterations..." for n in (0, 2, 4)
        ]
    assert _same(tmp_path / "a", tmp_path / "b")


def test_a_rollback_is_no_iteration(tmp_path):
    """It began behind a checkpoint whose iteration is one of --exit-interval, and the bad one was to be evaluated.

    The run left at once, at every start anew; and the weights of iteration 4 were evaluated as those of iteration 6.
    """
    save, curves = tmp_path / "save", tmp_path / "curves"
    flags = "--fault nan-loss --fault-iteration 6 --on-bad-loss rollback --exit-interval 4 --save-interval 100"
    flags += " --train-iters 12 --eval-interval 3 --tensorboard-log-interval 1 --bad-loss-window 2"
    words = [*TINY, *flags.split(), "--save", save, "--load", save, "--tensorboard-dir", curves, "--eval-iters", 1]
    run(*words, script="tests/e2e/faulty_gpt.py").ok()
    second = run(*words, script="tests/e2e/faulty_gpt.py").ok()
    assert [int(line["iteration"]) for line in second.lines] == [5, 7, 8]
    assert "exiting program at iteration 8" in second.out
    assert second.out.count("validation loss at iteration 6") == 1
    assert second.out.index("skipped iteration 6") < second.out.index("validation loss at iteration 6")
    assert list(scalars(curves)["lm loss"]) == [1, 2, 3, 4, 7, 8]
    assert list(read_metrics(save / "metrics.jsonl").train) == [1, 2, 3, 4, 7, 8]
