"""config.json of Hugging Face's GPT families <-> our flags and arguments.

Inwards a family gives the words of a command line, so that a converted model passes the same rules as a run. Outwards
it reads a run's arguments and refuses those that the family has no word for: a model that would compute something else
is never written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_lite.errors import ConfigError
from megatron_lite.fusions.rope import yarn_concentration
from megatron_lite.models.gpt.hf_names import GPT2_ROWS, LLAMA_ROWS, Args, Config, Row, Sizes, refuse


@dataclass(frozen=True)
class Setting:
    """A number of both sides; `default` is what transformers takes when the key is missing (None: it must be there)."""

    theirs: str
    flag: str
    ours: str
    default: Any = None


@dataclass(frozen=True)
class Family:
    """A family of models.

    settings: numbers with a name on both sides. flags: further words that every member has. requires: our arguments
    whose value makes the family. demands: keys of config.json that, if there, must have one of these values.
    read, write: what takes more than a table.
    """

    model_type: str
    architecture: str
    rows: Sequence[Row]
    settings: Sequence[Setting]
    flags: str
    requires: Mapping[str, Any]
    read: Callable[[Config], Iterator[object]]
    write: Callable[[Args, Sizes], dict[str, Any]]
    demands: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    tied_by_default: bool = False

    def to_flags(self, config: Config) -> list[str]:
        """The command line of the model that config.json describes. Raises: ConfigError naming what we lack."""
        words: list[object] = [*self.flags.split()]
        for key, allowed in {**_QUANTIZED, **self.demands}.items():
            value = config.get(key, allowed[0])
            if value not in allowed:
                raise refuse(
                    f"config.json has {key} = {value!r}",
                    f"a {self.model_type} model is understood with {key} = {' or '.join(map(repr, allowed))}",
                )
        for setting in self.settings:
            value = config.get(setting.theirs)
            value = setting.default if value is None else value
            if value is None:
                raise refuse(
                    f"config.json has no {setting.theirs}", f"every {self.model_type} model has it", "the whole file"
                )
            words += [setting.flag, value]
        if not config.get("tie_word_embeddings", self.tied_by_default):
            words.append("--untie-embeddings-and-output-weights")
        return [str(word) for word in [*words, *self.read(config)]]

    def problems(self, args: Args) -> list[str]:
        """What of these arguments the family cannot say; empty: it fits."""
        found = []
        for name, wanted in {**_NEUTRAL, **self.requires}.items():
            value = args.get(name, wanted)
            allowed = wanted if isinstance(wanted, tuple) else (wanted,)
            if value not in allowed:
                found.append(f"{name} is {value!r}, not {' or '.join(map(repr, allowed))}")
        try:
            if not found:
                self.write(args, Sizes.of(args, 1))
        except ConfigError as error:
            found.append(error.what)
        return found

    def to_config(self, args: Args, sizes: Sizes) -> dict[str, Any]:
        """config.json of a model with these arguments, without what belongs to its tokenizer. Raises: ConfigError."""
        problems = self.problems(args)
        if problems:
            raise refuse(
                f"the checkpoint is no {self.model_type} model:\n    " + "\n    ".join(problems),
                f"{self.architecture} has no such part",
                "another --hf-model-type, or leave it out to have the fitting one found",
            )
        numbers = {setting.theirs: args[setting.ours] for setting in self.settings}
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "vocab_size": sizes.vocabulary,
            "tie_word_embeddings": not args["untie_embeddings_and_output_weights"],
            **numbers,
            **self.write(args, sizes),
        }


_QUANTIZED: dict[str, tuple[Any, ...]] = {"quantization_config": (None,)}
# Arguments that no family here has a word for, with the values under which they do nothing.
_NEUTRAL: dict[str, Any] = {
    "apply_layernorm_1p": False,
    "apply_residual_connection_post_layernorm": False,
    "softmax_type": "vanilla",
    "no_rope_freq": None,
    "rotary_interleaved": False,
    "squared_relu": False,
    "quick_geglu": False,
    "num_experts": None,
    "multi_latent_attention": False,
    "mtp_num_layers": (None, 0),
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    "spec": (None, ["local"]),
}


# -- GPT-2 ---------------------------------------------------------------------------------------------------------

_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")


def _read_gpt2(config: Config) -> Iterator[object]:
    yield from ("--ffn-hidden-size", config.get("n_inner") or 4 * config["n_embd"], "--seq-length")
    yield config.get("n_positions", 1024)
    act = config.get("activation_function", "gelu_new")
    if act in _TANH:
        yield "--openai-gelu"
    elif act == "gelu":
        yield "--no-bias-gelu-fusion"  # whose kernels take the tanh form
    else:
        raise refuse(f"config.json has activation_function = {act!r}", f"GELU is understood: gelu, {', '.join(_TANH)}")
    if config.get("embd_pdrop", 0.1) != config.get("resid_pdrop", 0.1):
        raise refuse(
            f"config.json has embd_pdrop = {config.get('embd_pdrop', 0.1)} and resid_pdrop = "
            f"{config.get('resid_pdrop', 0.1)}",
            "--hidden-dropout is one number for both",
            "set both keys to the same number: dropout is no part of the weights",
        )


def _write_gpt2(args: Args, sizes: Sizes) -> dict[str, Any]:
    if sizes.groups != sizes.heads or sizes.heads * sizes.head != sizes.hidden:
        raise refuse(f"{sizes.groups} key/value heads of {sizes.head} channels", "GPT-2 has hidden / heads, ungrouped")
    tanh = args["openai_gelu"] or args["bias_gelu_fusion"]
    return {
        "n_inner": None if sizes.inner == 4 * sizes.hidden else sizes.inner,
        "activation_function": "gelu_new" if tanh else "gelu",
        "embd_pdrop": args["hidden_dropout"],
    }


_GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    rows=GPT2_ROWS,
    settings=(
        Setting("n_layer", "--num-layers", "num_layers", 12),
        Setting("n_embd", "--hidden-size", "hidden_size", 768),
        Setting("n_head", "--num-attention-heads", "num_attention_heads", 12),
        Setting("n_positions", "--max-position-embeddings", "max_position_embeddings", 1024),
        Setting("layer_norm_epsilon", "--norm-epsilon", "norm_epsilon", 1e-5),
        Setting("initializer_range", "--init-method-std", "init_method_std", 0.02),
        Setting("resid_pdrop", "--hidden-dropout", "hidden_dropout", 0.1),
        Setting("attn_pdrop", "--attention-dropout", "attention_dropout", 0.1),
    ),
    flags="--position-embedding-type learned_absolute --normalization LayerNorm",
    requires={
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "qk_layernorm": False,
        "swiglu": False,
        "window_size": None,
    },
    read=_read_gpt2,
    write=_write_gpt2,
    demands={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    tied_by_default=True,
)


# -- Llama and its kin ---------------------------------------------------------------------------------------------

_LLAMA_SETTINGS = (
    Setting("num_hidden_layers", "--num-layers", "num_layers"),
    Setting("hidden_size", "--hidden-size", "hidden_size"),
    Setting("intermediate_size", "--ffn-hidden-size", "ffn_hidden_size"),
    Setting("num_attention_heads", "--num-attention-heads", "num_attention_heads"),
    Setting("max_position_embeddings", "--max-position-embeddings", "max_position_embeddings", 2048),
    Setting("rms_norm_eps", "--norm-epsilon", "norm_epsilon", 1e-6),
    Setting("initializer_range", "--init-method-std", "init_method_std", 0.02),
    Setting("attention_dropout", "--attention-dropout", "attention_dropout", 0.0),
)
_LLAMA_FLAGS = "--position-embedding-type rope --normalization RMSNorm --swiglu --hidden-dropout 0"
_LLAMA_REQUIRES = {"position_embedding_type": ("rope", "yarn"), "normalization": "RMSNorm", "swiglu": True}
_SILU = {"hidden_act": ("silu", "swish")}


def _read_rope(config: Config) -> Iterator[object]:
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


def _write_rope(args: Args, sizes: Sizes) -> dict[str, Any]:
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


def _windowed(args: Args, layers: int) -> list[bool]:
    """Which layers look through the window."""
    pattern = args.get("window_attn_skip_freq")
    if args.get("window_size") is None:
        return [False] * layers
    if pattern is None:
        return [True] * layers
    if isinstance(pattern, int):
        return [number % pattern != 0 for number in range(1, layers + 1)]
    return [bool(item) for item in pattern]


def _window_flags(config: Config, windowed: Sequence[bool]) -> Iterator[object]:
    """Their window counts the query itself, ours the keys to its left."""
    if any(windowed):
        yield from ("--window-size", f"{config['sliding_window'] - 1},0")
        if not all(windowed):
            yield from ("--window-attn-skip-freq", "[" + ",".join(str(int(item)) for item in windowed) + "]")


def _window_of(args: Args) -> int | None:
    """Their number for our window."""
    if args.get("window_size") is None or args["window_size"][0] < 0:
        return None
    left, right = args["window_size"]
    if right > 0 or right < -1:
        raise refuse(f"window_size is {left, right}", "in a causal layer nothing lies to the right")
    return int(left) + 1


def _read_llama(config: Config) -> Iterator[object]:
    yield from _read_rope(config)
    attention, mlp = config.get("attention_bias", False), config.get("mlp_bias", False)
    if attention != mlp:
        raise refuse(
            f"config.json has attention_bias = {attention} and mlp_bias = {mlp}",
            "our linear layers have biases everywhere, nowhere, or on queries, keys and values alone",
        )
    if not attention:
        yield "--disable-bias-linear"


def _write_llama(args: Args, sizes: Sizes) -> dict[str, Any]:
    if args["add_qkv_bias"] and not args["add_bias_linear"]:
        raise refuse("add_qkv_bias is True", "Llama has biases everywhere or nowhere")
    return {
        **_write_rope(args, sizes),
        "attention_bias": args["add_bias_linear"],
        "mlp_bias": args["add_bias_linear"],
    }


def _read_mistral(config: Config) -> Iterator[object]:
    yield from _read_rope(config)
    yield "--disable-bias-linear"
    window = config.get("sliding_window", 4096)
    yield from _window_flags({**config, "sliding_window": window}, [window is not None] * config["num_hidden_layers"])


def _write_mistral(args: Args, sizes: Sizes) -> dict[str, Any]:
    windowed = _windowed(args, sizes.layers)
    if len(set(windowed)) > 1:
        raise refuse("window_attn_skip_freq leaves some layers without the window", "Mistral's layers are all alike")
    return {**_write_rope(args, sizes), "sliding_window": _window_of(args) if all(windowed) else None}


def _read_qwen(config: Config) -> Iterator[object]:
    yield from _read_rope(config)
    yield "--disable-bias-linear"
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types")
    if not config.get("use_sliding_window", False) or config.get("sliding_window") is None:
        windowed = [False] * layers
    elif kinds:
        windowed = [kind == "sliding_attention" for kind in kinds]
    else:
        windowed = [layer >= config.get("max_window_layers", 28) for layer in range(layers)]
    yield from _window_flags(config, windowed)


def _write_qwen(args: Args, sizes: Sizes) -> dict[str, Any]:
    windowed = _windowed(args, sizes.layers) if _window_of(args) else [False] * sizes.layers
    return {
        **_write_rope(args, sizes),
        "use_sliding_window": any(windowed),
        "sliding_window": _window_of(args),
        "max_window_layers": windowed.index(True) if any(windowed) else sizes.layers,
        "layer_types": ["sliding_attention" if item else "full_attention" for item in windowed],
    }


def _llama_like(model_type: str, architecture: str, flags: str, read: Any, write: Any, **more: Any) -> Family:
    requires, demands = more.pop("requires"), more.pop("demands", {})
    return Family(
        model_type=model_type,
        architecture=architecture,
        rows=LLAMA_ROWS,
        settings=_LLAMA_SETTINGS,
        flags=f"{_LLAMA_FLAGS} {flags}",
        requires={**_LLAMA_REQUIRES, **requires},
        read=read,
        write=write,
        demands={**_SILU, **demands},
    )


# In the order in which one is looked for when a model goes out: the first that fits.
FAMILIES = {
    family.model_type: family
    for family in (
        _GPT2,
        _llama_like(
            "llama",
            "LlamaForCausalLM",
            "",
            _read_llama,
            _write_llama,
            requires={"qk_layernorm": False, "window_size": None},
        ),
        _llama_like(
            "mistral",
            "MistralForCausalLM",
            "",
            _read_mistral,
            _write_mistral,
            requires={"qk_layernorm": False, "add_bias_linear": False, "add_qkv_bias": False},
        ),
        _llama_like(
            "qwen2",
            "Qwen2ForCausalLM",
            "--add-qkv-bias",
            _read_qwen,
            _write_qwen,
            requires={"qk_layernorm": False, "add_bias_linear": False, "add_qkv_bias": True},
        ),
        _llama_like(
            "qwen3",
            "Qwen3ForCausalLM",
            "--qk-layernorm",
            _read_qwen,
            _write_qwen,
            requires={"qk_layernorm": True, "add_bias_linear": False, "add_qkv_bias": False},
            demands={"attention_bias": (False,)},
        ),
    )
}

_EXPERTS = "layers of experts are not converted yet"
_LATENT = "multi-head latent attention and layers of experts are not converted yet"
_GEMMA = "it multiplies embeddings by sqrt(hidden) and gates with GELU"
_LATER = "it multiplies embeddings by sqrt(hidden), gates with GELU and has four norms a layer"
# Families that people will ask for -> what is missing.
_MISSING = {
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "phimoe", "olmoe", "gpt_oss", "dbrx"), _EXPERTS),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _LATENT),
    "gemma": _GEMMA,
    **dict.fromkeys(("gemma2", "gemma3", "gemma3_text"), _LATER),
    "bert": "the BERT model is not converted yet",
    **dict.fromkeys(("t5", "mt5", "umt5"), "the T5 model is not converted yet"),
}


def family_of(config: Config) -> Family:
    """The family that config.json names. Raises: ConfigError that says what is missing for it."""
    kind = config.get("model_type")
    if kind in FAMILIES:
        return FAMILIES[kind]
    raise refuse(
        f"config.json has model_type = {kind!r}",
        _MISSING.get(str(kind), "this family is not known") + f"; known are {', '.join(FAMILIES)}",
        "a model of one of these families",
    )


def fitting_family(args: Args, wanted: str | None = None) -> Family:
    """The first family that can say these arguments, or the wanted one. Raises: ConfigError."""
    if wanted is not None:
        if wanted not in FAMILIES:
            raise ConfigError(f"--hf-model-type {wanted}", why=f"known are {', '.join(FAMILIES)}", fix="one of these")
        return FAMILIES[wanted]
    reasons = {}
    for name, family in FAMILIES.items():
        reasons[name] = family.problems(args)
        if not reasons[name]:
            return family
    closest = min(reasons, key=lambda name: len(reasons[name]))
    raise refuse(
        f"no known family of Hugging Face computes what this checkpoint does; {closest} comes closest, but\n"
        + "\n".join(f"    {reason}" for reason in reasons[closest]),
        f"known are {', '.join(FAMILIES)}",
        "generate from the checkpoint here (megatron-lite generate)",
    )
