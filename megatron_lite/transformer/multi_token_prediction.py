"""Multi-token prediction: further layers that predict the token after next, and so on (DeepSeek-AI 2024, "DeepSeek-V3",
section 2.2).

    h_0            the main stack's output, behind its final norm
    depth k        u = [norm(embedding(tokens shifted by k)) ; norm(h_{k-1})] W       [s, b, 2 h] -> [s, b, h]
                   h_k = norm(layer(u))        predicts the token k + 1 ahead, with the model's own output layer
    loss           factor / D * sum of the depths' losses, which ride along in backward (`aux_loss`)

Embedding and output layer are the main model's. Depths stand on one stage of the pipeline, behind all other layers: the
last one, or where the layout string says m; a stage that does not hold the embedding has a copy of it. The states of
all depths leave the block laid one after another along the sequence, [(1 + D) s, b, h]. Evaluation leaves them out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_lite import collectives
from megatron_lite.aux_loss import attach_aux_loss
from megatron_lite.context_parallel.partition import join_sequence, one_document, split_sequence
from megatron_lite.errors import ConfigError
from megatron_lite.packed_seq_params import PackedSeqParams
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.tensor_parallel.fp8 import cast_products
from megatron_lite.tensor_parallel.layers import ColumnParallelLinear
from megatron_lite.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron_lite.tensor_parallel.random import checkpoint, get_cuda_rng_tracker
from megatron_lite.transformer.module import MegatronModule
from megatron_lite.transformer.spec_utils import ModuleSpec, build_module
from megatron_lite.transformer.torch_norm import WrappedTorchNorm
from megatron_lite.transformer.transformer_block import layout_of
from megatron_lite.transformer.transformer_config import TransformerConfig


@dataclass
class MultiTokenPredictionLayerSubmodules:
    """Parts of a depth."""

    enorm: ModuleSpec | type = None  # type: ignore[assignment]
    hnorm: ModuleSpec | type = None  # type: ignore[assignment]
    eh_proj: ModuleSpec | type = None  # type: ignore[assignment]
    transformer_layer: ModuleSpec | type = None  # type: ignore[assignment]
    layer_norm: ModuleSpec | type = None  # type: ignore[assignment]


@dataclass
class MultiTokenPredictionBlockSubmodules:
    """The depths, one spec each."""

    layer_specs: list[ModuleSpec] | None = None


def get_mtp_layer_spec(transformer_layer_spec: ModuleSpec, use_transformer_engine: bool = False) -> ModuleSpec:
    """A depth whose layer is like those of the main stack."""
    if use_transformer_engine:
        raise ConfigError(
            "multi-token prediction of Transformer Engine",
            why="its layers are not built yet",
            fix="use_transformer_engine=False",
        )
    return ModuleSpec(
        module=MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=WrappedTorchNorm,
            hnorm=WrappedTorchNorm,
            eh_proj=ColumnParallelLinear,
            transformer_layer=transformer_layer_spec,
            layer_norm=WrappedTorchNorm,
        ),
    )


def get_mtp_num_layers_to_build(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> int:
    """Depths of this stage's chunk: all or none."""
    pp = ProcessGroupCollection.use_mpu_process_groups().pp
    rank = collectives.group_rank(pp) if pp_rank is None else pp_rank
    return layout_of(config).cell(rank, vp_stage).mtp


