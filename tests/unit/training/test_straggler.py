"""Times by fake clocks: a step computes for what is left without collectives and data; the slowest rank is named."""

import urllib.error
import urllib.request
from argparse import Namespace

import pytest
import torch

from megatron_lite.training.stage_data import NotNeeded
from megatron_lite.training.straggler import COMPUTE, ROWS, Straggler, straggler_line


class Time:
    """Clocks that stand still until they are told."""

    def __init__(self):
        self.now = self.cpu = self.in_calls = 0.0

    def passes(self, seconds, *, cpu=0.0, calls=0.0):
        self.now, self.cpu, self.in_calls = self.now + seconds, self.cpu + cpu, self.in_calls + calls


@pytest.fixture
def time():
    return Time()


@pytest.fixture
def make(time):
    made = []

    def straggler(**more):
        args = {"device": torch.device("cpu"), "disable_straggler_on_startup": False, "straggler_ctrlr_port": 0}
        args |= {"straggler_minmax_count": 1, **more}
        made.append(Straggler(Namespace(**args), lambda: time.now, lambda: time.cpu, lambda: time.in_calls))
        return made[-1]

    yield straggler
    for one in made:
        one.close()


def _data(time, seconds):
    while True:
        time.passes(seconds)
        yield "batch"


def test_a_step_is_its_time_without_collectives_and_data(make, time, capsys):
    straggler = make()
    data = straggler.timed(_data(time, 0.25))
    for _ in range(2):
        with straggler.step():
            assert next(data) == "batch"
            time.passes(1.0, cpu=0.9)
            time.passes(3.0, calls=3.0)
        time.passes(100.0)  # an evaluation, say
    straggler.report(2e12)
    line = capsys.readouterr().out
    assert "MnRtt/Rnk: 1000.00ms/0 | MxRtt/Rnk: 1000.00ms/0" in line
    assert "MxCpu/Rnk: 900.00ms/0" in line and "MxDtl/Rnk: 250.00ms/0" in line and "MxEtpt/Rnk: 2.00TF/0" in line
    with straggler.step():
        time.passes(2.0)
    straggler.report(2e12)
    assert "MxRtt/Rnk: 2000.00ms/0" in capsys.readouterr().out  # and nothing of the interval before


def test_the_port_switches_the_reports_at_the_next_interval(make, time, capsys):
    straggler = make(disable_straggler_on_startup=True)
    address = f"http://127.0.0.1:{straggler._server.server_address[1]}"

    def interval():
        with straggler.step():
            time.passes(1.0)
        straggler.report(1e12)
        return "MnRtt" in capsys.readouterr().out

    assert not interval()
    assert b"on from the next log interval" in urllib.request.urlopen(f"{address}/").read()
    with pytest.raises(urllib.error.HTTPError):  # a browser asks for it by itself, which must not switch back
        urllib.request.urlopen(f"{address}/favicon.ico")
    assert not interval() and interval()
    assert b"off from the next log interval" in urllib.request.urlopen(f"{address}/").read()
    assert interval() and not interval()


def test_a_port_that_is_taken_costs_the_switch_alone(make, time, capsys):
    port = make()._server.server_address[1]
    second = make(straggler_ctrlr_port=port)
    assert f"--straggler-ctrlr-port {port} cannot be had" in capsys.readouterr().err
    with second.step():
        time.passes(1.0)
    second.report(1e12)
    assert "MnRtt" in capsys.readouterr().out


def test_what_needs_no_data_is_not_wrapped(make):
    nothing = NotNeeded()
    straggler = make()
    assert straggler.timed(nothing) is nothing and straggler.timed(None) is None


def test_both_ends_are_listed_and_what_is_far_above_the_median_is_named():
    table = [[10.0, 9.0, 0.0, 2.0], [19.0, 9.0, 0.0, 1.0], [11.0, 8.0, 5.0, 1.9], [13.0, 9.0, 0.0, 1.5]]
    line = straggler_line(ROWS, table, 2)
    assert " | MnRtt/Rnk: 10.00ms/0, 11.00ms/2 | MxRtt/Rnk: 19.00ms/1, 13.00ms/3 | " in line
    assert "MxDtl/Rnk: 5.00ms/2, " in line and "MnEtpt/Rnk: 1.00TF/1, 1.50TF/3 | MxEtpt/Rnk: 2.00TF/0, 1.90TF/2" in line
    assert line.endswith(" | slow: rank 1 (1.7 x the median)")
    assert "slow" not in straggler_line((COMPUTE,), [[10.0], [11.0], [10.5]], 1)


def test_on_a_device_forward_passes_are_timed_between_events(make, monkeypatch):
    """The host's clock would show how fast the host launches."""
    log = []

    class Event:
        def __init__(self, enable_timing):
            self.at = None

        def record(self):
            self.at = len(log)
            log.append("event")

        def elapsed_time(self, other):
            return 7.0 * (other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    straggler = make(device=Namespace(type="cuda"))
    forward = straggler.around(lambda data, model: log.append("forward") or "result")
    with straggler.step():
        assert forward(None, None) == "result"
    assert log == ["event", "forward", "event"]
    assert [begin.elapsed_time(end) for begin, end in straggler._events] == [14.0]
    straggler.on = False
    forward(None, None)
    assert log[3:] == ["forward"]
