"""T5 and T5 1.1 of Hugging Face in our names and arguments (see `models/gpt/hf_names` for how rows are read).

    T5        ReLU, logits / sqrt(hidden), output layer tied to the embedding
    T5 1.1    gated GELU in its tanh form, plain logits, output layer of its own

Both: RMSNorm, no biases, scores that are not scaled, one table of relative positions a stack. theirs keeps that table
in the stack's first layer. Tables: `ROWS` for the weights, `SETTINGS` for the numbers of config.json.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_lite.models.gpt.hf_family import Family, Setting
from megatron_lite.models.gpt.hf_names import Args, Config, KeyValue, Qkv, Row, Same, Sizes, Stacked, Vocabulary, refuse

EMBEDDING, OUTPUT = "shared.weight", "lm_head.weight"
COPIES = dict.fromkeys((OUTPUT, "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), EMBEDDING)
_E, _D = "encoder.layers.{}.", "decoder.layers.{}."
_TE, _TD = "encoder.block.{}.layer.", "decoder.block.{}.layer."


def _untied(args: Args) -> bool:
    return bool(args["untie_embeddings_and_output_weights"])


def _tied_plain(args: Args) -> bool:
    """Tied, and logits as they are: theirs says so with a copy of the embedding, whatever the version reads it."""
    return not _untied(args) and not args["scaled_logits"]


def _tied_scaled(args: Args) -> bool:
    return not _untied(args) and bool(args["scaled_logits"])


def _gated(args: Args) -> bool:
    return bool(args["geglu"] or args["swiglu"])


def _plain(args: Args) -> bool:
    return not _gated(args)


class Twice:
    """One of ours for two equal ones of theirs."""

    @staticmethod
    def join(parts: Iterator[Any], sizes: Sizes) -> Any:
        first, *others = parts
        if first.device.type != "meta" and not all(first.equal(other) for other in others):
            raise refuse(f"{EMBEDDING} and {OUTPUT} differ", "they were found equal before", "a folder at rest")
        return Vocabulary.join(iter([first]), sizes)

    @staticmethod
    def divide(tensor: Any, sizes: Sizes) -> list[Any]:
        return Vocabulary.divide(tensor, sizes) * 2


def _stack(ours: str, theirs: str, layers: str, mlp: int) -> Iterator[Row]:
    """What an encoder's and a decoder's layer have both; mlp: place of the MLP among theirs' parts of a layer."""
    at = f"{theirs}{mlp}."
    dense = f"{at}DenseReluDense."  # whatever the activation is
    qkv = [f"{theirs}0.SelfAttention.{x}.weight" for x in "qkv"]
    yield Row(ours + "input_layernorm.weight", Same, [theirs + "0.layer_norm.weight"], "h", layers=layers)
    yield Row(ours + "self_attention.linear_qkv.weight", Qkv, qkv, "qkv h", layers=layers)
    proj = [theirs + "0.SelfAttention.o.weight"]
    yield Row(ours + "self_attention.linear_proj.weight", Same, proj, "h q", layers=layers)
    yield Row(ours + "pre_mlp_layernorm.weight", Same, [at + "layer_norm.weight"], "h", layers=layers)
    fc1 = ours + "mlp.linear_fc1.weight"
    yield Row(fc1, Same, [dense + "wi.weight"], "f h", _plain, layers)
    yield Row(fc1, Stacked, [dense + "wi_0.weight", dense + "wi_1.weight"], "2f h", _gated, layers)
    yield Row(ours + "mlp.linear_fc2.weight", Same, [dense + "wo.weight"], "h f", layers=layers)


def _table(stack: str) -> Row:
    theirs = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return Row(f"{stack}_relative_pos_emb.relative_attention_bias.weight", Same, [theirs], "r n")


_CROSS = _TD + "1.EncDecAttention."
ROWS: tuple[Row, ...] = (
    Row("embedding.word_embeddings.weight", Vocabulary, [EMBEDDING], "v h", lambda args: not _tied_plain(args)),
    Row("embedding.word_embeddings.weight", Twice, [EMBEDDING, OUTPUT], "v h", _tied_plain),
    _table("encoder"),
    _table("decoder"),
    *_stack(_E, _TE, "all", 1),
    Row("encoder.final_layernorm.weight", Same, ["encoder.final_layer_norm.weight"], "h"),
    *_stack(_D, _TD, "behind", 2),
    Row(_D + "pre_cross_attn_layernorm.weight", Same, [_TD + "1.layer_norm.weight"], "h", layers="behind"),
    Row(_D + "cross_attention.linear_q.weight", Same, [_CROSS + "q.weight"], "q h", layers="behind"),
    Row(
        _D + "cross_attention.linear_kv.weight",
        KeyValue,
        [_CROSS + "k.weight", _CROSS + "v.weight"],
        "2q h",
        layers="behind",
    ),
    Row(_D + "cross_attention.linear_proj.weight", Same, [_CROSS + "o.weight"], "h q", layers="behind"),
    Row("decoder.final_layernorm.weight", Same, ["decoder.final_layer_norm.weight"], "h"),
    Row("lm_head.output_layer.weight", Vocabulary, [OUTPUT], "v h", _untied),
)