def roll_tensor(
    tensor: Tensor,
    shifts: int = -1,
    dims: int = -1,
    cp_group: ProcessGroup | None = None,
    packed_seq_params: PackedSeqParams | None = None,
) -> tuple[Tensor, Tensor]:
    """Every token gets what the next one has; the last of a sequence (of each document, where they are packed) gets 0.

    Args:
        tensor: `[b, s/cp]`, this context-parallel rank's share: a token's successor may be another rank's.
        shifts, dims: -1 each: the one way that is needed.
    Returns: `[b, s/cp]`, and its sum.
    """
    assert shifts == -1 and dims in (-1, tensor.dim() - 1), f"rolling by {shifts} along {dims}"
    size, rank = collectives.group_size(cp_group), collectives.group_rank(cp_group)
    length = tensor.shape[-1] * size
    documents = one_document(length) if packed_seq_params is None else packed_seq_params.documents("q")
    whole = tensor
    if size > 1:  # numbers of tokens: little beside one activation
        shares = tensor.new_empty(size, *tensor.shape)
        collectives.all_gather(shares.view(-1), tensor.reshape(-1), cp_group, purpose="tokens further ahead")
        whole = join_sequence(list(shares), -1, documents)
    rolled = whole.roll(-1, -1)
    rolled[..., [document.end - 1 for document in documents]] = 0
    own = split_sequence(rolled, rank, size, -1, documents) if size > 1 else rolled
    return own, own.sum()


class _KeepFromLearning(torch.autograd.Function):
    """x, whose gradient is 0: other stages still wait for this copy's share of a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return torch.zeros_like(g)


class MultiTokenPredictionLayer(MegatronModule):
    """One depth: `[s, b, h]` -> `[s, b, h]` (`[s/t, b, h]` with sequence parallelism).

    Args:
        layer_number: the depth, from 1.
        vp_stage: accepted as Megatron has it.
        pg_collection: None = the registered groups.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MultiTokenPredictionLayerSubmodules,
        layer_number: int = 1,
        vp_stage: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__(config)
        self.layer_number = layer_number
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        norm: dict[str, Any] = {
            "config": config,
            "hidden_size": config.hidden_size,
            "eps": config.layernorm_epsilon,
        }
        self.enorm = build_module(submodules.enorm, **norm)
        self.hnorm = build_module(submodules.hnorm, **norm)
        self.eh_proj = build_module(
            submodules.eh_proj,
            2 * config.hidden_size,
            config.hidden_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            tp_group=self.pg_collection.tp,
        )
        # Where layers differ (rotary positions or not, a window, ...), a depth is like the last one of the main stack.
        self.transformer_layer = build_module(
            submodules.transformer_layer,
            config=config,
            layer_number=config.num_layers,
            pg_collection=self.pg_collection,
        )
        self.final_layernorm = build_module(submodules.layer_norm, **norm)

    def forward(self, hidden_states: Tensor, embedded: Tensor, **same: Any) -> Tensor:
        """h_{k-1} and the embedding of the shifted tokens -> h_k.

        Args:
            same: what the main stack's layers get too.
        """

        def run(hidden: Tensor, embedded: Tensor) -> Tensor:
            tp = self.pg_collection.tp
            both = torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1)
            u, _ = self.eh_proj(both)
            u = gather_from_tensor_model_parallel_region(u, tp)
            if self.config.sequence_parallel:
                u = scatter_to_sequence_parallel_region(u, tp)
            return self.transformer_layer(u, **same)[0]

        if self.config.recompute_granularity == "full" and self.training:
            y = checkpoint(run, False, hidden_states, embedded)
        else:
            y = run(hidden_states, embedded)
        return self.final_layernorm(y)


