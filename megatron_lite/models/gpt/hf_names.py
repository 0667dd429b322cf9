"""GPT families of Hugging Face in our names and arguments: tables that are read in both directions.

    weights    a row: our name <- form - their names     "linear_qkv <- Qkv - q_proj, k_proj, v_proj"
    shape      a setting: their key of config.json <-> our flag and argument
    family     rows, settings, and what else must hold for the family to mean the same arithmetic

A form joins their tensors into ours and divides ours into theirs; it moves numbers and never changes one, so a model
that goes out and comes back is the same to the bit. Forms also run on tensors of the meta device, which gives all
shapes before anything is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_lite.errors import ConfigError
from megatron_lite.transformer.moe.moe_rules import moe_layers

Args = Mapping[str, Any]  # arguments of a run, by name, in JSON's types
Config = Mapping[str, Any]  # a config.json


@dataclass(frozen=True)
class Sizes:
    """What forms and shapes depend on."""

    layers: int
    hidden: int
    inner: int
    heads: int
    groups: int
    head: int
    vocabulary: int  # tokens: the rows of their embedding
    padded: int  # rows of ours
    positions: int
    experts: int = 0
    expert_inner: int = 0
    shared_inner: int = 0
    with_experts: tuple[bool, ...] = ()  # by layer
    behind: int = 0  # layers of a decoder behind an encoder
    buckets: int = 0  # of relative positions
    q_rank: int = 0  # of latent attention: ranks, then channels of a head
    kv_rank: int = 0
    unrotated: int = 0
    rotated: int = 0
    value: int = 0

    @classmethod
    def of(cls, args: Args, vocabulary: int) -> Sizes:
        """Of a run's arguments and the tokens that its vocabulary really has."""
        heads = args["num_attention_heads"]
        return cls(
            layers=args["num_layers"],
            hidden=args["hidden_size"],
            inner=args["ffn_hidden_size"],
            heads=heads,
            groups=args["num_query_groups"] if args["group_query_attention"] else heads,
            head=args["kv_channels"],
            vocabulary=vocabulary,
            padded=args["padded_vocab_size"],
            positions=args["max_position_embeddings"],
            experts=args.get("num_experts") or 0,
            expert_inner=args.get("moe_ffn_hidden_size") or 0,
            shared_inner=args.get("moe_shared_expert_intermediate_size") or 0,
            with_experts=tuple(moe_layers(args["num_layers"], args.get("num_experts"), args.get("moe_layer_freq", 1))),
            behind=args.get("decoder_num_layers") or 0,
            buckets=args.get("relative_attention_num_buckets") or 0,
            q_rank=args.get("q_lora_rank") or 0,
            kv_rank=args.get("kv_lora_rank") or 0,
            unrotated=args.get("qk_head_dim") or 0,
            rotated=args.get("qk_pos_emb_head_dim") or 0,
            value=args.get("v_head_dim") or 0,
        )

    def shape(self, words: str) -> tuple[int, ...]:
        """`"qkv h"` -> (rows of the fused projection, hidden)."""
        values = {
            "h": self.hidden,
            "f": self.inner,
            "2f": 2 * self.inner,
            "q": self.heads * self.head,
            "qkv": (self.heads + 2 * self.groups) * self.head,
            "d": self.head,
            "v": self.padded,
            "s": self.positions,
            "e": self.experts,
            "fe": self.expert_inner,
            "2fe": 2 * self.expert_inner,
            "fs": self.shared_inner,
            "2fs": 2 * self.shared_inner,
            "1": 1,
            "2": 2,
            "2q": 2 * self.heads * self.head,
            "n": self.heads,
            "r": self.buckets,
            "lq": self.q_rank,
            "lkv": self.kv_rank,
            "lkv+r": self.kv_rank + self.rotated,
            "nq": self.heads * (self.unrotated + self.rotated),
            "nkv": self.heads * (self.unrotated + self.value),
            "nv": self.heads * self.value,
        }
        return tuple(values[word] for word in words.split())


# -- forms: theirs <-> ours ----------------------------------------------------------------------------------------


