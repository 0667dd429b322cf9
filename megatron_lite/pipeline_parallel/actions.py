"""A schedule is a list of actions for each pipeline rank. Pure functions, no torch.

    1F1B, 3 stages, 4 micro-batches          F forward, B backward, I and W the two halves of B, a.b: chunk b
    rank 0   F0 F1 F2 B0 F3 B1 B2 B3         in flight at most 3
    rank 1   F0 F1 B0 F2 B1 F3 B2 B3                           2
    rank 2   F0 B0 F1 B1 F2 B2 F3 B3                           1

    interleaved, 2 stages, 2 chunks each, 4 micro-batches, groups of 2
    rank 0   F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 ...       a micro-batch goes rank 0, 1, then 0, 1 again

Messages follow from the actions: a forward pass hands its output to the next stage's (of the last stage: to the first
stage's next chunk), a backward pass hands its input gradient back the same way (`sender_of`). `schedule_check` proves a
schedule and times it, `executor` runs it. A new schedule is one function here.

Sources: Huang et al. 2019 (GPipe), Narayanan et al. 2021 (1F1B, interleaved), Qi et al. 2023 (zero bubble, ZB-H1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from megatron_lite.errors import ConfigError


class Kind(Enum):
    """What is done with a micro-batch.

    INPUT_GRAD and WEIGHT_GRAD are the two halves of BACKWARD: the first is what the stage before waits for.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"

    __hash__ = object.__hash__  # Enum's own is a Python function: members are singletons, and proofs hash them a lot

    @property
    def gives_input_grad(self) -> bool:
        """Whether the stage before receives something from it."""
        return self in (Kind.BACKWARD, Kind.INPUT_GRAD)

    @property
    def ends_microbatch(self) -> bool:
        """Whether the micro-batch's activations are free after it and its weight gradients complete."""
        return self in (Kind.BACKWARD, Kind.WEIGHT_GRAD)


class Action(NamedTuple):
    """One pass of one micro-batch through one of this rank's model chunks."""

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD  # noqa: E741
Schedule = list[list[Action]]  # per pipeline rank


@dataclass(frozen=True)
class Message:
    """What a pass needs from another rank: the result of `action` there. forward: an activation, else a gradient."""

    rank: int
    action: Action
    forward: bool


def sender_of(action: Action, rank: int, stages: int, chunks: int, backward: Kind = B) -> Message | None:
    """Where the input of an action comes from; None where nothing is received.

    Args:
        backward: the kind that hands gradients back in this schedule: BACKWARD or INPUT_GRAD.
    """
    if action.kind is F:
        if rank > 0:
            return Message(rank - 1, action, True)
        return Message(stages - 1, Action(F, action.microbatch, action.chunk - 1), True) if action.chunk > 0 else None
    if action.kind.gives_input_grad:
        if rank < stages - 1:
            return Message(rank + 1, Action(backward, action.microbatch, action.chunk), False)
        if action.chunk < chunks - 1:
            return Message(0, Action(backward, action.microbatch, action.chunk + 1), False)
    return None


def receiver_of(action: Action, rank: int, stages: int, chunks: int) -> Message | None:
    """Who takes the result of an action, and for which action; None where it is not sent."""
    if action.kind is F:
        if rank < stages - 1:
            return Message(rank + 1, action, True)
        return Message(0, Action(F, action.microbatch, action.chunk + 1), True) if action.chunk < chunks - 1 else None
    if action.kind.gives_input_grad:
        if rank > 0:
            return Message(rank - 1, action, False)
        if action.chunk > 0:
            return Message(stages - 1, Action(action.kind, action.microbatch, action.chunk - 1), False)
    return None


# -- the schedules -------------------------------------------------------------------------------------------------


def no_pipelining(num_microbatches: int, forward_only: bool = False) -> list[Action]:
    """One stage: backward follows each forward at once, so that one micro-batch's activations live at a time."""
    kinds = [F] if forward_only else [F, B]
    return [Action(kind, microbatch) for microbatch in range(num_microbatches) for kind in kinds]


def gpipe(stages: int, num_microbatches: int, rank: int) -> list[Action]:
    """All forward, then all backward: the reference that keeps every micro-batch alive."""
    return [Action(kind, m) for kind in (F, B) for m in range(num_microbatches)]


def warmup_of(stages: int, num_microbatches: int, rank: int, chunks: int = 1, group_size: int | None = None) -> int:
    """Forward passes before a rank's first backward (the pair's own forward not counted)."""
    if chunks == 1:
        return min(stages - 1 - rank, num_microbatches)
    group = group_size or stages
    return min(2 * (stages - 1 - rank) + (chunks - 1) * group, num_microbatches * chunks)


def one_f_one_b(stages: int, num_microbatches: int, rank: int) -> list[Action]:
    """1F1B without interleaving: a rank goes back as soon as it can, so that `stages - rank` are in flight at most."""
    return _alternate(
        [Action(F, m) for m in range(num_microbatches)],
        [Action(B, m) for m in range(num_microbatches)],
        warmup_of(stages, num_microbatches, rank),
    )


