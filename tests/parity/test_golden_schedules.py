"""Schedules against numbers that megatron-core produced."""

from types import SimpleNamespace

import pytest

from megatron_lite.errors import ConfigError
from megatron_lite.num_microbatches_calculator import build_num_microbatches_calculator
from megatron_lite.optimizer_param_scheduler import OptimizerParamScheduler

STYLES = [
    "linear",
    "cosine",
    "constant",
    "inverse-square-root",
    "linear_no_warmup",
    "cosine_no_init",
    "wd_linear",
    "wd_cosine",
    "WSD_exponential",
    "WSD_linear",
    "WSD_cosine",
    "WSD_minus_sqrt",
]


def _row(groups):
    return [group["lr"] for group in groups] + [group["weight_decay"] for group in groups]


@pytest.mark.parametrize("name", STYLES)
def test_curves_equal_megatrons(golden, name):
    """lr and weight decay of three groups over 111 steps; row 0 is what the first update uses. Tolerance 1e-12."""
    data = golden("param_scheduler.json")
    assert sorted(data["cases"]) == sorted(STYLES)
    case = data["cases"][name]
    optimizer = SimpleNamespace(param_groups=[dict(group) for group in data["param_groups"]])
    scheduler = OptimizerParamScheduler(optimizer, **case["config"])
    rows = [_row(optimizer.param_groups)]
    for _ in range(len(case["rows"]) - 1):
        scheduler.step(case["increment"])
        rows.append(_row(optimizer.param_groups))
    for ours, theirs in zip(rows, case["rows"], strict=True):
        assert ours == pytest.approx(theirs, rel=0, abs=1e-12)
    assert case["state_dict"].items() <= scheduler.state_dict().items()


@pytest.mark.parametrize("number", range(9))
def test_batch_sizes_equal_megatrons(golden, number):
    """Micro-batches, planned and running size over 60 steps, each of which consumes its running size."""
    case = golden("num_microbatches.json")[number]
    arguments = {k: v for k, v in case.items() if k not in ("rows", "error")}
    if "error" in case or case["rows"][0]["num_microbatches"] == 0:
        # Megatron divides by zero here, or stays at 0 micro-batches for ever.
        with pytest.raises(ConfigError, match="--rampup-batch-size"):
            build_num_microbatches_calculator(rank=0, **arguments)
        return
    calculator = build_num_microbatches_calculator(rank=0, **arguments)
    consumed = 0
    for row in case["rows"]:
        assert row["consumed"] == consumed
        if "consistency_error" in row:
            with pytest.raises(ConfigError, match="is no multiple of --micro-batch-size"):
                calculator.update(consumed, consistency_check=True)
            calculator.update(consumed, consistency_check=False)
        else:
            calculator.update(consumed, consistency_check=True)
        sizes = calculator.current_global_batch_size, calculator.get_current_running_global_batch_size()
        assert (calculator.get(), *sizes) == (row["num_microbatches"], row["current"], row["running"])
        consumed += sizes[1]
