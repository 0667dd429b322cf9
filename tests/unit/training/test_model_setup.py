"""From arguments to a schedule: also for runs that take no step."""

from types import SimpleNamespace

import pytest
import torch

from megatron_lite.training.arguments import parse_args, validate_args
from megatron_lite.training.initialize import _sum_in_fp32
from megatron_lite.training.model_setup import get_optimizer_param_scheduler

SHAPE = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --max-position-embeddings 8 "
    "--micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 7"
)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sums_of_bf16_products_stay_fp32_on_a_gpu_and_a_cpu_says_that_they_do(device, capsys):
    """torch allows cuBLAS to round partial sums to bf16."""
    switch = torch.backends.cuda.matmul
    before = switch.allow_bf16_reduced_precision_reduction
    try:
        switch.allow_bf16_reduced_precision_reduction = True
        _sum_in_fp32(torch.device(device))
        assert bool(switch.allow_bf16_reduced_precision_reduction) == (device == "cpu")
    finally:
        switch.allow_bf16_reduced_precision_reduction = before
    assert ("has no effect here" in capsys.readouterr().out) == (device == "cpu")


def scheduler_of(flags):
    args = validate_args(parse_args(f"{SHAPE} {flags}".split()), 1)
    return get_optimizer_param_scheduler(SimpleNamespace(param_groups=[{}]), args)


@pytest.mark.parametrize(
    "flags",
    [
        "--train-iters 0",
        "--train-iters 0 --lr-decay-iters 10",
        "--train-iters 0 --lr-decay-style WSD --lr-wsd-decay-iters 2",
        "--train-iters 0 --lr-warmup-fraction 0.1",
    ],
)
def test_a_run_of_no_iterations_has_a_schedule(flags):
    """A job script may ask for nothing; it crashed with a TypeError."""
    scheduler_of(flags)


@pytest.mark.parametrize("flags", ["--train-iters 10", "--train-samples 40"])
def test_the_default_decay_is_the_run(flags):
    """Both ways to say how long a run is give the same clock, in samples."""
    scheduler = scheduler_of(flags)
    assert (scheduler.lr_decay_steps, scheduler.wd_incr_steps, scheduler.lr_warmup_steps) == (40, 40, 0)


def test_C046_the_decay_includes_the_warmup_and_a_short_one_is_told_once(capsys):
    """The warm-up was subtracted by mistake; and two places told of a short decay, in two wordings."""
    scheduler = scheduler_of("--train-iters 220 --lr-warmup-iters 22 --lr-decay-iters 198")
    assert (scheduler.lr_decay_steps, scheduler.lr_warmup_steps) == (4 * 198, 88)
    said = capsys.readouterr()
    warnings = [line for line in (said.out + said.err).splitlines() if "warm-up" in line]
    assert len(warnings) == 1 and "from 198 on" in warnings[0]
