"""FP8 casts over ranks and steps: one tensor has one scale however it is cut, and a resume is bitwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.cli.convert import export_model
from megatron_lite.fusions.fp8 import Recipe
from megatron_lite.initialization import init_method_normal
from megatron_lite.model_parallel_config import ModelParallelConfig
from megatron_lite.process_groups_config import ProcessGroupCollection, register_process_groups
from megatron_lite.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron_lite.tensor_parallel.fp8 import LayerCasts, cast_products
from tests.distributed.layouts import Layout, Matrix
from tests.distributed.resume import folder_words, losses_of, train

E5M2 = torch.float8_e5m2
SEQUENCE, INNER, OUTER = 64, 256, 512  # a rank's parts are whole blocks of 128
RECIPES = {
    "tensorwise": Recipe("tensorwise", backward=E5M2),
    "delayed": Recipe("delayed", backward=E5M2, history=2, largest_of_history=True),
    "blockwise": Recipe("blockwise"),
    "mxfp8": Recipe("mxfp8"),
    "mxfp8 without wgrad": Recipe("mxfp8", wgrad=False),
}


def two_layers(kind: str, sequence_parallel: bool) -> dict[str, Tensor]:
    """A column and a row layer on exact numbers, of which the largest of every tensor is on the last rank; the third of
    three steps. Returns what this rank has of outputs and gradients."""
    size, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD if size > 1 else None
    groups = ProcessGroupCollection(tp=group, tp_cp=group, tp_dp_cp=group)
    register_process_groups(groups)
    torch.manual_seed(4)
    config = ModelParallelConfig(
        tensor_model_parallel_size=size, sequence_parallel=sequence_parallel and size > 1, expert_tensor_parallel_size=1
    )
    column = ColumnParallelLinear(INNER, OUTER, config=config, init_method=init_method_normal(0.1), bias=False)
    row = RowParallelLinear(
        OUTER, INNER, config=config, init_method=init_method_normal(0.1), bias=False, input_is_parallel=True,
        skip_bias_add=False,
    )  # fmt: skip
    ends = cast_products([column, row], [RECIPES[kind]] * 2, groups)
    generator = torch.Generator().manual_seed(6)
    whole_x, whole_g = (torch.randn(SEQUENCE, 2, INNER, generator=generator) for _ in range(2))
    whole_x[-1, -1, -1], whole_g[-1, -1, -1] = 9.0, 7.0
    cut = sequence_parallel and size > 1
    own = slice(rank * SEQUENCE // size, (rank + 1) * SEQUENCE // size) if cut else slice(None)
    found: dict[str, Tensor] = {}
    for step in range(3):
        factor = 1.0 + step  # histories differ from the present
        x = (whole_x[own] * factor).requires_grad_()
        middle, _ = column(x)
        middle.retain_grad()
        y, _ = row(middle)
        column.weight.grad = row.weight.grad = None
        y.backward(whole_g[own] / factor)
        found = {"y": y.detach(), "x": x.grad, "middle": middle.detach(), "column": column.weight.grad,
                 "row": row.weight.grad}  # fmt: skip
        if ends is not None:
            ends.after_grad_sync(groups)
    for name, layer in (("column", column), ("row", row)):
        assert isinstance(layer.fp8, LayerCasts)
        if layer.fp8.amax_history is not None:
            found[f"history of {name}"] = layer.fp8.amax_history
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("kind", RECIPES)
def test_layers_cut_over_ranks_round_as_whole_ones_do(world, kind, sequence_parallel):
    """A scale of a rank's own would change numbers by a sixteenth."""
    (whole,) = world(1).run(two_layers, kind, False)
    parts = world(2).run(two_layers, kind, sequence_parallel)
    joined = {
        "y": torch.cat([part["y"] for part in parts]) if sequence_parallel else parts[0]["y"],
        "x": torch.cat([part["x"] for part in parts]) if sequence_parallel else parts[0]["x"],
        "middle": torch.cat([part["middle"] for part in parts], -1),
        "column": torch.cat([part["column"] for part in parts]),
        "row": torch.cat([part["row"] for part in parts], -1),
    }
    for name, got in joined.items():
        # Sums of two ranks are rounded once more: now and then a number of the next layer falls to the other side.
        off = (got - whole[name]).abs() / whole[name].abs().max()
        assert off.mean() < 1e-6 and off.max() < 2e-3, (name, off.mean(), off.max())
    for name in whole.keys() - joined.keys():
        for part in parts:
            torch.testing.assert_close(part[name], whole[name], rtol=1e-5, atol=0)


