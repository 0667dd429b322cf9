"""In the encoder of neighbours: what was retrieved looks at the chunk that it was retrieved for.

    neighbours   [r, b*l*k, d]   columns: batch, chunk, neighbour (neighbour fastest)
    their chunk  [m, b*l,   d]   columns: batch, chunk

The k neighbours of a chunk ask the same keys, so they stand one after another in one long row of queries.
Output [r, k*b*l, d], the neighbour now outermost, as Megatron has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_lite.fusions.bias_dropout_add import bias_dropout_add
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.transformer.attention import CrossAttention, CrossAttentionSubmodules
from megatron_lite.transformer.enums import AttnMaskType
from megatron_lite.transformer.module import MegatronModule
from megatron_lite.transformer.transformer_config import TransformerConfig


class RetroEncoderCrossAttention(MegatronModule):
    """Args:
    num_neighbors: k.
    residual: what the output is added to: "normed", the input of this module, or "stream", the layer's residual.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: CrossAttentionSubmodules,
        layer_number: int = 1,
        attn_mask_type: AttnMaskType = AttnMaskType.padding,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        num_neighbors: int,
        residual: str = "normed",
    ):
        super().__init__(config)
        self.attn = CrossAttention(config, submodules, layer_number, attn_mask_type, pg_collection=pg_collection)
        self.num_neighbors, self.residual = num_neighbors, residual

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        key_value_states: Tensor | None = None,
        inference_context: Any = None,
        **unused: Any,
    ) -> dict[str, Any]:
        """v `[r, b*l*k, d]`, chunks `[m, b*l, d]` -> output `[k*r, b*l, d]` with its bias, for the addition."""
        r, columns, d = hidden_states.shape
        k = self.num_neighbors
        rows = hidden_states.view(r, columns // k, k, d).permute(2, 0, 1, 3).reshape(k * r, columns // k, d)
        output, bias = self.attn(rows, attention_mask, key_value_states=key_value_states)
        return {"output": output, "bias": bias, "normed": rows if self.residual == "normed" else None, "k": k}


def get_retro_encoder_bias_dropout_add(training: bool, fused: bool) -> Callable[[Any, Tensor, float], Tensor]:
    """residual + dropout(x + bias), laid out for the keys of the decoder. See `get_bias_dropout_add`."""

    def add(found: dict[str, Any], residual: Tensor, probability: float) -> Tensor:
        k = found["k"]
        rows, columns, d = found["output"].shape
        if found["normed"] is not None:
            residual = found["normed"]
        else:
            residual = residual.view(rows // k, columns, k, d).permute(2, 0, 1, 3).reshape(rows, columns, d)
        y = bias_dropout_add((found["output"], found["bias"]), residual, probability, training)
        return y.view(k, rows // k, columns, d).transpose(0, 1).reshape(rows // k, k * columns, d)

    return add
