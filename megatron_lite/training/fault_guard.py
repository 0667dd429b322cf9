"""Watches over the steps of a run: a result that cannot be right changes no weight, and its cause is looked for.

    run the step --> all results credible, or left out by the loss scale -------------------------------> go on
          |  some rank rejects one (result_checks): no rank has updated
          v
    repeat it in place, run it elsewhere --> a verdict on the machine (rerun)  --> transient: go on
          v
    look for the first bad value, write the report (loss_doctor)
          v
    --on-bad-loss   stop       status 16 behind a checkpoint from before the step, or 17
                    skip       the weights stay, the next batch comes
                    rollback   the last checkpoint, and this batch is left out when it comes again

All ranks hear of a rejection in the same step, so they decide alike. A good step sends no message for it.
"""

from __future__ import annotations

import math
import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from torch import nn

from megatron_lite import collectives
from megatron_lite.checkpointing.checkpoint import on_rank_0
from megatron_lite.errors import CheckpointError, DataError, RankFailure, RerunElsewhere, ResultRejected
from megatron_lite.log import print_rank_0, rank_and_world_size, warn_rank_0
from megatron_lite.optimizer import MegatronOptimizer
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.training.fault_handling import largest
from megatron_lite.training.loss_doctor import LossDoctor
from megatron_lite.training.replay import Replay
from megatron_lite.training.rerun import (
    Phase,
    Rejection,
    Variability,
    Verdict,
    causes,
    judge_elsewhere,
    judge_repeat,
    rejected_iterations,
    tracker_line,
)
from megatron_lite.training.result_checks import ResultChecks
from megatron_lite.training.rng_state import layout_of
from megatron_lite.training.train_step import StepResult

# (checks, update) -> what `train_step` gives
Step = Callable[[ResultChecks | None, bool], StepResult]


