"""How gradients are bucketed and reduced over the data-parallel group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields

from megatron_lite.config import flag
from megatron_lite.errors import ConfigError, RankFailure


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
        False, "Reject gradients far above the running maximum, before they are reduced."
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
        "Name patterns of parameters whose gradients accumulate in fp32 locally; all: every parameter.",
        name="--ddp-param-name-patterns-for-fp32-local-accumulation",
    )
    gradient_reduce_div_fusion: bool = flag(
        True, "Do not fold the division into the reduction.", off="--no-gradient-reduce-div-fusion"
    )
    nccl_ub: bool = flag(False, "Buffers in memory that NCCL has registered.", name="--use-nccl-ub")
    disable_symmetric_registration: bool = flag(False, "Register such buffers each rank for itself.")

    # Told of gradients that the two checks above reject, instead of ending the run: see `grad_checks`.
    on_bad_grads: Callable[[str, float, RankFailure], bool] | None = field(default=None, repr=False, compare=False)

    # -- fully sharded (flags: FullyShardedConfig): what FullyShardedDataParallel does
    use_megatron_fsdp: bool = False
    data_parallel_sharding_strategy: str = "no_shard"
    suggested_communication_unit_size: int | None = None

    # -- not in this version: refused unless left at the default
    delay_wgrad_compute: bool = False
    fp8_param_gather: bool = False
    reuse_grad_buf_for_mxfp8_param_ag: bool = False
    keep_fp8_transpose_cache: bool = False
    outer_dp_sharding_strategy: str = "no_shard"
    preserve_fp32_weights: bool = True
    fsdp_double_buffer: bool = False
    fsdp_manual_registration: bool = False

    def __post_init__(self) -> None:
        self._check_what_is_not_here()
        self._check_sizes()
        if self.overlap_param_gather and not (self.use_distributed_optimizer and self.overlap_grad_reduce):
            raise ConfigError(
                "--overlap-param-gather without --use-distributed-optimizer and --overlap-grad-reduce",
                why="only a sharded optimizer has parameters to gather, bucket by bucket of the overlap",
                fix="--use-distributed-optimizer --overlap-grad-reduce",
            )
        needs_shards = {
            "--ddp-pad-buckets-for-high-nccl-busbw": self.pad_buckets_for_high_nccl_busbw,
            "--ddp-reduce-scatter-with-fp32-accumulation": self.reduce_scatter_with_fp32_accumulation,
            f"--num-distributed-optimizer-instances {self.num_distributed_optimizer_instances}": (
                self.num_distributed_optimizer_instances > 1
            ),
        }
        if any(needs_shards.values()) and not self.use_distributed_optimizer:
            asked = " ".join(name for name, given in needs_shards.items() if given)
            raise ConfigError(
                f"{asked} without --use-distributed-optimizer",
                why="only buckets of a sharded optimizer are padded, and scattered as they are reduced",
                fix="--use-distributed-optimizer",
            )
        if self.reduce_scatter_with_fp32_accumulation and (
            self.num_distributed_optimizer_instances > 1 or self.average_in_collective
        ):
            raise ConfigError(
                "--ddp-reduce-scatter-with-fp32-accumulation with several optimizer instances or "
                "--ddp-average-in-collective",
                why="it is one sum in fp32 over all ranks",
                fix="leave one of them out",
            )
        if self.param_name_patterns_for_fp32_local_accumulation and self.grad_reduce_in_fp32:
            raise ConfigError(
                "--ddp-param-name-patterns-for-fp32-local-accumulation with --accumulate-allreduce-grads-in-fp32",
                why="all gradients accumulate in fp32 already (with --bf16 that is the default)",
                fix="--grad-reduce-in-bf16, or leave the patterns out",
            )

    def _check_sizes(self) -> None:
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
        if self.num_distributed_optimizer_instances < 1:
            raise ConfigError(
                f"--num-distributed-optimizer-instances {self.num_distributed_optimizer_instances}",
                why="there is at least one",
                fix="--num-distributed-optimizer-instances 1",
            )

    def _check_what_is_not_here(self) -> None:
        for names, what, fix in _NOT_HERE:
            asked = [name for name in names if getattr(self, name) != _DEFAULTS[name]]
            if asked:
                raise ConfigError(
                    f"DistributedDataParallelConfig: {', '.join(f'{n}={getattr(self, n)!r}' for n in asked)}",
                    why=f"{what} is not built here",
                    fix=fix,
                )


# Fields of Megatron's that nothing here reads: names, what they are of, what to do instead.
_NOT_HERE = (
    (
        ("delay_wgrad_compute",),
        "the pipeline schedule that computes weight gradients later, beside the communication of experts,",
        "leave it at False: weight gradients are computed with the others",
    ),
    (
        ("fp8_param_gather", "reuse_grad_buf_for_mxfp8_param_ag", "keep_fp8_transpose_cache"),
        "FP8",
        "leave it at False: parameters are gathered in their own format",
    ),
    (
        ("outer_dp_sharding_strategy", "preserve_fp32_weights", "fsdp_double_buffer", "fsdp_manual_registration"),
        "this detail of Megatron's own fully sharded data parallelism",
        "leave it at its default",
    ),
)
_DEFAULTS = {item.name: item.default for item in fields(DistributedDataParallelConfig)}
