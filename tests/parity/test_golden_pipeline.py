"""Schedule tables, warm-up counts and layer placement equal those that Megatron computes."""

import json
from pathlib import Path

import pytest

from megatron_lite.pipeline_parallel.actions import Kind, make_schedule, schedule_table, warmup_of
from megatron_lite.pipeline_parallel.stage_layout import stage_layout

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "pipeline_tables.json").read_text())


@pytest.mark.parametrize("case", GOLDEN["schedule_table"], ids=lambda c: "-".join(str(c[k]) for k in list(c)[:3]))
def test_schedule_table(case):
    """(micro-batch, chunk) in the order of the virtual micro-batches."""
    table = schedule_table(case["num_microbatches"], case["num_model_chunks"], case["group_size"])
    assert [list(entry) for entry in table] == case["table"]


@pytest.mark.parametrize(
    "case", GOLDEN["warmup"], ids=lambda c: f"{c['pp']}-{c['vp']}-{c['num_microbatches']}-{c['group_size']}"
)
def test_warmup(case):
    """[total, all in warm-up, warm-up, remaining] of every rank; what a list really does agrees with the count."""
    chunks, microbatches, stages = case["vp"] or 1, case["num_microbatches"], case["pp"]
    total = microbatches * chunks
    for rank, (all_passes, all_in_warmup, warmup, remaining) in enumerate(case["ranks"]):
        assert all_passes == total
        if case["forward_only"]:
            assert warmup == total and remaining == 0  # nothing but warm-up: no backward follows
            continue
        ours = warmup_of(stages, microbatches, rank, chunks, case["group_size"] if case["vp"] else None)
        assert (ours, total - ours, ours == total) == (warmup, remaining, all_in_warmup)
        actions = make_schedule(stages, microbatches, chunks, case["group_size"])[rank]
        before = [action.kind for action in actions].index(Kind.BACKWARD)
        assert before == min(warmup + 1, total)


@pytest.mark.parametrize("case", GOLDEN["layer_placement"], ids=lambda c: str(c["config"]))
def test_layer_placement(case):
    """Number and first layer of every chunk, for all ways to place layers."""
    config = case["config"]
    layout = stage_layout(
        config["num_layers"],
        config["pp"],
        config.get("vp", 1),
        config.get("num_layers_in_first_pipeline_stage"),
        config.get("num_layers_in_last_pipeline_stage"),
        config.get("account_for_embedding_in_pipeline_split", False),
        config.get("account_for_loss_in_pipeline_split", False),
        config.get("pipeline_model_parallel_layout"),
    )
    for cell in case["cells"]:
        held = layout.cell(cell["pp_rank"], cell["vp_stage"]).layers
        assert (len(held), held.start) == (cell["num_layers"], cell["offset"])
