"""config.json of models with experts (Mixtral, Qwen2-MoE, Qwen3-MoE) <-> our flags and arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_lite.models.gpt.hf_family import ANY
from megatron_lite.models.gpt.hf_llama import read_qwen, read_rope, window_flags, write_mistral, write_qwen
from megatron_lite.models.gpt.hf_names import Args, Config, Sizes, refuse

# What transformers' blocks of experts all do: a softmax, no groups, no bias, nothing dropped.
MOE_REQUIRES: dict[str, Any] = {
    "num_experts": ANY,
    "add_bias_linear": False,
    "moe_router_score_function": "softmax",
    "moe_router_num_groups": None,
    "moe_router_topk_scaling_factor": None,
    "moe_router_enable_expert_bias": False,
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
    "moe_expert_capacity_factor": None,
    "moe_apply_probs_on_input": False,
    "moe_latent_size": None,
}


def read_mixtral(config: Config) -> Iterator[object]:
    yield from read_rope({"rope_theta": 1e6, **config})
    window = config.get("sliding_window")
    yield from window_flags(config, [window is not None] * config["num_hidden_layers"])
    yield from ("--disable-bias-linear", "--num-experts", config.get("num_local_experts", 8))
    yield from ("--moe-router-topk", config.get("num_experts_per_tok", 2))
    yield from ("--moe-ffn-hidden-size", config["intermediate_size"])


def write_mixtral(args: Args, sizes: Sizes) -> dict[str, Any]:
    _wants_experts(sizes)
    if not all(sizes.with_experts):
        raise refuse(f"moe_layer_freq is {args['moe_layer_freq']}", "all of Mixtral's layers have experts")
    if args["moe_router_pre_softmax"]:
        raise refuse("moe_router_pre_softmax is True", "Mixtral's weights of the chosen experts add up to 1")
    if sizes.shared_inner:
        raise refuse(f"{sizes.shared_inner} channels of shared experts", "Mixtral has none")
    return {
        **write_mistral(args, sizes),
        "intermediate_size": sizes.expert_inner,
        "num_local_experts": sizes.experts,
        "num_experts_per_tok": args["moe_router_topk"],
    }


def _read_qwen_moe(config: Config) -> Iterator[object]:
    """What Qwen2-MoE and Qwen3-MoE share."""
    experts = config.get("num_experts") or config.get("num_local_experts")
    if not experts:
        raise refuse("config.json has no num_experts", "a model of this family has experts", "the whole file")
    yield from ("--num-experts", experts, "--moe-router-topk", config["num_experts_per_tok"])
    yield from ("--moe-ffn-hidden-size", config["moe_intermediate_size"])
    if not config.get("norm_topk_prob", False):
        yield "--moe-router-pre-softmax"
    dense, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step") or 1
    kinds = [int(i not in dense and (i + 1) % step == 0) for i in range(config["num_hidden_layers"])]
    if not all(kinds):
        yield from ("--moe-layer-freq", "[" + ",".join(map(str, kinds)) + "]")


def _write_qwen_moe(args: Args, sizes: Sizes) -> dict[str, Any]:
    _wants_experts(sizes)
    return {
        "num_experts": sizes.experts,
        "num_experts_per_tok": args["moe_router_topk"],
        "moe_intermediate_size": sizes.expert_inner,
        "norm_topk_prob": not args["moe_router_pre_softmax"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, has_experts in enumerate(sizes.with_experts) if not has_experts],
    }


def read_qwen2_moe(config: Config) -> Iterator[object]:
    yield from read_qwen(config)
    yield from _read_qwen_moe(config)
    if config.get("qkv_bias", True):
        yield "--add-qkv-bias"
    yield from ("--moe-shared-expert-intermediate-size", config["shared_expert_intermediate_size"])
    yield "--moe-shared-expert-gate"


def write_qwen2_moe(args: Args, sizes: Sizes) -> dict[str, Any]:
    if not sizes.shared_inner or not args["moe_shared_expert_gate"]:
        raise refuse("no shared experts with a gate", "every layer of experts of Qwen2-MoE has them")
    return {
        **write_qwen(args, sizes),
        **_write_qwen_moe(args, sizes),
        "qkv_bias": args["add_qkv_bias"],
        "shared_expert_intermediate_size": sizes.shared_inner,
    }


def read_qwen3_moe(config: Config) -> Iterator[object]:
    yield from read_rope(config)
    yield "--disable-bias-linear"
    windowed = bool(config.get("use_sliding_window") and config.get("sliding_window"))
    yield from window_flags(config, [windowed] * config["num_hidden_layers"])
    yield from _read_qwen_moe(config)


def write_qwen3_moe(args: Args, sizes: Sizes) -> dict[str, Any]:
    if sizes.shared_inner:
        raise refuse(f"{sizes.shared_inner} channels of shared experts", "Qwen3-MoE has none")
    shape = write_mistral(args, sizes)
    return {**shape, **_write_qwen_moe(args, sizes), "use_sliding_window": shape["sliding_window"] is not None}


def _wants_experts(sizes: Sizes) -> None:
    if not sizes.experts:
        raise refuse("num_experts is None", "a model of this family has experts")
