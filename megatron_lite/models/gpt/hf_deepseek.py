"""config.json of DeepSeek-V2 and DeepSeek-V3 (latent attention, experts) <-> our flags and arguments.

Both rotate even and odd channels as pairs, as we do, so that no weight changes its order. They choose among groups of
experts by another number than we: V2 by the best expert of a group, V3 by its two best; ours is topk / chosen groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_lite.fusions.rope import yarn_concentration
from megatron_lite.models.gpt.hf_family import ANY
from megatron_lite.models.gpt.hf_llama import read_yarn, write_yarn
from megatron_lite.models.gpt.hf_names import Args, Config, Sizes, refuse

REQUIRES: dict[str, Any] = {
    "position_embedding_type": "rope",
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "window_size": None,
    "add_bias_linear": False,
    "add_qkv_bias": ANY,  # there is no such projection
    "num_experts": ANY,
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
    "moe_expert_capacity_factor": None,
    "moe_apply_probs_on_input": False,
    "moe_latent_size": None,
    "moe_shared_expert_gate": False,
    "use_rope_scaling": False,
    "rotary_percent": 1.0,
    "rotary_seq_len_interpolation_factor": None,
}
# Norms of latent vectors have transformers' default epsilon, whatever config.json says of the others.
DEMANDS: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "rope_interleave": (True, None),
    "rms_norm_eps": (1e-6,),
}


def _read(config: Config) -> Iterator[object]:
    nope, rotary = config.get("qk_nope_head_dim", 128), config.get("qk_rope_head_dim", 64)
    yield from ("--multi-latent-attention", "--qk-layernorm", "--disable-bias-linear")
    yield from ("--kv-lora-rank", config.get("kv_lora_rank", 512), "--v-head-dim", config.get("v_head_dim", 128))
    yield from ("--qk-head-dim", nope, "--qk-pos-emb-head-dim", rotary, "--kv-channels", nope + rotary)
    rank = config.get("q_lora_rank", 1536)
    if rank is not None:
        yield from ("--q-lora-rank", rank)
    yield from ("--seq-length", config.get("max_position_embeddings") or 2048)
    yield from _read_angles(config)

    layers, dense = config["num_hidden_layers"], config.get("first_k_dense_replace") or 0
    experts = config.get("n_routed_experts")
    if experts is None or dense >= layers:
        return
    wide = config["moe_intermediate_size"]
    yield from ("--num-experts", experts, "--moe-ffn-hidden-size", wide)
    yield from ("--moe-router-topk", config["num_experts_per_tok"], "--moe-router-dtype", "fp32")
    yield from ("--moe-shared-expert-intermediate-size", wide * config["n_shared_experts"])
    yield from ("--moe-router-topk-scaling-factor", config.get("routed_scaling_factor", 1.0))
    if dense:
        yield from ("--moe-layer-freq", f"[0]*{dense}+[1]*{layers - dense}")


def _read_angles(config: Config) -> Iterator[object]:
    both = {**config, **(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    base = both.get("rope_theta") or 10000.0
    if base != int(base):
        raise refuse(f"config.json has rope_theta = {base}", "--rotary-base is a whole number")
    yield from ("--rotary-base", int(base))
    kind = both.get("rope_type") or both.get("type") or "default"
    if kind == "default":
        yield from ("--rope-type", "rope")
        return
    if kind != "yarn":
        raise refuse(f"config.json has rope_type = {kind!r}", "default and yarn are built for latent attention")
    mscale, all_dim, given = both.get("mscale") or 0.0, both.get("mscale_all_dim"), both.get("attention_factor")
    if all_dim and not mscale:
        raise refuse(f"config.json has mscale_all_dim = {all_dim} and no mscale", "--mscale-all-dim divides --mscale")
    if given is not None and all_dim and abs(given - yarn_concentration(both["factor"], mscale, all_dim)) > 1e-9:
        raise refuse(f"config.json has attention_factor = {given}", "--mscale and --mscale-all-dim give another one")
    yield from ("--rope-type", "yarn", *read_yarn(both))


def _groups(config: Config, best: int) -> Iterator[object]:
    """Flags of the choice among groups, which go by the sum of the `best` experts of a group."""
    groups, chosen, topk = config.get("n_group") or 1, config.get("topk_group") or 1, config["num_experts_per_tok"]
    if groups == 1:
        return
    if topk // chosen != best:
        raise refuse(
            f"config.json has num_experts_per_tok = {topk} and topk_group = {chosen}",
            f"this family ranks groups by their {best} best experts, --moe-router-group-topk by {topk // chosen}",
        )
    yield from ("--moe-router-num-groups", groups, "--moe-router-group-topk", chosen)


def read_v2(config: Config) -> Iterator[object]:
    words = list(_read(config))
    yield from words
    if "--num-experts" in words:
        yield "--moe-router-pre-softmax"
        method = config.get("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise refuse(
                f"config.json has topk_method = {method!r}", "transformers knows two: greedy among all, or groups"
            )
        if method != "greedy":
            yield from _groups(config, 1)


def read_v3(config: Config) -> Iterator[object]:
    words = list(_read(config))
    yield from words
    if "--num-experts" in words:
        if not config.get("norm_topk_prob", True):
            raise refuse("config.json has norm_topk_prob = False", "our sigmoid scores are divided by their sum")
        yield from ("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias")
        yield from _groups({"n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, **config}, 2)


def _write(args: Args, sizes: Sizes, best: int) -> dict[str, Any]:
    if not sizes.experts or not sizes.shared_inner or sizes.shared_inner % sizes.expert_inner:
        raise refuse(
            f"{sizes.experts} experts of {sizes.expert_inner} channels with {sizes.shared_inner} shared ones",
            "DeepSeek has both, and a whole number of shared experts",
        )
    dense = sizes.with_experts.index(True)
    if not all(sizes.with_experts[dense:]):
        raise refuse(f"moe_layer_freq is {args['moe_layer_freq']}", "DeepSeek's dense layers come before all others")
    groups, chosen, topk = args["moe_router_num_groups"], args["moe_router_group_topk"], args["moe_router_topk"]
    if groups and groups > 1 and topk // chosen != best:
        raise refuse(
            f"moe_router_topk {topk} of {chosen} groups", f"this family ranks groups by their {best} best experts"
        )
    if args["norm_epsilon"] != 1e-6:
        raise refuse(f"norm_epsilon is {args['norm_epsilon']}", "transformers' norms of latent vectors have 1e-6")
    yarn = args["rope_type"] != "rope"
    rope = write_yarn(args) if yarn else {"rope_type": "default"}
    return {
        "num_key_value_heads": sizes.heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_interleave": True,
        "rope_theta": float(args["rotary_base"]),
        "rope_scaling": rope if yarn else None,
        "rope_parameters": {**rope, "rope_theta": float(args["rotary_base"])},
        "q_lora_rank": args["q_lora_rank"],
        "kv_lora_rank": args["kv_lora_rank"],
        "qk_nope_head_dim": args["qk_head_dim"],
        "qk_rope_head_dim": args["qk_pos_emb_head_dim"],
        "v_head_dim": args["v_head_dim"],
        "n_routed_experts": sizes.experts,
        "num_experts_per_tok": topk,
        "moe_intermediate_size": sizes.expert_inner,
        "n_shared_experts": sizes.shared_inner // sizes.expert_inner,
        "first_k_dense_replace": dense,
        "moe_layer_freq": 1,
        "routed_scaling_factor": args["moe_router_topk_scaling_factor"] or 1.0,
        "n_group": groups or 1,
        "topk_group": chosen or 1,
    }


def write_v2(args: Args, sizes: Sizes) -> dict[str, Any]:
    if args["moe_router_score_function"] != "softmax" or not args["moe_router_pre_softmax"]:
        raise refuse("the router has no softmax over all experts", "DeepSeek-V2 chooses by it")
    if args["moe_router_enable_expert_bias"]:
        raise refuse("moe_router_enable_expert_bias is True", "DeepSeek-V2's router has no bias")
    grouped = (args["moe_router_num_groups"] or 1) > 1
    method = "group_limited_greedy" if grouped else "greedy"
    return {**_write(args, sizes, 1), "topk_method": method, "scoring_func": "softmax", "norm_topk_prob": False}


def write_v3(args: Args, sizes: Sizes) -> dict[str, Any]:
    if args["moe_router_score_function"] != "sigmoid" or not args["moe_router_enable_expert_bias"]:
        raise refuse("the router has no sigmoid scores with a bias", "DeepSeek-V3 chooses by them")
    if args["moe_router_topk"] < 2:
        raise refuse("moe_router_topk is 1", "a single score would be divided by itself")
    return {
        **_write(args, sizes, 2),
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
    }
