"""What the flags of full sharding mean for a run: which kind of data parallelism, what is told."""

import pytest
import torch

from megatron_lite.distributed import TorchFullyShardedDataParallelConfig
from megatron_lite.training.arguments import (
    ddp_config_from_args,
    fully_sharded_config_from_args,
    parse_args,
    validate_args,
)
from megatron_lite.training.memory_estimate import memory_of

SHAPE = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8 "
    "--micro-batch-size 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 7 --train-iters 9"
)


def resolved(flags: str, ranks: int = 4):
    return validate_args(parse_args(f"{SHAPE} {flags}".split()), ranks)


@pytest.mark.parametrize(
    "flags, sharded_optimizer, fully",
    [
        ("", False, False),
        ("--use-torch-fsdp2", True, True),
        ("--use-megatron-fsdp", True, True),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", True, True),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim", True, False),
        ("--use-megatron-fsdp --use-distributed-optimizer --data-parallel-sharding-strategy no_shard", False, False),
        ("--use-megatron-fsdp --tensor-model-parallel-size 4", True, False),  # one rank a copy
        ("--use-megatron-fsdp --num-distributed-optimizer-instances 4", True, False),
        ("--use-megatron-fsdp --num-distributed-optimizer-instances 4 --enable-full-sharding-in-hsdp", True, True),
    ],
)
def test_each_strategy_runs_the_kind_of_data_parallelism_that_it_names(flags, sharded_optimizer, fully):
    args = resolved(flags)
    assert (args.use_distributed_optimizer, args.is_fully_sharded) == (sharded_optimizer, fully)


@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
@pytest.mark.parametrize("ranks, flags", [(1, ""), (2, "--tensor-model-parallel-size 2")])
def test_one_rank_a_copy_gets_buffers_that_the_plain_wrapper_takes(strategy, ranks, flags):
    args = resolved(f"--use-megatron-fsdp --data-parallel-sharding-strategy {strategy} {flags}", ranks)
    assert args.data_parallel_sharding_strategy == strategy  # as typed, for whoever resumes on more ranks
    config = ddp_config_from_args(args)
    assert (config.data_parallel_sharding_strategy, config.use_distributed_optimizer) == ("optim", True)


def test_what_is_done_otherwise_is_told(capsys):
    resolved(
        "--use-megatron-fsdp --use-nccl-ub --fsdp-double-buffer --outer-dp-sharding-strategy optim "
        "--overlap-grad-reduce --ddp-bucket-size 100 --init-model-with-meta-device"
    )
    said = "".join(capsys.readouterr())
    for words in (
        "shared out over 4 ranks, by rows",
        "--use-nccl-ub has no effect here",
        "--fsdp-double-buffer has no effect here",
        "--outer-dp-sharding-strategy optim has no effect here",
        "--ddp-bucket-size: no effect with full sharding",
        "as with --no-gradient-accumulation-fusion",
    ):
        assert words in said
    resolved("--use-torch-fsdp2 --init-model-with-meta-device", ranks=1)
    assert "there is nothing to shard: plain buffers" in capsys.readouterr().out


def test_the_config_of_the_wrapper_follows_the_flags():
    config = fully_sharded_config_from_args(
        resolved("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward --grad-reduce-in-bf16 --bf16")
    )
    assert isinstance(config, TorchFullyShardedDataParallelConfig)
    assert not config.reshard_after_forward and not config.grad_reduce_in_fp32
    config = fully_sharded_config_from_args(
        resolved(
            "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads --megatron-fsdp-grad-comm-dtype bf16"
        )
    )
    assert (config.data_parallel_sharding_strategy, config.grad_comm_dtype) == ("optim_grads", "bf16")
    assert config.reshard_after_forward and config.use_megatron_fsdp


@pytest.mark.parametrize(
    "flags, bytes_per_parameter",
    [
        ("--bf16", 18.0),
        ("--bf16 --use-distributed-optimizer", 6 + 12 / 4),
        ("--bf16 --use-torch-fsdp2", 16 / 4),
        ("--use-torch-fsdp2", 16 / 4),
        ("--use-megatron-fsdp --num-distributed-optimizer-instances 2", 16 / 2),
        ("--bf16 --freeze-all-layers", 2.0),  # neither gradients nor moments
        ("--bf16 --freeze-all-layers --use-torch-fsdp2", 4 / 4),
        ("--bf16 --skip-train --use-torch-fsdp2", 2.0),  # the bare model, whole
    ],
)
def test_the_memory_of_a_rank_follows_the_formula(flags, bytes_per_parameter):
    args = resolved(flags)
    assert memory_of(args, 1_000_000).total == bytes_per_parameter * 1_000_000
    assert args.params_dtype in (torch.float32, torch.bfloat16)
