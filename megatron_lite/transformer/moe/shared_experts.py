"""Experts that every token passes through: one MLP, split over the tensor-parallel ranks as a dense one is."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.initialization import set_init
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.sharding import whole
from megatron_lite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron_lite.transformer.mlp import MLP, MLPSubmodules
from megatron_lite.transformer.transformer_config import TransformerConfig


class SharedExpertMLP(MLP):
    """`[s, b, h]` -> `[s, b, h]`.

    Args:
        config: `moe_shared_expert_intermediate_size` is the width of all shared experts together. They have no biases.
        submodules: the linear layers; None: this package's own.
        gate: multiply the output by sigmoid(x w^T), w `[1, h]`, a number for each token.
        pg_collection: None = the registered groups.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules | None = None,
        gate: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        super().__init__(
            config,
            submodules or MLPSubmodules(ColumnParallelLinear, RowParallelLinear),
            ffn_hidden_size=config.moe_shared_expert_intermediate_size,
            tp_group=groups.tp,
            bias=False,
        )
        self.use_shared_expert_gate = gate
        self.register_parameter("gate_weight", None)
        if gate:
            weight = nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))
            self.gate_weight = weight
            weight.shard = whole("gate_weight", tuple(weight.shape))  # type: ignore[attr-defined]
            weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
            assert config.init_method is not None
            set_init(weight, config.init_method, "gate_weight")

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """The sum over the shared experts; there is no bias that a caller had to add."""
        y, _ = super().forward(hidden_states)
        if self.gate_weight is not None:
            y = y * torch.sigmoid(F.linear(hidden_states, self.gate_weight))
        return y
