"""What looks at a run from outside, on runs in the session's worlds: profiles, memory, groups of parameters."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.distributed.layouts import Layout
from tests.distributed.test_expert_log import lines, whole_run

pytestmark = pytest.mark.slow

RUN = "--train-iters 6 --lr-warmup-iters 0 --log-interval 3 --save-interval 100".split()


@pytest.fixture(scope="module")
def profiled(world, tmp_path_factory) -> tuple[Path, str]:
    """A run with all of a profile's flags, and what it printed."""
    folder = tmp_path_factory.mktemp("profiled")
    words = """--profile --profile-step-start 2 --profile-step-end 4 --pytorch-profiler-collect-shapes
        --pytorch-profiler-collect-callstack --pytorch-profiler-collect-chakra --nvtx-ranges --record-memory-history
        --train-sync-interval 2 --log-memory-interval 2 --log-device-memory-used --log-energy""".split()
    (printed,) = world(1).run(whole_run, Layout(), [*RUN, *words, "--save", str(folder)])
    return folder, printed


def test_the_trace_names_the_iterations_and_the_parts_of_the_model(profiled):
    """Of the profiled steps alone, with shapes, and with allocations, which a CPU has nowhere else."""
    events = json.loads((profiled[0] / "trace_rank0.json").read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert {name for name in names if name.startswith("iteration ")} == {"iteration 2", "iteration 3"}
    assert {"decoder.layers.0.self_attention.linear_qkv", "decoder.layers.1.mlp", "embedding"} <= names
    assert "[memory]" in names
    assert any(name.startswith("nn.Module") or ".py(" in name for name in names), "no call stack"
    shapes = [event["args"]["Input Dims"] for event in events if "Input Dims" in event.get("args", {})]
    assert any(shape for shape in shapes)


def test_the_execution_trace_is_one(profiled):
    trace = json.loads((profiled[0] / "execution_trace_rank0.json").read_text())
    assert len(trace["nodes"]) > 100 and {"id", "name", "ctrl_deps"} <= trace["nodes"][0].keys()


def test_flags_that_have_nothing_to_do_on_a_cpu_say_what_is_done(profiled):
    assert (
        "--record-memory-history: torch keeps a history of allocations on CUDA alone; --profile's trace" in profiled[1]
    )
    assert "--log-energy: unavailable" in profiled[1] or "energy per GPU (J/iter/GPU):" in profiled[1]


def test_memory_is_told_after_the_first_iteration_and_at_its_interval(profiled):
    told = re.findall(
        r"\[Rank 0\] \(after (\d) iterations\) memory \(MB\) \| resident: \d+\.\d \| max resident: \d+\.\d \| "
        r"total device memory used: \d+\.\d\n",
        profiled[1],
    )
    assert told == ["1", "2", "4", "6"]


def test_the_map_of_parameter_groups_names_all_parameters_of_the_model_whatever_the_layout(world, tmp_path):
    """Every rank used to write its own part of the model under local names into one file."""
    found = []
    for layout in (Layout(model="mixtral"), Layout(model="mixtral", pp=2, ep=2, dp=2)):
        path = tmp_path / f"{layout.pp}" / "groups.json"
        words = ["--train-iters", "1", "--dump-param-to-param-group-map", str(path)]
        world(layout.world_size).run(whole_run, layout, words)
        found.append(json.loads(path.read_text()))
    alone, spread = found
    assert alone.keys() == spread.keys() and len(alone) > 20
    decayed = {name for name, group in alone.items() if group == alone["embedding.word_embeddings.weight"]}
    assert "decoder.layers.0.mlp.linear_fc1.weight" in decayed and "decoder.final_layernorm.weight" not in decayed


def test_the_largest_score_is_a_field_at_the_end_of_the_line_and_a_scalar(world, tmp_path):
    """At every step that is logged, and only there: other steps would compute the scores for nothing."""
    from tests.e2e.test_log_and_exit import scalars

    words = ["--log-max-attention-logit", "--tensorboard-dir", str(tmp_path), "--tensorboard-log-interval", "2"]
    printed = world(1).run(whole_run, Layout(), [*RUN, *words])
    found = lines(printed)
    assert [line["iteration"] for line in found] == ["1", "3", "6"]
    assert all(list(line)[-1] == "max attention logit" for line in found)
    scalar = scalars(tmp_path)["max_attention_logit"]
    assert [*scalar] == [2, 4, 6]
    assert f"{scalar[6]:.3f}" == found[-1]["max attention logit"]


def test_progress_of_saves_in_the_background_is_told_when_they_begin_and_when_they_are_there(world, tmp_path):
    """A job that is killed in between has not saved what the first line says."""
    words = "--train-iters 4 --lr-warmup-iters 0 --save-interval 2 --async-save --log-progress".split()
    world(1).run(whole_run, Layout(), [*words, "--save", str(tmp_path)])
    told = [line.split("\t")[3:5] for line in (tmp_path / "progress.txt").read_text().splitlines()]
    assert told[0] == ["Starting job"]
    for iteration in (2, 4):
        begun, there = (
            told.index([f"{word} async checkpoint", f"Iteration: {iteration}"]) for word in ("Saving", "Saved")
        )
        assert begun < there
    assert len(told) == 5
