"""What the watch over steps does where ranks could come to disagree, or where its file cannot be read."""

import math
from argparse import Namespace
from types import SimpleNamespace

import pytest

from megatron_lite.errors import CheckpointError, DataError, RankFailure
from megatron_lite.training.fault_guard import FaultGuard, _tracked
from megatron_lite.training.rerun import Phase, Rejection, Verdict
from megatron_lite.training.train_step import StepResult

BAD = Rejection(0, "gradients", "nan", math.nan, None, "rank 0: NaN in a gradient", "node", "cpu")


def _guard(found):
    guard = object.__new__(FaultGuard)
    guard.checks = SimpleNamespace(begin=lambda *_, **__: None, found=found)
    return guard


def _step(skipped, norm):
    return lambda checks, update: StepResult({"lm loss": 5.0}, skipped, 1e-3, norm, None)


def test_a_rejection_that_the_norm_did_not_carry_stops_this_rank():
    """The others have updated their weights: going on would train replicas that differ."""
    with pytest.raises(RankFailure, match="rank 0: NaN in a gradient, and the other ranks did not hear of it"):
        _guard([BAD])._run(3, _step(False, 1.0), Phase.INITIAL)


def test_a_step_that_the_loss_scale_left_out_is_no_rejection():
    result, found = _guard([])._run(3, _step(True, None), Phase.INITIAL)
    assert result.skipped and found == []


def test_a_step_that_was_left_out_by_a_rejection_is_one():
    assert _guard([BAD])._run(3, _step(True, None), Phase.INITIAL)[1] == [BAD]


def test_a_tracker_file_that_is_not_there_names_nothing_and_one_that_cannot_be_read_is_an_error(tmp_path):
    path = tmp_path / "rejected"
    assert _tracked(Namespace(result_rejected_tracker_filename=str(path))) == []
    path.mkdir()
    with pytest.raises(DataError, match="cannot be read"):
        _tracked(Namespace(result_rejected_tracker_filename=str(path)))


def test_where_the_state_cannot_be_saved_the_error_still_names_the_bad_step_and_its_report():
    """A full disk must not hide why the run ended."""

    def full():
        raise CheckpointError("cannot save to /x", why="no space is left", fix="delete something")

    guard = _guard([BAD])
    guard.args, guard._save = Namespace(save="/x", iteration=2), full
    with pytest.raises(CheckpointError) as error:
        guard._stop(3, [BAD], Verdict.REPRODUCED, f"{BAD.text}\nreport: /x/faults/iteration_0000003.txt")
    text = str(error.value)
    assert "NaN in a gradient" in text and "report: /x/faults" in text and "cannot save to /x" in text
    assert "no space is left" in text and "delete something" in text and "--iterations-to-skip 3" in text
