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
<<<<<<< HEAD
        raise _nan_in(
            f"{some(bad)} (bucket {bucket.number}, before it is summed over ranks, on {bucket.grad_data.device})"
=======
        rank, _ = rank_and_world_size()
        failure = RankFailure(
            f"rank {rank}: NaN or Inf in the gradient of {some(bad)} (bucket {bucket.number}, "
            f"before it is summed over ranks, on {bucket.grad_data.device})",
            why="the sum would carry it to every rank; no weight has been changed by this step",
            fix="look at this rank's batch, lower --lr, or skip such steps with --no-check-for-nan-in-loss-and-grad",
>>>>>>> 6a8af5f (Bad losses and gradients: steps are repeated to judge the machine, a report names the first bad value and the samples, batches can be left out)
        )
        _reject(bucket, "nan", math.nan, failure, listener)


<<<<<<< HEAD
def not_finite(units: Sequence[tuple[str, Tensor]]) -> None:
    """Stop when gradients of a fully sharded model were NaN or Inf on this rank, before they were summed.

    Args:
        units: (name of a module whose gradients travelled together, whether all were finite: bool scalar).
    Raises: RankFailure naming the rank and the modules.
    """
    if not units:
        return
    finite = torch.stack([flag for _, flag in units])
    if not bool(finite.all()):
        bad = [name for (name, _), good in zip(units, finite.tolist()) if not good]
        raise _nan_in(f"{some(list(dict.fromkeys(bad)))} (before it is summed over ranks, on {finite.device})")


def _nan_in(what: str) -> RankFailure:
    rank, _ = rank_and_world_size()
    return RankFailure(
        f"rank {rank}: NaN or Inf in the gradient of {what}",
        why="the sum would carry it to every rank; no weight has been changed by this step",
        fix="look at this rank's batch, lower --lr, or skip such steps with --no-check-for-nan-in-loss-and-grad",
    )


class LargeGradients:
=======
def _reject(bucket: Bucket, kind: str, norm: float, failure: RankFailure, listener: Listener | None) -> None:
    if listener is None:
        raise failure
    if listener(kind, norm, failure):
        bucket.grad_data.fill_(math.nan)


class LargeGradients(RunningMaximum):
>>>>>>> 6a8af5f (Bad losses and gradients: steps are repeated to judge the machine, a report names the first bad value and the samples, batches can be left out)
    """Stops when the norm of a bucket is far above all norms that it has had.

    Args:
        factor: times the running maximum.
        warm_up: norms before the first verdict.
    """

    def __init__(self, factor: float = LARGE, warm_up: int = WARM_UP):
        super().__init__(factor, warm_up)

<<<<<<< HEAD
    def check(
        self,
        grads: Tensor,
        params: Mapping[str, nn.Parameter],
        bucket: int,
        when: str = "before it is summed over ranks",
    ) -> None:
        """Look at the flat gradients of some parameters and remember their norm.

        Args:
            bucket: its number, and `when` they are looked at: for the message.
=======
    def check(self, bucket: Bucket, listener: Listener | None = None) -> None:
        """Look at the bucket's gradients and remember their norm.
>>>>>>> 6a8af5f (Bad losses and gradients: steps are repeated to judge the machine, a report names the first bad value and the samples, batches can be left out)

        Raises: RankFailure naming the rank, the bucket, and the parameters that made the norm large, where nobody
            listens.
        """
<<<<<<< HEAD
        norm = float(torch.linalg.vector_norm(grads, dtype=torch.float32))
        if self.seen >= self.warm_up and norm > self.factor * self.largest:
            rank, _ = rank_and_world_size()
            raise RankFailure(
                f"rank {rank}: the gradients of bucket {bucket} have norm {norm:.3g}, the largest of {self.seen}"
                f" before was {self.largest:.3g}; most of it is in {some(_largest(params))} "
                f"({when}, on {grads.device})",
=======
        norm = float(torch.linalg.vector_norm(bucket.grad_data, dtype=torch.float32))
        if self.exceeded_by(norm):
            rank, _ = rank_and_world_size()
            failure = RankFailure(
                f"rank {rank}: the gradients of bucket {bucket.number} have norm {norm:.3g}, the largest of {self.seen}"
                f" before was {self.largest:.3g}; most of it is in {some(_largest(bucket.params))} "
                f"(before it is summed over ranks, on {bucket.grad_data.device})",
>>>>>>> 6a8af5f (Bad losses and gradients: steps are repeated to judge the machine, a report names the first bad value and the samples, batches can be left out)
                why=f"--check-for-large-grads stops at {self.factor:g} times the running maximum; no weight has been "
                "changed by this step",
                fix="look at this rank's batch, lower --lr, or leave --check-for-large-grads out",
            )
            _reject(bucket, "large gradients", norm, failure, listener)
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