SETTINGS = (
    Setting("num_layers", "--encoder-num-layers", "num_layers", 6),
    Setting("d_model", "--hidden-size", "hidden_size", 512),
    Setting("d_kv", "--kv-channels", "kv_channels", 64),
    Setting("d_ff", "--ffn-hidden-size", "ffn_hidden_size", 2048),
    Setting("num_heads", "--num-attention-heads", "num_attention_heads", 8),
    Setting("n_positions", "--max-position-embeddings", "max_position_embeddings", 512),
    Setting(
        "relative_attention_num_buckets",
        "--relative-attention-num-buckets",
        "relative_attention_num_buckets",
        32,
    ),
    Setting(
        "relative_attention_max_distance",
        "--relative-attention-max-distance",
        "relative_attention_max_distance",
        128,
    ),
    Setting("layer_norm_epsilon", "--norm-epsilon", "norm_epsilon", 1e-6),
    Setting("dropout_rate", "--hidden-dropout", "hidden_dropout", 0.1),
)
_ACTIVATIONS = {"relu": "--relu", "gated-gelu": "--geglu --openai-gelu", "gated-silu": "--swiglu"}


def _scaled(config: Config) -> bool:
    """transformers 5 says it, 4 concludes it from whether the output layer is tied."""
    return bool(config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True)))


def _read(config: Config) -> Iterator[object]:
    layers = config.get("num_decoder_layers")
    yield from ("--decoder-num-layers", config.get("num_layers", 6) if layers is None else layers)
    yield from ("--encoder-seq-length", config.get("n_positions", 512))
    yield from ("--decoder-seq-length", config.get("n_positions", 512))
    yield from ("--attention-dropout", config.get("dropout_rate", 0.1))
    kind = config.get("feed_forward_proj", "relu")
    if kind not in _ACTIVATIONS:
        raise refuse(f"config.json has feed_forward_proj = {kind!r}", f"{', '.join(_ACTIVATIONS)} are understood")
    yield from _ACTIVATIONS[kind].split()
    if _scaled(config):
        yield "--scaled-logits"
    if not config["output_is_embedding"]:
        yield "--untie-embeddings-and-output-weights"
    # Sentinels are the vocabulary's last tokens; a small test's vocabulary is mostly text all the same.
    yield from ("--vocab-extra-ids", min(100, max(1, config["vocab_size"] // 4)))


def _write(args: Args, sizes: Sizes) -> dict[str, Any]:
    if sizes.groups != sizes.heads:
        raise refuse(f"{sizes.groups} key/value heads", "T5 has one for each query head")
    if not _untied(args) and args["lm_head_bias"]:
        raise refuse("the output layer has a bias", "theirs has none", "--no-lm-head-bias in the training")
    if _untied(args) and args["scaled_logits"]:
        raise refuse("scaled_logits with an output layer of its own", "theirs scales logits of a tied one")
    if args["hidden_dropout"] != args["attention_dropout"]:
        raise refuse(
            f"hidden_dropout {args['hidden_dropout']} and attention_dropout {args['attention_dropout']}",
            "T5 has one number for both",
        )
    if args["softmax_scale"] != 1.0:
        raise refuse(f"softmax_scale is {args['softmax_scale']}", "T5 does not scale scores", "--softmax-scale 1")
    kinds = [kind for kind, flags in _ACTIVATIONS.items() if all(args[_name(flag)] for flag in flags.split())]
    if len(kinds) != 1:
        raise refuse("the activation of the MLP", f"T5 has {', '.join(_ACTIVATIONS)}")
    return {
        "num_decoder_layers": sizes.behind,
        "feed_forward_proj": kinds[0],
        "tie_word_embeddings": args["scaled_logits"],
        "scale_decoder_outputs": args["scaled_logits"],
        "is_encoder_decoder": True,
    }


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


T5 = Family(
    model_type="t5",
    architecture="T5ForConditionalGeneration",
    rows=ROWS,
    settings=SETTINGS,
    flags="--position-embedding-type relative --normalization RMSNorm --disable-bias-linear --no-lm-head-bias "
    "--softmax-scale 1",
    requires={
        "model_family": "t5",
        "position_embedding_type": "relative",
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "window_size": None,
        "geglu": (False, True),
        "relu": (False, True),
        "softmax_scale": 1.0,
    },
    read=_read,
    write=_write,
    model_family="t5",
    ends=(EMBEDDING, OUTPUT),
    copies=COPIES,
)
