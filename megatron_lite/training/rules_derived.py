"""Rules that hold for the outcome of `derived.derive`, as one table: the batch is a multiple of micro-batch * dp."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

from megatron_lite.errors import ConfigError
from megatron_lite.tokenizers.build_tokenizer import missing_fields
from megatron_lite.tokenizers.tokenizer_config import NOT_FOR_TEXT
from megatron_lite.training.derived import (
    gradients_are_fp32,
    horizon,
    phase_transitions,
    problem_of_batch,
)
from megatron_lite.training.rule import Rule, flag_of, named, positive, reported
from megatron_lite.training.rules_layout import LAYOUT


def _formats(a: Namespace, is_meant: Callable[[str], bool]) -> str:
    """The flags of the optimizer's number formats whose values are meant, as typed."""
    names = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    return " ".join(f"{flag_of(name)} {getattr(a, name)}" for name in names if is_meant(getattr(a, name)))


def _problem_of_phases(a: Namespace) -> ConfigError | None:
    try:
        phase_transitions(a)
    except ConfigError as problem:
        return problem
    return None


def _below(name: str, bound: str) -> Rule:
    return Rule(
        lambda a: (
            getattr(a, name) is not None and getattr(a, bound) is not None and getattr(a, name) > getattr(a, bound)
        ),
        f"{flag_of(name)} {{{name}}} with {flag_of(bound)} {{{bound}}}",
        f"{flag_of(bound)} is the highest learning rate",
        f"a smaller {flag_of(name)}",
    )


