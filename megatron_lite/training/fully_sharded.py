"""Fully sharded data parallelism on the command line: Megatron's two kinds, and what of them runs here.

    --use-torch-fsdp2                                        fully_shard (ZeRO-3)
    --use-megatron-fsdp  --data-parallel-sharding-strategy
                         no_shard                            DistributedDataParallel
                         optim                               DistributedDataParallel, sharded optimizer (ZeRO-1)
                         optim_grads                         fully_shard that gathers once a step (ZeRO-2)
                         optim_grads_params                  fully_shard (ZeRO-3)
    with --num-distributed-optimizer-instances N             any of the last three inside dp / N ranks (HSDP)

`args.is_fully_sharded` says whether a rank keeps parts of the weights.
"""

from __future__ import annotations

from argparse import Namespace

from megatron_lite.training.rule import Rule, exclusive, named

_WHOLE = ("no_shard", "optim")
_FORMATS = ("megatron_fsdp_main_grads_dtype", "megatron_fsdp_grad_comm_dtype")


def is_full(args: Namespace) -> bool:
    """Whether weights are asked to be sharded; over one rank they are not."""
    return args.use_torch_fsdp2 or (args.use_megatron_fsdp and args.data_parallel_sharding_strategy not in _WHOLE)


def is_alone(args: Namespace) -> bool:
    """Whether weights are asked to be sharded, and every copy of the model is on one rank: plain buffers hold them."""
    return is_full(args) and not args.is_fully_sharded


def derive_fully_sharded(args: Namespace, notices: list[str], warnings: list[str]) -> None:
    """Which kind of data parallelism runs; `args.data_parallel_size` is known."""
    given = args.use_torch_fsdp2 or args.use_megatron_fsdp
    args.is_fully_sharded = False
    if not given:
        return
    kind = "--use-torch-fsdp2"
    if args.use_megatron_fsdp:
        kind = f"--use-megatron-fsdp --data-parallel-sharding-strategy {args.data_parallel_sharding_strategy}"
        if args.data_parallel_sharding_strategy in _WHOLE:
            args.use_distributed_optimizer = args.data_parallel_sharding_strategy == "optim"
            sharded = "a sharded" if args.use_distributed_optimizer else "an unsharded"
            notices.append(f"{kind}: flat gradient buffers and {sharded} optimizer")
            return
    args.use_distributed_optimizer = True  # the optimizer steps on a rank's part
    if args.enable_full_sharding_in_hsdp and args.num_distributed_optimizer_instances > 1:
        args.num_distributed_optimizer_instances = 1
        notices.append("--enable-full-sharding-in-hsdp: one set of shards over all data-parallel ranks")
    ranks = args.data_parallel_size * args.context_parallel_size // max(1, args.num_distributed_optimizer_instances)
    if ranks <= 1:
        notices.append(f"{kind}: each copy of the model is on one rank, there is nothing to shard: plain buffers")
        if args.init_model_with_meta_device:
            notices.append("--init-model-with-meta-device has no effect here: weights are made where they stay")
        return
    args.is_fully_sharded = True
    notices.append(f"{kind}: weights, gradients and optimizer state are shared out over {ranks} ranks, by rows")
    if args.gradient_accumulation_fusion:
        args.gradient_accumulation_fusion = False
        notices.append("weight gradients are summed after each backward (as with --no-gradient-accumulation-fusion)")
    if args.use_nccl_ub:
        args.use_nccl_ub = False
        notices.append("--use-nccl-ub has no effect here: what travels lies in torch's ordinary memory")
    buckets = [name for name in _OF_BUCKETS if name in args.typed]
    if buckets:
        flags = " ".join("--" + name.replace("_", "-") for name in buckets)
        warnings.append(
            f"{flags}: no effect with full sharding: layers travel, not buckets, and parts are summed in fp32"
        )


_OF_BUCKETS = (
    "ddp_bucket_size",
    "ddp_num_buckets",
    "ddp_pad_buckets_for_high_nccl_busbw",
    "ddp_param_name_patterns_for_fp32_local_accumulation",
)


