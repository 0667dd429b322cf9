"""Chunked cross attention: the tokens behind a chunk look at the neighbours of that chunk (Borgeaud et al. 2022).

    m = 4, ns = 10          0 1 | 2 3 4 5 | 6 7 8 9         chunks that are retrieved for, the partial one first
    pad = (ns - 1) % m = 1    1 2 3 4 | 5 6 7 8 | 9         queries: the last token of a chunk and the m - 1 after it

A chunk's neighbours are found by all of its tokens, so its last token is the first that may see them: that is the
causal shift. The first `pad` tokens see nothing.

    h [ns, b, d] --shift, cut--> [m, b*l, d] --attention to [r*k, b*l, d]--> [m, b*l, d] --shift back--> [ns, b, d]

The first layer that retrieves owns the encoder of neighbours; later ones use its output, which travels as the context.
Chunks do not fall together with shards of the sequence: under sequence parallelism the sequence is gathered before and
cut after.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite import collectives
from megatron_lite.errors import DataError
from megatron_lite.fusions.bias_dropout_add import bias_dropout_add
from megatron_lite.models.retro.config import RetroConfig, whole_sequence_config
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron_lite.tensor_parallel.random import get_cuda_rng_tracker
from megatron_lite.transformer.attention import CrossAttention, CrossAttentionSubmodules
from megatron_lite.transformer.enums import AttnMaskType
from megatron_lite.transformer.module import MegatronModule
from megatron_lite.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules


def chunks_of(h: Tensor, m: int) -> Tensor:
    """`[ns, b, d]` -> `[m, b*l, d]`, the chunks that are retrieved for: a partial one first, filled up with zeros."""
    partial = h.shape[0] % m
    if partial:
        h = torch.cat([F.pad(h[:partial], (0, 0, 0, 0, 0, m - partial)), h[partial:]])
    return _columns(h, m)


def queries_of(h: Tensor, m: int) -> Tensor:
    """`[ns, b, d]` -> `[m, b*l, d]`, the tokens that see a chunk's neighbours: from its last one on, zeros at the
    end."""
    pad = (h.shape[0] - 1) % m
    return _columns(F.pad(h[pad:], (0, 0, 0, 0, 0, m - 1)), m)


def in_sequence(y: Tensor, ns: int, b: int) -> Tensor:
    """What `queries_of` undoes: `[m, b*l, d]` -> `[ns, b, d]`, zeros where nothing is seen."""
    m, columns, d = y.shape
    pad = (ns - 1) % m
    rows = y.view(m, b, columns // b, d).permute(2, 0, 1, 3).reshape(-1, b, d)
    return F.pad(rows[: ns - pad], (0, 0, 0, 0, pad, 0))


def _columns(h: Tensor, m: int) -> Tensor:
    """`[l*m, b, d]` -> `[m, b*l, d]`, columns: batch, chunk."""
    rows, b, d = h.shape
    return h.view(rows // m, m, b, d).permute(1, 2, 0, 3).reshape(m, -1, d)


class RetroDecoderCrossAttention(MegatronModule):
    """Args:
    encoder_block_spec: the encoder of neighbours, in the first layer that retrieves; None: the context is encoded.
    """

    config: RetroConfig

    def __init__(
        self,
        config: RetroConfig,
        submodules: CrossAttentionSubmodules,
        layer_number: int = 1,
        attn_mask_type: AttnMaskType = AttnMaskType.padding,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        encoder_block_spec: TransformerBlockSubmodules | None = None,
    ):
        super().__init__(config)
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        tp = self.pg_collection.tp
        self.sequence_parallel = config.sequence_parallel and collectives.group_size(tp) > 1
        assert config.retro_chunk_length is not None, "the project's config.json says it"
        self.chunk_length, self.num_neighbors = config.retro_chunk_length, config.retro_num_neighbors
        self.attn = CrossAttention(
            whole_sequence_config(config), submodules, layer_number, attn_mask_type, pg_collection=self.pg_collection
        )
        self.encoder: TransformerBlock | None = None
        if encoder_block_spec is not None:
            self.encoder = TransformerBlock(
                whole_sequence_config(
                    config,
                    num_layers=config.retro_encoder_num_layers,
                    hidden_dropout=config.retro_encoder_hidden_dropout,
                    attention_dropout=config.retro_encoder_attention_dropout,
                ),
                encoder_block_spec,
                post_layer_norm=False,
                post_process=False,
                pg_collection=self.pg_collection,
                held=range(config.retro_encoder_num_layers),
            )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        key_value_states: Tensor | None = None,
        inference_context: Any = None,
        **unused: Any,
    ) -> dict[str, Any]:
        """h `[ns, b, d]` (`[ns/t, b, d]` with sequence parallelism), and the context: neighbours `[r, b*l*k, d]` in the
        layer with the encoder, else what that one returned, `[r, k*b*l, d]`.

        Returns: `attention_output`, like h, and `context` for the layers behind.
        """
        assert key_value_states is not None, "a layer that retrieves, without neighbours"
        if self.config.retro_off:
            return {"attention_output": None, "context": key_value_states}
        h, tp = hidden_states, self.pg_collection.tp
        if self.sequence_parallel:
            # What follows is the same on all ranks of tp, and so is its gradient.
            h = gather_from_sequence_parallel_region(h, tensor_parallel_output_grad=False, group=tp)
        # A block with dropout computes on shards in their own region of random numbers (TransformerBlock.forward).
        dropout = self.config.hidden_dropout > 0.0 or self.config.attention_dropout > 0.0
        shards = self.sequence_parallel and self.training and dropout
        with get_cuda_rng_tracker().leave() if shards else nullcontext():
            output, context = self._attend(h, key_value_states)
        if self.sequence_parallel:
            output = scatter_to_sequence_parallel_region(output, tp)
        return {"attention_output": output, "context": context}

    def _attend(self, h: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        ns, b, d = h.shape
        m, k = self.chunk_length, self.num_neighbors
        columns = b * -(-ns // m)
        if context.shape[1] != columns * k:
            raise DataError(
                f"{context.shape[1]} neighbours came with {b} samples of {ns} tokens",
                why=f"{k} neighbours of each of their {columns} chunks of {m} tokens are {columns * k}",
                fix="neighbor_tokens [b, l, k, r] of the samples, with --retro-num-neighbors k",
            )
        if self.encoder is not None:
            context = self.encoder(context, None, context=chunks_of(h, m), context_mask=None)
        keys = context.reshape(-1, columns, d)  # row: token, neighbour
        output, bias = self.attn(queries_of(h, m), None, key_value_states=keys.to(h.dtype))
        if bias is not None:
            output = output + bias
        return in_sequence(output, ns, b), context


def get_retro_decoder_bias_dropout_add(training: bool, fused: bool) -> Callable[[Any, Tensor, float], Tensor]:
    """residual + dropout(what was found). See `get_bias_dropout_add`."""

    def add(found: dict[str, Any], residual: Tensor, probability: float) -> Tensor:
        if found["attention_output"] is None:
            return residual
        return bias_dropout_add((found["attention_output"], None), residual, probability, training)

    return add
