"""Rules that hold for the outcome of `derived.derive`, as one table: the batch is a multiple of micro-batch * dp."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron_lite.errors import ConfigError
from megatron_lite.pipeline_parallel.actions import fall_into_groups
from megatron_lite.pipeline_parallel.stage_layout import encoder_decoder_layout, stage_layout
from megatron_lite.rank_grid import nearest_multiples
from megatron_lite.tokenizers.build_tokenizer import missing_fields
from megatron_lite.tokenizers.tokenizer_config import NOT_FOR_TEXT
from megatron_lite.training.derived import (
    all_layers,
    gradients_are_fp32,
    has_decoder_behind,
    horizon,
    phase_transitions,
    problem_of_batch,
)
from megatron_lite.training.rule import Rule, exclusive, flag_of, named, positive, reported


def _misplaced(a: Namespace) -> bool | dict[str, Any]:
    """Layers that do not fall into the pipeline's stages."""
    if min(a.num_layers or 0, a.decoder_num_layers or 1, a.pipeline_model_parallel_size) < 1:
        return False
    chunks = a.virtual_pipeline_model_parallel_size or 1
    typed = a.num_layers_per_virtual_pipeline_stage
    per_stage = all_layers(a) / a.pipeline_model_parallel_size
    if typed and chunks * typed != per_stage:
        return {
            "misplaced": f"--num-layers-per-virtual-pipeline-stage {typed} with {per_stage:g} layers on each of "
            f"{a.pipeline_model_parallel_size} stages",
            "rule": "the layers of a stage divide into its virtual stages",
            "way_out": "--num-virtual-stages-per-pipeline-rank, or a number that divides",
        }
    ways: dict[str, Any] = {
        "first": a.decoder_first_pipeline_num_layers,
        "last": a.decoder_last_pipeline_num_layers,
        "count_embedding": a.account_for_embedding_in_pipeline_split,
        "count_loss": a.account_for_loss_in_pipeline_split,
        "layout": a.pipeline_model_parallel_layout,
    }
    stages, split = a.pipeline_model_parallel_size, a.pipeline_model_parallel_split_rank or None
    try:
        if has_decoder_behind(a):
            encoder_decoder_layout(a.num_layers, a.decoder_num_layers, stages, chunks, split, **ways)
        else:
            stage_layout(a.num_layers, stages, chunks, mtp_layers=a.mtp_num_layers or 0, **ways)
    except ConfigError as error:
        return {"misplaced": error.what, "rule": error.why, "way_out": error.fix}
    return False