GIVEN = (
    exclusive("use_torch_fsdp2", "use_megatron_fsdp", "they are two ways to the same"),
    Rule(
        lambda a: a.use_distributed_optimizer and (a.use_torch_fsdp2 or (a.use_megatron_fsdp and _version(a) == 2)),
        "--use-distributed-optimizer with --use-torch-fsdp2, or with --megatron-fsdp-version 2",
        "the optimizer is sharded with the weights",
        "leave --use-distributed-optimizer out",
    ),
    Rule(
        lambda a: a.use_torch_fsdp2 and a.fp16,
        "--use-torch-fsdp2 with --fp16",
        "Megatron refuses it, and a command line should mean the same there and here",
        "--bf16, or --use-megatron-fsdp",
    ),
    Rule(
        lambda a: a.ckpt_format == "torch_dcp" and not a.use_torch_fsdp2,
        "--ckpt-format torch_dcp without --use-torch-fsdp2",
        "it is the format of torch's sharded tensors",
        "--ckpt-format torch_dist, which is on the disk the same here",
    ),
    Rule(
        lambda a: a.ckpt_format == "torch_dcp" and a.tensor_model_parallel_size * a.pipeline_model_parallel_size > 1,
        "--ckpt-format torch_dcp with tensor or pipeline parallelism",
        "Megatron refuses it, and a command line should mean the same there and here",
        "--ckpt-format torch_dist, which is on the disk the same here",
    ),
    Rule(
        lambda a: a.ckpt_format == "fsdp_dtensor" and not a.use_megatron_fsdp,
        "--ckpt-format fsdp_dtensor without --use-megatron-fsdp",
        "it is the format of Megatron's sharded tensors",
        "--ckpt-format torch_dist, which is on the disk the same here",
    ),
    Rule(
        lambda a: a.init_model_with_meta_device and a.use_megatron_fsdp and a.data_parallel_sharding_strategy in _WHOLE,
        "--init-model-with-meta-device with --data-parallel-sharding-strategy {data_parallel_sharding_strategy}",
        "every rank keeps whole weights, and makes them where they stay",
        "leave --init-model-with-meta-device out",
    ),
    Rule(
        lambda a: a.fsdp_manual_registration and not a.use_nccl_ub,
        "--fsdp-manual-registration without --use-nccl-ub",
        "there is no memory to register",
        "leave it out",
    ),
    Rule(
        lambda a: (
            a.use_megatron_fsdp
            and a.data_parallel_sharding_strategy in _WHOLE
            and named(
                given=" ".join(
                    f"--{name.replace('_', '-')} {getattr(a, name)}" for name in _FORMATS if getattr(a, name) != "auto"
                )
            )
        ),
        "{given} with --data-parallel-sharding-strategy {data_parallel_sharding_strategy}",
        "gradients gather and travel in one buffer, whose format is another flag's",
        "--accumulate-allreduce-grads-in-fp32 or --grad-reduce-in-bf16",
    ),
    Rule(
        lambda a: a.use_megatron_fsdp and a.megatron_fsdp_main_grads_dtype in ("bf16", "fp16"),
        "--megatron-fsdp-main-grads-dtype {megatron_fsdp_main_grads_dtype}",
        "torch sums a rank's part of the gradients in the format of the weights that the optimizer keeps, fp32",
        "--megatron-fsdp-main-grads-dtype fp32; --megatron-fsdp-grad-comm-dtype bf16 halves what travels",
    ),
    Rule(
        lambda a: a.use_megatron_fsdp and _main_params(a) != "fp32",
        "--megatron-fsdp-main-params-dtype {megatron_fsdp_main_params_dtype} with a model of 16 bits",
        "an update of 1e-4 of a weight is lost in 16 bits: the optimizer keeps fp32, which is all that a rank keeps",
        "--megatron-fsdp-main-params-dtype fp32",
    ),
    Rule(
        lambda a: a.suggested_communication_unit_size is not None and a.suggested_communication_unit_size < 1,
        "--suggested-communication-unit-size {suggested_communication_unit_size}",
        "it is a number of parameters, up to which layers are gathered ahead",
        "1 or more, or leave it out: one layer ahead",
    ),
    Rule(
        lambda a: not a.strict_fsdp_dtensor_load and not (a.use_torch_fsdp2 or a.use_megatron_fsdp),
        "--no-strict-fsdp-dtensor-load without --use-megatron-fsdp",
        "it is about checkpoints of fully sharded models",
        "--dist-ckpt-strictness log_all",
    ),
)


def _version(a: Namespace) -> int:
    return int(a.megatron_fsdp_version)


def _main_params(a: Namespace) -> str:
    """What the flag asks for: `auto` is the model's own format."""
    wanted = str(a.megatron_fsdp_main_params_dtype)
    own = "bf16" if a.bf16 else "fp16" if a.fp16 else "fp32"
    return own if wanted == "auto" else wanted


DERIVED = (
    Rule(
        lambda a: is_full(a) and a.pipeline_model_parallel_size > 1,
        "full sharding with --pipeline-model-parallel-size {pipeline_model_parallel_size}",
        "every micro-batch of every stage would gather its weights anew",
        "--pipeline-model-parallel-size 1, or --use-distributed-optimizer in place of the full sharding",
    ),
    Rule(
        lambda a: (
            is_full(a)
            and bool(a.num_experts)
            and (a.expert_model_parallel_size > 1 or a.expert_tensor_parallel_size != a.tensor_model_parallel_size)
        ),
        "full sharding with --expert-model-parallel-size {expert_model_parallel_size} and "
        "--expert-tensor-parallel-size {expert_tensor_parallel_size}",
        "experts would have to be cut over other ranks than the rest of their layer",
        "--expert-model-parallel-size 1, or --use-distributed-optimizer in place of the full sharding",
    ),
    Rule(
        lambda a: is_full(a) and a.optimizer == "muon",
        "full sharding with --optimizer muon",
        "it needs whole matrices, and a rank has rows",
        "--optimizer adam, or --use-distributed-optimizer in place of the full sharding",
    ),
    Rule(
        lambda a: is_full(a) and a.main_grads_dtype != "fp32",
        "full sharding with --main-grads-dtype {main_grads_dtype}",
        "a rank's part of the gradients is summed in fp32",
        "leave it out",
    ),
    *(
        Rule(
            lambda a, name=name: is_full(a) and bool(getattr(a, name)),  # type: ignore[misc]
            f"full sharding with --{name.replace('_', '-')}",
            why,
            fix,
        )
        for name, why, fix in (
            ("optimizer_cpu_offload", "weights are stepped on where they are gathered from", "leave it out"),
            (
                "check_weight_hash_across_dp_replicas_interval",
                "data-parallel ranks hold different rows, and no replicas",
                "leave it out",
            ),
            ("moe_use_upcycling", "it makes experts out of whole tensors", "upcycle with --use-distributed-optimizer"),
        )
    ),
)
