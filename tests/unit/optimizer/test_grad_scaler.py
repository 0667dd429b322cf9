"""Loss scales by the trace, and their resume."""

import pytest

from megatron_lite.errors import ConfigError, RankFailure
from megatron_lite.optimizer import ConstantGradScaler, DynamicGradScaler

# (Inf found, scale after it, hysteresis after it), window 3
TRACE = [
    (1, 2**32, 1),
    (0, 2**32, 1),
    (1, 2**31, 0),
    (1, 2**30, -1),
    (0, 2**30, -1),
    (0, 2**30, -1),
    (0, 2**31, 2),
    (1, 2**31, 1),
    (1, 2**30, 0),
]


def _scaler(**changes):
    settings = dict(
        initial_scale=2.0**32, min_scale=1.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=3, hysteresis=2
    )
    return DynamicGradScaler(**{**settings, **changes})


@pytest.mark.parametrize("resume_at", [None, 2, 5])
def test_the_scale_follows_the_trace_also_across_a_resume(resume_at):
    scaler = _scaler()
    for step, (found_inf, scale, hysteresis) in enumerate(TRACE):
        if step == resume_at:
            state = scaler.state_dict()
            scaler = _scaler()
            scaler.load_state_dict(state)
        scaler.update(bool(found_inf))
        assert (scaler.scale, scaler.state_dict()["hysteresis_tracker"]) == (scale, hysteresis)
        assert scaler.inv_scale * scaler.scale == 1.0


def test_the_scale_has_a_floor_and_gives_up_there_with_the_reason():
    scaler = _scaler(initial_scale=4.0, min_scale=1.0, hysteresis=1, patience=3)
    for expected in (2.0, 1.0, 1.0, 1.0):
        scaler.update(True)
        assert scaler.scale == expected
    with pytest.raises(RankFailure, match="3 times in a row at the smallest loss scale 1"):
        scaler.update(True)
    scaler = _scaler(initial_scale=1.0, hysteresis=1, patience=3)
    for found_inf in (True, True, False) * 5:  # a clean step in between: no reason to give up
        scaler.update(found_inf)


def test_a_constant_scale_never_moves():
    scaler = ConstantGradScaler(128.0)
    for found_inf in (True, False) * 10:
        scaler.update(found_inf)
    assert scaler.scale == 128.0 and scaler.state_dict() == {}


@pytest.mark.parametrize(
    "changes, flag",
    [
        (dict(min_scale=0.0), "--min-loss-scale"),
        (dict(min_scale=2.0**33), "--min-loss-scale"),
        (dict(growth_interval=0), "--loss-scale-window"),
        (dict(hysteresis=0), "--hysteresis"),
        (dict(initial_scale=0.0, min_scale=-1.0), "loss scale 0.0"),
    ],
)
def test_numbers_that_cannot_work_are_refused(changes, flag):
    with pytest.raises(ConfigError, match=flag):
        _scaler(**changes)
