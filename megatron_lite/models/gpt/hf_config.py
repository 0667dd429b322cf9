"""config.json of Hugging Face's GPT families <-> our flags and arguments.

Inwards a family gives the words of a command line, so that a converted model passes the same rules as a run. Outwards
it reads a run's arguments and refuses those that the family has no word for: a model that would compute something else
is never written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_lite.models.gpt import hf_deepseek
from megatron_lite.models.gpt.hf_family import Family, Setting
from megatron_lite.models.gpt.hf_llama import (
    LLAMA_FLAGS,
    LLAMA_REQUIRES,
    LLAMA_SETTINGS,
    SILU,
    read_llama,
    read_mistral,
    read_qwen,
    write_llama,
    write_mistral,
    write_qwen,
)
from megatron_lite.models.gpt.hf_moe import (
    MOE_REQUIRES,
    read_mixtral,
    read_qwen2_moe,
    read_qwen3_moe,
    write_mixtral,
    write_qwen2_moe,
    write_qwen3_moe,
)
from megatron_lite.models.gpt.hf_names import (
    DEEPSEEK_V2_ROWS,
    DEEPSEEK_V3_ROWS,
    GPT2_ROWS,
    LLAMA_ROWS,
    MIXTRAL_ROWS,
    QWEN2_MOE_ROWS,
    QWEN3_MOE_ROWS,
    Args,
    Config,
    Sizes,
    refuse,
)

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
    copies={"lm_head.weight": "transformer.wte.weight"},
)


def _llama_like(model_type: str, architecture: str, flags: str, read: Any, write: Any, **more: Any) -> Family:
    requires, demands = more.pop("requires"), more.pop("demands", {})
    return Family(
        model_type=model_type,
        architecture=architecture,
        rows=more.pop("rows", LLAMA_ROWS),
        settings=LLAMA_SETTINGS,
        flags=f"{LLAMA_FLAGS} {flags}",
        requires={**LLAMA_REQUIRES, **requires},
        read=read,
        write=write,
        demands={**SILU, **demands},
        copies={"lm_head.weight": "model.embed_tokens.weight"},
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
            read_llama,
            write_llama,
            requires={"qk_layernorm": False, "window_size": None},
        ),
        _llama_like(
            "mistral",
            "MistralForCausalLM",
            "",
            read_mistral,
            write_mistral,
            requires={"qk_layernorm": False, "add_bias_linear": False, "add_qkv_bias": False},
        ),
        _llama_like(
            "qwen2",
            "Qwen2ForCausalLM",
            "--add-qkv-bias",
            read_qwen,
            write_qwen,
            requires={"qk_layernorm": False, "add_bias_linear": False, "add_qkv_bias": True},
        ),
        _llama_like(
            "qwen3",
            "Qwen3ForCausalLM",
            "--qk-layernorm",
            read_qwen,
            write_qwen,
            requires={"qk_layernorm": True, "add_bias_linear": False, "add_qkv_bias": False},
            demands={"attention_bias": (False,)},
        ),
        _llama_like(
            "mixtral",
            "MixtralForCausalLM",
            "",
            read_mixtral,
            write_mixtral,
            rows=MIXTRAL_ROWS,
            requires={**MOE_REQUIRES, "qk_layernorm": False, "add_qkv_bias": False},
        ),
        _llama_like(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            "",
            read_qwen2_moe,
            write_qwen2_moe,
            rows=QWEN2_MOE_ROWS,
            requires={**MOE_REQUIRES, "qk_layernorm": False},
        ),
        _llama_like(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            "--qk-layernorm",
            read_qwen3_moe,
            write_qwen3_moe,
            rows=QWEN3_MOE_ROWS,
            requires={**MOE_REQUIRES, "qk_layernorm": True, "add_qkv_bias": False},
            demands={"attention_bias": (False,)},
        ),
        *(
            _llama_like(
                f"deepseek_{name}",
                f"Deepseek{name.upper()}ForCausalLM",
                "",
                read,
                write,
                rows=rows,
                requires=hf_deepseek.REQUIRES,
                demands=hf_deepseek.DEMANDS,
            )
            for name, read, write, rows in (
                ("v2", hf_deepseek.read_v2, hf_deepseek.write_v2, DEEPSEEK_V2_ROWS),
                ("v3", hf_deepseek.read_v3, hf_deepseek.write_v3, DEEPSEEK_V3_ROWS),
            )
        ),
    )
}

_EXPERTS = "layers of experts are not converted yet"
_GEMMA = "it multiplies embeddings by sqrt(hidden) and gates with GELU"
_LATER = "it multiplies embeddings by sqrt(hidden), gates with GELU and has four norms a layer"
# Families that people will ask for -> what is missing.
MISSING = {
    **dict.fromkeys(("phimoe", "olmoe", "gpt_oss", "dbrx"), _EXPERTS),
    "gemma": _GEMMA,
    **dict.fromkeys(("gemma2", "gemma3", "gemma3_text"), _LATER),
    **dict.fromkeys(("mt5", "umt5"), "T5 and T5 1.1 are converted, its multilingual kin is not yet"),
}
