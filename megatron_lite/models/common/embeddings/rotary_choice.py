"""Which rotary embedding a model has, by the kind of its positions and by its config."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite import collectives
from megatron_lite.context_parallel.partition import split_sequence
from megatron_lite.errors import ConfigError
from megatron_lite.models.common.embeddings.rope_utils import angles_of_documents
from megatron_lite.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding, RotaryEmbedding
from megatron_lite.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron_lite.packed_seq_params import PackedSeqParams
from megatron_lite.transformer.transformer_config import MLATransformerConfig, TransformerConfig

ROTARY = ("rope", "yarn", "mrope")


def yarn_settings(config: Any) -> dict[str, Any]:
    """What a YaRN embedding takes beside factor and scales, of anything with these fields."""
    given = {
        "original_max_position_embeddings": config.yarn_original_max_position_embeddings,
        "beta_fast": config.yarn_beta_fast,
        "beta_slow": config.yarn_beta_slow,
    }
    settings = {name: value for name, value in given.items() if value is not None}
    return {**settings, "correction_range_round_to_int": config.yarn_correction_range_round_to_int}


def rotary_embedding_of(
    config: TransformerConfig,
    kind: str,
    rotary_percent: float,
    rotary_base: float,
    seq_len_interpolation_factor: float | None,
    rope_scaling: bool,
    rope_scaling_factor: float,
    cp_group: ProcessGroup | None = None,
) -> RotaryEmbedding | MultimodalRotaryEmbedding | None:
    """The embedding of a model with `kind` of positions; None: it has none.

    Multi-latent attention rotates channels of its own, and its config says all about them.
    Raises: ConfigError where the config does not have what the kind needs.
    """
    embedding = _embedding_of(
        config, kind, rotary_percent, rotary_base, seq_len_interpolation_factor, rope_scaling, rope_scaling_factor
    )
    if embedding is not None:
        embedding.cp_group = cp_group
    return embedding


def _embedding_of(
    config: TransformerConfig,
    kind: str,
    rotary_percent: float,
    rotary_base: float,
    seq_len_interpolation_factor: float | None,
    rope_scaling: bool,
    rope_scaling_factor: float,
) -> RotaryEmbedding | MultimodalRotaryEmbedding | None:
    if isinstance(config, MLATransformerConfig):
        return _latent(config, kind, seq_len_interpolation_factor, rope_scaling, rope_scaling_factor)
    if kind not in ROTARY:
        return None
    assert config.kv_channels is not None
    same = (config.kv_channels, rotary_percent, config.rotary_interleaved, seq_len_interpolation_factor, rotary_base)
    if kind == "rope":
        return RotaryEmbedding(*same, rope_scaling, rope_scaling_factor)
    if kind == "mrope":
        if config.mrope_section is None:
            raise ConfigError(
                "--position-embedding-type mrope without --mrope-section",
                why="it says which channels turn by a token's time, which by its height and its width",
                fix="--mrope-section 16 24 24, for heads of 128 channels",
            )
        return MultimodalRotaryEmbedding(*same)
    if config.yarn_rotary_scaling_factor is None:
        raise ConfigError(
            "positions of YaRN without a factor",
            why="it says how many times longer the context is",
            fix="TransformerConfig(yarn_rotary_scaling_factor=...); on the command line --rotary-scaling-factor",
        )
    return YarnRotaryEmbedding(
        *same,
        scaling_factor=config.yarn_rotary_scaling_factor,
        mscale=config.yarn_mscale,
        mscale_all_dim=config.yarn_mscale_all_dim,
        **yarn_settings(config),
    )


def _latent(
    config: MLATransformerConfig,
    kind: str,
    seq_len_interpolation_factor: float | None,
    rope_scaling: bool,
    rope_scaling_factor: float,
) -> RotaryEmbedding:
    if kind != "rope":
        raise ConfigError(
            f"--position-embedding-type {kind} with --multi-latent-attention",
            why="its keys have a part for rotary positions; --rope-type says which",
            fix="--position-embedding-type rope",
        )
    # Even and odd channels are pairs: what DeepSeek reorders to halves before it rotates. Scores do not see the order.
    same = (config.qk_pos_emb_head_dim, config.rotary_percent, True, seq_len_interpolation_factor, config.rotary_base)
    if config.rope_type == "rope":
        return RotaryEmbedding(*same, rope_scaling, rope_scaling_factor)
    if rope_scaling:
        raise ConfigError(
            "--use-rope-scaling with --rope-type yarn",
            why="both rescale the frequencies",
            fix="--rope-type rope, or leave --use-rope-scaling out",
        )
    return YarnRotaryEmbedding(
        *same,
        scaling_factor=config.rotary_scaling_factor,
        original_max_position_embeddings=config.original_max_position_embeddings,
        beta_fast=config.beta_fast,
        beta_slow=config.beta_slow,
        mscale=config.mscale,
        mscale_all_dim=config.mscale_all_dim,
        correction_range_round_to_int=config.yarn_correction_range_round_to_int,
    )


def rotary_angles(
    embedding: RotaryEmbedding | MultimodalRotaryEmbedding,
    length: int,
    position_ids: Tensor | None,
    config: TransformerConfig,
    device: torch.device,
    cp_group: ProcessGroup | None = None,
    packed: PackedSeqParams | None = None,
) -> Tensor:
    """Angles of the tokens that this rank holds, `[length/cp, 1 or b, 1, r]`.

    Args:
        length: positions of the whole sequence, or of the longest packed document.
        cp_group: ranks that hold the other tokens.
        packed: positions restart in each of these documents.
        position_ids: `[3, b, length]` are taken by a multimodal embedding as they are. Positions of text, `[b, s]` or
            None on a stage that reads no data, are 0, 1, ... for every rotary embedding.
    """
    if embedding.inv_freq.device != device and device.type != "meta":
        embedding.inv_freq = embedding.inv_freq.to(device)
    if packed is not None and not isinstance(embedding, RotaryEmbedding):
        raise ConfigError(
            "packed documents with multimodal positions",
            why="their positions are given for each token, and restart as the data say",
            fix="no packed_seq_params",
        )
    if isinstance(embedding, RotaryEmbedding):
        angles = embedding.angles(length)
        if packed is not None:
            return angles_of_documents(angles, packed, "q", cp_group)
        return split_sequence(angles, collectives.group_rank(cp_group), collectives.group_size(cp_group))
    if position_ids is None or position_ids.dim() == 2:
        position_ids = torch.arange(length, device=device).expand(3, 1, -1)
    elif position_ids.shape[-1] != length:
        raise ConfigError(
            f"{position_ids.shape[-1]} multimodal positions for {length} tokens",
            why="decoding with a cache wants the positions of all tokens so far, and a context-parallel rank those of "
            "the whole sequence",
            fix="position_ids [3, b, s] of the whole sequence, without a cache",
        )
    assert config.mrope_section is not None
    angles = embedding(position_ids, config.mrope_section)
    return split_sequence(angles, collectives.group_rank(cp_group), collectives.group_size(cp_group))
