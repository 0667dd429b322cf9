"""Proves a schedule before it runs, and times it: every pass once, inputs before use, no deadlock, peak memory.

    check_schedule(make_schedule(4, 8), chunks=1)  ->  Proof(span=33.0, bubble=0.375, peaks=[4, 3, 2, 1], ...)

Time is simulated: a pass takes what `durations` says, messages take none (or `message_time`), a rank does its list in
order and waits for inputs. Two kinds of messages:

    free      a send never waits for its receiver: how the executor works
    blocking  a send ends when its receive has been posted, and a rank's next action waits for its sends. A receiver
              posts `depth` receives ahead on each channel, in the sender's order: the strictest backend

A channel is one direction of one pair of stages; the way round from the last stage to the first is one of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_lite.errors import ConfigError
from megatron_lite.pipeline_parallel.actions import Action, Kind, Schedule, receiver_of, sender_of

DURATIONS = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.INPUT_GRAD: 1.0, Kind.WEIGHT_GRAD: 1.0}


class ScheduleError(ConfigError):
    """A schedule that cannot work, with the rank and the action."""


@dataclass(frozen=True)
class Timed:
    """An action with the simulated time at which it ran."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Proof:
    """What is known of a schedule that works.

    span: simulated time from the first start to the last end. bubble: idle over busy time of the busiest rank. peaks:
    per rank, micro-batches whose activations live at once (each chunk counts apart). timeline: per rank.
    """

    span: float
    bubble: float
    peaks: list[int]
    timeline: list[list[Timed]]


def check_schedule(
    schedule: Schedule,
    chunks: int = 1,
    durations: Mapping[Kind, float] | None = None,
    message_time: float = 0.0,
    blocking_depth: int | None = None,
    num_microbatches: int | None = None,
) -> Proof:
    """Prove that a schedule completes.

    Args:
        durations: of one pass through one chunk.
        blocking_depth: None = sends are free; else receives posted ahead per channel with blocking sends.
        num_microbatches: to be found in the schedule; None = as many as rank 0 begins.
    Raises: ScheduleError if a pass is missing, doubled or out of order, or if ranks wait for each other.
    """
    _check_lists(schedule, chunks, num_microbatches)
    simulation = _Simulation(schedule, chunks, durations or DURATIONS, message_time, blocking_depth)
    timeline = simulation.run()
    span = max((timed[-1].end for timed in timeline if timed), default=0.0)
    busy = max((sum(t.end - t.start for t in timed) for timed in timeline), default=0.0)
    return Proof(span, span / busy - 1.0 if busy else 0.0, [peak_in_flight(actions) for actions in schedule], timeline)


def peak_in_flight(actions: Sequence[Action]) -> int:
    """Largest number of (micro-batch, chunk) between forward and the end of backward."""
    alive = peak = 0
    for action in actions:
        if action.kind is Kind.FORWARD:
            alive += 1
            peak = max(peak, alive)
        elif action.kind.ends_microbatch:
            alive -= 1
    return peak


def receive_depth(schedule: Schedule, chunks: int = 1) -> int:
    """The smallest number of receives posted ahead per channel with which blocking sends cannot deadlock."""
    longest = max(len(actions) for actions in schedule)
    for depth in range(1, longest + 1):
        try:
            _Simulation(schedule, chunks, DURATIONS, 0.0, depth).run()
        except ScheduleError:
            continue
        return depth
    raise ScheduleError("the schedule", why="its ranks wait for each other whatever is received ahead", fix="check it")


def _check_lists(schedule: Schedule, chunks: int, num_microbatches: int | None) -> None:
    microbatches = num_microbatches
    if microbatches is None:
        microbatches = 1 + max((a.microbatch for a in schedule[0]), default=-1)
    for rank, actions in enumerate(schedule):
        places: dict[Action, int] = {}
        for place, action in enumerate(actions):
            if action in places:
                raise ScheduleError(f"rank {rank}: {action} twice", why=f"at {places[action]} and {place}", fix="once")
            if not (0 <= action.microbatch < microbatches and 0 <= action.chunk < chunks):
                raise ScheduleError(
                    f"rank {rank}: {action}", why=f"there are {microbatches} micro-batches, {chunks} chunks", fix="-"
                )
            places[action] = place
        kinds = {action.kind for action in actions}
        for m in range(microbatches):
            for chunk in range(chunks):
                order = [places.get(Action(kind, m, chunk)) for kind in Kind if kind in kinds]
                if None in order or order != sorted(order, key=lambda p: -1 if p is None else p):
                    raise ScheduleError(
                        f"rank {rank}, micro-batch {m}, chunk {chunk}: passes at {order}",
                        why=f"each of {', '.join(k.value for k in Kind if k in kinds)} is due once, in this order",
                        fix="correct the function that made the schedule",
                    )
        if Kind.BACKWARD in kinds and kinds & {Kind.INPUT_GRAD, Kind.WEIGHT_GRAD}:
            raise ScheduleError(f"rank {rank} mixes B with I and W", why="B is both halves", fix="one or the other")


