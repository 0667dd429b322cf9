"""From the command line to the config of the gradient buffers."""

import pytest
from torch import nn

from megatron_lite.training.arguments import ddp_config_from_args, parse_args, validate_args

BASE = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 4 --max-position-embeddings 4 "
    "--micro-batch-size 1 --lr 1e-3 --train-iters 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 8"
)


def _config(flags, module=None):
    return ddp_config_from_args(validate_args(parse_args([*BASE.split(), *flags.split()])), module)


def _changed(flags):
    plain, config = vars(_config("")), vars(_config(flags))
    return {name: value for name, value in config.items() if value != plain[name]}


@pytest.mark.parametrize(
    ("flags", "changed"),
    [
        ("--overlap-grad-reduce --ddp-bucket-size 7", {"overlap_grad_reduce": True, "bucket_size": 7}),
        ("--ddp-average-in-collective", {"average_in_collective": True}),
        ("--accumulate-allreduce-grads-in-fp32", {"grad_reduce_in_fp32": True}),
        ("--bf16", {"grad_reduce_in_fp32": True}),
        ("--bf16 --grad-reduce-in-bf16", {}),
        ("--no-gradient-reduce-div-fusion", {"gradient_reduce_div_fusion": False}),
        ("--check-for-large-grads", {"check_for_large_grads": True}),
        ("--no-check-for-nan-in-loss-and-grad", {"check_for_nan_in_grad": False}),
        ("--fp16", {"check_for_nan_in_grad": False}),
        (
            "--use-nccl-ub --disable-symmetric-registration",
            {"nccl_ub": True, "disable_symmetric_registration": True},
        ),
        (
            "--bf16 --grad-reduce-in-bf16 --ddp-param-name-patterns-for-fp32-local-accumulation *norm* all",
            {"param_name_patterns_for_fp32_local_accumulation": ["*norm*", "all"]},
        ),
        (
            "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
            {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
        ),
        (
            "--use-distributed-optimizer --ddp-pad-buckets-for-high-nccl-busbw",
            {"use_distributed_optimizer": True, "pad_buckets_for_high_nccl_busbw": True},
        ),
        (
            "--use-distributed-optimizer --fp16 --ddp-reduce-scatter-with-fp32-accumulation",
            {
                "use_distributed_optimizer": True,
                "reduce_scatter_with_fp32_accumulation": True,
                "check_for_nan_in_grad": False,
            },
        ),
        # nothing is aligned without virtual pipeline stages
        ("--no-align-param-gather", {}),
    ],
)
def test_flags_change_the_fields_that_they_name_and_no_others(flags, changed):
    assert _changed(flags) == changed


def test_a_number_of_buckets_becomes_a_share_of_the_trainable_parameters():
    module = nn.Linear(10, 10)
    module.bias.requires_grad_(False)
    config = _config("--overlap-grad-reduce --ddp-num-buckets 4", module)
    assert (config.bucket_size, config.num_buckets) == (25, None)
