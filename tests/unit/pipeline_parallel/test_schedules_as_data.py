"""Schedules: the lists as published, and proofs that they complete, in what time, with how much alive."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.pipeline_parallel.actions import (
    Action,
    B,
    F,
    I,
    W,
    gpipe,
    grad_sync_points,
    interleaved,
    make_schedule,
    one_f_one_b,
    param_sync_points,
    warmup_of,
)
from megatron_lite.pipeline_parallel.schedule_check import (
    ScheduleError,
    check_schedule,
    peak_in_flight,
    receive_depth,
)


def text(actions):
    return " ".join(map(str, actions))


def legal_groups(stages, microbatches):
    """Group sizes that an interleaved schedule takes."""
    sizes = range(stages, microbatches + 1)
    return [n for n in sizes if microbatches % n == 0 or microbatches % n >= stages]


def test_1f1b_as_published():
    """Narayanan et al. 2021, figure 4 (top) for four stages and eight micro-batches."""
    assert text(one_f_one_b(4, 8, 0)) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"
    assert text(one_f_one_b(4, 8, 3)) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"


def test_interleaved_as_published():
    """Two stages of two chunks: the fourth virtual micro-batch is the second chunk's second."""
    expected = "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3"
    assert text(interleaved(2, 2, 4, 0)) == expected
    assert text(interleaved(2, 2, 4, 1)) == "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3"
    assert [warmup_of(4, 8, rank, 2, 4) for rank in range(4)] == [10, 8, 6, 4]
    assert [warmup_of(2, 5, rank, 2, 3) for rank in range(2)] == [5, 3]


@pytest.mark.parametrize(
    ("stages", "chunks", "microbatches", "group", "span"),
    [(4, 1, 8, None, 33), (4, 2, 8, 4, 28.5), (4, 4, 8, 4, 26.25), (8, 1, 8, None, 45), (2, 2, 5, 3, 16.5)],
)
def test_simulated_time_is_the_formula(stages, chunks, microbatches, group, span):
    """M (f + g) + (p - 1) (f + g) / V, with f = 1 and g = 2 for a rank's whole share of a micro-batch."""
    schedule = make_schedule(stages, microbatches, chunks, group)
    proof = check_schedule(schedule, chunks, durations={F: 1 / chunks, B: 2 / chunks})
    assert proof.span == pytest.approx(span)
    if group != 3:
        assert proof.bubble == pytest.approx((stages - 1) / (chunks * microbatches))


@pytest.mark.parametrize("stages", range(2, 9))
def test_every_1f1b_and_zero_bubble_schedule(stages):
    """For up to 32 micro-batches: complete, free of deadlock under blocking sends, peaks and times as the formulas."""
    for microbatches in range(1, 33):
        schedule = make_schedule(stages, microbatches)
        proof = check_schedule(schedule, blocking_depth=1, num_microbatches=microbatches)
        assert proof.peaks == [min(stages - rank, microbatches) for rank in range(stages)]
        assert proof.span == pytest.approx(3 * (microbatches + stages - 1))
        halves = make_schedule(stages, microbatches, zero_bubble=True)
        proof = check_schedule(halves, blocking_depth=1, num_microbatches=microbatches)
        assert max(proof.peaks) == min(stages, microbatches)
        if microbatches >= stages:  # Qi et al. 2023, table 1: a bubble of (p - 1)(f + i - w) instead of (p - 1)(f + g)
            assert proof.span == pytest.approx(3 * microbatches + (stages - 1))


@pytest.mark.slow
@pytest.mark.parametrize("stages", range(2, 9))
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_every_interleaved_schedule(stages, chunks):
    """Every number of micro-batches up to 32 with every legal group size; peaks are one more than the warm-up."""
    for microbatches in range(stages, 33):
        for group in legal_groups(stages, microbatches):
            schedule = make_schedule(stages, microbatches, chunks, group)
            proof = check_schedule(schedule, chunks, num_microbatches=microbatches)
            total = microbatches * chunks
            warmups = [warmup_of(stages, microbatches, rank, chunks, group) for rank in range(stages)]
            assert proof.peaks == [min(w + 1, total) for w in warmups]


