"""The watch's thread answers and reports while the main threads wait in real collectives, or sleep."""

import os
import signal
import time

import torch
import torch.distributed as dist

from megatron_lite import calls, collectives
from megatron_lite.training import hang_watch
from megatron_lite.training.local_world import World


def _watched(limit_s, body, listen=False):
    """What the watch of this rank printed while `body(watch)` ran on all ranks."""
    printed, said = [], hang_watch.say
    hang_watch.say = lambda text, file=None: printed.append(text)
    watch = hang_watch.HangWatch(dist.distributed_c10d._get_default_store(), limit_s, listen=listen)
    try:
        body(watch)
        collectives.barrier(collectives.world(), purpose="the end of the test")
    finally:
        watch.close()
        hang_watch.say = said
    return printed


def _one_comes_late(watch):
    watch.note("iteration 3")
    if dist.get_rank() == 2:
        _oversleep(3.0)
    collectives.all_reduce(torch.ones(2), collectives.world(), purpose="losses")


def _oversleep(seconds):
    time.sleep(seconds)


def _report_of_a_late_rank():
    collectives.name_group(collectives.world(), "dp")
    return _watched(2.0, _one_comes_late)


def test_one_rank_reports_once_who_is_late_and_where_and_the_run_goes_on(world):
    """Also while the main thread of the one that reports is in gloo, without the interpreter's lock."""
    texts = [text for printed in world(3).run(_report_of_a_late_rank) for text in printed]
    assert len(texts) == 1, texts
    assert (
        "s of at most 2 in all_reduce for losses over dp (ranks 0-2; call 1 of it)\n  not there: rank 2\n" in texts[0]
    )
    assert "rank 2: iteration 3, has made no call yet; now in _oversleep (test_hang_watch.py:" in texts[0]
    assert "ranks 0-1: iteration 3, waits in all_reduce for losses" in texts[0]
    assert "waiting for nobody: rank 2." in texts[0]


def _wait_for_a_report(watch):
    """Until this rank has answered, and whoever asked has printed it."""
    deadline = time.monotonic() + 20
    while watch._answered == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(watch._patience + 0.1)


def _ask(watch):
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGUSR2)
    _wait_for_a_report(watch)


def _report_on_demand():
    before = signal.getsignal(signal.SIGUSR2)
    printed = _watched(4.0, _ask, listen=True)
    assert signal.getsignal(signal.SIGUSR2) == before
    return printed


def test_sigusr2_to_one_rank_has_it_report_of_all(world):
    printed = world(2).run(_report_on_demand)
    assert printed[0] == [] and len(printed[1]) == 1
    assert printed[1][0].startswith("\nHANG REPORT: asked for by SIGUSR2 to rank 1\n")
    assert "now in _wait_for_a_report (test_hang_watch.py:" in printed[1][0]


def _notes_of_calls():
    x, group = torch.ones(4), collectives.world()
    before = calls.seconds()
    handle = collectives.all_reduce(x, group, purpose="one", async_op=True)
    inside = calls.under_way()
    handle.wait()
    key = group.group_name
    first = calls.numbers()[key]
    if dist.get_rank() == 0:
        collectives.send(x, group, to=1, purpose="two").wait()
    else:
        collectives.receive(x, group, source=0, purpose="two").wait()
    last = calls.last_call().facts()
    return inside, calls.under_way(), calls.numbers()[key] - first, last["kind"], last["peer"], calls.seconds() > before


def test_calls_are_noted_while_they_last_and_sends_have_no_number(world):
    """Numbers that differ between ranks of one group would blame the wrong rank."""
    assert world(2).run(_notes_of_calls) == [([], [], 0, "send", 1, True), ([], [], 0, "receive", 0, True)]


def _facts_of_a_destroyed_group():
    side = dist.new_group([0, 1])
    collectives.barrier(side, purpose="a save")
    dist.destroy_process_group(side)
    return calls.last_call().facts()["ranks"], calls.last_call().facts()["purpose"]


def test_the_last_call_may_be_of_a_group_that_is_gone(world):
    """The thread that answers for a hung rank died of it."""
    assert world(2).run(_facts_of_a_destroyed_group) == [([], "a save")] * 2


def _on_a_device():
    """Calls return before they are done. Rank 1 is stuck in something else; rank 0 has made one call more."""
    group, printed = collectives.world(), []
    collectives.name_group(group, "dp")
    hang_watch.say = lambda text, file=None: printed.append(text)
    torch.cuda.is_available = lambda: True
    watch = hang_watch.HangWatch(dist.distributed_c10d._get_default_store(), 2.0, listen=False)
    for _ in range(3 - dist.get_rank()):
        with calls.Call(group, "all_reduce", "gradients"):
            pass
    _wait_for_a_report(watch)
    told = list(printed)
    watch.close()
    return told


def test_on_a_device_the_rank_that_has_begun_fewer_calls_is_missing():
    small = World(2)  # it is patched
    try:
        texts = [text for printed in small.run(_on_a_device) for text in printed]
    finally:
        small.close()
    assert len(texts) == 1
    call = "in all_reduce for gradients over dp (ranks 0-1; call 3 of it)"
    if "rank 0 has waited" in texts[0]:
        assert f"s of at most 2 {call}\n  not there: rank 1\n" in texts[0]
    else:  # rank 1 asked first
        assert f"  not there: nobody; all its ranks have begun it\n  not there: rank 1 {call}\n" in texts[0]
    assert "waiting for nobody: rank 1." in texts[0]
