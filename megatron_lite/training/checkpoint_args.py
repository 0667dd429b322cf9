"""The arguments of a checkpoint: which are saved, which are taken. What may differ: `resume_differences`."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron_lite.checkpointing.plain_values import to_json
from megatron_lite.log import print_rank_0

EXPERTS = (
    "num_experts",
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_enable_expert_bias",
    "moe_apply_probs_on_input",
)
# What makes a checkpoint's weights mean something else. Most of these show in no tensor's shape.
MODEL_ARGUMENTS = (
    "model_family",
    "bert_binary_head",
    "num_layers",
    "decoder_num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "group_query_attention",
    "num_query_groups",
    "position_embedding_type",
    "relative_attention_num_buckets",
    "relative_attention_max_distance",
    "add_position_embedding",
    "rotary_interleaved",
    "rotary_percent",
    "mrope_section",
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "qk_l2_norm",
    "mtp_num_layers",
    "mtp_use_repeated_layer",
    "attention_output_gate",
    "normalization",
    "apply_layernorm_1p",
    "apply_residual_connection_post_layernorm",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "apply_query_key_layer_scaling",
    "swiglu",
    "quick_geglu",
    "geglu",
    "relu",
    "softmax_scale",
    "lm_head_bias",
    "scaled_logits",
    "squared_relu",
    "openai_gelu",
    "untie_embeddings_and_output_weights",
    "use_mup",
    "mup_base_hidden_size",
    "mup_embedding_mult",
    "mup_output_mult",
    "mup_base_head_dim",
    "mup_attn_scale_power",
    *EXPERTS,
    "retro_add_retriever",
    "retro_layers",
    "retro_encoder_layers",
    "retro_encoder_residual",
)
# What makes its token numbers mean something else: when all of these agree, only the padding can differ.
TOKENS = (
    "tokenizer_type",
    "tokenizer_model",
    "vocab_file",
    "merge_file",
    "vocab_size",
    "vocab_extra_ids",
    "tokenizer_special_tokens",
)
VOCABULARY = ("tokenizer_type", "make_vocab_size_divisible_by", "padded_vocab_size")
# Taken with --use-checkpoint-args beside these, though they may change from run to run.
_TAKEN = (
    *MODEL_ARGUMENTS,
    "retro_project_dir",
    "retro_num_neighbors",
    "retro_num_retrieved_chunks",
    "retro_missing_chunks",
    "seq_length",
    "decoder_seq_length",
    "max_position_embeddings",
    "rotary_base",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
    "rope_type",
    "rotary_scaling_factor",
    "mscale",
    "mscale_all_dim",
    "yarn_original_max_position_embeddings",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_correction_range_round_to_int",
    "norm_epsilon",
    "fp32_residual_connection",
    "hidden_dropout",
    "attention_dropout",
    "softmax_type",
    "window_size",
    "window_attn_skip_freq",
    "no_rope_freq",
    "bias_gelu_fusion",  # its kernels take the tanh form of GELU
    "glu_linear_offset",
    "activation_func_clamp_value",
    "tokenizer_type",
    "tokenizer_model",
    "vocab_file",
    "merge_file",
    "vocab_size",
    "vocab_extra_ids",
    "tokenizer_special_tokens",
    "tokenizer_sentencepiece_legacy",
    "tokenizer_sentencepiece_ignore_extra_whitespaces",
    "tokenizer_hf_no_use_fast",
    "tokenizer_hf_no_include_special_tokens",
    "tiktoken_pattern",
    "tiktoken_num_special_tokens",
    "chat_template",
    "null_tokenizer_eod_id",
    "null_tokenizer_pad_id",
    "make_vocab_size_divisible_by",
)
# With --use-mp-args-from-checkpoint-args.
_PARALLEL = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
)
# Without --no-use-tokenizer-model-from-checkpoint-args.
TOKENIZER_FILES = ("tokenizer_model", "vocab_file", "merge_file")
# None is a value of these, not the lack of one.
OPTIONAL = {
    "retro_layers",
    "window_size",
    "window_attn_skip_freq",
    "no_rope_freq",
    "rotary_seq_len_interpolation_factor",
    "q_lora_rank",
    "mtp_num_layers",
    "mup_base_hidden_size",
    "mup_base_head_dim",
    "yarn_original_max_position_embeddings",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
}
# Facts of one process, not of the run.
_NOT_SAVED = {"rank", "local_rank", "typed", "device", "timers", "rerun_state"}


def args_to_save(args: Namespace) -> dict[str, Any]:
    """Every argument that JSON can hold."""
    plain = (type(None), bool, int, float, str, list, tuple, dict)
    values = {name: value for name, value in vars(args).items() if name not in _NOT_SAVED}
    return {
        name: to_json(value)
        for name, value in sorted(values.items())
        if isinstance(value, plain) or type(value).__name__ == "dtype"
    }


def take_args(args: Namespace, saved: dict[str, Any], *, parallel: bool = False, tokenizer: bool = True) -> None:
    """`--use-checkpoint-args`: the model's arguments as the checkpoint has them. What was typed wins.

    Args:
        parallel: the sizes of parallelism too.
        tokenizer: the tokenizer's files too.

    Prints one line for each value that changes, for each typed one that differs, and for each that the file lacks.
    """
    taken = [*_TAKEN, *(_PARALLEL if parallel else ())]
    for name in taken:
        if not hasattr(args, name) or (name in TOKENIZER_FILES and not tokenizer):
            continue
        if name not in saved:
            print_rank_0(f"Checkpoint did not provide arguments {name}")
            continue
        here, there = to_json(getattr(args, name)), saved[name]
        if here == there:
            continue
        if name in args.typed:
            print_rank_0(f"Keeping {name} at {here}, as typed; the checkpoint has {there}")
        else:
            print_rank_0(f"Setting {name} to {there} from checkpoint")
            setattr(args, name, there)


def has_vocabulary_of(args: Namespace, saved: dict[str, Any]) -> bool:
    """Whether the checkpoint's tokens are this run's, so that rows beyond them are padding on both sides."""
    return all(name in saved and to_json(getattr(args, name, None)) == saved[name] for name in TOKENS)


def grows_into_retro(args: Namespace, saved: dict[str, Any]) -> bool:
    """Whether the checkpoint is a GPT's and this run adds what retrieves, which starts afresh."""
    return bool(getattr(args, "retro_add_retriever", False)) and not saved.get("retro_add_retriever", False)


def is_retros_own(name: str) -> bool:
    """Whether a tensor is of the parts that a Retro has and a GPT has not."""
    return ".cross_attention." in name or ".pre_cross_attn_layernorm." in name


def has_fp8_history(args: dict[str, Any]) -> bool:
    """Whether a run with these arguments keeps the largest numbers of past steps."""
    return args.get("fp8_format") is not None and args.get("fp8_recipe") == "delayed"


def is_fp8_history(name: str) -> bool:
    """Whether a tensor is such a history: no weight, of no use to other recipes, and as long as the run wants it."""
    return name.endswith(".fp8.amax_history")
