"""How gradients are bucketed and reduced over the data-parallel group."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config import flag
from megatron_lite.errors import ConfigError


@dataclass(kw_only=True)
class DistributedDataParallelConfig:
    """Gradient buffer, buckets and their reduction. Field names and defaults are Megatron's."""

    grad_reduce_in_fp32: bool = flag(
        False,
        "Accumulate and reduce gradients in fp32. With --bf16 it is on, unless --grad-reduce-in-bf16.",
        name="--accumulate-allreduce-grads-in-fp32",
    )
    overlap_grad_reduce: bool = flag(False, "Reduce a bucket as soon as its last gradient is there.")
    overlap_param_gather: bool = flag(False, "Gather updated parameters during the next forward.")
    align_param_gather: bool = False
    use_distributed_optimizer: bool = flag(False, "Shard the optimizer's state over the data-parallel ranks (ZeRO-1).")
    num_distributed_optimizer_instances: int = flag(1, "Shard inside dp / N ranks, and keep N copies in step.")
    check_for_nan_in_grad: bool = False
    check_for_large_grads: bool = flag(
        False, "Stop at gradients far above the running maximum, before they are reduced."
    )
    bucket_size: int | None = flag(
        None, "Size of a bucket. Default: max(40e6, 1e6 * dp).", name="--ddp-bucket-size", unit="parameters"
    )
    num_buckets: int | None = flag(None, "Number of buckets, instead of a size.", name="--ddp-num-buckets")
    pad_buckets_for_high_nccl_busbw: bool = flag(
        False, "Pad buckets to a multiple of 2^16.", name="--ddp-pad-buckets-for-high-nccl-busbw"
    )
    average_in_collective: bool = flag(
        False, "Average inside the collective instead of scaling before it.", name="--ddp-average-in-collective"
    )
    reduce_scatter_with_fp32_accumulation: bool = flag(
        False,
        "Low-precision wire with an fp32 sum on the receiving rank.",
        name="--ddp-reduce-scatter-with-fp32-accumulation",
    )
    param_name_patterns_for_fp32_local_accumulation: list[str] = flag(
        [],
        "Name patterns of parameters whose gradients accumulate in fp32 locally.",
        name="--ddp-param-name-patterns-for-fp32-local-accumulation",
    )
    gradient_reduce_div_fusion: bool = flag(
        True, "Do not fold the division into the reduction.", off="--no-gradient-reduce-div-fusion"
    )

    def __post_init__(self) -> None:
        for name in ("bucket_size", "num_buckets"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(
                    f"--ddp-{name.replace('_', '-')} {value}", why="a bucket holds something", fix="a positive number"
                )
        if self.bucket_size is not None and self.num_buckets is not None:
            raise ConfigError(
                f"--ddp-bucket-size {self.bucket_size} and --ddp-num-buckets {self.num_buckets}",
                why="the number of buckets is another way to say their size",
                fix="leave one of them out",
            )
        if self.overlap_param_gather and not (self.use_distributed_optimizer and self.overlap_grad_reduce):
            raise ConfigError(
                "--overlap-param-gather without --use-distributed-optimizer and --overlap-grad-reduce",
                why="only a sharded optimizer has parameters to gather, bucket by bucket of the overlap",
                fix="--use-distributed-optimizer --overlap-grad-reduce",
            )
