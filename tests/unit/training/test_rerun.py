"""The pure part of the rerun machine: what the runs of a step say about devices, and the file of rejected results."""

import math
import re
from dataclasses import replace

import pytest

from megatron_lite.running_maximum import RunningMaximum
from megatron_lite.training.rerun import (
    Phase,
    Rejection,
    Variability,
    Verdict,
    causes,
    injected_value,
    judge_elsewhere,
    judge_repeat,
    rejected_iterations,
    same,
    tracker_line,
)

NAN = Rejection(1, "lm loss", "nan", math.nan, 2, "rank 1: lm loss is nan", "node7", "GPU-1")
SPIKE = replace(NAN, kind="spike", value=50.0)
GRADS = replace(NAN, rank=0, what="gradients", microbatch=None)


def test_a_second_run_that_is_credible_makes_the_first_a_transient_error():
    assert judge_repeat([NAN], []) is Verdict.TRANSIENT


def test_the_same_bad_result_twice_is_reproduced_and_another_one_is_unstable():
    """NaN is unequal to itself, and kernels that add in any order repeat a spike to a few digits only."""
    assert judge_repeat([NAN], [NAN]) is Verdict.REPRODUCED
    assert judge_repeat([SPIKE], [replace(SPIKE, value=50.0001)]) is Verdict.REPRODUCED
    for other in (replace(SPIKE, value=51.0), replace(SPIKE, microbatch=1), replace(SPIKE, rank=0), NAN):
        assert judge_repeat([SPIKE], [other]) is Verdict.UNSTABLE
    assert judge_repeat([SPIKE], [SPIKE, replace(SPIKE, rank=0)]) is Verdict.UNSTABLE


def test_only_another_device_can_exonerate_the_first():
    here, there = {1: "node7 GPU-1"}, {1: "node8 GPU-1"}
    assert judge_elsewhere([NAN], [], there) is Verdict.PERSISTENT
    assert judge_elsewhere([SPIKE], [NAN], there) is Verdict.PERSISTENT
    assert judge_elsewhere([NAN], [NAN], there) is Verdict.CORRECT
    assert judge_elsewhere([NAN], [NAN], {1: "node7 GPU-2"}) is Verdict.CORRECT
    assert judge_elsewhere([NAN], [NAN], here) is Verdict.UNDECIDED


def test_bad_gradients_behind_a_bad_loss_are_no_causes():
    """Otherwise every stage of a pipeline would be named for the NaN that the last one sent back."""
    assert causes([GRADS, NAN]) == [NAN]
    assert causes([GRADS]) == [GRADS]
    assert same([GRADS, NAN], [NAN])


def test_a_number_is_trained_on_when_it_is_correct_and_nan_never():
    assert NAN.fatal and replace(SPIKE, value=math.inf).fatal and not SPIKE.fatal


@pytest.mark.parametrize(
    "kind, verdicts",
    [
        ("transient_error", (Verdict.TRANSIENT, None)),
        ("persistent_error", (Verdict.REPRODUCED, Verdict.PERSISTENT)),
        ("correct_result", (Verdict.REPRODUCED, Verdict.CORRECT)),
    ],
)
def test_an_injected_fault_gets_the_verdict_of_its_name(kind, verdicts):
    def run(phase):
        value = injected_value(kind, phase, 5.5)
        return [] if value is None else [replace(NAN, kind="injected", value=value)]

    first = run(Phase.INITIAL)
    assert first and judge_repeat(first, run(Phase.IN_PLACE)) is verdicts[0]
    if verdicts[1] is not None:  # on the same device: injection stands for another one
        assert judge_elsewhere(first, run(Phase.ELSEWHERE), {1: "node7 GPU-1"}) is verdicts[1]


def test_the_running_maximum_warms_up_and_ignores_what_is_no_number():
    maximum = RunningMaximum(10.0, 3)
    for value in (1.0, 2.0, math.nan):
        maximum.add(value)
    assert not maximum.exceeded_by(1000.0)  # two numbers so far
    maximum.add(0.5)
    assert maximum.exceeded_by(20.1) and not maximum.exceeded_by(19.9) and not maximum.exceeded_by(math.nan)


def test_a_window_forgets_the_large_losses_of_the_start():
    maximum = RunningMaximum(2.0, 100, window=2)
    for value in (11.0, 3.0, 2.0):
        maximum.add(value)
    assert maximum.exceeded_by(6.1) and not maximum.exceeded_by(5.9)
    resumed = RunningMaximum(2.0, 100, window=2)
    resumed.load_state_dict(maximum.state_dict())
    assert resumed.exceeded_by(6.1) and not resumed.exceeded_by(5.9)
    resumed.add(1.0)
    assert resumed.exceeded_by(4.1)  # 3.0 has left the window


def test_variability_counts_identical_results_and_sizes_the_others():
    found = Variability()
    for pair in ((1.0, 1.0), (math.nan, math.nan), (1.0, 1.001), (2.0, 2.0 + 2e-6), (1.0, math.nan)):
        found.add(*pair)
    assert (found.compared, found.identical) == (5, 2) and found.largest == 1.0
    assert found.by_decade == {-4: 1, -7: 1, 0: 1}
    assert "5 results, 2 identical (40.0 %)" in str(found)
    assert Variability.of(found.as_dict()) == found
    assert str(Variability(3, 3)) == "3 results, 3 identical (100.0 %)"


def test_a_tracker_line_has_megatrons_keys_and_only_rejected_iterations_are_left_out():
    lines = [
        tracker_line("2026-01-01T00:00:00", "42", number, status, replace(NAN, text="two\nlines status=rejected "))
        for number, status in ((7, "reproduced"), (9, "rejected"), (8, "transient"), (3, "rejected"), (9, "rejected"))
    ]
    keys = re.findall(r"(\w+)=", lines[0].split(" message=")[0])
    assert keys == "ts node device jobID rank iteration status result".split()
    assert all(line.count("\n") == 1 for line in lines)
    assert rejected_iterations("".join(lines)) == [3, 9]
