"""Timers of several ranks."""

import re

import torch.distributed as dist

from megatron_lite.timers import Timers


def _three_ranks_times():
    """Rank r takes (r + 1) "seconds"; the last rank has a timer of its own."""
    rank = dist.get_rank()
    timers = Timers(0, "minmax")
    timers("common").start(barrier=True)
    timers("common").stop()
    timers("common")._elapsed = rank + 1.0
    if rank == 1:
        timers("own").start()
        timers("own").stop()
        timers("own")._elapsed = 5.0
    named = timers.get_all_timers_string(["common", "own"], reset=False)
    return named, timers.get_all_timers_string(None)


def test_minimum_and_maximum_are_over_the_ranks_that_have_the_timer(world):
    for named, everything in world(2).run(_three_ranks_times):
        assert named == everything
        assert re.findall(r"(\S+) \.+: (.*)", named) == [
            ("common", "(1000.00, 2000.00)"),
            ("own", "(5000.00, 5000.00)"),
        ]
