"""A schedule is a list of actions for each rank. Pure functions, no torch.

    no pipelining, 4 micro-batches      F0 B0 F1 B1 F2 B2 F3 B3
    the same, forward only              F0 F1 F2 F3

`executor` runs a list; whatever order a function here returns, the arithmetic of a micro-batch is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What is done with a micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True)
class Action:
    """One pass of one micro-batch through one of this rank's model chunks."""

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


def no_pipelining(num_microbatches: int, forward_only: bool = False) -> list[Action]:
    """One stage: backward follows each forward at once, so that one micro-batch's activations live at a time."""
    kinds = [Kind.FORWARD] if forward_only else [Kind.FORWARD, Kind.BACKWARD]
    return [Action(kind, microbatch) for microbatch in range(num_microbatches) for kind in kinds]
