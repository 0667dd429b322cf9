"""What a rank finds wrong with its results of one step: losses here, gradients by way of DDP's checks.

    the last micro-batch's loss    all losses of the step are looked at: one wait for the device a step, and before its
                                   backward sends gradients to other ranks, so that a NaN is found where it arose
    a bucket before its sum        `distributed.grad_checks`

A step that is to be judged by all ranks goes on to its end: a rejected loss is multiplied by NaN, gradients of a
rejected bucket are NaN, and the gradient norm carries that to every rank, where the optimizer leaves the update out.
So a good step costs no message, and no rank waits for one that gave up.
"""

from __future__ import annotations

import math
import socket
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite import collectives
from megatron_lite.errors import RankFailure
from megatron_lite.log import rank_and_world_size
from megatron_lite.pipeline_parallel.executor import ForwardStep
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.running_maximum import RunningMaximum
from megatron_lite.training.rerun import Phase, Rejection, injected_value

Value = Tensor | tuple[Tensor, Tensor]
Reports = Sequence[dict[str, Value]]
_WARM_UP = 100  # steps that are only collected, unless --spiky-loss-window says otherwise


class ResultChecks:
    """The checks of one step after another.

    Args:
        at_once: a rejection ends the run on this rank, as nobody listens.
    Attributes:
        found: what this run of the step has shown.
    """

    def __init__(self, args: Namespace, pg_collection: ProcessGroupCollection, *, at_once: bool = False):
        self.args, self.pg_collection, self.at_once = args, pg_collection, at_once
        self.maximum = RunningMaximum(args.spiky_loss_factor, _WARM_UP, args.spiky_loss_window)
        self.rank, world_size = rank_and_world_size()
        self._injects = args.error_injection_rate > 0 and self.rank == world_size - 1
        self.node, self.device = socket.gethostname(), device_name(args.device)
        self.begin(0)

    def begin(self, iteration: int, phase: Phase = Phase.INITIAL, *, accept: bool = False) -> None:
        """A run of step `iteration` starts.

        Args:
            accept: look at nothing: this run's results count, whatever they are.
        """
        self.iteration, self.phase, self.accept = iteration, phase, accept
        self.found: list[Rejection] = []
        self._reports: list[dict[str, Value]] = []

    def watch(self, forward_step_func: ForwardStep, num_microbatches: int) -> ForwardStep:
        """`forward_step_func`, whose losses are looked at with the last micro-batch."""

        def step(*arguments: Any) -> tuple[Tensor, Callable[..., Any]]:
            output, loss_func = forward_step_func(*arguments)

            def checked(output: Tensor) -> Any:
                result = loss_func(output)
                self._reports.append(result[-1])
                if len(self._reports) == num_microbatches and self._look(self._reports):
                    return (result[0] * math.nan, *result[1:])
                return result

            return output, checked

        return step

    def listen(self, chunks: Sequence[nn.Module]) -> None:
        """Hear of gradients that the model's DDP rejects."""
        for chunk in chunks:
            chunk.ddp_config.on_bad_grads = self.bad_grads  # type: ignore[union-attr]

    def bad_grads(self, kind: str, norm: float, failure: RankFailure) -> bool:
        """DDP would reject gradients of this rank. Those behind a rejected loss are no news."""
        if self.accept:
            return False
        if not self.found:
            told = RankFailure(f"{failure.what}, at iteration {self.iteration}", why=failure.why, fix=failure.fix)
            self._reject("gradients", kind, norm, None, told)
        return True

    def losses(self) -> list[float]:
        """Of this run of the step by micro-batch, as the script reports them first; empty where no loss is computed.
        Waits for the device."""
        key = next(iter(self._reports[0]), None) if self._reports else None
        if key is None:
            return []
        table = torch.stack([flat(report[key]) for report in self._reports])  # [m, 2] or [m, 1]
        if self.args.check_for_spiky_loss and table.shape[1] == 2:
            collectives.all_reduce(table, self.pg_collection.cp, purpose="losses of a micro-batch")
        return (table[:, 0] / table[:, 1].clamp(min=1) if table.shape[1] == 2 else table[:, 0]).tolist()

    # -- losses ------------------------------------------------------------------------------------------------------

    def _look(self, reports: Reports) -> bool:
        """Look at all losses of the step. Returns: whether any was rejected."""
        args = self.args
        if self.accept or not reports[0]:
            return False
        if args.check_for_nan_in_loss_and_grad:
            self._look_for_nan(reports)
        if args.check_for_spiky_loss or self._injects:
            key, values = next(iter(reports[0])), self.losses()
            if args.check_for_spiky_loss and not self.found:
                self._look_for_spikes(key, values)
            if self._injects and not self.found:
                self._inject(key, values[0])
        return bool(self.found)

    def _look_for_nan(self, reports: Reports) -> None:
        sums = torch.stack([torch.stack([flat(report[key])[0] for key in report]) for report in reports])  # [m, keys]
        if bool(torch.isfinite(sums).all()):
            return
        keys = list(reports[0])
        for microbatch, column in (~torch.isfinite(sums)).nonzero().tolist():
            key, value = keys[column], sums[microbatch, column].item()
            failure = RankFailure(
                f"rank {self.rank}: {key} is {value} at iteration {self.iteration} (micro-batch {microbatch})",
                why="a forward pass gave NaN or Inf; no weight has been changed by this iteration",
                fix="look at this batch (--iterations-to-skip leaves it out), or lower --lr",
            )
            self._reject(key, "nan", value, microbatch, failure)

    def _look_for_spikes(self, key: str, values: Sequence[float]) -> None:
        for microbatch, value in enumerate(values):
            if self.maximum.exceeded_by(value):
                failure = RankFailure(
                    f"rank {self.rank}: {key} is {value:.6g} at iteration {self.iteration} (micro-batch {microbatch}), "
                    f"more than {self.maximum.factor:g} times the largest before, {self.maximum.largest:.6g}",
                    why="--check-for-spiky-loss takes it for a bad result; no weight has been changed by this step",
                    fix="look at this batch (--iterations-to-skip leaves it out), or raise --spiky-loss-factor",
                )
                self._reject(key, "spike", value, microbatch, failure)

    def _inject(self, key: str, true: float) -> None:
        """`--error-injection-rate`: take the first micro-batch's loss for another, or the true one for a bad one."""
        kind = self.args.error_injection_type
        if self.iteration % self.args.error_injection_rate:
            return
        value = injected_value(kind, self.phase, true)
        if value is not None:
            failure = RankFailure(
                f"rank {self.rank}: {key} is {value:.6g} at iteration {self.iteration} (micro-batch 0), by injection "
                f"of a {kind}",
                why="--error-injection-rate pretends it",
                fix="leave the flag out",
            )
            self._reject(key, "injected", value, 0, failure)

    def _reject(self, what: str, kind: str, value: float, microbatch: int | None, failure: RankFailure) -> None:
        if self.at_once:
            raise failure
        self.found.append(Rejection(self.rank, what, kind, value, microbatch, failure.what, self.node, self.device))


def device_name(device: torch.device) -> str:
    """Which device of its machine this is, in a word that another process would use for the same one."""
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    return str(getattr(properties, "uuid", "") or f"cuda:{device.index}").replace(" ", "_")


def flat(value: Value) -> Tensor:
    """A reported value as `[2]` (sum, tokens) or `[1]`, fp32."""
    if isinstance(value, tuple):
        value = torch.stack(value)
    return value.detach().float().flatten()
