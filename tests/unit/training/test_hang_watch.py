"""A report of a hang names who is waited for: ranks that did not come, that sleep, that answer no more."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_lite.training.hang_watch import HangWatch, causes, missing, report


def call(kind, number, *, ranks=(0, 1, 2, 3), group="dp", purpose="gradients", peer=None):
    facts = {"kind": kind, "purpose": purpose, "group": group, "key": group, "ranks": list(ranks)}
    return {**facts, "number": number if peer is None else None, "peer": peer, "seconds": 50.0}


def waiting(*calls, numbers=None):
    counted = numbers or {c["key"]: c["number"] for c in calls if c["number"]}
    return {"doing": "iteration 5", "waits": list(calls), "last": None, "numbers": counted, "place": "step (a.py:1)"}


def elsewhere(last, place):
    return {"doing": "iteration 5", "waits": [], "last": last, "numbers": {last["key"]: last["number"]}, "place": place}


def test_a_rank_that_made_fewer_calls_of_the_group_is_missing_and_is_told_where_it_is():
    stuck = call("all_reduce", 17)
    states = [waiting(stuck), waiting(stuck), elsewhere(call("all_reduce", 16), "load (my_data.py:40)"), waiting(stuck)]
    lines = report("rank 0 has waited 50 s", states, stuck)
    assert lines == [
        "HANG REPORT: rank 0 has waited 50 s in all_reduce for gradients over dp (ranks 0-3; call 17 of it)",
        "  not there: rank 2",
        "  ranks 0-1, 3: iteration 5, waits in all_reduce for gradients over dp (ranks 0-3; call 17 of it); now in "
        "step (a.py:1)",
        "  rank 2: iteration 5, in no call for 50 s; the last one was all_reduce for gradients over dp (ranks 0-3; "
        "call 16 of it); now in load (my_data.py:40)",
        "  waited for, and waiting for nobody: rank 2. Look there first.",
    ]


def test_a_rank_without_an_answer_is_missing():
    stuck = call("barrier", 3)
    lines = report("why", [waiting(stuck), None, waiting(stuck), None], stuck)
    assert (
        "  not there: ranks 1, 3" in lines
        and "  ranks 1, 3: NO ANSWER: ended, stopped, or its machine is gone" in lines
    )
    assert lines[-1].endswith("ranks 1, 3. Look there first.")


def test_who_waits_for_one_that_waits_is_not_the_cause():
    """A pipeline: stage 2 waits for 1, which waits for 0, which sleeps; the sums of dp wait for all of them."""
    pipe = {"ranks": (0, 1, 2), "group": "pp", "purpose": "activations"}
    first, second = call("receive", 0, peer=0, **pipe), call("receive", 0, peer=1, **pipe)
    states = [elsewhere(call("all_reduce", 4, ranks=(0, 1, 2)), ""), waiting(first), waiting(second)]
    assert missing(second, states) == [1] and missing(first, states) == [0]
    assert causes(states) == [0]
    assert "receive for activations over pp (ranks 0-2; with rank 1)" in report("why", states, second)[0]


def test_ranks_that_wait_for_each_other_in_different_calls_are_told_so():
    one, other = call("all_reduce", 5, ranks=(0, 1), group="tp"), call("all_reduce", 9, ranks=(0, 1), group="dp")
    states = [waiting(one, numbers={"tp": 5, "dp": 8}), waiting(other, numbers={"tp": 4, "dp": 9})]
    lines = report("why", states, one)
    assert lines[1] == "  not there: rank 1"
    assert lines[-1] == "  every rank waits for another one: they make their calls in different orders"


def test_a_call_that_all_ranks_have_begun_hangs_in_the_network():
    stuck = call("all_gather", 2, ranks=(0, 1))
    assert (
        report("why", [waiting(stuck), waiting(stuck)], stuck)[1] == "  not there: nobody; all its ranks have begun it"
    )


@pytest.mark.parametrize("hangs", [False, True])
def test_a_report_that_the_end_of_the_run_overtakes_accuses_nobody(capsys, hangs):
    """Asked for just before an orderly end: ranks that have ended give no answer. In a hang that is one."""
    watch = object.__new__(HangWatch)
    watch.rank, watch.size, watch._answered, watch._patience, watch._closing = 0, 2, 0, 60.0, True
    watch._store, watch._told = dist.HashStore(), None
    watch._limit, watch._doing, watch._since, watch._main = 60.0, "iteration 3", 0.0, None
    stuck = SimpleNamespace(facts=lambda: call("barrier", 3, ranks=(0, 1)))
    watch._ask("asked for by SIGUSR2 to rank 0", stuck if hangs else None)
    text = capsys.readouterr().err
    assert text.startswith("\nHANG REPORT: asked for by SIGUSR2 to rank 0")
    assert ("NO ANSWER" in text) == hangs and ("the run of this rank ended" in text) != hangs