@given(st.integers(2, 6), st.integers(1, 4), st.integers(1, 24), st.data())
def test_sends_may_block(stages, chunks, microbatches, data):
    """Enough receives posted ahead let every schedule run with sends that block; a ring of p stages needs few."""
    group = None
    if chunks > 1:
        groups = legal_groups(stages, microbatches)
        if not groups:
            return
        group = data.draw(st.sampled_from(groups))
    schedule = make_schedule(stages, microbatches, chunks, group)
    depth = receive_depth(schedule, chunks)
    check_schedule(schedule, chunks, blocking_depth=depth)
    assert depth <= max(1, (group or stages) - stages + 2)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 24))
def test_evaluation_runs_every_pass_once(stages, chunks, microbatches):
    """Forward only: proven like training; nothing is kept."""
    schedule = make_schedule(stages, microbatches, chunks, evaluate=True)
    check_schedule(schedule, chunks, num_microbatches=microbatches)
    assert all(action.kind is F for actions in schedule for action in actions)


def test_gpipe_keeps_everything_alive():
    """The reference: same bubble as 1F1B, every micro-batch in flight."""
    schedule = [gpipe(4, 8, rank) for rank in range(4)]
    proof = check_schedule(schedule)
    assert (proof.span, proof.peaks) == (33, [8] * 4)


def test_messages_take_time():
    """A message of half a forward pass delays each hop of the ramp-up and of the ramp-down, and nothing in between."""
    times = [check_schedule(make_schedule(4, 16), message_time=t).span for t in (0.0, 0.5)]
    assert times[1] - times[0] >= 6 * 0.5


BROKEN = {
    "a pass is missing": ([[Action(F, 0), Action(B, 0), Action(F, 1)]], "due once"),
    "backward before forward": ([[Action(B, 0), Action(F, 0)]], "due once"),
    "twice": ([[Action(F, 0), Action(F, 0), Action(B, 0)]], "twice"),
    "weights before inputs": ([[Action(F, 0), Action(W, 0), Action(I, 0)]], "due once"),
    "both kinds of backward": ([[Action(F, 0), Action(B, 0), Action(I, 0), Action(W, 0)]], "mixes"),
    "no such chunk": ([[Action(F, 0, 1), Action(B, 0, 1)]], "chunks"),
    "a circle": (
        [
            [Action(F, 0), Action(B, 0), Action(F, 1), Action(B, 1)],
            [Action(F, 0), Action(F, 1), Action(B, 0), Action(B, 1)],
        ],
        "deadlock: rank 0 at B0; rank 1 at F1",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_schedules_are_found(name):
    """Each with the rank and the action in the message."""
    schedule, message = BROKEN[name]
    with pytest.raises(ScheduleError, match=message):
        check_schedule(schedule)


def test_blocking_sends_can_deadlock():
    """Two chunks in groups twice the stages: the way round needs receives ahead, and the checker knows."""
    schedule = make_schedule(4, 8, 2, 8)
    assert receive_depth(schedule, 2) > 1
    with pytest.raises(ScheduleError, match="blocking sends, 1 receives ahead"):
        check_schedule(schedule, 2, blocking_depth=1)


def test_gathers_and_reductions_meet_on_all_stages():
    """Four stages of four chunks, eight micro-batches: the passes at which parameters and gradients move, per rank."""
    expected_gathers = {0: {4: 2, 8: 3}, 1: {3: 2, 7: 3}, 2: {2: 2, 6: 3}, 3: {1: 2, 5: 3}}
    expected_sums = {0: {19: [3], 23: [2], 27: [1], 31: [0]}, 1: {20: [3], 24: [2], 28: [1], 31: [0]}}
    for rank in range(4):
        actions = interleaved(4, 4, 8, rank)
        forward = [place for place, action in enumerate(actions) if action.kind is F]
        backward = [place for place, action in enumerate(actions) if action.kind is B]
        gathers = param_sync_points(actions, rank, 4)
        assert {forward.index(place): chunk for place, chunk in gathers.items()} == expected_gathers[rank]
        sums = grad_sync_points(actions, rank, aligned=True)
        if rank in expected_sums:
            assert {backward.index(place): chunks for place, chunks in sums.items()} == expected_sums[rank]
        at_once = grad_sync_points(actions, rank, aligned=False)
        assert {backward.index(place): chunks for place, chunks in at_once.items()} == expected_sums[0]


def test_peak_counts_weight_gradients_too():
    """A micro-batch whose weight gradients wait still has its activations."""
    assert peak_in_flight([Action(F, 0), Action(I, 0), Action(F, 1), Action(W, 0)]) == 2
    assert peak_in_flight([Action(F, 0), Action(I, 0), Action(W, 0), Action(F, 1)]) == 1
