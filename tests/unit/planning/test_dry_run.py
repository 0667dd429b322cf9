"""Sizes of stages under fake groups: equal to what a run of that layout builds."""

import contextlib
import re
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_lite.cli import dry_run
from megatron_lite.errors import ConfigError
from megatron_lite.training import global_vars

SMALL = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 1 --train-iters 10 --lr 1e-3 --mock-data"""


def told(capsys: pytest.CaptureFixture[str], ranks: int, more: str) -> str:
    dry_run.main(["--ranks", str(ranks), "--vocabulary", "256", *SMALL.split(), *more.split()])
    return capsys.readouterr().out


def parameters(text: str) -> int:
    found = re.search(r"the model has ([\d,]+) parameters", text)
    assert found
    return int(found[1].replace(",", ""))


WHOLE = 4 * (12 * 64**2 + 13 * 64) + (256 + 32 + 2) * 64


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, ""),
        (2, "--tensor-model-parallel-size 2"),
        (8, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"),
        (4, "--pipeline-model-parallel-size 4"),
        (4, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 8"),
        (8, "--pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping"),
        (64, "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --use-distributed-optimizer"),
    ],
)
def test_C135_the_model_is_as_large_under_every_layout(
    ranks: int, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = told(capsys, ranks, f"{layout} --make-vocab-size-divisible-by 16")
    assert parameters(text) == WHOLE
    assert not dist.is_initialized()
    with pytest.raises(AssertionError):
        global_vars.get_args()


def test_untied_tables_count_twice(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, 2, "--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights")
    assert parameters(text) == WHOLE + 256 * 64


def test_a_stage_is_listed_with_what_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [line.split(None, 3) for line in told(capsys, 2, "--pipeline-model-parallel-size 2").splitlines()]
    stages = [row for row in rows if row and row[0].isdigit() and len(row) == 4 and "layers" in row[3]]
    assert [row[0] for row in stages] == ["0", "1"]
    assert "embedding" in stages[0][3] and "loss" in stages[1][3]


def test_memory_is_that_of_the_sharded_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    """bf16 over 4 ranks: 2 + 4 + 12/4 bytes a parameter."""
    flags = "--bf16 --use-distributed-optimizer --accumulate-allreduce-grads-in-fp32"
    line = next(x for x in told(capsys, 4, flags).splitlines() if x.startswith("the largest"))
    sizes = [float(x) for x in re.findall(r"([\d.]+) KiB", line)]
    assert sizes == pytest.approx([WHOLE * n / 1024 for n in (2, 4, 3)], rel=1e-3)


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (3, "--tensor-model-parallel-size 2"),
        (8, "--tensor-model-parallel-size 8"),
        (4, "--num-layers 6 --pipeline-model-parallel-size 4"),
    ],
)
def test_what_cannot_start_is_told(ranks: int, layout: str) -> None:
    with pytest.raises(ConfigError), contextlib.redirect_stdout(None):
        dry_run.main(["--ranks", str(ranks), "--vocabulary", "256", *SMALL.split(), *layout.split()])


@pytest.mark.parametrize("ranks", ["0", "-3"])
def test_a_world_without_a_rank_is_refused(ranks: str) -> None:
    with pytest.raises(ConfigError, match=f"--ranks {ranks}"):
        dry_run.main(["--ranks", ranks, "--vocabulary", "256", *SMALL.split()])


def test_a_tokenizer_that_is_not_here_is_named() -> None:
    flags = [*SMALL.split(), "--vocab-file", str(Path("nowhere") / "vocab.json"), "--merge-file", "nowhere/merges.txt"]
    with pytest.raises(Exception, match="nowhere"):
        dry_run.main(["--ranks", "1", *flags])
