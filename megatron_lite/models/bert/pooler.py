"""A sequence as one vector: the first token's, through a dense layer and tanh (Devlin et al. 2019)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.models.common.replicated_linear import replicated_linear
from megatron_lite.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron_lite.transformer.module import MegatronModule
from megatron_lite.transformer.transformer_config import TransformerConfig


class Pooler(MegatronModule):
    """`[s, b, h]` (`[s/t, b, h]` with sequence parallelism) -> `[b, h]`.

    Args:
        hidden_size: h.
        init_method: of the dense layer's weight; None: the config's.
        sequence_parallel: the input is this rank's share of the sequence.
        tp_group: None = the registered tensor-parallel group.
    """

    def __init__(
        self,
        hidden_size: int,
        init_method: Callable[[Tensor], Any] | None,
        config: TransformerConfig,
        sequence_parallel: bool = False,
        tp_group: ProcessGroup | None = None,
    ):
        super().__init__(config)
        self.dense = replicated_linear(hidden_size, hidden_size, config, init_method)
        self.sequence_parallel, self.tp_group = sequence_parallel, tp_group

    def forward(self, hidden_states: Tensor, sequence_index: int = 0) -> Tensor:
        """tanh(x A + b) of position `sequence_index` of the whole sequence."""
        if self.sequence_parallel:
            # Every rank computes the same from the whole sequence: the gradient of its share is a part of it, no sum.
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return torch.tanh(self.dense(hidden_states[sequence_index]))
