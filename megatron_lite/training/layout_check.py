"""Whether two runs that should be the same are: how far losses, norms, gradients and weights lie apart.

Numbers are compared relative to the reference. A tensor's difference is the largest of its elements', relative to the
tensor's largest element, or to the root mean square of all tensors' elements where that is larger: a gradient that is
zero but for rounding (a key's bias does not change a softmax) has no size of its own.

Adam divides gradients by their size, so that rounding alone moves such a parameter by the learning rate. Runs that are
compared take an epsilon above the rounding error (`EPSILON`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.training.held import exceeds
from megatron_lite.training.record import Record

EPSILON = 1e-4


@dataclass(frozen=True)
class Tolerance:
    """Largest deviations that another order of summation may cause, relative."""

    losses: float
    gradients: float
    gradient_norm: float
    weights: float


# bf16 has 8 bits of mantissa, of which a rounding moves the last: 0.4 %; fp16 has 11. A tensor's worst element shows
# the sum of several such roundings, a loss or a norm their mean (BERT's that of a few masked words). Where rounding
# turns a small gradient's sign, Adam moves a weight the other way: the learning rates of the steps, twice, against the
# largest weight.
TOLERANCE = {
    "fp32": Tolerance(1e-5, 1e-5, 1e-5, 1e-5),
    "bf16": Tolerance(losses=1e-3, gradients=1e-1, gradient_norm=1e-2, weights=6e-2),
    "fp16": Tolerance(losses=2.5e-4, gradients=2e-2, gradient_norm=2e-3, weights=3e-2),
}


@dataclass(frozen=True)
class Deviation:
    """How far something lies from the reference, and how far it may.

    where: the tensor, or the step, of the largest deviation.
    """

    what: str
    value: float
    allowed: float
    where: str = ""

    @property
    def is_ok(self) -> bool:
        """Within what is allowed; NaN is not."""
        return self.value <= self.allowed


def compare(reference: Record, run: Record, tolerance: Tolerance) -> list[Deviation]:
    """Every comparison, in the order of a run. First weights, and the copies of ranks, must be equal bit by bit."""
    first = _tensors("first weights", [reference.first_weights], [run.first_weights], 0.0)
    rows = [
        first,
        _numbers("losses", reference.losses, run.losses, tolerance.losses),
        _tensors("gradients", reference.gradients, run.gradients, tolerance.gradients),
        _numbers("gradient norm", _keyed(reference.grad_norms), _keyed(run.grad_norms), tolerance.gradient_norm),
        _tensors("weights", [reference.last_weights], [run.last_weights], tolerance.weights),
    ]
    what, (value, where) = max(run.copies.items(), key=lambda item: (math.isnan(item[1][0]), item[1][0]))
    rows.append(Deviation("copies on other ranks", value, 0.0, f"{what}: {where}" if value else ""))
    return rows


def _keyed(norms: Sequence[float | None]) -> list[dict[str, float]]:
    return [{"": math.nan if norm is None else norm} for norm in norms]


def _numbers(
    what: str, reference: Sequence[Mapping[str, float]], run: Sequence[Mapping[str, float]], allowed: float
) -> Deviation:
    """The largest relative difference of numbers by step and key."""
    worst, where = 0.0, ""
    for step, (want, got) in enumerate(zip(reference, run, strict=True), start=1):
        for key in {**want, **got}:
            a, b = want.get(key, math.nan), got.get(key, math.nan)
            difference = 0.0 if a == b else abs(a - b) / max(abs(a), 1e-30)
            if exceeds(difference, worst):
                worst, where = difference, f"step {step}"
    return Deviation(what, worst, allowed, where)


def _tensors(
    what: str, reference: Sequence[Mapping[str, Tensor]], run: Sequence[Mapping[str, Tensor]], allowed: float
) -> Deviation:
    """The largest difference of tensors by step and name, relative to the tensor (see the top of this file)."""
    worst, where = 0.0, ""
    for step, (want, got) in enumerate(zip(reference, run, strict=True), start=1):
        at = f", step {step}" if len(reference) > 1 else ""
        other = set(want) ^ set(got) | {name for name in set(want) & set(got) if want[name].shape != got[name].shape}
        if other:
            return Deviation(what, math.inf, allowed, f"{min(other)} is in one run only, or has another shape{at}")
        numel = sum(tensor.numel() for tensor in want.values())
        root = math.sqrt(sum(float(t.double().square().sum()) for t in want.values()) / max(numel, 1))
        for name, tensor in want.items():
            if torch.equal(tensor, got[name]):
                continue
            size = max(float(tensor.abs().max()), root)
            difference = float((tensor - got[name]).abs().max()) / size if size else math.inf
            if exceeds(difference, worst):
                worst, where = difference, name + at
    return Deviation(what, worst, allowed, where)


def table(rows: Sequence[Deviation]) -> str:
    """The comparison as text, a line each."""
    width = max(len(row.what) for row in rows)
    lines = []
    for row in rows:
        mark = "ok  " if row.is_ok else "FAIL"
        limit = f"<= {row.allowed:.0e}" if row.allowed else "= 0"
        where = f"  {row.where}" if row.where and row.value else ""
        lines.append(f"  {mark} {row.what:<{width}}  {row.value:9.2e}  {limit:<9}{where}")
    return "\n".join(lines)
