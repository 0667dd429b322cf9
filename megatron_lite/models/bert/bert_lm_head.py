"""Between encoder and output layer: dense, GELU, norm (Devlin et al. 2019)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megatron_lite.models.common.replicated_linear import replicated_linear
from megatron_lite.transformer.module import MegatronModule
from megatron_lite.transformer.torch_norm import LayerNorm
from megatron_lite.transformer.transformer_config import TransformerConfig


class BertLMHead(MegatronModule):
    """`[s, b, h]` -> `[s, b, h]`; with sequence parallelism each rank its own positions.

    Args:
        hidden_size: h.
    """

    def __init__(self, hidden_size: int, config: TransformerConfig):
        super().__init__(config)
        self.dense = replicated_linear(hidden_size, hidden_size, config, sequence_parallel=config.sequence_parallel)
        self.layer_norm = LayerNorm(config, hidden_size, config.layernorm_epsilon)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """norm(gelu(x A + b)), GELU in its exact form."""
        return self.layer_norm(F.gelu(self.dense(hidden_states)))
