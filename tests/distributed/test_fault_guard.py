"""A bad result under every kind of layout: all ranks hear of it, none updates, the first bad value is found.

Each run is compared, bit for bit and rank by rank, with one of the same layout in which nothing was bad, or which left
the step out.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite import collectives
from megatron_lite.enums import ModelType
from megatron_lite.errors import RerunElsewhere, ResultRejected
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.training import record
from megatron_lite.training.arguments import parse_args, validate_args
from megatron_lite.training.batch import skip_batch
from megatron_lite.training.data_loading import build_train_valid_test_data_iterators
from megatron_lite.training.expert_log import collect
from megatron_lite.training.families import defaults_of
from megatron_lite.training.fault_guard import FaultGuard
from megatron_lite.training.model_setup import setup_model_and_optimizer
from megatron_lite.training.stage_data import for_chunks
from megatron_lite.training.train_step import train_step
from megatron_lite.training.training import start
from tests.distributed.layouts import MODELS, Layout

STEPS, BAD = 4, 3  # of STEPS steps, which is bad


class Poison:
    """The MLP of the first layer of the first stage gives NaN in the second micro-batch of the bad step, on the last
    data-parallel rank.

    Args:
        runs: in so many runs of that step.
    """

    def __init__(self, model: Any, runs: int, groups: ProcessGroupCollection):
        first = collectives.group_rank(groups.pp) == 0
        last = collectives.group_rank(groups.dp) == collectives.group_size(groups.dp) - 1
        self.runs = runs if first and last else 0
        self.iteration = self.microbatch = 0
        inner = model[0]
        while hasattr(inner, "module"):
            inner = inner.module
        inner.register_forward_pre_hook(self._count)
        inner.decoder.layers[0].mlp.register_forward_hook(self._spoil)

    def begin(self, iteration: int) -> None:
        self.runs -= self.iteration == iteration == BAD and self.microbatch > 0  # the step was run before
        self.iteration, self.microbatch = iteration, 0

    def _count(self, *_: Any) -> None:
        self.microbatch += 1

    def _spoil(self, module: Any, inputs: Any, output: Any) -> Any:
        if self.iteration == BAD and self.microbatch == 2 and self.runs > 0:
            return (output[0] * float("nan"), *output[1:])
        return output


def _train(layout: Layout, flags: str, runs: int, leave_out: bool = False, saved: Any = None) -> dict[str, Any]:
    """One rank's part of a training.

    Args:
        saved: what a former guard put into a checkpoint.
    Returns: what its guard did, and its weights, buffers and moments.
    """
    said = io.StringIO()
    args = parse_args([*layout.words(), *flags.split()], args_defaults=defaults_of("gpt"))
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            validate_args(args, layout.world_size)
            start(args)
            args.rerun_state = saved
            found = _steps(args, record.load_script(MODELS[layout.model].script), runs, leave_out)
    finally:
        record._forget_run()
    return {**found, "said": said.getvalue()}


def _steps(args: Any, script: Any, runs: int, leave_out: bool) -> dict[str, Any]:
    args.iteration = args.consumed_train_samples = args.consumed_valid_samples = 0
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model, optimizer, scheduler = setup_model_and_optimizer(
        script.model_provider, ModelType.encoder_or_decoder, args, groups
    )
    data: Any = build_train_valid_test_data_iterators(script.train_valid_test_datasets_provider, args, groups)
    guard = FaultGuard(args, model, optimizer, for_chunks(data.train, args, groups), groups, lambda: None)
    guard._save = lambda: kept.append(guard.state_dict())
    kept: list[Any] = []
    poison = Poison(model, runs, groups)
    skipped, losses, error = [], [], None
    for iteration in range(1, STEPS + 1):
        if leave_out and iteration == BAD:
            for _ in range(args.global_batch_size // args.micro_batch_size // args.data_parallel_size):
                skip_batch(guard.data, groups.tp)
            continue

        def run(checks: Any, update: bool, iteration: int = iteration) -> Any:
            poison.begin(iteration)
            step = (script.forward_step, guard.data, model, optimizer, scheduler, args, iteration, groups)
            return train_step(*step, checks, update)  # type: ignore[arg-type]

        try:
            result = guard.step(iteration, run)
        except (ResultRejected, RerunElsewhere) as rejected:
            error = str(rejected)
            break
        assert result is not None, "no rollback here"
        if args.num_experts:
            collect(model, args.num_layers, args.num_experts, groups)
        skipped.append(result.skipped)
        losses.append(result.losses)
    state = {name: _own(x) for name, x in optimizer.state_dict()["tensors"].items()}  # type: ignore[union-attr]
    for chunk in model:
        state |= {name: _own(x) for name, x in chunk.state_dict().items() if isinstance(x, torch.Tensor)}
    return {"skipped": skipped, "losses": losses, "error": error, "state": state, "kept": kept}


def _own(x: Any) -> torch.Tensor:
    """A copy of this rank's part."""
    return (x.to_local() if hasattr(x, "to_local") else x).clone()


