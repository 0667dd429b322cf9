"""Timers: what they add up and how they print."""

import re

import pytest

from megatron_lite import timers as timers_module
from megatron_lite.errors import ConfigError
from megatron_lite.timers import Timers


class _Clock:
    """A clock that a test moves."""

    now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = _Clock()
    monkeypatch.setattr(timers_module, "time", clock)
    return clock


def _run(timers, name, clock, seconds, log_level=0):
    timers(name, log_level=log_level).start()
    clock.now += seconds
    timers(name).stop()


def test_a_timer_adds_up_until_it_is_read(clock):
    timers = Timers(0, "minmax")
    _run(timers, "a", clock, 1.5)
    _run(timers, "a", clock, 0.5)
    assert timers("a").elapsed(reset=False) == 2.0
    assert timers("a").elapsed() == 2.0
    assert timers("a").elapsed() == 0.0
    assert timers("a").active_time() == 2.0
    timers("a").start()
    clock.now += 3.0
    assert timers("a").elapsed() == 3.0  # running: read, reset and running on
    clock.now += 1.0
    timers("a").stop()
    assert timers("a").elapsed() == 1.0


def test_lines_have_megatrons_form(clock):
    timers = Timers(2, "minmax")
    _run(timers, "forward-backward", clock, 0.25, log_level=1)
    timers("never-ran")
    text = timers.get_all_timers_string(["forward-backward", "never-ran", "unknown"], normalizer=2)
    assert text == (
        "(min, max) time across ranks (ms):\n    forward-backward ...............................: (125.00, 125.00)"
    )
    assert len(re.search(r"forward-backward \.+", text)[0]) == 48
    assert timers.get_all_timers_string(["forward-backward"]) is None  # it was reset


def test_the_other_two_options(clock):
    for option, expected in (
        ("max", "max time across ranks (ms):\n    a " + "." * 46 + ": 10.00"),
        ("all", "times across ranks (ms):\n    a:\n        rank  0: 10.00"),
    ):
        timers = Timers(0, option)
        _run(timers, "a", clock, 0.01)
        assert timers.get_all_timers_string(None) == expected


def test_timers_above_the_level_do_nothing(clock, capsys):
    timers = Timers(0, "minmax")
    _run(timers, "detail", clock, 1.0, log_level=2)
    assert timers.get_all_timers_string(None) is None
    timers.log(None)
    assert capsys.readouterr().out == ""
    with pytest.raises(RuntimeError, match="--timing-log-level"):
        timers("detail").elapsed()


def test_tensorboard_gets_seconds_and_the_old_tag(clock):
    written = []

    class Writer:
        def add_scalar(self, *scalar):
            written.append(scalar)

    timers = Timers(1, "minmax")
    _run(timers, "non-tensor-parallel-grads-all-reduce", clock, 0.5, log_level=1)
    timers.write(["non-tensor-parallel-grads-all-reduce"], Writer(), 7, normalizer=5, reset=False)
    tags = ["non-tensor-parallel-grads-all-reduce-time", "layernorm-grads-all-reduce-time"]
    assert written == [(tag, pytest.approx(0.1), 7) for tag in tags]
    timers.write(None, None, 7)  # a rank that does not write takes part all the same
    assert len(written) == 2


def test_misuse_is_told():
    with pytest.raises(ConfigError, match="--timing-log-level 3"):
        Timers(3, "max")
    with pytest.raises(ConfigError, match="--timing-log-option mean"):
        Timers(0, "mean")
    timers = Timers(0, "max")
    timers("a").start()
    with pytest.raises(AssertionError, match="a is running"):
        timers("a").start()
    with pytest.raises(AssertionError, match="level 0, not 1"):
        timers("a", log_level=1)
