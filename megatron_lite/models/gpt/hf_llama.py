"""config.json of Llama and its kin (Mistral, Qwen2, Qwen3) <-> our flags and arguments."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_lite.fusions.rope import yarn_concentration
from megatron_lite.models.gpt.hf_family import Setting
from megatron_lite.models.gpt.hf_names import Args, Config, Sizes, refuse

LLAMA_SETTINGS = (
    Setting("num_hidden_layers", "--num-layers", "num_layers"),
    Setting("hidden_size", "--hidden-size", "hidden_size"),
    Setting("intermediate_size", "--ffn-hidden-size", "ffn_hidden_size"),
    Setting("num_attention_heads", "--num-attention-heads", "num_attention_heads"),
    Setting("max_position_embeddings", "--max-position-embeddings", "max_position_embeddings", 2048),
    Setting("rms_norm_eps", "--norm-epsilon", "norm_epsilon", 1e-6),
    Setting("initializer_range", "--init-method-std", "init_method_std", 0.02),
    Setting("attention_dropout", "--attention-dropout", "attention_dropout", 0.0),
)
LLAMA_FLAGS = "--position-embedding-type rope --normalization RMSNorm --swiglu --hidden-dropout 0"
LLAMA_REQUIRES = {"position_embedding_type": ("rope", "yarn"), "normalization": "RMSNorm", "swiglu": True}
SILU = {"hidden_act": ("silu", "swish")}


def read_rope(config: Config) -> Iterator[object]:
    """Heads, positions and their angles. transformers 5 keeps all about angles in one table, 4 in two keys."""
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    if groups != heads:
        yield from ("--group-query-attention", "--num-query-groups", groups)
    yield from ("--kv-channels", config.get("head_dim") or config["hidden_size"] // heads)
    yield from ("--seq-length", config.get("max_position_embeddings") or 2048)

    both = {**config, **(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    base = both.get("rope_theta") or 10000.0
    if base != int(base):
        raise refuse(f"config.json has rope_theta = {base}", "--rotary-base is a whole number")
    yield from ("--rotary-base", int(base), "--rotary-percent", both.get("partial_rotary_factor") or 1.0)
    kind = both.get("rope_type") or both.get("type") or "default"
    if kind == "llama3":
        numbers = tuple(
            both.get(key) for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        )
        if numbers != (1.0, 4.0, 8192):
            raise refuse(
                f"config.json has low_freq_factor, high_freq_factor, original_max_position_embeddings = {numbers}",
                "--use-rope-scaling knows Llama 3.1's: 1, 4 and 8192",
            )
        yield from ("--use-rope-scaling", "--rope-scaling-factor", both["factor"])
    elif kind == "linear":
        if both["factor"] != int(both["factor"]):
            raise refuse(
                f"config.json has a linear rope factor of {both['factor']}",
                "--rotary-seq-len-interpolation-factor is a whole number",
            )
        yield from ("--rotary-seq-len-interpolation-factor", int(both["factor"]))
    elif kind == "yarn":
        yield from ("--position-embedding-type", "yarn")
        yield from read_yarn(both)
    elif kind != "default":
        raise refuse(f"config.json has rope_type = {kind!r}", "default, linear, llama3 and yarn are built")


def read_yarn(rope: Config) -> Iterator[object]:
    """YaRN's numbers. Rope: all that config.json says about angles, and the model's length."""
    old = rope.get("original_max_position_embeddings") or rope["max_position_embeddings"]
    factor = rope.get("factor") or rope["max_position_embeddings"] / old
    mscale, all_dim, given = rope.get("mscale"), rope.get("mscale_all_dim"), rope.get("attention_factor")
    if not (mscale and all_dim):  # transformers looks at both or at neither
        mscale, all_dim = 1.0, 0.0
    if given is not None and abs(given - yarn_concentration(factor, mscale, all_dim)) > 1e-9:
        if factor <= 1.0:
            raise refuse(f"config.json has attention_factor = {given} with factor = {factor}", "--mscale has no effect")
        mscale, all_dim = (given - 1.0) / (0.1 * math.log(factor)), 0.0
    yield from ("--rotary-scaling-factor", factor, "--yarn-original-max-position-embeddings", int(old))
    yield from ("--mscale", mscale, "--mscale-all-dim", all_dim)
    yield from ("--yarn-beta-fast", rope.get("beta_fast") or 32.0, "--yarn-beta-slow", rope.get("beta_slow") or 1.0)
    if not rope.get("truncate", True):
        yield "--no-yarn-correction-range-round-to-int"


def write_yarn(args: Args) -> dict[str, Any]:
    """YaRN's numbers, the other way."""
    factor, mscale, all_dim = args["rotary_scaling_factor"], args["mscale"], args["mscale_all_dim"]
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": args["yarn_original_max_position_embeddings"] or 4096,
        "beta_fast": args["yarn_beta_fast"] or 32.0,
        "beta_slow": args["yarn_beta_slow"] or 1.0,
        "mscale": mscale,
        "mscale_all_dim": all_dim,
        "attention_factor": yarn_concentration(factor, mscale, all_dim),
        "truncate": args["yarn_correction_range_round_to_int"],
    }


