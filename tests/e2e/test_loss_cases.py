"""Public bug reports about losses: masks, evaluation, NaN. Each is named by its row of our list of cases."""

import pytest
import torch

from megatron_lite.checkpointing import folders
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.training.train_step import average_losses
from tests.e2e.launch import TINY, checkpoint_tensors, run, torchrun

FAULTY = "tests/e2e/faulty_gpt.py"


def scalar(*values):
    return tuple(torch.tensor(float(v)) for v in values)


def test_C054_the_printed_loss_is_the_optimised_one():
    """One valid token of loss 4, three of loss 0: 1.0 per token in any micro-batching; 2.0 as the mean of means."""
    alone = ProcessGroupCollection()
    one_each = [{"lm loss": scalar(4, 1)}, {"lm loss": scalar(0, 3)}]
    together = [{"lm loss": scalar(4, 4)}]
    assert average_losses(one_each, alone, per_token=True)["lm loss"] == 1.0
    assert average_losses(together, alone, per_token=True)["lm loss"] == 1.0
    assert average_losses(one_each, alone, per_token=False)["lm loss"] == 2.0
    assert average_losses(together, alone, per_token=False)["lm loss"] == 1.0


@pytest.mark.slow
def test_C054_per_token_training_does_not_depend_on_the_micro_batch():
    """With uneven masks, losses, norms and so all weights agree for micro-batches of 1 and 4."""
    flags = [*TINY, *"--fault uneven-masks --calculate-per-token-loss --train-iters 3 --log-params-norm".split()]
    small = run(*flags, "--micro-batch-size", 1, script=FAULTY).ok()
    large = run(*flags, "--micro-batch-size", 4, script=FAULTY).ok()
    for field in ("lm loss", "grad norm", "params norm"):
        assert small.values(field) == pytest.approx(large.values(field), rel=1e-5), field
    plain = [flag for flag in flags if flag != "--calculate-per-token-loss"]
    unweighted = run(*plain, "--micro-batch-size", 1, script=FAULTY).ok()
    assert unweighted.values("lm loss") != pytest.approx(small.values("lm loss"), rel=1e-4), "masks were not uneven"


@pytest.mark.slow
def test_C059_C062_evaluation_is_one_number_over_the_stated_samples():
    """The same samples in 1 or 8 micro-batches a step, with uneven masks; and 3 batches of 8 are 24 samples."""
    flags = [*TINY, *"--train-iters 2 --skip-train --eval-iters 3 --eval-interval 1 --fault uneven-masks".split()]
    found = []
    for size in (1, 8):
        done = run(*flags, "--micro-batch-size", size, script=FAULTY).ok()
        assert "Evaluating on 24 samples" in done.out
        found.append(float(done.out.split("lm loss value: ")[1].split()[0]))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.slow
def test_C063_a_loss_of_zero_is_printed():
    """A batch without any token that counts: the field is there, with 0, and the weights stay finite."""
    done = run(*TINY, *"--train-iters 2 --fault no-tokens --log-params-norm".split(), script=FAULTY).ok()
    assert done.values("lm loss") == [0.0, 0.0] and done.values("grad norm") == [0.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("fault, found", [("nan-loss", "lm loss is nan"), ("nan-grad", "gradient")])
def test_C064_C065_a_poisoned_batch_stops_the_run_before_any_weight_changes(tmp_path, fault, found):
    """The message names the iteration and the guilty rank; looking after the reduction would blame every rank."""
    flags = [*TINY, *f"--train-iters 4 --fault {fault} --fault-call 5 --fault-rank 1 --save-interval 2".split()]
    done = torchrun(2, *flags, "--rerun-mode", "disabled", "--save", tmp_path, script=FAULTY)
    assert done.status != 0
    assert "rank 1" in done.err and found in done.err
    assert "iteration 3" in done.err and "ResultRejected" in done.err
    assert len(done.lines) == 2 and folders.read_tracker(tmp_path) == 2


@pytest.mark.slow
def test_C064_with_checks_off_a_bad_step_is_skipped_and_counted(tmp_path):
    """Weights and moments are bit-equal to before; the next step is finite."""
    flags = [
        *TINY,
        *"--train-iters 4 --fault nan-loss --fault-call 9 --log-params-norm".split(),
        *"--no-check-for-nan-in-loss-and-grad --save-interval 1 --save-retain-interval 1".split(),
    ]
    done = run(*flags, "--save", tmp_path, script=FAULTY).ok()
    assert done.values("number of skipped iterations") == [0, 0, 1, 0]
    assert done.values("number of nan iterations") == [0, 0, 1, 0]
    assert done.lines[2]["lm loss"] == "NAN" and done.values("consumed samples") == [8, 16, 24, 32]
    before, after, later = (checkpoint_tensors(tmp_path, step) for step in (2, 3, 4))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(value.isfinite().all() for value in later.values())
    assert any(not torch.equal(after[name], later[name]) for name in after)
    assert done.values("params norm")[1] == done.values("params norm")[2] != done.values("params norm")[3]
