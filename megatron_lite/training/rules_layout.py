"""Rules on the layout of a run: what its ranks share, and how layers, micro-batches and sequences fall on them."""

from __future__ import annotations

import math
from argparse import Namespace
from typing import Any

from megatron_lite.errors import ConfigError
from megatron_lite.pipeline_parallel.actions import fall_into_groups
from megatron_lite.pipeline_parallel.stage_layout import encoder_decoder_layout, stage_layout
from megatron_lite.rank_grid import nearest_multiples
from megatron_lite.training.derived import all_layers, has_decoder_behind
from megatron_lite.training.rule import Rule, exclusive, flag_of, positive


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


LAYOUT: tuple[Rule, ...] = (
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
)
