"""The slow rank of three is named, though a step takes all of them equally long."""

from argparse import Namespace

import pytest
import torch
import torch.distributed as dist

from megatron_lite.training import straggler


def _report(minmax):
    """Three steps of 10 s by fake clocks; rank 1 computes for 8 of them, the others for 4 and wait."""
    now, in_calls, printed = [0.0], [0.0], []
    straggler.print_rank_last = printed.append
    args = {"device": torch.device("cpu"), "disable_straggler_on_startup": False, "straggler_ctrlr_port": 0}
    one = straggler.Straggler(
        Namespace(**args, straggler_minmax_count=minmax), lambda: now[0], lambda: 0.0, lambda: in_calls[0]
    )
    computing = 8.0 if dist.get_rank() == 1 else 4.0
    for _ in range(3):
        with one.step():
            now[0] += 10.0
            in_calls[0] += 10.0 - computing
    one.report(24e12)
    if dist.get_rank() == 0:
        one.wanted = False  # as the port does
    states = [one.on]
    one.report(24e12)
    one.close()
    return printed, [*states, one.on]


@pytest.mark.parametrize("minmax", [1, 2])
def test_the_slow_rank_is_named_and_all_ranks_follow_the_switch(world, minmax):
    results = world(3).run(_report, minmax)
    line = results[2][0][0]
    ends = "MnRtt/Rnk: 4000.00ms/0 | MxRtt/Rnk: 8000.00ms/1"
    assert (ends if minmax == 1 else "MxRtt/Rnk: 8000.00ms/1, 4000.00ms/2") in line
    assert "MnEtpt/Rnk: 1.00TF/1" in line and line.endswith("slow: rank 1 (2.0 x the median)")
    assert [states for _, states in results] == [[True, False]] * 3