class MultiTokenPredictionBlock(MegatronModule):
    """All depths.

    Args:
        spec: the depths' specs, or a module with them; one where `mtp_use_repeated_layer` is set.
        vp_stage, pg_collection: as everywhere.
    """

    def __init__(
        self,
        config: TransformerConfig,
        spec: MultiTokenPredictionBlockSubmodules | ModuleSpec,
        vp_stage: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__(config)
        submodules = spec.submodules if isinstance(spec, ModuleSpec) else spec
        assert submodules.layer_specs, "multi-token prediction without depths"
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.depths = config.mtp_num_layers or 0
        self.layers = nn.ModuleList(
            build_module(layer, config=config, layer_number=i + 1, vp_stage=vp_stage, pg_collection=self.pg_collection)
            for i, layer in enumerate(submodules.layer_specs)
        )
        recipes = [config.fp8_recipe_of(config.num_layers)] * len(self.layers)  # as the last layer of the main stack
        self.fp8_scaling = cast_products(list(self.layers), recipes, self.pg_collection)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        hidden_states: Tensor,
        embedding: Callable[..., Tensor],
        packed_seq_params: PackedSeqParams | None = None,
        **same: Any,
    ) -> Tensor:
        """h_0 `[s, b, h]` -> h_0 to h_D, `[(1 + D) s, b, h]`.

        Args:
            input_ids, position_ids: `[b, s]` of the main stack.
            embedding: ids and positions -> `[s, b, h]`.
            same: what the main stack's layers get too.
        """
        cp, detach = self.pg_collection.cp, self.config.mtp_detach_heads
        states = [hidden_states]
        hidden = hidden_states.detach() if detach else hidden_states
        dropout = self.config.hidden_dropout > 0.0 or self.config.attention_dropout > 0.0
        # As in TransformerBlock: sequence shards differ between tensor-parallel ranks, and so must their dropout.
        forked = self.config.sequence_parallel and self.training and dropout
        for depth in range(self.depths):
            input_ids, _ = roll_tensor(input_ids, cp_group=cp, packed_seq_params=packed_seq_params)
            if position_ids is not None:
                position_ids, _ = roll_tensor(position_ids, cp_group=cp, packed_seq_params=packed_seq_params)
            embedded = embedding(input_ids=input_ids, position_ids=position_ids)
            embedded = _KeepFromLearning.apply(embedded) if detach else embedded
            layer = self.layers[0 if self.config.mtp_use_repeated_layer else depth]
            with get_cuda_rng_tracker().fork() if forked else nullcontext():
                hidden = layer(hidden, embedded, packed_seq_params=packed_seq_params, **same)
            states.append(hidden)
        return torch.cat(states)


def attach_mtp_losses(
    states: Sequence[Tensor],
    labels: Tensor,
    loss_mask: Tensor | None,
    losses_of: Callable[[Tensor, Tensor], Tensor],
    config: TransformerConfig,
    cp_group: ProcessGroup | None = None,
    packed_seq_params: PackedSeqParams | None = None,
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """h_0, with the losses of the other depths riding along; and those for the log, as (sum, tokens) by key.

    A depth's loss is a mean over the tokens that have a successor so far ahead, all context-parallel ranks together;
    with per-token loss that mean times the tokens of the main loss.

    Args:
        states: h_0 to h_D, `[s, b, h]`.
        labels, loss_mask: `[b, s]`, of the main loss; no mask: every token counts.
        losses_of: hidden states and labels -> losses `[b, s]`.
    """
    mask = torch.ones_like(labels, dtype=torch.float32) if loss_mask is None else loss_mask.float()
    hidden, reports = states[0], {}
    tokens = _over(mask.sum(), cp_group)
    for depth, state in enumerate(states[1:], start=1):
        labels, _ = roll_tensor(labels, cp_group=cp_group, packed_seq_params=packed_seq_params)
        mask, own = roll_tensor(mask, cp_group=cp_group, packed_seq_params=packed_seq_params)
        total = (losses_of(state, labels).float() * mask).sum()
        reports[f"mtp_{depth} loss"] = (total.detach(), own.detach())
        loss = total / _over(own, cp_group).clamp(min=1)
        if config.calculate_per_token_loss:
            loss = loss * tokens
        hidden = attach_aux_loss(hidden, loss * (config.mtp_loss_scaling_factor / len(states[1:])))
    return hidden, reports


def _over(tokens: Tensor, cp_group: ProcessGroup | None) -> Tensor:
    """A number of tokens, of all context-parallel ranks together."""
    tokens = tokens.detach().clone()
    collectives.all_reduce(tokens, cp_group, purpose="number of tokens")
    return tokens
