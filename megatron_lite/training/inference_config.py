"""The settings of `megatron-lite serve`, declared here because every command line understands them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config import flag


@dataclass(kw_only=True)
class InferenceConfig:
    """How `megatron-lite serve` shares a model between requests; a training run reads none of these."""

    inference_max_requests: int = flag(8, "serve: prompts that are computed together.")
    inference_max_seq_length: int = flag(2560, "serve: longest prompt plus answer.", unit="tokens")
    max_tokens_to_oom: int = flag(
        12000, "serve: refuse requests of more prompts times longest prompt plus answer.", unit="tokens"
    )
    inference_batch_times_seqlen_threshold: int = flag(
        -1, "serve: a forward pass takes no more sequences than this divided by the longest. -1: all.", unit="tokens"
    )
    inference_dynamic_batching: bool = flag(
        False, "serve: prompts join and leave between any two tokens, not request by request."
    )
    inference_dynamic_batching_buffer_size_gb: float = flag(
        40.0, "serve, dynamic batching: memory for keys and values.", unit="GiB"
    )
    inference_dynamic_batching_block_size: int = flag(
        256, "serve, dynamic batching: tokens of a block of that memory.", unit="tokens"
    )
    inference_dynamic_batching_max_requests: int | None = flag(
        None, "serve, dynamic batching: instead of --inference-max-requests."
    )
    inference_dynamic_batching_max_tokens: int | None = flag(
        None, "serve, dynamic batching: most tokens of a step. Default: 16384.", unit="tokens"
    )
    enable_chunked_prefill: bool = flag(False, "serve, dynamic batching: spread a long prompt over several steps.")
    offset_sampling_seed_by_dp_rank: bool = flag(
        True,
        "serve: replicas draw alike for requests without a seed of their own.",
        off="--use-same-sampling-seed-across-dp-ranks",
    )
    inference_logging_step_interval: int = flag(0, "serve: a line on what runs and waits every N steps. 0: never.")
    inference_text_gen_server_logging: bool = flag(False, "serve: a line for each request.", pair=True)