class Same:
    """One tensor, as it is."""

    @staticmethod
    def join(parts: Iterator[Tensor], sizes: Sizes) -> Tensor:
        (part,) = parts
        return part

    @staticmethod
    def divide(tensor: Tensor, sizes: Sizes) -> list[Tensor]:
        return [tensor]


class Transposed:
    """GPT-2 keeps weights as `[in, out]`."""

    @staticmethod
    def join(parts: Iterator[Tensor], sizes: Sizes) -> Tensor:
        (part,) = parts
        return part.t()

    @staticmethod
    def divide(tensor: Tensor, sizes: Sizes) -> list[Tensor]:
        return [tensor.t()]


class Qkv:
    """q `[np hn, ...]`, k and v `[ng hn, ...]` <-> per query group: its query heads, its key, its value."""

    @staticmethod
    def join(parts: Iterator[Tensor], sizes: Sizes) -> Tensor:
        per_group, size = sizes.heads // sizes.groups, sizes.head
        out = None
        places = slice(0, per_group), slice(per_group, per_group + 1), slice(per_group + 1, None)
        for part, rows in zip(parts, places):
            if out is None:  # one after the other: only one of the three is in memory beside the result
                out = part.new_empty(sizes.groups, per_group + 2, size, *part.shape[1:])
            out[:, rows] = part.reshape(sizes.groups, -1, size, *part.shape[1:])
            del part
        assert out is not None
        return out.flatten(0, 2)

    @staticmethod
    def divide(tensor: Tensor, sizes: Sizes) -> list[Tensor]:
        per_group = sizes.heads // sizes.groups
        grouped = tensor.view(sizes.groups, per_group + 2, sizes.head, *tensor.shape[1:])
        parts = grouped[:, :per_group], grouped[:, per_group : per_group + 1], grouped[:, per_group + 1 :]
        return [part.flatten(0, 2) for part in parts]


class FusedQkv:
    """GPT-2: `[h, 3 h]` or `[3 h]`, all queries, then all keys, then all values."""

    @staticmethod
    def join(parts: Iterator[Tensor], sizes: Sizes) -> Tensor:
        (part,) = parts
        return Qkv.join(iter(part.t().chunk(3)), sizes)

    @staticmethod
    def divide(tensor: Tensor, sizes: Sizes) -> list[Tensor]:
        return [torch.cat(Qkv.divide(tensor, sizes)).t()]


class Stacked:
    """Two matrices with as many rows, one on the other: [gate; up]."""

    @staticmethod
    def join(parts: Iterator[Tensor], sizes: Sizes) -> Tensor:
        first = next(parts)
        out = first.new_empty(2, *first.shape)
        out[0] = first
        del first
        out[1] = next(parts)
        return out.flatten(0, 1)

    @staticmethod
    def divide(tensor: Tensor, sizes: Sizes) -> list[Tensor]:
        return list(tensor.chunk(2))


class KeyValue:
    """k and v `[np hn, ...]` <-> per head its key, its value: cross attention."""

    @staticmethod
    def join(parts: Iterator[Tensor], sizes: Sizes) -> Tensor:
        first = next(parts)
        out = first.new_empty(sizes.heads, 2, sizes.head, *first.shape[1:])
        out[:, 0] = first.reshape(sizes.heads, sizes.head, *first.shape[1:])
        del first
        second = next(parts)
        out[:, 1] = second.reshape(sizes.heads, sizes.head, *second.shape[1:])
        return out.flatten(0, 2)

    @staticmethod
    def divide(tensor: Tensor, sizes: Sizes) -> list[Tensor]:
        grouped = tensor.view(sizes.heads, 2, sizes.head, *tensor.shape[1:])
        return [grouped[:, i].flatten(0, 1) for i in range(2)]


class Vocabulary:
    """Rows of tokens, and zeros in ours up to the padded size."""

    @staticmethod
    def join(parts: Iterator[Tensor], sizes: Sizes) -> Tensor:
        (part,) = parts
        if sizes.padded == part.shape[0]:
            return part
        out = part.new_zeros(sizes.padded, *part.shape[1:])
        out[: part.shape[0]] = part
        return out

    @staticmethod
    def divide(tensor: Tensor, sizes: Sizes) -> list[Tensor]:
        return [tensor[: sizes.vocabulary]]


