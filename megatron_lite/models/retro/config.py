"""RetroConfig: a GPT's config, which layers retrieve, and how the encoder of neighbours is built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from megatron_lite.config import flag
from megatron_lite.errors import ConfigError
from megatron_lite.transformer.transformer_config import TransformerConfig

RESIDUALS, MISSING_CHUNKS = ("normed", "stream"), ("eod", "wrap")


@dataclass(kw_only=True)
class RetroSettings:
    """Retro: what is retrieved, and the layers that look at it."""

    retro_project_dir: str | None = flag(
        None, "Project directory of `megatron-lite retro preprocess`; its config.json says data, tokenizer and lengths."
    )
    retro_add_retriever: bool = flag(
        False, "Retrieve. Without it pretrain_retro.py trains a plain GPT on the same samples."
    )
    retro_off: bool = flag(False, "Leave out what layers find in neighbours: what the rest has learned (evaluation).")
    retro_cyclic_train_iters: int | None = flag(
        None, "Train so many iterations, over the project's samples again and again.", unit="iterations"
    )
    retro_encoder_num_layers: int = flag(2, "Layers of the neighbours' encoder.", name="--retro-encoder-layers")
    retro_encoder_hidden_dropout: float = flag(0.1, "Hidden dropout in it.")
    retro_encoder_attention_dropout: float = flag(0.1, "Attention dropout in it.")
    retro_encoder_residual: str = flag(
        "normed",
        "What attention to the chunk is added to in the encoder: the norm's output, as Megatron has it, or the stream.",
        choices=RESIDUALS,
    )
    retro_num_neighbors: int = flag(2, "Neighbours of each chunk.")
    retro_num_retrieved_chunks: int = flag(2, "Chunks of a neighbour: the one that was found and those behind it.")
    retro_missing_chunks: str = flag(
        "eod",
        "What stands for a missing neighbour or continuation: end-of-document tokens, or, as Megatron has it, what "
        "comes next in the database.",
        choices=MISSING_CHUNKS,
    )
    retro_layers: list[int] | None = flag(
        None, "Layers that retrieve, from 1. Default: from 6 (9 with more than 15 layers) on every third."
    )
    retro_attention_gate: float = flag(1.0, "Gate on the cross attention; there is none: 1.", kind="float")
    retro_verify_neighbor_count: bool = flag(
        True, "Go on where there are neighbours for fewer samples than are drawn.",
        off="--retro-no-verify-neighbor-count",
    )  # fmt: skip


@dataclass(kw_only=True)
class RetroConfig(RetroSettings, TransformerConfig):
    """Of a RetroModel.

    `retro_chunk_length` m and the settings of the project come from config.json (`training.retro_data`).
    """

    retro_block_size: int | None = None
    retro_chunk_length: int | None = None
    retro_neighbor_dirs: dict[str, str | None] | None = None
    retro_split_preprocessing: str | None = None
    retro_bert_tokenizer_type: str | None = None
    retro_bert_vocab_file: str | None = None

    @property
    def retro_retrieved_length(self) -> int:
        """r, tokens of a neighbour."""
        assert self.retro_chunk_length is not None
        return self.retro_num_retrieved_chunks * self.retro_chunk_length

    def _problems(self) -> Iterator[ConfigError]:
        yield from super()._problems()
        yield from problems_of_retro(self)


def retro_layer_numbers(num_layers: int, layers: list[int] | None = None) -> list[int]:
    """Layers that retrieve, from 1: those given, or from 6 (9 with more than 15 layers) on every third."""
    if layers:
        return sorted(set(layers))
    return list(range(6 if num_layers <= 15 else 9, num_layers + 1, 3))


def problems_of_retro(config: Any) -> Iterator[ConfigError]:
    """What Retro cannot have.

    Args:
        config: a RetroConfig, or the arguments of a run, which have the same names.
    """
    numbers = retro_layer_numbers(config.num_layers or 0, config.retro_layers)
    if not numbers or numbers[0] < 1 or numbers[-1] > (config.num_layers or 0):
        given = f" and --retro-layers {' '.join(map(str, config.retro_layers))}" if config.retro_layers else ""
        yield ConfigError(
            f"Retro with --num-layers {config.num_layers}{given}",
            why="no layer would retrieve: the first one that does is 6, or 9 with more than 15 layers"
            if not config.retro_layers
            else "layers are numbered from 1 to the last",
            fix="--num-layers 6 or more, or --retro-layers 2 4 for a small model",
        )
    for name, why in (
        (
            "pipeline_model_parallel_size",
            "the encoder lives inside a decoder layer and its output is used by later ones",
        ),
        ("context_parallel_size", "chunks of the sequence are attended to their neighbours as a whole"),
        ("expert_model_parallel_size", "its layers are dense"),
    ):
        if getattr(config, name, 1) > 1:
            yield ConfigError(f"--{name.replace('_', '-')} {getattr(config, name)} with Retro", why=why, fix="1")
    if getattr(config, "num_moe_experts", None) or getattr(config, "num_experts", None):
        yield ConfigError("--num-experts with Retro", why="its layers are dense", fix="leave it out")
    if getattr(config, "multi_latent_attention", False):
        yield ConfigError(
            "--multi-latent-attention with Retro", why="its layers have standard attention", fix="leave it out"
        )
    groups = config.num_query_groups if getattr(config, "group_query_attention", True) else None
    if groups not in (None, config.num_attention_heads):
        yield ConfigError(
            f"--num-query-groups {groups} with Retro",
            why="cross attention has a key/value head for every query head",
            fix="leave --group-query-attention out",
        )
    if config.retro_attention_gate != 1.0:
        yield ConfigError(
            f"--retro-attention-gate {config.retro_attention_gate}",
            why="this model has no gate on its cross attention; what layers find is added as it is",
            fix="--retro-attention-gate 1; --retro-off leaves it out altogether",
        )
    layers = getattr(config, "retro_encoder_num_layers", None)
    counts = {
        "--retro-encoder-layers": config.retro_encoder_layers if layers is None else layers,  # its flag's name
        "--retro-num-neighbors": config.retro_num_neighbors,
        "--retro-num-retrieved-chunks": config.retro_num_retrieved_chunks,
    }
    for name, count in counts.items():
        if count < 1:
            yield ConfigError(f"{name} {count}", why="there is at least one", fix=f"{name} 2")


def whole_sequence_config(config: TransformerConfig, **changes: Any) -> TransformerConfig:
    """Of the layers between chunks and neighbours, which see whole sequences, in both directions, without windows.

    Under sequence parallelism they are plain tensor-parallel ones: chunks do not fall together with shards.
    """
    values = {item.name: getattr(config, item.name) for item in fields(TransformerConfig) if item.init}
    full = config.recompute_granularity == "full"  # of the layer around them: all is computed again anyway
    values |= {
        "sequence_parallel": False,
        "tp_comm_overlap": False,
        "window_size": None,
        "window_attn_skip_freq": None,
        "no_rope_freq": None,
        "distribute_saved_activations": False,
    }
    if full:
        values |= {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None}
    return TransformerConfig(**{**values, **changes})