class FaultGuard:
    """Runs the steps of a training.

    Args:
        args: `args.rerun_state` is what the checkpoint held of this, None at a first start.
        data: what the steps read.
        save: write a checkpoint of the present state, and wait for it.
    Attributes:
        data: the same, as steps are to take it.
        left_out: iterations whose batch is read and not trained on.
    """

    def __init__(
        self,
        args: Namespace,
        model: Sequence[nn.Module],
        optimizer: MegatronOptimizer,
        data: Any,
        pg_collection: ProcessGroupCollection,
        save: Callable[[], None],
    ):
        self.args, self.model, self.optimizer, self.pg_collection = args, model, optimizer, pg_collection
        self._save = save
        self._validates, self._compares = args.rerun_mode == "validate_results", args.rerun_mode == "report_stats"
        checks = args.check_for_nan_in_loss_and_grad or args.check_for_spiky_loss or args.check_for_large_grads
        self._active = bool(checks or self._compares or args.error_injection_rate)
        self.left_out: set[int] = set(_tracked(args))
        self._given_up: list[int] = []
        self._suspects: list[Rejection] = []  # what the step after the loaded checkpoint gave on other hardware
        self._suspected = -1  # which step that is
        self.variability: dict[str, Variability] = {}
        self.checks = ResultChecks(args, pg_collection)
        self.read_from(data)
        self.doctor = LossDoctor(args, model, pg_collection)
        if self._active:
            self.checks.listen(model)
            self._load(args.rerun_state or {})

    def read_from(self, data: Any) -> None:
        """Steps read `data` from now on."""
        self.data = data
        if self._active:
            self._replay = Replay(data, self.model, self.optimizer)
            self.data = self._replay.data

    # -- a step ------------------------------------------------------------------------------------------------------

    def step(self, iteration: int, run: Step) -> StepResult | None:
        """Run a step, as often as it takes.

        Returns: what it did; None: go back to the last checkpoint.
        Raises: ResultRejected or RerunElsewhere, on every rank; the weights are those from before the step.
        """
        if not self._active:
            return run(None, True)
        self._replay.begin()
        before = self._preview(iteration, run) if self._compares else None
        verdict = Verdict.NONE
        resumed = self._suspects if iteration == self._suspected else []
        if iteration >= self._suspected:
            self._suspects = []
        result, found = self._run(iteration, run, Phase.ELSEWHERE if resumed else Phase.INITIAL)
        if before is not None:
            self._compare(iteration, before, result)
        if resumed:
            verdict = judge_elsewhere(resumed, found, self._devices(resumed))
            self._tell(iteration, verdict, resumed)
            if verdict is Verdict.CORRECT and not any(rejection.fatal for rejection in found):
                self._replay.rewind()
                result, found = self._run(iteration, run, Phase.ELSEWHERE, accept=True)
        if found and self._validates and verdict in (Verdict.NONE, Verdict.PERSISTENT):
            self._replay.rewind()
            result, again = self._run(iteration, run, Phase.IN_PLACE)
            verdict = judge_repeat(found, again)
            self._tell(iteration, verdict, found)
            found = again
        if found:
            outcome = self._give_up(iteration, run, found, verdict, result)
            self._replay.forget()
            return outcome
        if self.args.check_for_spiky_loss:
            losses = self.checks.losses()
            self.checks.maximum.add(largest(max(losses, default=-math.inf), self.args.device))
        self.doctor.note(iteration, result, self._replay.samples())
        self._replay.forget()
        return result

    def _run(
        self, iteration: int, run: Step, phase: Phase, *, accept: bool = False, update: bool = True
    ) -> tuple[StepResult, list[Rejection]]:
        """One run of the step. Returns: with what all ranks reject of it."""
        self.checks.begin(iteration, phase, accept=accept)
        result = run(self.checks, update)
        mine = self.checks.found
        if not result.skipped or result.grad_norm is not None or not update:
            if mine:  # a gradient that other ranks hold too, and that is counted there
                raise RankFailure(
                    f"{mine[0].text}, and the other ranks did not hear of it",
                    why="this parameter's gradient is the same on several ranks, of which another one counts",
                    fix="the weights may have been changed by this step: go on from the last checkpoint",
                )
            return result, []
        by_rank = collectives.all_gather_object(mine, collectives.world(), purpose="rejected results")
        return result, [rejection for of_rank in by_rank for rejection in of_rank]

    def _preview(self, iteration: int, run: Step) -> tuple[list[float], float]:
        """`--rerun-mode report_stats`: losses and gradient norm of a run of the step that changes nothing."""
        self.checks.begin(iteration, accept=True)
        result = run(self.checks, False)
        losses = self.checks.losses()
        self._replay.rewind()
        return losses, _norm(result)

    def _compare(self, iteration: int, before: tuple[list[float], float], result: StepResult) -> None:
        losses, norm = before
        for first, second in zip(losses, self.checks.losses()):
            self.variability.setdefault("loss of a micro-batch", Variability()).add(first, second)
        self.variability.setdefault("grad norm", Variability()).add(norm, _norm(result))
        if iteration % self.args.log_interval == 0 or iteration == self.args.train_iters:
            self._print_variability(iteration)

    def _print_variability(self, iteration: int) -> None:
        world = collectives.world()
        lines = [f"  {name}: {found}" for name, found in self.variability.items()]
        by_rank = collectives.all_gather_object(lines, world, purpose="variability of results")
        print_rank_0(
            f"run-to-run differences up to iteration {iteration}, every step run twice (--rerun-mode report_stats):"
        )
        for rank, of_rank in enumerate(by_rank):
            for line in of_rank:
                print_rank_0(f"  rank {rank}:{line}")

    # -- a bad one -----------------------------------------------------------------------------------------------------

    def _devices(self, suspects: Sequence[Rejection]) -> dict[int, str]:
        mine = f"{self.checks.node} {self.checks.device}"
        return dict(enumerate(collectives.all_gather_object(mine, collectives.world(), purpose="devices")))

    def _tell(self, iteration: int, verdict: Verdict, found: Sequence[Rejection]) -> None:
        """Say and track what the runs of the step mean."""
        first = causes(found)[0]
        place = f"node {first.node}, device {first.device}"
        warn_rank_0(f"iteration {iteration}: {first.text}{_others(found)} ({place}).\n  verdict: {verdict.value}")
        self._track(iteration, verdict.name.lower(), found)

    def _track(self, iteration: int, status: str, found: Sequence[Rejection]) -> None:
        path = self.args.result_rejected_tracker_filename
        if path is None or rank_and_world_size()[0] != 0:
            return
        now = datetime.now().isoformat(timespec="seconds")
        job = os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID") or "none"
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.writelines(tracker_line(now, job, iteration, status, one) for one in causes(found))
        except OSError as error:
            warn_rank_0(f"--result-rejected-tracker-filename {path} cannot be written: {error.strerror}")

    def _give_up(
        self, iteration: int, run: Step, found: list[Rejection], verdict: Verdict, result: StepResult
    ) -> StepResult | None:
        """The step stays bad: look why, and do what --on-bad-loss says."""
        args, text = self.args, causes(found)[0].text + _others(found)

        def again() -> None:
            self._replay.rewind()
            self.checks.begin(iteration, Phase.IN_PLACE, accept=True)
            run(self.checks, False)

        self.doctor.note(iteration, result, self._replay.samples())
        report = self.doctor.examine(iteration, found, verdict, again, self._replay)
        self._replay.rewind()  # a checkpoint, and the next step, have the generators as they were before this one
        if args.on_bad_loss == "stop":
            self._stop(iteration, found, verdict, f"{text}\n{report}")
        self._track(iteration, "rejected", found)
        self._given_up.append(iteration)
        if len(self._given_up) > args.bad_loss_limit:
            raise ResultRejected(
                f"{text}\n{report}",
                why=f"these are more than --bad-loss-limit {args.bad_loss_limit} batches that were left out "
                f"(iterations {_numbers(self._given_up)}): it is not the batches",
                fix="look at the reports, lower --lr, or start from an older checkpoint (--ckpt-step)",
            )
        if args.on_bad_loss == "skip":
            print_rank_0(f"iteration {iteration} is left out (--on-bad-loss skip): {text}\n{report}")
            return StepResult(result.losses, True, result.learning_rate, None, None)
        self.left_out |= set(range(max(1, iteration - args.bad_loss_window + 1), iteration + 1))
        print_rank_0(
            f"iteration {iteration}: {text}\n{report}\nback to the last checkpoint; left out from there on: iterations "
            f"{_numbers(self.left_out)} (--on-bad-loss rollback)"
        )
        return None

    def _stop(self, iteration: int, found: list[Rejection], verdict: Verdict, text: str) -> None:
        args = self.args
        fix = (
            f"--iterations-to-skip {iteration} leaves this batch out, --on-bad-loss skip or rollback every such; or "
            "lower --lr"
        )
        if verdict is Verdict.REPRODUCED and args.save:
            self._suspects, self._suspected = causes(found), iteration
            try:
                self._save()
            except CheckpointError as error:
                raise CheckpointError(
                    f"{text}\nand the state before the step is not saved: {error.what}",
                    why=f"{error.why}. The step gave this twice on the same device; no weight has been changed by it",
                    fix=f"{error.fix}; then start again from the last checkpoint. Or {fix}",
                ) from None
            raise RerunElsewhere(
                text,
                why="the step gave this twice on the same device; only another one can tell whether it is broken. "
                f"The state before the step is saved, as iteration {args.iteration}; no weight has been changed by it",
                fix=f"start again on other hardware with --load {args.save}. Or do not ask: {fix}",
            )
        self._track(iteration, "rejected", found)
        why = f"{verdict.value}. No weight has been changed by this step"
        if verdict is Verdict.REPRODUCED:
            why += "; without --save it cannot be run on other hardware"
        raise ResultRejected(text, why=why, fix=fix)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        """Plain values, for the checkpoint; collective. None where nothing is watched."""
        if not self._active:
            return None
        variability: list[dict[str, Any]] = []
        if self._compares:
            mine = {name: found.as_dict() for name, found in self.variability.items()}
            variability = collectives.all_gather_object(mine, collectives.world(), purpose="variability of results")
        return {
            "mode": self.args.rerun_mode,
            "layout": layout_of(self.pg_collection),
            "suspected_iteration": self._suspected if self._suspects else -1,
            "suspects": [rejection.as_dict() for rejection in self._suspects],
            "largest_loss": self.checks.maximum.state_dict(),
            "given_up": list(self._given_up),
            "left_out": sorted(self.left_out),
            "variability": variability,
        }

    def _load(self, state: dict[str, Any]) -> None:
        if not state:
            return
        self.checks.maximum.load_state_dict(state["largest_loss"])
        self._given_up = list(state["given_up"])
        self.left_out |= set(state["left_out"])
        same_layout = state["layout"] == layout_of(self.pg_collection)
        if not same_layout and (state["suspects"] or state["variability"]):
            print_rank_0("Job sharding has changed: Rerun state will be ignored")
            return
        self._suspects = [Rejection(**saved) for saved in state["suspects"]]
        self._suspected = state["suspected_iteration"]
        if state["variability"]:
            mine = state["variability"][rank_and_world_size()[0]]
            self.variability = {name: Variability.of(saved) for name, saved in mine.items()}


def _tracked(args: Namespace) -> list[int]:
    """The iterations that earlier runs gave up, by the file of --result-rejected-tracker-filename."""
    path = args.result_rejected_tracker_filename
    if path is None:
        return []

    def read() -> list[int]:
        try:
            return rejected_iterations(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise DataError(
                f"--result-rejected-tracker-filename {path} cannot be read: {error.strerror}", fix="another path"
            ) from None

    found = on_rank_0(read, collectives.world())
    if found:
        print_rank_0(f"iterations that {path} names are left out: {_numbers(found)}")
    return found


def _norm(result: StepResult) -> float:
    return math.nan if result.grad_norm is None else result.grad_norm


def _others(found: Sequence[Rejection]) -> str:
    ranks = sorted({rejection.rank for rejection in causes(found)})[1:]
    return f", and so on rank{'s' * (len(ranks) > 1)} {_numbers(ranks)}" if ranks else ""


def _numbers(numbers: Any) -> str:
    ordered = sorted(numbers)
    more = f" and {len(ordered) - 10} more" if len(ordered) > 10 else ""
    return ", ".join(map(str, ordered[:10])) + more