def test_a_history_holds_the_largest_of_each_step_newest_first(world):
    (whole,) = world(1).run(two_layers, "delayed", False)
    assert whole["history of column"][:, 0].tolist() == [27.0, 18.0]  # of 9 times 1, 2, 3
    torch.testing.assert_close(whole["history of row"][:, 2], torch.tensor([7 / 3, 7 / 2]))


FP8 = {
    "tensorwise": ("--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"),
    "delayed": ("--fp8-format", "hybrid", "--fp8-amax-history-len", "3", "--fp8-amax-compute-algo", "max"),
    "mxfp8": ("--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"),
}
ROWS = [
    Layout(model="llama", tp=2, sp=True, flags=FP8["tensorwise"]),
    Layout(model="llama", tp=2, cp=2, flags=FP8["tensorwise"]),
    Layout(model="llama", tp=2, dp=2, distributed_optimizer=True, flags=FP8["delayed"]),
    Layout(model="llama", pp=2, recompute="full", flags=FP8["delayed"]),
    Layout(model="mixtral", dp=2, flags=FP8["delayed"]),
    Layout(model="mixtral", ep=2, dp=2, flags=FP8["mxfp8"]),
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ROWS, ids=str)
def test_layouts_train_alike_within_a_rounding_now_and_then(world, layout):
    """Sums in another order differ in their last bit, and of a thousand numbers one then falls to the other side of a
    step of e4m3. What fp32 makes of the same model is much farther away."""
    matrix = Matrix(world)
    one, other, plain = (matrix.record(row) for row in (layout.reference, layout, Layout(model=layout.model)))
    losses = [torch.tensor([step["lm loss"] for step in record.losses]) for record in (one, other, plain)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=0)
    assert (losses[2] - losses[0]).abs().max() > 3 * (losses[1] - losses[0]).abs().max()
    torch.testing.assert_close(losses[2], losses[0], rtol=0.02, atol=0)


def resumed(layout: Layout, words: list[str], steps: int, save_after: int | None = None):
    return train(layout, words, steps, save_after=save_after)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resume_with_delayed_scales_is_bitwise(world, tmp_path, precision):
    """Without the histories the first step would be cast at the scales of its own tensors."""
    layout = Layout(model="llama", tp=2, dp=2, distributed_optimizer=True, precision=precision, flags=FP8["delayed"])
    whole = losses_of(world(4).run(resumed, layout, folder_words(save=tmp_path), 5, 3))
    assert losses_of(world(4).run(resumed, layout, folder_words(load=tmp_path), 2)) == whole[3:]


@pytest.mark.slow
def test_fp8_can_be_taken_up_and_given_up_at_a_resume_and_histories_grow(world, tmp_path):
    plain, delayed = Layout(model="llama"), Layout(model="llama", flags=FP8["delayed"])
    longer = Layout(model="llama", flags=(*FP8["delayed"], "--fp8-amax-history-len", "5"))
    folders: list[Path] = [tmp_path / name for name in "ab"]
    losses_of(world(1).run(resumed, plain, folder_words(save=folders[0]), 3, 3))
    taken = world(1).run(resumed, delayed, [*folder_words(save=folders[1], load=folders[0]), "--force"], 2, 5)
    assert "starts afresh: the histories" in taken[0].said and "casts are simulated" in taken[0].said
    given_up = losses_of(world(1).run(resumed, plain, [*folder_words(load=folders[1]), "--force"], 1))
    grown = losses_of(world(1).run(resumed, longer, [*folder_words(load=folders[1]), "--force"], 1))
    assert given_up[0] != grown[0] and given_up[0] == pytest.approx(grown[0], rel=0.02)
    export_model(folders[1], tmp_path / "hf")  # histories are no weights, and are left
    assert (tmp_path / "hf" / "config.json").is_file()
