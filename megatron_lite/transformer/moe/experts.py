"""The experts of one rank: MLPs, each of which sees the rows that were sent to it.

    rows [n, h]      | of expert 0 | of expert 1 | ...        tokens_per_expert, sum n
    y = p * (act(x A_e + a_e) B_e + b_e)                      p [n]: the router's weight of each row

`SequentialMLP` runs one MLP after the other; `GroupedMLP` runs each step for all of them: a grouped product, one
activation, a grouped product. Their parameters are the same, with the same names, so checkpoints fit both. The weight p
is multiplied between the two products, where the tensor is narrow and a backward needs nothing more.

With expert tensor parallelism a rank holds a share of each expert's inner width, and y is its part of a sum: the
dispatcher brings the rows and adds the parts up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.collectives import group_rank
from megatron_lite.fusions.grouped_matmul import grouped_linear
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron_lite.tensor_parallel.random import CheckpointWithoutOutput
from megatron_lite.transformer.mlp import MLP, MLPSubmodules
from megatron_lite.transformer.module import MegatronModule
from megatron_lite.transformer.transformer_config import TransformerConfig


class Experts(MegatronModule):
    """What both kinds share: the MLPs, which know their number among all experts.

    Args:
        num_local_experts: how many this rank holds.
        submodules: the linear layers of each; None: this package's own.
        pg_collection: None = the registered groups; `ep` and `expt_tp` are read.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__(config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.num_local_experts = num_local_experts
        first = group_rank(groups.ep) * num_local_experts
        self.local_experts = nn.ModuleList()
        for place in range(num_local_experts):
            expert = MLP(
                config,
                submodules or MLPSubmodules(ColumnParallelLinear, RowParallelLinear),
                is_expert=True,
                input_size=config.moe_latent_size,
                output_size=config.moe_latent_size,
                ffn_hidden_size=config.moe_ffn_hidden_size,
                tp_group=groups.expt_tp,
            )
            expert.expert_number = first + place  # type: ignore[assignment]  # what its global name is made of
            self.local_experts.append(expert)

    def _weighted_input(self, rows: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """`--moe-apply-probs-on-input`: the weights go into the rows, and are 1 from there on."""
        if not self.config.moe_apply_probs_on_input:
            return rows, probs
        return (rows * probs.unsqueeze(-1)).to(rows.dtype), torch.ones_like(probs)


class SequentialMLP(Experts):
    """One expert after the other. Args: see `Experts`."""

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: list[int] | Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """rows `[n, h]`, rows of each expert, weights `[n]` -> (`[n, h]`, None). An expert without rows runs too: its
        gradients are zeros, and not absent."""
        counts = _as_list(tokens_per_expert)
        rows, probs = self._weighted_input(permuted_local_hidden_states, permuted_probs)
        parts = [expert(x, p)[0] for expert, x, p in zip(self.local_experts, rows.split(counts), probs.split(counts))]
        return torch.cat(parts), None


class GroupedMLP(Experts):
    """All experts step by step. Args: see `Experts`."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__(num_local_experts, config, submodules, pg_collection)
        selective = config.recompute_granularity == "selective"
        self.recompute_activation = selective and "moe_act" in (config.recompute_modules or ())

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: list[int] | Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """As SequentialMLP's."""
        counts = _as_list(tokens_per_expert)
        rows, probs = self._weighted_input(permuted_local_hidden_states, permuted_probs)
        experts: list[Any] = list(self.local_experts)
        activate = experts[0].activate
        inner = self._linear([expert.linear_fc1 for expert in experts], rows, counts)
        keep = CheckpointWithoutOutput() if self.recompute_activation and self.training else None
        inner = activate(inner, probs) if keep is None else keep.checkpoint(activate, inner, probs)
        layers = [expert.linear_fc2 for expert in experts]
        y = self._linear(layers, inner, counts)
        if keep is not None:
            keep.discard_output_and_register_recompute(y)
        if layers[0].bias is not None:
            owners = torch.repeat_interleave(torch.tensor(counts, device=y.device))
            biases = torch.stack([layer.bias for layer in layers])
            y = y + (biases.index_select(0, owners) * probs.unsqueeze(-1)).to(y.dtype)
        return y, None

    def _linear(self, layers: list[Any], x: Tensor, counts: list[int]) -> Tensor:
        """A layer of every expert: with the bias, unless the layer leaves it to its caller."""
        if layers[0].fp8 is not None:  # each expert has scales of its own
            return torch.cat([layer(part)[0] for layer, part in zip(layers, x.split(counts))])
        added = layers[0].bias is not None and not layers[0].skip_bias_add
        return grouped_linear(
            x,
            [layer.weight for layer in layers],
            counts,
            [layer.bias for layer in layers] if added else (),
            gradient_accumulation_fusion=self.config.gradient_accumulation_fusion,
            weight_grad_store=self.config.weight_grad_store,
        )


# Transformer Engine's grouped layers have this name in Megatron; the numbers are the same.
TEGroupedMLP = GroupedMLP


def _as_list(counts: list[int] | Tensor) -> list[int]:
    return counts.tolist() if isinstance(counts, Tensor) else counts
