"""Looks at a rank's own gradients before they are summed over ranks, while it is still known whose a bad one is.

Both checks wait for the device, and both end the run: no weight has been changed by the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from megatron_lite.distributed.param_and_grad_buffer import Bucket, reduced_grad
from megatron_lite.errors import RankFailure
from megatron_lite.log import rank_and_world_size

LARGE = 10.0  # times the largest norm so far
WARM_UP = 100  # norms that are only collected: the first steps tell what is usual


def check_for_nan(bucket: Bucket) -> None:
    """Stop when a gradient of this rank is NaN or Inf.

    Raises: RankFailure naming the rank, the bucket and the parameters.
    """
    # A sum is NaN or Inf if an element is. It may also overflow by itself; the parameters decide.
    if bool(torch.isfinite(bucket.grad_data.sum())):
        return
    bad = [name for name, param in bucket.params.items() if not bool(torch.isfinite(reduced_grad(param)).all())]
    if bad:
        raise _nan_in(
            f"{some(bad)} (bucket {bucket.number}, before it is summed over ranks, on {bucket.grad_data.device})"
        )


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
    """Stops when the norm of a bucket is far above all norms that it has had.

    Args:
        factor: times the running maximum.
        warm_up: norms before the first verdict.
    """

    def __init__(self, factor: float = LARGE, warm_up: int = WARM_UP):
        self.factor, self.warm_up = factor, warm_up
        self.seen, self.largest = 0, 0.0

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

        Raises: RankFailure naming the rank, the bucket, and the parameters that made the norm large.
        """
        norm = float(torch.linalg.vector_norm(grads, dtype=torch.float32))
        if self.seen >= self.warm_up and norm > self.factor * self.largest:
            rank, _ = rank_and_world_size()
            raise RankFailure(
                f"rank {rank}: the gradients of bucket {bucket} have norm {norm:.3g}, the largest of {self.seen}"
                f" before was {self.largest:.3g}; most of it is in {some(_largest(params))} "
                f"({when}, on {grads.device})",
                why=f"--check-for-large-grads stops at {self.factor:g} times the running maximum; no weight has been "
                "changed by this step",
                fix="look at this rank's batch, lower --lr, or leave --check-for-large-grads out",
            )
        if math.isfinite(norm):
            self.seen += 1
            self.largest = max(self.largest, norm)


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
