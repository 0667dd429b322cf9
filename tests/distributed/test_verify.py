"""`megatron-lite verify`: the table, the exit status, and what it says to a layout that it cannot try."""

import pytest

from megatron_lite.cli import main as cli

pytestmark = pytest.mark.slow

FLAGS = """verify --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --lr 1e-4 --bf16
    --max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size 512 --train-iters 1000
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model /nowhere --data-path /nowhere --load /nowhere/run
    --tensor-model-parallel-size 2 --sequence-parallel --steps 2""".split()
ROWS = ["first weights", "losses", "gradients", "gradient norm", "weights", "copies on other ranks"]


def test_a_layout_that_trains_alike_passes_in_fp32_and_in_its_own_format(capfd):
    assert cli.main(FLAGS) == 0
    out = capfd.readouterr().out
    assert "checking tp 2, dp 2, sequence parallel on 4 processes against one" in out
    assert "2 layers of" in out and "instead of 12 of 768" in out
    for row in ROWS:
        assert out.count(f"  ok   {row} ") == 2, out
    assert "fp32: largest deviation" in out and "bf16: largest deviation" in out
    assert "this layout trains as one process does" in out


def test_a_deviation_beyond_the_tolerance_ends_with_status_1(capfd):
    """Sums in another order differ in the last bits: nothing passes at 1e-12."""
    assert cli.main([*FLAGS, "--tolerance", "1e-12", "--ranks", "2"]) == 1
    out = capfd.readouterr().out
    assert "checking tp 2, sequence parallel on 2 processes" in out
    fp32 = out.split("fp32: ")[1].split("bf16: ")[0]
    assert "FAIL gradients" in fp32 and "FAIL weights" in fp32 and "ok   first weights" in fp32
    assert "this layout does NOT train as one process does" in out


def test_a_layout_for_more_processes_than_allowed_is_refused_with_the_number(capsys):
    assert cli.main([*FLAGS, "--max-processes", "3"]) == 2
    error = capsys.readouterr().err
    assert "needs 4 processes" in error and "--max-processes 4" in error and "Traceback" not in error


def test_ranks_that_are_no_multiple_of_a_copy_are_refused(capsys):
    assert cli.main([*FLAGS, "--ranks", "7"]) == 2
    assert "7" in capsys.readouterr().err