def schedule_table(num_microbatches: int, chunks: int, group_size: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) of each forward pass of an interleaved schedule; groups go through all chunks in turn."""
    return [
        (microbatch, chunk)
        for first in range(0, num_microbatches, group_size)
        for chunk in range(chunks)
        for microbatch in range(first, min(first + group_size, num_microbatches))
    ]


def interleaved(
    stages: int, chunks: int, num_microbatches: int, rank: int, group_size: int | None = None
) -> list[Action]:
    """Interleaved 1F1B: chunks of a rank take turns in groups of micro-batches, the bubble shrinks by their number.

    Args:
        group_size: micro-batches that go through one chunk before the next chunk's turn; None = stages.
    """
    table = schedule_table(num_microbatches, chunks, group_size or stages)
    return _alternate(
        [Action(F, microbatch, chunk) for microbatch, chunk in table],
        [Action(B, microbatch, chunks - 1 - chunk) for microbatch, chunk in table],
        warmup_of(stages, num_microbatches, rank, chunks, group_size),
    )


def forward_only(num_microbatches: int, chunks: int = 1, group_size: int | None = None) -> list[Action]:
    """Evaluation: the forward passes in the order of training."""
    table = schedule_table(num_microbatches, chunks, group_size or num_microbatches)
    return [Action(F, microbatch, chunk) for microbatch, chunk in table]


def zero_bubble_h1(stages: int, num_microbatches: int, rank: int) -> list[Action]:
    """ZB-H1: 1F1B whose weight gradients wait, so that they fill the bubble at the end. Memory as 1F1B's rank 0.

    Rank r lets r weight gradients wait; every rank then has at most `stages` micro-batches alive.
    """
    actions: list[Action] = []
    waiting: list[int] = []
    for action in one_f_one_b(stages, num_microbatches, rank):
        if action.kind is F:
            actions.append(action)
            continue
        actions.append(Action(I, action.microbatch))
        waiting.append(action.microbatch)
        if len(waiting) > rank:
            actions.append(Action(W, waiting.pop(0)))
    return actions + [Action(W, m) for m in waiting]


def _alternate(forward: Sequence[Action], backward: Sequence[Action], warmup: int) -> list[Action]:
    """`warmup` forward passes, then pairs, then what is left of backward."""
    actions = list(forward[:warmup])
    for f, b in zip(forward[warmup:], backward):
        actions += [f, b]
    return actions + list(backward[len(forward) - warmup :])


def make_schedule(
    stages: int,
    num_microbatches: int,
    chunks: int = 1,
    group_size: int | None = None,
    evaluate: bool = False,
    zero_bubble: bool = False,
) -> Schedule:
    """Every rank's list for a layout, as training takes it.

    Args:
        group_size: of the interleaved schedule; None = stages.
        evaluate: forward only.
        zero_bubble: ZB-H1 in place of 1F1B; one chunk a rank.
    """
    ranks = range(stages)
    if evaluate:
        group = (group_size or stages) if chunks > 1 else None
        return [forward_only(num_microbatches, chunks, group) for _ in ranks]
    if chunks > 1:
        return [interleaved(stages, chunks, num_microbatches, rank, group_size) for rank in ranks]
    if stages == 1:
        return [no_pipelining(num_microbatches)]
    shape = zero_bubble_h1 if zero_bubble else one_f_one_b
    return [shape(stages, num_microbatches, rank) for rank in ranks]


def fall_into_groups(num_microbatches: int, stages: int, group: int) -> bool:
    """Whether an interleaved schedule takes them: stages <= group <= micro-batches, the last group 0 or >= stages."""
    last = num_microbatches % group
    return stages <= group <= num_microbatches and (last == 0 or last >= stages)


def check_microbatch_groups(num_microbatches: int, stages: int, group: int) -> None:
    """Raises ConfigError, with the numbers and two ways out, unless `fall_into_groups`."""
    if fall_into_groups(num_microbatches, stages, group):
        return
    last = num_microbatches % group
    raise ConfigError(
        f"{num_microbatches} micro-batches (global batch / micro batch / data-parallel size) on {stages} interleaved "
        f"stages, {group} to a group",
        why=f"a group is at least the {stages} stages and at most the micro-batches, and {num_microbatches} modulo "
        f"{group} = {last} must be 0 or at least {stages}",
        fix=f"--global-batch-size for {max(stages, -(-num_microbatches // stages) * stages)} micro-batches, or "
        "--pipeline-model-parallel-size without virtual stages",
    )


# -- when gradients and parameters move between data-parallel ranks ------------------------------------------------


def param_sync_points(actions: Sequence[Action], rank: int, chunks: int) -> dict[int, int]:
    """Place of a forward action -> chunk whose parameters are gathered from there on.

    Chunks 0 and 1 are gathered before the first action. A later chunk's gather begins one chunk ahead of its use, at
    the same time on all stages: rank r asks r passes earlier, because its passes come r later.
    """
    passes = [place for place, action in enumerate(actions) if action.kind is F]
    points = {}
    for k, place in enumerate(passes):
        q = k + rank
        if q < len(passes):
            action = actions[passes[q]]
            if action.microbatch == 0 and 1 < action.chunk + 1 < chunks:
                points[place] = action.chunk + 1
    return points


def grad_sync_points(actions: Sequence[Action], rank: int, aligned: bool) -> dict[int, list[int]]:
    """Place of an action -> chunks whose gradients are complete and are reduced after it.

    Args:
        aligned: at the same time on all stages (rank r waits r backward passes, what is left comes after the last);
            else as soon as they are complete.
    """
    backward = [place for place, action in enumerate(actions) if action.kind.ends_microbatch]
    points: dict[int, list[int]] = {}
    for k, place in enumerate(backward):
        if _completes(actions, place):
            later = min(k + rank, len(backward) - 1) if aligned else k
            points.setdefault(backward[later], []).append(actions[place].chunk)
    return points


def _completes(actions: Sequence[Action], place: int) -> bool:
    """Whether the action is the last that adds to its chunk's gradients."""
    chunk = actions[place].chunk
    return all(a.chunk != chunk or a.kind is F for a in actions[place + 1 :])
