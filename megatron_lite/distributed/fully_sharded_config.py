"""The settings of fully sharded data parallelism, with the flags of both of Megatron's kinds."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config import flag
from megatron_lite.distributed.distributed_data_parallel_config import DistributedDataParallelConfig

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


@dataclass(kw_only=True)
class TorchFullyShardedDataParallelConfig(DistributedDataParallelConfig):
    """How a fully sharded model is gathered and reduced.

    reshard_after_forward: give a layer's gathered weights up between its forward and its backward. grad_comm_dtype: the
    number format in which gradients travel (`fp32`, `bf16`, `fp16`); `auto`: as `grad_reduce_in_fp32` says.
    """

    reshard_after_forward: bool = True
    grad_comm_dtype: str = "auto"


@dataclass(kw_only=True)
class FullyShardedConfig:
    """Fully sharded data parallelism."""

    use_torch_fsdp2: bool = flag(False, "Keep a part of every weight on a rank, gather layers as they run.")
    torch_fsdp2_reshard_after_forward: bool = flag(
        True,
        "Keep gathered weights between forward and backward.",
        off="--torch-fsdp2-no-reshard-after-forward",
    )
    use_megatron_fsdp: bool = flag(False, "Shard over the data-parallel ranks what the strategy says.")
    data_parallel_sharding_strategy: str = flag(
        "optim_grads_params", "What is sharded: nothing, up to all of it (ZeRO 0 to 3).", choices=STRATEGIES
    )
    enable_full_sharding_in_hsdp: bool = flag(
        False, "Shard over all data-parallel ranks, also with several optimizer instances."
    )
    megatron_fsdp_version: int = flag(
        1, "Which of Megatron's implementations is meant; 2 refuses --use-distributed-optimizer.", choices=(1, 2)
    )
    megatron_fsdp_main_params_dtype: str = flag(
        "fp32", "Number format of the weights that the optimizer keeps.", choices=("fp32", "bf16", "fp16", "auto")
    )
    megatron_fsdp_main_grads_dtype: str = flag(
        "auto",
        "Number format in which a rank's part of the gradients is summed.",
        choices=("fp32", "bf16", "fp16", "auto"),
    )
    megatron_fsdp_grad_comm_dtype: str = flag(
        "auto", "Number format in which gradients travel.", choices=("fp32", "fp16", "bf16", "auto")
    )
    suggested_communication_unit_size: int | None = flag(
        None, "Layers ahead are gathered until together they have this size.", unit="parameters"
    )
    init_model_with_meta_device: bool = flag(
        False, "Build without memory, and make each rank's part of the weights after it is cut."
    )
    strict_fsdp_dtensor_load: bool = flag(
        True,
        "Load also a checkpoint that lacks some of the model's tensors, or has more.",
        off=("--no-strict-fsdp-dtensor-load", "--disable-strict-fsdp-dtensor-load"),
    )