@dataclass
class _Simulation:
    schedule: Schedule
    chunks: int
    durations: Mapping[Kind, float]
    message_time: float
    depth: int | None
    done: dict[tuple[int, Action], float] = field(default_factory=dict)
    timeline: list[list[Timed]] = field(default_factory=list)

    def run(self) -> list[list[Timed]]:
        """Every rank's actions with their times; raises ScheduleError where nobody can go on."""
        ranks = range(len(self.schedule))
        self.timeline = [[] for _ in ranks]
        self.ready_at = [0.0 for _ in ranks]
        self.backward = _backward_kind(self.schedule)
        self.orders = self._channel_orders() if self.depth is not None else {}
        self.taken: dict[tuple[int, int, bool, bool], int] = {}
        moved = True
        while moved:
            moved = False
            for rank in ranks:
                while self._step(rank):
                    moved = True
        stuck = [rank for rank in ranks if len(self.timeline[rank]) < len(self.schedule[rank])]
        if stuck:
            waits = "; ".join(f"rank {r} at {self.schedule[r][len(self.timeline[r])]}" for r in stuck)
            kind = "free sends" if self.depth is None else f"blocking sends, {self.depth} receives ahead"
            raise ScheduleError(f"deadlock: {waits}", why=f"each waits for another ({kind})", fix="reorder the actions")
        return self.timeline

    def _step(self, rank: int) -> bool:
        """Do the rank's next action if its input is there and (blocking) its last result has been taken."""
        place = len(self.timeline[rank])
        if place == len(self.schedule[rank]):
            return False
        if self.depth is not None and place > 0 and not self._posted(rank, self.schedule[rank][place - 1]):
            return False
        action = self.schedule[rank][place]
        start = self.ready_at[rank]
        source = sender_of(action, rank, len(self.schedule), self.chunks, self.backward)
        if source is not None:
            sent = self.done.get((source.rank, source.action))
            if sent is None:
                return False
            start = max(start, sent + self.message_time)
            if self.depth is not None:
                channel = self._channel(source.rank, rank, source.forward)
                self.taken[channel] = self.taken.get(channel, 0) + 1
        end = start + self.durations[action.kind]
        self.done[rank, action] = self.ready_at[rank] = end
        self.timeline[rank].append(Timed(action, start, end))
        return True

    def _posted(self, rank: int, action: Action) -> bool:
        """Whether the receive for this action's result has been posted by its receiver."""
        target = receiver_of(action, rank, len(self.schedule), self.chunks)
        if target is None:
            return True
        channel = self._channel(rank, target.rank, target.forward)
        # The receiver has taken some of the channel's messages and has posted `depth` more.
        return self.orders[channel][action] < self.taken.get(channel, 0) + (self.depth or 0)

    def _channel(self, sender: int, receiver: int, forward: bool) -> tuple[int, int, bool, bool]:
        around = (sender > receiver) == forward
        return sender, receiver, forward, around

    def _channel_orders(self) -> dict[tuple[int, int, bool, bool], dict[Action, int]]:
        """Per channel the place of each message in the order in which they are sent."""
        orders: dict[tuple[int, int, bool, bool], dict[Action, int]] = {}
        for rank, actions in enumerate(self.schedule):
            for action in actions:
                target = receiver_of(action, rank, len(self.schedule), self.chunks)
                if target is not None:
                    order = orders.setdefault(self._channel(rank, target.rank, target.forward), {})
                    order[action] = len(order)
        return orders


def _backward_kind(schedule: Schedule) -> Kind:
    halves = any(action.kind is Kind.INPUT_GRAD for actions in schedule for action in actions)
    return Kind.INPUT_GRAD if halves else Kind.BACKWARD