def _ungrouped(a: Namespace) -> bool | dict[str, Any]:
    """Micro-batches that do not fall into the groups of an interleaved schedule."""
    if a.virtual_pipeline_model_parallel_size is None or not a.global_batch_size or not a.micro_batch_size:
        return False
    microbatches = a.global_batch_size // (a.micro_batch_size * a.data_parallel_size)
    stages = a.pipeline_model_parallel_size
    group = a.microbatch_group_size_per_virtual_pipeline_stage or stages
    if fall_into_groups(microbatches, stages, group):
        return False
    rounded = max(1, -(-microbatches // group))
    return {"group": group, "microbatches": microbatches, "last": microbatches % group, "rounded": rounded}


def _uneven_chunks(a: Namespace) -> bool | dict[str, Any]:
    """A sequence that does not fall into the chunks of context-parallel ranks."""
    cp, tp = a.context_parallel_size, a.tensor_model_parallel_size if a.sequence_parallel else 1
    unit = math.lcm(2 * cp, cp * tp)
    names = ["seq_length", "decoder_seq_length"] if has_decoder_behind(a) else ["seq_length"]
    uneven = [name for name in names if getattr(a, name) and unit > 0 and getattr(a, name) % unit]
    if cp <= 1 or not uneven:
        return False
    length = getattr(a, uneven[0])
    return {
        "uneven": f"{flag_of(uneven[0])} {length}",
        "unit": unit,
        "near": f"{flag_of(uneven[0])} {nearest_multiples(length, unit)}",
        "sequence_parallel_too": f", --sequence-parallel and --tensor-model-parallel-size {tp}" if tp > 1 else "",
        "shared_too": ", and its tensor-parallel ranks share the two" if tp > 1 else "",
    }


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
    # -- ranks
    *(
        positive(name)
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
        )
    ),
    Rule(
        lambda a: (
            a.model_parallel_ranks > 0
            and a.world_size % a.model_parallel_ranks != 0
            and {"near": nearest_multiples(a.world_size, a.model_parallel_ranks)}
        ),
        "world size {world_size} with --tensor-model-parallel-size {tensor_model_parallel_size} "
        "--pipeline-model-parallel-size {pipeline_model_parallel_size} --context-parallel-size {context_parallel_size}",
        "a copy of the model takes their product, {model_parallel_ranks} ranks, and the world is a number of copies",
        "start {near} processes, or choose other sizes",
    ),
    # -- the pipeline
    Rule(_misplaced, "{misplaced}", "{rule}", "{way_out}"),
    Rule(
        lambda a: a.virtual_pipeline_model_parallel_size is not None and a.pipeline_model_parallel_size == 1,
        "virtual pipeline stages with --pipeline-model-parallel-size 1",
        "they shorten the time in which pipeline stages wait for each other",
        "--pipeline-model-parallel-size 2 or more, or leave them out",
    ),
    Rule(
        _ungrouped,
        "{microbatches} micro-batches (--global-batch-size {global_batch_size} / --micro-batch-size {micro_batch_size} "
        "/ data-parallel size {data_parallel_size}) with virtual pipeline stages in groups of {group}",
        "a group is at least --pipeline-model-parallel-size {pipeline_model_parallel_size} and at most the number of "
        "micro-batches, and {microbatches} modulo {group} = {last} must be 0 or at least that size",
        "--global-batch-size {rounded} * {group} * {micro_batch_size} * {data_parallel_size}, or no virtual stages",
    ),
    Rule(
        lambda a: (
            a.delay_wgrad_compute
            and (
                a.pipeline_model_parallel_size == 1
                or a.virtual_pipeline_model_parallel_size is not None
                or not a.gradient_accumulation_fusion
            )
        ),
        "--delay-wgrad-compute with --pipeline-model-parallel-size {pipeline_model_parallel_size}, virtual stages "
        "{virtual_pipeline_model_parallel_size}, fusion of weight gradients {gradient_accumulation_fusion}",
        "it fills the waiting times of 1F1B over several stages, and adds weight gradients into their buffer itself",
        "--pipeline-model-parallel-size 2 or more, without virtual stages and --no-gradient-accumulation-fusion",
    ),
    Rule(
        lambda a: (
            a.defer_embedding_wgrad_compute
            and (a.pipeline_model_parallel_size == 1 or not a.gradient_accumulation_fusion)
        ),
        "--defer-embedding-wgrad-compute with --pipeline-model-parallel-size {pipeline_model_parallel_size}, fusion of "
        "weight gradients {gradient_accumulation_fusion}",
        "it moves products to where the last of several stages would wait, and adds them into the gradient buffer",
        "--pipeline-model-parallel-size 2 or more, without --no-gradient-accumulation-fusion",
    ),
    exclusive(
        "defer_embedding_wgrad_compute",
        "delay_wgrad_compute",
        "the zero-bubble schedule has a place of its own for every weight gradient",
    ),
    Rule(
        lambda a: a.wgrad_deferral_limit != 0 and not a.defer_embedding_wgrad_compute,
        "--wgrad-deferral-limit {wgrad_deferral_limit} without --defer-embedding-wgrad-compute",
        "nothing is deferred that it could limit",
        "both, or neither",
    ),
    positive("wgrad_deferral_limit", 0),
    Rule(
        lambda a: (
            not a.align_grad_reduce
            and a.overlap_grad_reduce
            and (a.delay_wgrad_compute or a.defer_embedding_wgrad_compute)
        ),
        "--no-align-grad-reduce with weight gradients that are put off (--delay-wgrad-compute, "
        "--defer-embedding-wgrad-compute)",
        "then the schedule starts their reduction, at the same time on all stages, not the last backward pass",
        "leave out --no-align-grad-reduce",
    ),
    Rule(
        lambda a: a.pipeline_model_parallel_comm_backend == "ucc",
        "--pipeline-model-parallel-comm-backend ucc",
        "UCC is in no build of torch that can be installed ready-made, and stages need no more than sends and receives",
        "leave it out: messages go the way of the run's other communication",
    ),
    Rule(
        lambda a: a.overlap_p2p_communication_warmup_flush and not a.overlap_p2p_comm,
        "--overlap-p2p-communication-warmup-flush without overlapped messages",
        "it extends the overlap of an interleaved schedule to its beginning and end",
        "virtual pipeline stages, without --no-overlap-p2p-communication",
    ),
    # -- shares of the tensor-parallel ranks
    *(
        Rule(
            lambda a, name=name: (
                bool(getattr(a, name))  # type: ignore[misc]
                and a.tensor_model_parallel_size > 0
                and getattr(a, name) % a.tensor_model_parallel_size != 0
                and {"near": nearest_multiples(getattr(a, name), a.tensor_model_parallel_size)}
            ),
            f"{flag_of(name)} {{{name}}} with --tensor-model-parallel-size {{tensor_model_parallel_size}}",
            "each rank takes an equal share",
            f"{flag_of(name)} {{near}}, or another --tensor-model-parallel-size",
        )
        for name in ("num_attention_heads", "ffn_hidden_size")
    ),
    Rule(
        lambda a: (
            a.group_query_attention
            and a.num_query_groups > 0
            and a.tensor_model_parallel_size > 0
            and a.num_query_groups % a.tensor_model_parallel_size != 0
            and a.tensor_model_parallel_size % a.num_query_groups != 0
        ),
        "--num-query-groups {num_query_groups} with --tensor-model-parallel-size {tensor_model_parallel_size}",
        "a rank holds whole key/value heads, or a whole number of ranks shares one",
        "a number of groups that divides the tensor-parallel size or is a multiple of it",
    ),
    Rule(
        lambda a: (
            a.sequence_parallel
            and bool(a.seq_length)
            and a.context_parallel_size == 1
            and a.seq_length % a.tensor_model_parallel_size != 0
            and {"near": nearest_multiples(a.seq_length, a.tensor_model_parallel_size)}
        ),
        "--seq-length {seq_length} with --sequence-parallel and --tensor-model-parallel-size "
        "{tensor_model_parallel_size}",
        "each rank takes an equal share of the sequence",
        "--seq-length {near}, or without --sequence-parallel",
    ),
    Rule(
        _uneven_chunks,
        "{uneven} with --context-parallel-size {context_parallel_size}{sequence_parallel_too}",
        "a context-parallel rank takes an early and a late chunk{shared_too}: {unit} divides the length",
        "{near}, or another layout",
    ),
    Rule(
        lambda a: a.tp_comm_overlap and not a.sequence_parallel,
        "--tp-comm-overlap without --sequence-parallel",
        "it sends the parts of the sequence that sequence parallelism cuts",
        "--sequence-parallel, or leave it out",
    ),
    Rule(
        lambda a: (
            a.distribute_saved_activations
            and (a.recompute_granularity != "full" or a.tensor_model_parallel_size == 1 or a.sequence_parallel)
        ),
        "--distribute-saved-activations without --recompute-granularity full and --tensor-model-parallel-size > 1, "
        "or with --sequence-parallel",
        "it cuts the inputs that full recompute saves over ranks that all hold them alike",
        "leave it out",
    ),
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