class Form(Protocol):
    """How tensors of theirs become one of ours, and back."""

    @staticmethod
    def join(parts: Iterator[Tensor], sizes: Sizes) -> Tensor: ...

    @staticmethod
    def divide(tensor: Tensor, sizes: Sizes) -> list[Tensor]: ...


@dataclass(frozen=True)
class Row:
    """One of our tensors and those of theirs that it is made of; `{}` stands for a layer, `{next}` for the one
    after it, `{e}` for an expert.

    shape: of ours, in the words of `Sizes.shape`. when: the argument that must be on for the tensor to exist. layers:
    which have it: "all", "dense" or "experts"; or "behind", those of a decoder behind the encoder. last: our name in
    the last layer, where it is another.
    """

    ours: str
    form: Form
    theirs: Sequence[str]
    shape: str
    when: Callable[[Args], bool] = lambda args: True
    layers: str = "all"
    last: str = ""


@dataclass(frozen=True)
class Link:
    """A row for one layer."""

    ours: str
    form: Form
    theirs: tuple[str, ...]
    shape: tuple[int, ...]


def _untied(args: Args) -> bool:
    return bool(args["untie_embeddings_and_output_weights"])


def _biases(args: Args) -> bool:
    return bool(args["add_bias_linear"])


def _qkv_bias(args: Args) -> bool:
    return bool(args["add_bias_linear"] or args["add_qkv_bias"])


def _head_norms(args: Args) -> bool:
    return bool(args["qk_layernorm"])


_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_OURS = "decoder.layers.{}."
_T, _M = "transformer.h.{}.", "model.layers.{}."

GPT2_ROWS = (
    Row(_EMBEDDING, Vocabulary, ["transformer.wte.weight"], "v h"),
    Row("embedding.position_embeddings.weight", Same, ["transformer.wpe.weight"], "s h"),
    *(
        row
        for kind, turned, fused in (("weight", Transposed, " h"), ("bias", Same, ""))
        for row in (
            Row(_OURS + f"input_layernorm.{kind}", Same, [_T + f"ln_1.{kind}"], "h"),
            Row(_OURS + f"self_attention.linear_qkv.{kind}", FusedQkv, [_T + f"attn.c_attn.{kind}"], f"qkv{fused}"),
            Row(
                _OURS + f"self_attention.linear_proj.{kind}",
                turned,
                [_T + f"attn.c_proj.{kind}"],
                f"h{fused and ' q'}",
            ),
            Row(_OURS + f"pre_mlp_layernorm.{kind}", Same, [_T + f"ln_2.{kind}"], "h"),
            Row(_OURS + f"mlp.linear_fc1.{kind}", turned, [_T + f"mlp.c_fc.{kind}"], f"f{fused}"),
            Row(_OURS + f"mlp.linear_fc2.{kind}", turned, [_T + f"mlp.c_proj.{kind}"], f"h{fused and ' f'}"),
        )
    ),
    Row("decoder.final_layernorm.weight", Same, ["transformer.ln_f.weight"], "h"),
    Row("decoder.final_layernorm.bias", Same, ["transformer.ln_f.bias"], "h"),
    Row(_OUTPUT, Vocabulary, ["lm_head.weight"], "v h", _untied),
)
_DENSE_MLP = (
    Row(
        _OURS + "mlp.linear_fc1.weight",
        Stacked,
        [_M + f"mlp.{x}_proj.weight" for x in ("gate", "up")],
        "2f h",
        layers="dense",
    ),
    Row(
        _OURS + "mlp.linear_fc1.bias",
        Stacked,
        [_M + f"mlp.{x}_proj.bias" for x in ("gate", "up")],
        "2f",
        _biases,
        "dense",
    ),
    Row(_OURS + "mlp.linear_fc2.weight", Same, [_M + "mlp.down_proj.weight"], "h f", layers="dense"),
    Row(_OURS + "mlp.linear_fc2.bias", Same, [_M + "mlp.down_proj.bias"], "h", _biases, "dense"),
)
LLAMA_ROWS = (
    Row(_EMBEDDING, Vocabulary, ["model.embed_tokens.weight"], "v h"),
    Row(_OURS + "input_layernorm.weight", Same, [_M + "input_layernorm.weight"], "h"),
    Row(
        _OURS + "self_attention.linear_qkv.weight",
        Qkv,
        [_M + f"self_attn.{x}_proj.weight" for x in "qkv"],
        "qkv h",
    ),
    Row(
        _OURS + "self_attention.linear_qkv.bias",
        Qkv,
        [_M + f"self_attn.{x}_proj.bias" for x in "qkv"],
        "qkv",
        _qkv_bias,
    ),
    Row(_OURS + "self_attention.q_layernorm.weight", Same, [_M + "self_attn.q_norm.weight"], "d", _head_norms),
    Row(_OURS + "self_attention.k_layernorm.weight", Same, [_M + "self_attn.k_norm.weight"], "d", _head_norms),
    Row(_OURS + "self_attention.linear_proj.weight", Same, [_M + "self_attn.o_proj.weight"], "h q"),
    Row(_OURS + "self_attention.linear_proj.bias", Same, [_M + "self_attn.o_proj.bias"], "h", _biases),
    Row(_OURS + "pre_mlp_layernorm.weight", Same, [_M + "post_attention_layernorm.weight"], "h"),
    *_DENSE_MLP,
    Row("decoder.final_layernorm.weight", Same, ["model.norm.weight"], "h"),
    Row(_OUTPUT, Vocabulary, ["lm_head.weight"], "v h", _untied),
)


