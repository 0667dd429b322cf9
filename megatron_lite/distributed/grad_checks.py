"""Looks at a rank's own gradients before they are summed over ranks, while it is still known whose a bad one is.

Both checks wait for the device. What they find ends the run, or is told to a listener (`on_bad_grads` of the config):
if it agrees, the bucket becomes NaN: the sum over ranks tells all of them that this step must not be taken. Either
way no weight is changed by the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from megatron_lite.distributed.param_and_grad_buffer import Bucket, reduced_grad
from megatron_lite.errors import RankFailure
from megatron_lite.log import rank_and_world_size
from megatron_lite.running_maximum import RunningMaximum

LARGE = 10.0  # times the largest norm so far
WARM_UP = 100  # norms that are only collected: the first steps tell what is usual
Listener = Callable[[str, float, RankFailure], bool]  # kind, norm, what is to be said -> is it rejected


def check_for_nan(bucket: Bucket, listener: Listener | None = None) -> None:
    """Reject a gradient of this rank that is NaN or Inf.

    Raises: RankFailure naming the rank, the bucket and the parameters, where nobody listens.
    """
    # A sum is NaN or Inf if an element is. It may also overflow by itself; the parameters decide.
    if bool(torch.isfinite(bucket.grad_data.sum())):
        return
    bad = [name for name, param in bucket.params.items() if not bool(torch.isfinite(reduced_grad(param)).all())]
    if bad:
        failure = _nan_in(
            f"{some(bad)} (bucket {bucket.number}, before it is summed over ranks, on {bucket.grad_data.device})"
        )
        _reject([bucket.grad_data], "nan", math.nan, failure, listener)


def _reject(grads: Sequence[Tensor], kind: str, norm: float, failure: RankFailure, listener: Listener | None) -> None:
    if listener is None:
        raise failure
    if listener(kind, norm, failure):
        for grad in grads:
            grad.fill_(math.nan)


def not_finite(
    units: Sequence[tuple[str, Tensor]], grads: Sequence[Tensor] = (), listener: Listener | None = None
) -> None:
    """Reject gradients of a fully sharded model that were NaN or Inf on this rank, before they were summed.

    Args:
        units: (name of a module whose gradients travelled together, whether all were finite: bool scalar).
        grads: this rank's parts of the sums.
    Raises: RankFailure naming the rank and the modules, where nobody listens.
    """
    if not units:
        return
    finite = torch.stack([flag for _, flag in units])
    if not bool(finite.all()):
        bad = [name for (name, _), good in zip(units, finite.tolist()) if not good]
        failure = _nan_in(f"{some(list(dict.fromkeys(bad)))} (before it is summed over ranks, on {finite.device})")
        _reject(grads, "nan", math.nan, failure, listener)


def _nan_in(what: str) -> RankFailure:
    rank, _ = rank_and_world_size()
    return RankFailure(
        f"rank {rank}: NaN or Inf in the gradient of {what}",
        why="the sum would carry it to every rank; no weight has been changed by this step",
        fix="look at this rank's batch, lower --lr, or skip such steps with --no-check-for-nan-in-loss-and-grad",
    )


class LargeGradients(RunningMaximum):
    """Stops when the norm of a bucket is far above all norms that it has had.

    Args:
        factor: times the running maximum.
        warm_up: norms before the first verdict.
    """

    def __init__(self, factor: float = LARGE, warm_up: int = WARM_UP):
        super().__init__(factor, warm_up)

    def check(
        self,
        grads: Tensor,
        params: Mapping[str, nn.Parameter],
        bucket: int,
        when: str = "before it is summed over ranks",
        listener: Listener | None = None,
    ) -> None:
        """Look at the flat gradients of some parameters and remember their norm.

        Args:
            bucket: its number, and `when` they are looked at: for the message.

        Raises: RankFailure naming the rank, the bucket, and the parameters that made the norm large, where nobody
            listens.
        """
        norm = float(torch.linalg.vector_norm(grads, dtype=torch.float32))
        if self.exceeded_by(norm):
            rank, _ = rank_and_world_size()
            failure = RankFailure(
                f"rank {rank}: the gradients of bucket {bucket} have norm {norm:.3g}, the largest of {self.seen}"
                f" before was {self.largest:.3g}; most of it is in {some(_largest(params))} "
                f"({when}, on {grads.device})",
                why=f"--check-for-large-grads stops at {self.factor:g} times the running maximum; no weight has been "
                "changed by this step",
                fix="look at this rank's batch, lower --lr, or leave --check-for-large-grads out",
            )
            _reject([grads], "large gradients", norm, failure, listener)
            return
        self.add(norm)


def _largest(params: Mapping[str, nn.Parameter]) -> list[str]:
    """The parameters that hold 90 % of the sum of squares, largest first, with their norms."""
    squares = {name: float(reduced_grad(param).double().square().sum()) for name, param in params.items()}
    total, held, names = sum(squares.values()), 0.0, []
    for name in sorted(squares, key=squares.__getitem__, reverse=True):
        names.append(f"{name} ({squares[name] ** 0.5:.3g})")
        held += squares[name]
        if held >= 0.9 * total:
            break
    return names


def some(names: Sequence[str], count: int = 5) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more