def write_rope(args: Args, sizes: Sizes) -> dict[str, Any]:
    scaling: dict[str, Any] | None = None
    interpolation = args.get("rotary_seq_len_interpolation_factor")
    if args["use_rope_scaling"] and interpolation:
        raise refuse(
            "--use-rope-scaling with --rotary-seq-len-interpolation-factor", "transformers has one or the other"
        )
    if args["use_rope_scaling"]:
        scaling = {
            "rope_type": "llama3",
            "factor": args["rope_scaling_factor"],
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    elif interpolation:
        scaling = {"rope_type": "linear", "factor": float(interpolation)}
    if args["position_embedding_type"] == "yarn":
        if scaling is not None:
            raise refuse("YaRN beside another way to rescale positions", "transformers has one of them")
        scaling = write_yarn(args)
    if args["rotary_percent"] != 1.0:
        raise refuse(f"rotary_percent is {args['rotary_percent']}", "transformers' Llama family turns all channels")
    return {
        "num_key_value_heads": sizes.groups,
        "head_dim": sizes.head,
        "hidden_act": "silu",
        "rope_theta": float(args["rotary_base"]),
        "rope_scaling": scaling,
    }


def windowed_layers(args: Args, layers: int) -> list[bool]:
    """Which layers look through the window."""
    pattern = args.get("window_attn_skip_freq")
    if args.get("window_size") is None:
        return [False] * layers
    if pattern is None:
        return [True] * layers
    if isinstance(pattern, int):
        return [number % pattern != 0 for number in range(1, layers + 1)]
    return [bool(item) for item in pattern]


def window_flags(config: Config, windowed: Sequence[bool]) -> Iterator[object]:
    """Their window counts the query itself, ours the keys to its left."""
    if any(windowed):
        yield from ("--window-size", f"{config['sliding_window'] - 1},0")
        if not all(windowed):
            yield from ("--window-attn-skip-freq", "[" + ",".join(str(int(item)) for item in windowed) + "]")


def window_of(args: Args) -> int | None:
    """Their number for our window."""
    if args.get("window_size") is None or args["window_size"][0] < 0:
        return None
    left, right = args["window_size"]
    if right > 0 or right < -1:
        raise refuse(f"window_size is {left, right}", "in a causal layer nothing lies to the right")
    return int(left) + 1


def read_llama(config: Config) -> Iterator[object]:
    yield from read_rope(config)
    attention, mlp = config.get("attention_bias", False), config.get("mlp_bias", False)
    if attention != mlp:
        raise refuse(
            f"config.json has attention_bias = {attention} and mlp_bias = {mlp}",
            "our linear layers have biases everywhere, nowhere, or on queries, keys and values alone",
        )
    if not attention:
        yield "--disable-bias-linear"


def write_llama(args: Args, sizes: Sizes) -> dict[str, Any]:
    if args["add_qkv_bias"] and not args["add_bias_linear"]:
        raise refuse("add_qkv_bias is True", "Llama has biases everywhere or nowhere")
    return {
        **write_rope(args, sizes),
        "attention_bias": args["add_bias_linear"],
        "mlp_bias": args["add_bias_linear"],
    }


def read_mistral(config: Config) -> Iterator[object]:
    yield from read_rope(config)
    yield "--disable-bias-linear"
    window = config.get("sliding_window", 4096)
    yield from window_flags({**config, "sliding_window": window}, [window is not None] * config["num_hidden_layers"])


def write_mistral(args: Args, sizes: Sizes) -> dict[str, Any]:
    windowed = windowed_layers(args, sizes.layers)
    if len(set(windowed)) > 1:
        raise refuse("window_attn_skip_freq leaves some layers without the window", "Mistral's layers are all alike")
    return {**write_rope(args, sizes), "sliding_window": window_of(args) if all(windowed) else None}


def read_qwen(config: Config) -> Iterator[object]:
    yield from read_rope(config)
    yield "--disable-bias-linear"
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types")
    if not config.get("use_sliding_window", False) or config.get("sliding_window") is None:
        windowed = [False] * layers
    elif kinds:
        windowed = [kind == "sliding_attention" for kind in kinds]
    else:
        windowed = [layer >= config.get("max_window_layers", 28) for layer in range(layers)]
    yield from window_flags(config, windowed)


def write_qwen(args: Args, sizes: Sizes) -> dict[str, Any]:
    windowed = windowed_layers(args, sizes.layers) if window_of(args) else [False] * sizes.layers
    return {
        **write_rope(args, sizes),
        "use_sliding_window": any(windowed),
        "sliding_window": window_of(args),
        "max_window_layers": windowed.index(True) if any(windowed) else sizes.layers,
        "layer_types": ["sliding_attention" if item else "full_attention" for item in windowed],
    }
