"""Rules on models with an encoder and a decoder, and on flags that only these have; after `derived.derive`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron_lite.rank_grid import nearest_multiples
from megatron_lite.training.derived import has_decoder_behind
from megatron_lite.training.rule import Rule, flag_of, positive


def _cannot(flags: str, when: Callable[[Namespace], Any], why: str, fix: str = "leave it out") -> Rule:
    return Rule(lambda a: has_decoder_behind(a) and bool(when(a)), f"{flags} for T5", why, fix)


def _is_list(name: str) -> Callable[[Namespace], bool]:
    return lambda a: isinstance(getattr(a, name), list) and a.num_layers != a.decoder_num_layers


ENCODER_DECODER: tuple[Rule, ...] = (
    positive("decoder_num_layers"),
    positive("decoder_seq_length", 3, "a beginning, a sentinel and one token are the least that a decoder reads"),
    Rule(
        lambda a: has_decoder_behind(a) and a.decoder_seq_length is None,
        "--decoder-seq-length is missing",
        "a decoder reads sentinels and what they stand for, which is shorter than the text",
        "--decoder-seq-length N, a quarter of --encoder-seq-length {seq_length} with --mask-prob 0.15",
    ),
    Rule(
        lambda a: has_decoder_behind(a) and a.vocab_extra_ids == 0,
        "--vocab-extra-ids 0 for T5",
        "each run of words that is left out of a text is named by a sentinel token of its own",
        "--vocab-extra-ids 100",
    ),
    Rule(
        lambda a: (
            has_decoder_behind(a)
            and None not in (a.decoder_seq_length, a.max_position_embeddings)
            and a.max_position_embeddings < a.decoder_seq_length
        ),
        "--decoder-seq-length {decoder_seq_length} with --max-position-embeddings {max_position_embeddings}",
        "positions beyond the table do not exist",
        "--max-position-embeddings {decoder_seq_length}",
    ),
    Rule(
        lambda a: (
            has_decoder_behind(a)
            and a.sequence_parallel
            and a.context_parallel_size == 1
            and bool(a.decoder_seq_length)
            and a.decoder_seq_length % a.tensor_model_parallel_size != 0
            and {"near": nearest_multiples(a.decoder_seq_length, a.tensor_model_parallel_size)}
        ),
        "--decoder-seq-length {decoder_seq_length} with --sequence-parallel and --tensor-model-parallel-size "
        "{tensor_model_parallel_size}",
        "each rank takes an equal share of the sequence",
        "--decoder-seq-length {near}, or without --sequence-parallel",
    ),
    _cannot(
        "--group-query-attention",
        lambda a: a.group_query_attention,
        "cross attention has a key/value head for every query head",
    ),
    _cannot(
        "--window-size",
        lambda a: a.window_size is not None,
        "the decoder's queries and the encoder's keys have no common positions",
    ),
    _cannot(
        "--mtp-num-layers {mtp_num_layers}",
        lambda a: a.mtp_num_layers,
        "a sentinel's text has no further tokens to foretell",
    ),
    _cannot(
        "--num-experts {num_experts}", lambda a: a.num_experts, "its layers are dense", "pretrain_gpt.py has experts"
    ),
    _cannot("--spec", lambda a: a.spec and a.spec != ["local"], "a recipe is one layer, and T5 has two kinds"),
    _cannot(
        "--position-embedding-type {position_embedding_type}",
        lambda a: a.position_embedding_type not in ("learned_absolute", "rope", "relative"),
        "attention alone does not know in which order tokens stand",
        "learned_absolute, rope or relative",
    ),
    _cannot(
        "--use-rope-scaling",
        lambda a: a.use_rope_scaling,
        "it stretches the frequencies of a decoder for long contexts",
    ),
    *(
        _cannot(
            f"a list for {flag_of(name)} with another number of layers in the decoder",
            _is_list(name),
            "it says something for each layer of one stack",
            "one number, or as many layers in both stacks",
        )
        for name in ("no_rope_freq",)
    ),
    Rule(
        lambda a: getattr(a, "model_family", None) not in (None, "t5") and a.position_embedding_type == "relative",
        "--position-embedding-type relative",
        "its tables belong to the two stacks of a T5",
        "--position-embedding-type rope, or pretrain_t5.py",
    ),
    Rule(
        lambda a: (
            getattr(a, "model_family", None) not in (None, "t5")
            and a.pipeline_model_parallel_split_rank not in (None, 0, a.pipeline_model_parallel_size)
        ),
        "--pipeline-model-parallel-split-rank {pipeline_model_parallel_split_rank}",
        "it is the first stage of a decoder that stands behind an encoder, and this model is one stack",
        "leave it out, or pretrain_t5.py",
    ),
    Rule(
        lambda a: a.position_embedding_type == "relative" and a.context_parallel_size > 1,
        "--position-embedding-type relative with --context-parallel-size {context_parallel_size}",
        "its bias is of the whole sequence by the whole sequence, and ranks attend block by block",
        "--position-embedding-type rope or learned_absolute, or --context-parallel-size 1",
    ),
    Rule(
        lambda a: a.position_embedding_type == "relative" and a.attention_backend in ("flash", "fused"),
        "--attention-backend {attention_backend} with --position-embedding-type relative",
        "their kernels take no bias together with a causal mask",
        "--attention-backend auto",
    ),
)
