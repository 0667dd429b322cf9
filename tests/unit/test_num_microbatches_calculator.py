"""Batch sizes beyond the golden ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite import num_microbatches_calculator as nmb
from megatron_lite.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_calculator_is_left_behind():
    nmb.unset_num_microbatches_calculator()
    yield
    nmb.unset_num_microbatches_calculator()


def test_C053_ramp_of_126_increments():
    ramp = nmb.build_num_microbatches_calculator(0, [16, 8, 300000], 1024, 8, 2)
    assert ramp.rampup_samples_per_increment == pytest.approx(300000 / 126)
    consumed = [0, 2380, 2381, 150000, 300000, 300001]
    sizes = [16, 16, 24, 520, 1024, 1024]
    for seen, size in zip(consumed, sizes, strict=True):
        ramp.update(seen, consistency_check=False)
        assert ramp.get_current_global_batch_size() == size
        resumed = nmb.build_num_microbatches_calculator(0, [16, 8, 300000], 1024, 8, 2)
        resumed.update(seen, consistency_check=False)
        assert vars(resumed) == vars(ramp)


@given(
    unit=st.integers(1, 8),
    start=st.integers(1, 10),
    increments=st.integers(1, 20),
    increment=st.integers(1, 10),
    samples=st.integers(1, 10**6),
    seen=st.lists(st.integers(0, 2 * 10**6), min_size=2),
)
def test_a_ramp_only_grows_and_ends_at_the_full_size(unit, start, increments, increment, samples, seen):
    full = (start + increments * increment) * unit
    ramp = nmb.build_num_microbatches_calculator(0, [start * unit, increment * unit, samples], full, unit, 1)
    sizes = []
    for consumed in sorted(seen):
        ramp.update(consumed, consistency_check=True)
        sizes.append(ramp.get_current_running_global_batch_size())
        assert ramp.get() * unit == sizes[-1] >= start * unit
    assert sizes == sorted(sizes)
    ramp.update(samples, consistency_check=True)
    assert ramp.get_current_global_batch_size() == full


def test_steps_change_at_thresholds_in_tokens_rounded_down_to_samples():
    steps = nmb.build_num_microbatches_calculator(
        0, None, 32, 2, 2, step_batch_size_schedule="0:8, 1K:16 2.5K:32", seq_length=100
    )
    sizes = []
    for consumed in (0, 9, 10, 24, 25, 10**6):
        steps.update(consumed, consistency_check=True)
        sizes.append(steps.get_current_global_batch_size())
    assert sizes == [8, 8, 16, 16, 32, 32]
    assert nmb.parse_step_batch_size_schedule("0:384 3B:768,12B:1536")[2] == (12 * 10**9, 1536)


@pytest.mark.parametrize("schedule", ["1K:8", "0:8 1K:16 1K:32", "0:8 x:9", "0:0", "", "0:8 2K", "0:8 -1K:9"])
def test_bad_step_schedules_are_refused(schedule):
    with pytest.raises(ConfigError, match="--step-batch-size-schedule"):
        nmb.parse_step_batch_size_schedule(schedule)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(rampup_batch_size=[8, 8, 0]), "three positive numbers"),
        (dict(rampup_batch_size=[8, 0, 100]), "three positive numbers"),
        (dict(rampup_batch_size=[64, 8, 100]), "a smaller start"),
        (dict(rampup_batch_size=[128, 8, 100]), "a smaller start"),
        (dict(rampup_batch_size=[8, 9, 100]), "divides 56"),
        (dict(rampup_batch_size=[2, 2, 100]), "no rank would get a micro-batch"),
        (dict(rampup_batch_size=[8, 8]), "three numbers"),
        (dict(global_batch_size=63), "--decrease-batch-size-if-needed"),
        (dict(global_batch_size=0), "--global-batch-size 4"),
        (dict(global_batch_size=2), "no rank would get a micro-batch"),
        (dict(micro_batch_size=0), "--micro-batch-size 0"),
        (dict(step_batch_size_schedule="0:32", seq_length=8), "ends with 32"),
        (dict(step_batch_size_schedule="0:2 1K:64", seq_length=8), "no rank would get"),
        (dict(step_batch_size_schedule="0:64", seq_length=8, rampup_batch_size=[8, 8, 9]), "with --rampup"),
        (dict(step_batch_size_schedule="0:64", seq_length=8, decrease_batch_size_if_needed=True), "with --decrease"),
    ],
)
def test_sizes_that_cannot_be_run_are_refused_with_the_fix(changes, message):
    arguments = dict(rampup_batch_size=None, global_batch_size=64, micro_batch_size=2, data_parallel_size=2)
    with pytest.raises(ConfigError) as error:
        nmb.build_num_microbatches_calculator(0, **{**arguments, **changes})
    assert message in str(error.value)


def test_the_runs_calculator_is_made_once_and_can_be_replaced(capsys):
    nmb.init_num_microbatches_calculator(0, [8, 8, 100], 32, 2, 2)
    with pytest.raises(AssertionError, match="reconfigure"):
        nmb.init_num_microbatches_calculator(0, None, 32, 2, 2)
    nmb.update_num_microbatches(0)
    assert (nmb.get_num_microbatches(), nmb.get_micro_batch_size()) == (2, 2)
    nmb.update_num_microbatches(100, verbose=True)
    assert nmb.get_current_global_batch_size() == nmb.get_current_running_global_batch_size() == 32
    assert "global batch size 8 -> 32 after 100 samples" in capsys.readouterr().out
    nmb.reconfigure_num_microbatches_calculator(0, None, 64, 2, 2)
    assert nmb.get_num_microbatches() == 16
    nmb.destroy_num_microbatches_calculator()
    with pytest.raises(AssertionError, match="init_num_microbatches_calculator"):
        nmb.get_num_microbatches()