DERIVED: tuple[Rule, ...] = (
    # -- buckets
    *(
        Rule(
            lambda a, name=name: getattr(a, name) and not a.use_distributed_optimizer,  # type: ignore[misc]
            f"{flag_of(name)} without --use-distributed-optimizer",
            "only buckets of a sharded optimizer are padded, and scattered as they are reduced",
            "--use-distributed-optimizer, or leave it out",
        )
        for name in ("ddp_pad_buckets_for_high_nccl_busbw", "ddp_reduce_scatter_with_fp32_accumulation")
    ),
    Rule(
        lambda a: (
            a.ddp_reduce_scatter_with_fp32_accumulation
            and (a.num_distributed_optimizer_instances > 1 or a.ddp_average_in_collective)
        ),
        "--ddp-reduce-scatter-with-fp32-accumulation with several optimizer instances or --ddp-average-in-collective",
        "it is one sum in fp32 over all ranks",
        "leave one of them out",
    ),
    Rule(
        lambda a: bool(a.ddp_param_name_patterns_for_fp32_local_accumulation) and gradients_are_fp32(a),
        "--ddp-param-name-patterns-for-fp32-local-accumulation with gradients that are fp32",
        "all of them accumulate in fp32 already",
        "--bf16 --grad-reduce-in-bf16, or leave the patterns out",
    ),
    # -- optimizer
    Rule(
        lambda a: a.overlap_param_gather and not (a.use_distributed_optimizer and a.overlap_grad_reduce),
        "--overlap-param-gather without --use-distributed-optimizer and --overlap-grad-reduce",
        "only a sharded optimizer has parameters to gather, bucket by bucket of the overlap",
        "--use-distributed-optimizer --overlap-grad-reduce",
    ),
    Rule(
        lambda a: (
            a.overlap_param_gather_with_optimizer_step
            and not (a.overlap_param_gather and a.virtual_pipeline_model_parallel_size)
        ),
        "--overlap-param-gather-with-optimizer-step without --overlap-param-gather and virtual pipeline stages",
        "it gathers one model chunk's parameters while other chunks are updated",
        "--num-virtual-stages-per-pipeline-rank N --overlap-param-gather, or leave it out",
    ),
    positive("num_distributed_optimizer_instances"),
    Rule(
        lambda a: a.num_distributed_optimizer_instances > 1 and not a.use_distributed_optimizer,
        "--num-distributed-optimizer-instances {num_distributed_optimizer_instances} without "
        "--use-distributed-optimizer",
        "there is no optimizer state that is shared by ranks",
        "--use-distributed-optimizer, or leave it out",
    ),
    Rule(
        lambda a: (
            a.num_distributed_optimizer_instances > 0
            and (a.data_parallel_size * a.context_parallel_size) % a.num_distributed_optimizer_instances > 0
            and {"ranks": a.data_parallel_size * a.context_parallel_size}
        ),
        "--num-distributed-optimizer-instances {num_distributed_optimizer_instances} on {ranks} data-parallel ranks",
        "every instance is shared by equally many ranks",
        "a number that divides {ranks}",
    ),
    Rule(
        lambda a: a.use_precision_aware_optimizer and not (a.use_distributed_optimizer and a.optimizer == "adam"),
        "--use-precision-aware-optimizer without --use-distributed-optimizer and --optimizer adam",
        "it is a variant of the sharded Adam",
        "add them, or leave it out",
    ),
    Rule(
        lambda a: not a.use_precision_aware_optimizer and named(given=_formats(a, lambda value: value != "fp32")),
        "{given} without --use-precision-aware-optimizer",
        "only that optimizer has number formats to choose",
        "--use-precision-aware-optimizer, or leave the format out",
    ),
    Rule(
        lambda a: a.use_precision_aware_optimizer and named(given=_formats(a, lambda value: value in ("fp16", "fp8"))),
        "{given}",
        "numbers of 1e-6 and their squares leave the range of fp16 and fp8, and weights move by less than a step of "
        "fp16",
        "bf16 for moments, fp32 for main parameters",
    ),
    Rule(
        lambda a: a.main_grads_dtype == "bf16" and a.accumulate_allreduce_grads_in_fp32,
        "--main-grads-dtype bf16 with gradients that are accumulated in fp32",
        "the optimizer reads the buffer in which they are",
        "--grad-reduce-in-bf16, or leave it out",
    ),
    Rule(
        lambda a: a.optimizer_cpu_offload and not a.use_precision_aware_optimizer,
        "--optimizer-cpu-offload without --use-precision-aware-optimizer",
        "Megatron couples them, and a command line should mean the same there and here",
        "--use-precision-aware-optimizer (with its fp32 defaults nothing else changes)",
    ),
    Rule(
        lambda a: not 0.0 <= a.optimizer_offload_fraction <= 1.0,
        "--optimizer-offload-fraction {optimizer_offload_fraction}",
        "it is a share of the optimizer's state",
        "a number from 0 to 1",
    ),
    Rule(
        lambda a: (
            a.optimizer == "muon"
            and a.tensor_model_parallel_size > (a.num_query_groups or 1)
            and a.group_query_attention
        ),
        "--optimizer muon with --num-query-groups {num_query_groups} on {tensor_model_parallel_size} tensor-parallel "
        "ranks",
        "ranks then hold copies of keys and values, and the matrix is no longer made of the ranks' blocks",
        "--tensor-model-parallel-size {num_query_groups}, or another optimizer",
    ),
    # -- ranks, the pipeline, shares of the tensor-parallel ranks
    *LAYOUT,
    # -- batch
    Rule(
        lambda a: (
            bool(a.global_batch_size)
            and bool(a.micro_batch_size)
            and a.rampup_batch_size is None
            and a.step_batch_size_schedule is None
            and not a.decrease_batch_size_if_needed
            and a.global_batch_size % (a.micro_batch_size * a.data_parallel_size) != 0
            and {
                "unit": a.micro_batch_size * a.data_parallel_size,
                "near": -(-a.global_batch_size // (a.micro_batch_size * a.data_parallel_size))
                * (a.micro_batch_size * a.data_parallel_size),
            }
        ),
        "--global-batch-size {global_batch_size} with --micro-batch-size {micro_batch_size} "
        "and data-parallel size {data_parallel_size}",
        "every rank computes the same number of micro-batches, so micro-batch * dp = {unit} divides the global batch",
        "--global-batch-size {near}, or --decrease-batch-size-if-needed",
    ),
    Rule(
        lambda a: (
            bool(a.global_batch_size)
            and bool(a.micro_batch_size)
            and a.decrease_batch_size_if_needed
            and a.global_batch_size < a.micro_batch_size * a.data_parallel_size
            and {"unit": a.micro_batch_size * a.data_parallel_size}
        ),
        "--global-batch-size {global_batch_size} with --micro-batch-size {micro_batch_size} "
        "and data-parallel size {data_parallel_size}",
        "rounded down to a multiple of {unit} nothing is left",
        "--global-batch-size {unit}",
    ),
    reported(problem_of_batch),
    Rule(
        lambda a: (
            bool(a.eval_global_batch_size)
            and bool(a.eval_micro_batch_size)
            # The training sizes have a rule of their own.
            and (a.eval_global_batch_size, a.eval_micro_batch_size) != (a.global_batch_size, a.micro_batch_size)
            and a.eval_global_batch_size % (a.eval_micro_batch_size * a.data_parallel_size) != 0
            and {"unit": a.eval_micro_batch_size * a.data_parallel_size}
        ),
        "--eval-global-batch-size {eval_global_batch_size} with --eval-micro-batch-size {eval_micro_batch_size} "
        "and data-parallel size {data_parallel_size}",
        "every rank evaluates the same number of micro-batches, so micro-batch * dp = {unit} divides the batch",
        "--eval-global-batch-size {unit}, or another multiple",
    ),
    reported(_problem_of_phases),
    # -- shape
    Rule(
        lambda a: (
            bool(a.hidden_size)
            and bool(a.num_attention_heads)
            and a.kv_channels is None
            and a.hidden_size % a.num_attention_heads != 0
        ),
        "--hidden-size {hidden_size} with --num-attention-heads {num_attention_heads}",
        "without --kv-channels a head gets hidden / heads channels, and that is no whole number",
        "a multiple of the heads, or --kv-channels N",
    ),
    Rule(
        lambda a: (
            a.group_query_attention
            and bool(a.num_attention_heads)
            and a.num_query_groups > 0
            and a.num_attention_heads % a.num_query_groups != 0
        ),
        "--num-attention-heads {num_attention_heads} with --num-query-groups {num_query_groups}",
        "every key/value head serves the same number of query heads",
        "a number of groups that divides the heads",
    ),
    Rule(
        lambda a: (
            a.seq_length is not None
            and a.max_position_embeddings is not None
            and a.max_position_embeddings < a.seq_length
        ),
        "--seq-length {seq_length} with --max-position-embeddings {max_position_embeddings}",
        "positions beyond the table do not exist",
        "--max-position-embeddings {seq_length}",
    ),
    Rule(
        lambda a: not 0.0 < a.rotary_percent <= 1.0,
        "--rotary-percent {rotary_percent}",
        "a share of the channels, above 0 and at most 1",
        "--rotary-percent 1.0",
    ),
    *(
        Rule(
            lambda a, name=name: not 0.0 <= getattr(a, name) < 1.0,  # type: ignore[misc]
            f"{flag_of(name)} {{{name}}}",
            "a share of the activations, at least 0 and below 1",
            f"{flag_of(name)} 0.1",
        )
        for name in ("hidden_dropout", "attention_dropout")
    ),
    *(
        Rule(
            lambda a, name=name: (
                isinstance(getattr(a, name), list)  # type: ignore[misc]
                and a.num_layers is not None
                and len(getattr(a, name)) != a.num_layers
                and {"count": len(getattr(a, name))}
            ),
            f"{flag_of(name)} has {{count}} entries with --num-layers {{num_layers}}",
            "a list says it for every layer",
            "a list of {num_layers} entries, or one number",
        )
        for name in ("no_rope_freq", "window_attn_skip_freq")
    ),
    Rule(
        lambda a: (
            isinstance(a.no_rope_freq, int)
            and bool(a.num_layers)
            and (a.no_rope_freq < 1 or a.num_layers % a.no_rope_freq != 0)
        ),
        "--no-rope-freq {no_rope_freq} with --num-layers {num_layers}",
        "every N-th layer does without rotary positions, and N divides the layers",
        "another number, or a list of {num_layers} entries",
    ),
    Rule(
        lambda a: a.window_attn_skip_freq is not None and a.window_size is None,
        "--window-attn-skip-freq without --window-size",
        "there is no window that a layer could do without",
        "--window-size LEFT,RIGHT",
    ),
    Rule(
        lambda a: a.use_rope_scaling and a.position_embedding_type != "rope",
        "--use-rope-scaling with --position-embedding-type {position_embedding_type}",
        "it rescales rotary positions",
        "--position-embedding-type rope",
    ),
    # -- learning rate
    Rule(
        lambda a: a.lr is None and not a.skip_train,
        "--lr is missing",
        "no training can do without it",
        "--lr 3e-4",
    ),
    *(positive(name, 0) for name in ("lr", "min_lr", "lr_warmup_init", "lr_warmup_iters", "lr_warmup_samples")),
    _below("min_lr", "lr"),
    _below("lr_warmup_init", "lr"),
    _below("decoupled_min_lr", "decoupled_lr"),
    Rule(
        lambda a: a.decoupled_min_lr is not None and a.decoupled_lr is None,
        "--decoupled-min-lr {decoupled_min_lr} without --decoupled-lr",
        "it is where that learning rate ends",
        "--decoupled-lr X",
    ),
    Rule(
        lambda a: (span := horizon(a)) is not None and span[0] >= span[1] and {"warmup": span[0], "decay": span[1]},
        "a warm-up of {warmup} in a schedule of {decay}",
        "the learning rate decays after its warm-up, which is counted in",
        "a shorter --lr-warmup-fraction, --lr-warmup-iters or --lr-warmup-samples",
    ),
    Rule(
        lambda a: (
            a.lr_decay_style == "WSD" and (a.lr_wsd_decay_samples if a.train_samples else a.lr_wsd_decay_iters) is None
        ),
        "--lr-decay-style WSD without the length of its anneal",
        "the last part of the run anneals",
        "--lr-wsd-decay-iters N, or --lr-wsd-decay-samples N for a run counted in samples",
    ),
    Rule(
        lambda a: (
            a.start_weight_decay is not None
            and a.end_weight_decay is not None
            and not 0.0 <= a.start_weight_decay <= a.end_weight_decay
        ),
        "--start-weight-decay {start_weight_decay} --end-weight-decay {end_weight_decay}",
        "weight decay grows from the first to the second, from 0 on",
        "a larger --end-weight-decay",
    ),
    # -- tokenizer
    Rule(
        lambda a: bool(missing_fields(a)) and {"missing": " and ".join(map(flag_of, missing_fields(a)))},
        "--tokenizer-type {tokenizer_type} without {missing}",
        "the tokenizer is made from it",
        "{missing}, or another --tokenizer-type",
    ),
    Rule(
        lambda a: a.tokenizer_type in NOT_FOR_TEXT and dict(zip(("reason", "instead"), NOT_FOR_TEXT[a.tokenizer_type])),
        "--tokenizer-type {tokenizer_type} is not supported",
        "{reason}",
        "--tokenizer-type {instead}",
    ),
)
