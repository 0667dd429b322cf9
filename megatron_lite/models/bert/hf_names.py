"""BERT families of Hugging Face in our names and arguments, read in both directions as those of `models.gpt`.

    bert            norms behind each half of a layer    --apply-residual-connection-post-layernorm
    megatron-bert   norms in front of them               the default

With that flag the residual is the norm's output, so that a layer's first norm is the last one of the layer before it:

    ours    input_layernorm 0   pre_mlp_layernorm 0   input_layernorm 1 ...   final_layernorm
    theirs  embeddings'         attention output's 0  output's 0        ...   output's of the last layer

Both come with two heads (...ForPreTraining) or with that of the masks alone (...ForMaskedLM). The latter keeps a table
of segments all the same, of which a text of one segment takes the first row; our model without the binary head has
none, so that the row is a part of its positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_lite.models.gpt.hf_family import Family, Setting
from megatron_lite.models.gpt.hf_names import Args, Config, Qkv, Row, Same, Sizes, Vocabulary, refuse


class FirstSegment:
    """Positions `[s, h]` and segments `[t, h]` <-> positions with the first segment in them; back come zeros for it."""

    @staticmethod
    def join(parts: Iterator[Tensor], sizes: Sizes) -> Tensor:
        positions, segments = parts
        return positions + segments[0]

    @staticmethod
    def divide(tensor: Tensor, sizes: Sizes) -> list[Tensor]:
        return [tensor, torch.zeros_like(tensor[:1])]


class FirstOfTwo:
    """A vector of the vocabulary that theirs hold twice, of which the second is used by nothing."""

    @staticmethod
    def join(parts: Iterator[Tensor], sizes: Sizes) -> Tensor:
        first, _ = parts
        return Vocabulary.join(iter([first]), sizes)

    @staticmethod
    def divide(tensor: Tensor, sizes: Sizes) -> list[Tensor]:
        return Vocabulary.divide(tensor, sizes) * 2


def _untied(args: Args) -> bool:
    return bool(args["untie_embeddings_and_output_weights"])


def _tied(args: Args) -> bool:
    return not _untied(args)


def _segments(args: Args) -> bool:
    return bool(args["bert_binary_head"])


def _one_segment(args: Args) -> bool:
    return not _segments(args)


_OURS, _THEIRS = "encoder.layers.{}.", "bert.encoder.layer.{}."
_POSITIONS = "embedding.position_embeddings.weight"
_TABLES = [f"bert.embeddings.{kind}_embeddings.weight" for kind in ("position", "token_type")]


def _both(ours: str, form: Any, theirs: Sequence[str], weight: str, bias: str, **more: Any) -> list[Row]:
    """The rows of a weight and its bias."""
    return [
        Row(f"{ours}.{kind}", form, [f"{name}.{kind}" for name in theirs], shape, **more)
        for kind, shape in (("weight", weight), ("bias", bias))
    ]


_BEGIN = (
    Row("embedding.word_embeddings.weight", Vocabulary, ["bert.embeddings.word_embeddings.weight"], "v h"),
    Row(_POSITIONS, Same, _TABLES[:1], "s h", _segments),
    Row(_POSITIONS, FirstSegment, _TABLES, "s h", _one_segment),
    Row("embedding.tokentype_embeddings.weight", Same, _TABLES[1:], "2 h", _segments),
)
_LAYER = (
    *_both(
        _OURS + "self_attention.linear_qkv",
        Qkv,
        [_THEIRS + f"attention.self.{name}" for name in ("query", "key", "value")],
        "qkv h",
        "qkv",
    ),
    *_both(_OURS + "self_attention.linear_proj", Same, [_THEIRS + "attention.output.dense"], "h q", "h"),
    *_both(_OURS + "mlp.linear_fc1", Same, [_THEIRS + "intermediate.dense"], "f h", "f"),
    *_both(_OURS + "mlp.linear_fc2", Same, [_THEIRS + "output.dense"], "h f", "h"),
)
_HEADS = (
    *_both("lm_head.dense", Same, ["cls.predictions.transform.dense"], "h h", "h"),
    *_both("lm_head.layer_norm", Same, ["cls.predictions.transform.LayerNorm"], "h", "h"),
    Row("output_layer.weight", Vocabulary, ["cls.predictions.decoder.weight"], "v h", _untied),
    Row("output_layer.bias", FirstOfTwo, ["cls.predictions.decoder.bias", "cls.predictions.bias"], "v", _untied),
    Row("output_layer.bias", Vocabulary, ["cls.predictions.bias"], "v", _tied),
    *_both("binary_head", Same, ["cls.seq_relationship"], "2 h", "2", when=_segments),
    *_both("pooler.dense", Same, ["bert.pooler.dense"], "h h", "h", when=_segments),
)
BERT_ROWS = (
    *_BEGIN,
    *_both("encoder.layers.0.input_layernorm", Same, ["bert.embeddings.LayerNorm"], "h", "h"),
    *_LAYER,
    *_both(_OURS + "pre_mlp_layernorm", Same, [_THEIRS + "attention.output.LayerNorm"], "h", "h"),
    *(
        replace(row, last=row.ours.replace("layers.{next}.input", "final"))
        for row in _both("encoder.layers.{next}.input_layernorm", Same, [_THEIRS + "output.LayerNorm"], "h", "h")
    ),
    *_HEADS,
)
MEGATRON_BERT_ROWS = (
    *_BEGIN,
    *_both(_OURS + "input_layernorm", Same, [_THEIRS + "attention.ln"], "h", "h"),
    *_LAYER,
    *_both(_OURS + "pre_mlp_layernorm", Same, [_THEIRS + "ln"], "h", "h"),
    *_both("encoder.final_layernorm", Same, ["bert.encoder.ln"], "h", "h"),
    *_HEADS,
)

_SETTINGS = (
    Setting("num_hidden_layers", "--num-layers", "num_layers", 12),
    Setting("hidden_size", "--hidden-size", "hidden_size", 768),
    Setting("num_attention_heads", "--num-attention-heads", "num_attention_heads", 12),
    Setting("intermediate_size", "--ffn-hidden-size", "ffn_hidden_size", 3072),
    Setting("max_position_embeddings", "--max-position-embeddings", "max_position_embeddings", 512),
    Setting("layer_norm_eps", "--norm-epsilon", "norm_epsilon", 1e-12),
    Setting("initializer_range", "--init-method-std", "init_method_std", 0.02),
    Setting("hidden_dropout_prob", "--hidden-dropout", "hidden_dropout", 0.1),
    Setting("attention_probs_dropout_prob", "--attention-dropout", "attention_dropout", 0.1),
)


def _read(config: Config) -> Iterator[object]:
    yield from ("--seq-length", config.get("max_position_embeddings", 512))
    yield "--no-bias-gelu-fusion"  # whose kernels take the tanh form
    kinds = config.get("architectures") or ["BertForPreTraining"]
    kind = str(kinds[0])
    if kind.endswith("ForMaskedLM"):
        yield "--bert-no-binary-head"
    elif not kind.endswith("ForPreTraining"):
        raise refuse(
            f"config.json has architectures = {kinds}",
            "a BERT is understood with both of its heads, or with that of the masks",
            "a model saved as ...ForPreTraining or ...ForMaskedLM",
        )
    elif config.get("type_vocab_size", 2) != 2:
        raise refuse(f"config.json has type_vocab_size = {config['type_vocab_size']}", "texts have two segments")


def _note(config: Config) -> str:
    kinds = config.get("architectures") or [""]
    if not str(kinds[0]).endswith("ForMaskedLM") or config.get("type_vocab_size", 2) == 1:
        return ""
    return (
        "a model with the masks' head alone reads one segment: the row of the first is now a part of the positions, "
        "and that of a second segment is gone"
    )


def _write(args: Args, sizes: Sizes) -> dict[str, Any]:
    if sizes.groups != sizes.heads or sizes.heads * sizes.head != sizes.hidden:
        raise refuse(f"{sizes.groups} key/value heads of {sizes.head} channels", "BERT has hidden / heads, ungrouped")
    if args["openai_gelu"] or args["bias_gelu_fusion"]:
        raise refuse(
            "GELU in its tanh form in the layers (--bias-gelu-fusion is the default), and exact in the masks' head",
            "theirs have one form for both",
            "a model trained with --no-bias-gelu-fusion",
        )
    return {
        "hidden_act": "gelu",
        "type_vocab_size": 2 if args["bert_binary_head"] else 1,
        "position_embedding_type": "absolute",
    }


def _family(model_type: str, prefix: str, rows: Sequence[Row], post: bool) -> Family:
    return Family(
        model_type=model_type,
        architecture=f"{prefix}ForPreTraining",
        architecture_of=lambda args: f"{prefix}For{'PreTraining' if args['bert_binary_head'] else 'MaskedLM'}",
        model_family="bert",
        rows=rows,
        settings=_SETTINGS,
        flags="--position-embedding-type learned_absolute --normalization LayerNorm"
        + " --apply-residual-connection-post-layernorm" * post,
        requires={
            "model_family": "bert",
            "position_embedding_type": "learned_absolute",
            "normalization": "LayerNorm",
            "add_bias_linear": True,
            "qk_layernorm": False,
            "swiglu": False,
            "window_size": None,
            "apply_residual_connection_post_layernorm": post,
        },
        read=_read,
        note=_note,
        write=_write,
        # The head of the masks has the exact form of GELU, and theirs the same as the layers.
        demands={
            "hidden_act": ("gelu",),
            "position_embedding_type": ("absolute",),
            "is_decoder": (False,),
            "add_cross_attention": (False,),
        },
        tied_by_default=True,
        copies={
            "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
    )


BERT_FAMILIES = {
    family.model_type: family
    for family in (
        _family("bert", "Bert", BERT_ROWS, post=True),
        _family("megatron-bert", "MegatronBert", MEGATRON_BERT_ROWS, post=False),
    )
}
