"""What a result that cannot be right says about the machine: the pure part of `--rerun-mode`.

    initial run            a result is rejected: NaN, Inf, a spike
      repeated in place    same data, weights and random numbers, same device
        accepted           transient error of the device; the second result counts
        another, bad too   unstable: neither can be trusted
        the same           reproduced: saved as it was before the step, exit status 16: other hardware must tell
      run elsewhere        the step after that checkpoint, on whatever the next start got
        accepted           persistent error of the first device
        the same           correct: the data or the model are at fault, not a device. Undecided on the same device
                           as before. A loss that is a number is then trained on; NaN ends the run with status 17

`--rerun-mode report_stats` runs every step twice and says how much results vary. Nothing here knows torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

TOLERANCE = 1e-3  # relative: kernels that add in any order give the same spike to about this


class Phase(Enum):
    """Which run of a step it is."""

    INITIAL = "initial run"
    IN_PLACE = "repeated in place"
    ELSEWHERE = "run again from the checkpoint"


class Verdict(Enum):
    """What the runs of a step say together."""

    NONE = "the step was run once (--rerun-mode disabled)"
    TRANSIENT = "transient error: repeated on the same device, the step gave a credible result"
    UNSTABLE = "the step gave two different results on the same device, and neither is credible"
    REPRODUCED = "the step was repeated on the same device and gave the same result"
    PERSISTENT = "persistent error: another device gave another result"
    CORRECT = "correct result: another device gave the same, so the data or the model are at fault"
    UNDECIDED = "the same device as before gave the same result: a persistent error, or the data or the model"


@dataclass(frozen=True)
class Rejection:
    """A result that a rank does not believe.

    Args:
        what: a loss's key, or whose gradients.
        kind: nan, spike, large gradients, injected.
        microbatch: of this rank, from 0; None: of the whole step.
        text: for people.
    """

    rank: int
    what: str
    kind: str
    value: float
    microbatch: int | None
    text: str
    node: str
    device: str

    @property
    def place(self) -> tuple[int, str, int | None]:
        return self.rank, self.what, self.microbatch

    @property
    def fatal(self) -> bool:
        """No weight may be changed by it, whatever the machine is worth."""
        return not math.isfinite(self.value)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def causes(found: Iterable[Rejection]) -> list[Rejection]:
    """The rejections that are no consequence of others, by rank: a bad loss makes bad gradients on all ranks behind."""
    found = sorted(found, key=lambda r: (r.rank, r.microbatch or 0, r.what))
    losses = [r for r in found if r.microbatch is not None]
    return losses or found


def same(first: Sequence[Rejection], second: Sequence[Rejection]) -> bool:
    """Whether two runs of a step gave the same bad results in the same places."""
    one, two = ({r.place: r.value for r in causes(found)} for found in (first, second))
    return one.keys() == two.keys() and all(_close(one[place], two[place]) for place in one)


def _close(a: float, b: float) -> bool:
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    return a == b or math.isclose(a, b, rel_tol=TOLERANCE)


def judge_repeat(first: Sequence[Rejection], second: Sequence[Rejection]) -> Verdict:
    """After the step was repeated in place."""
    if not second:
        return Verdict.TRANSIENT
    return Verdict.REPRODUCED if same(first, second) else Verdict.UNSTABLE


def judge_elsewhere(first: Sequence[Rejection], second: Sequence[Rejection], devices: dict[int, str]) -> Verdict:
    """After the step was run again from its checkpoint.

    Args:
        devices: rank -> "node device" of this run.
    """
    if not second or not same(first, second):
        return Verdict.PERSISTENT
    moved = all(devices.get(r.rank) != f"{r.node} {r.device}" or r.kind == "injected" for r in causes(first))
    return Verdict.CORRECT if moved else Verdict.UNDECIDED


def injected_value(kind: str, phase: Phase, true: float) -> float | None:
    """What a rank with an injected fault takes for its result; None: there is nothing to reject.

    Args:
        kind: of --error-injection-type.
    """
    wrong = 1.5 * true + 1.0
    if kind == "correct_result":  # suspicious and right, wherever it is computed
        return true
    if kind == "transient_error":
        return wrong if phase is Phase.INITIAL else None
    assert kind == "persistent_error", kind
    return None if phase is Phase.ELSEWHERE else wrong


@dataclass
class Variability:
    """Relative differences between two runs of the same steps, of one kind of result."""

    compared: int = 0
    identical: int = 0
    total: float = 0.0
    largest: float = 0.0
    by_decade: dict[int, int] = field(default_factory=dict)  # differences of 10^k .. 10^(k+1)

    def add(self, first: float, second: float) -> None:
        self.compared += 1
        both_nan = math.isnan(first) and math.isnan(second)
        if first == second or both_nan:
            self.identical += 1
            return
        difference = abs(first - second) / max(abs(first), abs(second))
        if not math.isfinite(difference):  # NaN or Inf once: as different as can be
            difference = 1.0
        self.total += difference
        self.largest = max(self.largest, difference)
        decade = math.floor(math.log10(difference))
        self.by_decade[decade] = self.by_decade.get(decade, 0) + 1

    def __str__(self) -> str:
        share = 100.0 * self.identical / max(self.compared, 1)
        text = f"{self.compared} results, {self.identical} identical ({share:.1f} %)"
        if self.identical == self.compared:
            return text
        decades = ", ".join(f"{count} of 1e{k:+03d}" for k, count in sorted(self.by_decade.items()))
        mean = self.total / (self.compared - self.identical)
        return f"{text}, relative differences of the others: mean {mean:.2e}, largest {self.largest:.2e} ({decades})"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "by_decade": {str(k): count for k, count in self.by_decade.items()}}

    @staticmethod
    def of(saved: dict[str, Any]) -> Variability:
        return Variability(**{**saved, "by_decade": {int(k): count for k, count in saved["by_decade"].items()}})


# -- the file of rejected results ------------------------------------------------------------------------------------


def tracker_line(time: str, job: str, iteration: int, status: str, rejection: Rejection) -> str:
    """A line of `--result-rejected-tracker-filename`, with Megatron's keys."""
    message = " ".join(rejection.text.split())
    return (
        f"ts={time} node={rejection.node} device={rejection.device} jobID={job} rank={rejection.rank} "
        f"iteration={iteration} status={status} result={rejection.value} message={message}\n"
    )


def rejected_iterations(text: str) -> list[int]:
    """The iterations that a file of such lines says are to be left out, in order."""
    return sorted({int(number) for number in re.findall(r"^ts=.* iteration=(\d+) status=rejected ", text, re.M)})