def _experts(block: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    """A router and its experts, in their names of the block and of an expert's matrices."""
    ours, theirs = _OURS + "mlp.experts.local_experts.{e}.", _M + block + ".experts.{e}."
    return (
        Row(_OURS + "mlp.router.weight", Same, [_M + block + ".gate.weight"], "e h", layers="experts"),
        Row(
            ours + "linear_fc1.weight",
            Stacked,
            [theirs + f"{gate}.weight", theirs + f"{up}.weight"],
            "2fe h",
            layers="experts",
        ),
        Row(ours + "linear_fc2.weight", Same, [theirs + f"{down}.weight"], "h fe", layers="experts"),
    )


def _with(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Llama's rows, with these in layers of experts."""
    place = LLAMA_ROWS.index(_DENSE_MLP[-1]) + 1
    return (*LLAMA_ROWS[:place], *rows, *LLAMA_ROWS[place:])


def _compressed(args: Args) -> bool:
    return args.get("q_lora_rank") is not None


_A, _THEIR_A = _OURS + "self_attention.", _M + "self_attn."
_LATENT = (
    Row(_A + "linear_q_proj.weight", Same, [_THEIR_A + "q_proj.weight"], "nq h", lambda args: not _compressed(args)),
    Row(_A + "linear_q_down_proj.weight", Same, [_THEIR_A + "q_a_proj.weight"], "lq h", _compressed),
    Row(_A + "q_layernorm.weight", Same, [_THEIR_A + "q_a_layernorm.weight"], "lq", _compressed),
    Row(_A + "linear_q_up_proj.weight", Same, [_THEIR_A + "q_b_proj.weight"], "nq lq", _compressed),
    Row(_A + "linear_kv_down_proj.weight", Same, [_THEIR_A + "kv_a_proj_with_mqa.weight"], "lkv+r h"),
    Row(_A + "kv_layernorm.weight", Same, [_THEIR_A + "kv_a_layernorm.weight"], "lkv"),
    Row(_A + "linear_kv_up_proj.weight", Same, [_THEIR_A + "kv_b_proj.weight"], "nkv lkv"),
    Row(_A + "linear_proj.weight", Same, [_THEIR_A + "o_proj.weight"], "h nv"),
)


def _deepseek(*router: Row) -> tuple[Row, ...]:
    """Latent attention, dense layers and layers with experts, of which some are shared."""
    shared = _M + "mlp.shared_experts."
    experts = (
        *_experts("mlp", "gate_proj", "up_proj", "down_proj"),
        *router,
        Row(
            _OURS + "mlp.shared_experts.linear_fc1.weight",
            Stacked,
            [f"{shared}{x}_proj.weight" for x in ("gate", "up")],
            "2fs h",
            layers="experts",
        ),
        Row(
            _OURS + "mlp.shared_experts.linear_fc2.weight",
            Same,
            [f"{shared}down_proj.weight"],
            "h fs",
            layers="experts",
        ),
    )
    rows = [row for row in _with(experts) if ".self_attention." not in row.ours]
    place = next(i for i, row in enumerate(rows) if "pre_mlp_layernorm" in row.ours)
    return (*rows[:place], *_LATENT, *rows[place:])


DEEPSEEK_V2_ROWS = _deepseek()
DEEPSEEK_V3_ROWS = _deepseek(
    Row(_OURS + "mlp.router.expert_bias", Same, [_M + "mlp.gate.e_score_correction_bias"], "e", layers="experts")
)
_SHARED = _M + "mlp.shared_expert"
MIXTRAL_ROWS = _with(_experts("block_sparse_moe", "w1", "w3", "w2"))
QWEN3_MOE_ROWS = _with(_experts("mlp", "gate_proj", "up_proj", "down_proj"))
QWEN2_MOE_ROWS = _with(
    (
        *_experts("mlp", "gate_proj", "up_proj", "down_proj"),
        Row(
            _OURS + "mlp.shared_experts.linear_fc1.weight",
            Stacked,
            [f"{_SHARED}.{x}_proj.weight" for x in ("gate", "up")],
            "2fs h",
            layers="experts",
        ),
        Row(
            _OURS + "mlp.shared_experts.linear_fc2.weight",
            Same,
            [f"{_SHARED}.down_proj.weight"],
            "h fs",
            layers="experts",
        ),
        Row(
            _OURS + "mlp.shared_experts.gate_weight",
            Same,
            [f"{_SHARED}_gate.weight"],
            "1 h",
            layers="experts",
        ),
    )
)


def _stack_of(row: Row) -> tuple[bool, bool]:
    """Whether a row is one for each layer, and whether of a decoder behind the encoder."""
    return "{}" in row.ours or "{next}" in row.ours, row.layers == "behind"


def links(rows: Sequence[Row], args: Args, sizes: Sizes) -> list[Link]:
    """The rows that exist in a model with these arguments, layer by layer."""

    def link(row: Row, layer: int = 0, expert: int = 0) -> Link:
        theirs = tuple(name.format(layer, e=expert) for name in row.theirs)
        ours = row.last if row.last and layer == sizes.layers - 1 else row.ours
        return Link(ours.format(layer, next=layer + 1, e=expert), row.form, theirs, sizes.shape(row.shape))

    def of_layer(row: Row, layer: int) -> Iterator[Link]:
        kind = "experts" if row.layers != "behind" and sizes.with_experts[layer] else "dense"
        if row.layers in ("all", "behind", kind):
            numbers = range(sizes.experts if "{e}" in row.ours else 1)
            yield from (link(row, layer, expert) for expert in numbers)

    found: list[Link] = []
    wanted = [row for row in rows if row.when(args)]
    for (is_layer, behind), group in groupby(wanted, key=_stack_of):
        stack = list(group)
        if not is_layer:
            found += map(link, stack)
            continue
        for layer in range(sizes.behind if behind else sizes.layers):
            found += (item for row in stack for item in of_layer(row, layer))
    return found


# Buffers that older versions of transformers saved among the weights: masks and angles, which follow from the shape.
_BUFFERS = re.compile(
    r"(h\.\d+\.attn\.(bias|masked_bias)|self_attn\.rotary_emb\.inv_freq|embeddings\.(position_ids|token_type_ids))$"
)


def is_buffer(name: str) -> bool:
    """Whether a tensor of theirs is no weight, but follows from the shape."""
    return _BUFFERS.search(name) is not None


def refuse(what: str, why: str, fix: str = "a model without it") -> ConfigError:
    """The error for a model that cannot be said in the other side's words."""
    return ConfigError(what, why=why, fix=fix)