def _assert_same_state(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert mine["state"].keys() == theirs["state"].keys() and len(mine["state"]) > 10
        different = [name for name, x in mine["state"].items() if not torch.equal(x, theirs["state"][name])]
        assert not different


LAYOUTS = [
    Layout(),
    Layout(dp=2),
    Layout(dp=2, distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True),
    Layout(dp=2, flags=("--use-torch-fsdp2",)),
    Layout(tp=2, sp=True),
    Layout(pp=2),
    Layout(pp=2, vpp=2, flags=("--num-layers", "4")),
    Layout(cp=2),
    Layout(model="deepseek", dp=2, ep=2),  # its routers' bias moves inside the step
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_transient_fault_leaves_no_trace_in_the_training(world, layout):
    """Dropout is on: a repeated step that drew other numbers, or moved a bias twice, would be another training."""
    flags = "--hidden-dropout 0.1 --attention-dropout 0.1"
    ranks = world(layout.world_size)
    hurt = ranks.run(_train, layout, flags, 1)
    assert "verdict: transient error" in hurt[0]["said"] and not any(hurt[0]["skipped"])
    _assert_same_state(hurt, ranks.run(_train, layout, flags, 0))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_step_that_stays_bad_is_left_out_by_all_ranks_and_its_first_bad_value_is_named(world, layout, tmp_path):
    """The state is that of a run that never took the step, generators included."""
    flags = f"--hidden-dropout 0.1 --on-bad-loss skip --save {tmp_path} --save-interval 100"
    ranks = world(layout.world_size)
    hurt = ranks.run(_train, layout, flags, 99)
    assert [rank["skipped"] for rank in hurt] == [[False, False, True, False]] * layout.world_size
    (report,) = Path(tmp_path, "faults").iterdir()
    text = report.read_text()
    assert "iteration 3" in text and str(report) in hurt[0]["said"]
    (first, *_) = [line for line in text.splitlines() if line.startswith("  forward, rank")]
    assert "micro-batch 1: the output of decoder.layers.0.mlp" in first and "of layer 1)" in first
    assert "its inputs are finite" in first
    blamed = f"forward, rank {layout.world_size - 1}," if layout.dp > 1 else "forward, rank"
    assert blamed in first and "sample " in text
    _assert_same_state(hurt, ranks.run(_train, layout, flags, 0, True))


def test_more_bad_batches_than_the_limit_end_the_run_on_every_rank(world):
    found = world(2).run(_train, Layout(dp=2), "--on-bad-loss skip --bad-loss-limit 0 --rerun-mode disabled", 99)
    assert found[0]["error"] == found[1]["error"] and "--bad-loss-limit 0" in found[0]["error"]
    assert "rank 1: lm loss is nan at iteration 3 (micro-batch 1)" in found[0]["error"]
    assert len(found[0]["skipped"]) == 2


@pytest.mark.parametrize("kind", ["persistent_error", "correct_result"])
def test_an_injected_fault_is_judged_behind_its_checkpoint_and_training_goes_on(world, kind, tmp_path):
    """A persistent error is another device's; a correct result that is a number is trained on, suspicious or not."""
    layout, ranks = Layout(dp=2), world(2)
    flags = f"--error-injection-rate {BAD} --error-injection-type {kind} --save {tmp_path} --save-interval 100"
    first = ranks.run(_train, layout, flags, 0)
    assert all("only another one can tell" in rank["error"] for rank in first)
    (kept,) = first[0]["kept"]
    assert kept == first[1]["kept"][0] and kept["suspected_iteration"] == BAD
    second = ranks.run(_train, layout, flags, 0, False, kept)
    assert f"verdict: {kind.replace('_', ' ')}" in second[0]["said"] and second[0]["error"] is None
    _assert_same_state(second, ranks.run(_train, layout, "", 0))


def test_suspicions_of_another_layout_are_dropped_and_said(world, tmp_path):
    """Ranks mean something else there."""
    flags = f"--error-injection-rate {BAD} --error-injection-type correct_result --save {tmp_path} --save-interval 100"
    (kept, *_) = world(2).run(_train, Layout(dp=2), flags, 0)[0]["kept"]
    (alone,) = world(1).run(_train, Layout(), "", 0, False, kept)
    assert "Job sharding has changed: Rerun state will be ignored" in alone["said"] and alone["error"] is None
    assert "verdict" not in alone["said"]


def test_without_save_a_reproduced_fault_is_final(world):
    found = world(2).run(_train, Layout(dp=2), "", 99)
    assert (
        found[0]["error"] == found[1]["error"]
        and "without --save it cannot be run on other hardware" in (found[0]["error"])
    )
    assert "A bad result at iteration 3" in found[0]["error"]  # there is no folder for the report


def test_statistics_mode_says_how_much_results_vary_and_trains_as_without_it(world):
    """Twice the same on a CPU, dropout and all."""
    layout, flags, ranks = Layout(dp=2), "--hidden-dropout 0.1 --log-interval 2", world(2)
    found = ranks.run(_train, layout, f"{flags} --rerun-mode report_stats", 0)
    for rank in range(2):
        assert f"rank {rank}:  loss of a micro-batch: 8 results, 8 identical (100.0 %)" in found[0]["said"]
        assert f"rank {rank}:  grad norm: 4 results, 4 identical (100.0 %)" in found[0]["said"]
    _assert_same_state(found, ranks.run(_train, layout, flags, 0))


def test_statistics_mode_sees_a_step_that_is_not_repeatable(world):
    """The poison acts in one run of a step only: one loss of eight differs, on the rank that has it."""
    flags = "--rerun-mode report_stats --on-bad-loss skip --log-interval 2"
    (found, _) = world(2).run(_train, Layout(dp=2), flags, 1)
    assert "rank 1:  loss of a micro-batch: 8 results, 7 identical (87.5 %)" in found["said"]
    assert "rank 0:  loss of a micro-batch: 8 results, 8 identical (100.0 %)" in found["said"]


def test_a_good_step_sends_no_message_for_being_watched(world):
    """Counted by group and purpose: what a run pays that never meets a bad loss."""
    watched, not_watched = (world(2).run(_messages, flag) for flag in ("", "--no-check-for-nan-in-loss-and-grad"))
    assert watched == not_watched and watched[0]


def _messages(flag: str) -> dict[Any, Any]:
    before = collectives.counts()
    _train(Layout(dp=2), flag, 0)
    return {key: value for key, value in collectives.difference(collectives.counts(), before).items() if value[0]}
