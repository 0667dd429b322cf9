"""The stack of layers that one pipeline stage (or chunk of it) holds.

    first stage    embeddings --> layers ... --> send
    last stage     receive    --> layers ... --> final norm

Recompute (Chen et al. 2016; Korthikanti et al. 2022):

    full, uniform   groups of N layers, the last may be smaller; each group keeps its input and runs again in backward
    full, block     the first N layers of the stage one by one, the rest keeps its activations
    selective       within a layer: core_attn, mlp, layernorm (see TransformerLayer and Attention), moe, shared_experts
                    (see MoELayer)
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite import collectives
from megatron_lite.config_logger import log_config_to_disk
from megatron_lite.errors import ConfigError
from megatron_lite.pipeline_parallel.stage_layout import StageLayout, stage_layout
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.tensor_parallel.fp8 import cast_products
from megatron_lite.tensor_parallel.random import checkpoint, get_cuda_rng_tracker
from megatron_lite.transformer.inference_context import InferenceContext
from megatron_lite.transformer.module import MegatronModule
from megatron_lite.transformer.spec_utils import ModuleSpec, build_module, get_module
from megatron_lite.transformer.torch_norm import WrappedTorchNorm
from megatron_lite.transformer.transformer_config import TransformerConfig
from megatron_lite.transformer.transformer_layer import BaseTransformerLayer


@dataclass
class TransformerBlockSubmodules:
    """The layers of this stage, one spec each, and the class of the final norm (None: no final norm)."""

    layer_specs: list[ModuleSpec] | None = None
    layer_norm: ModuleSpec | type | None = None


def layout_of(config: TransformerConfig, pp_size: int | None = None) -> StageLayout:
    """Which stage and chunk holds what, of one stack. Raises ConfigError where the layers do not come out even."""
    stages = config.pipeline_model_parallel_size if pp_size is None else pp_size
    if config.pipeline_model_parallel_split_rank not in (None, 0, stages):
        raise ConfigError(
            f"--pipeline-model-parallel-split-rank {config.pipeline_model_parallel_split_rank} for one stack of layers",
            why="it is the first stage of a decoder that stands behind an encoder",
            fix="leave it out, or pretrain_t5.py",
        )
    return stage_layout(
        config.num_layers,
        stages,
        config.virtual_pipeline_model_parallel_size or 1,
        config.num_layers_in_first_pipeline_stage,
        config.num_layers_in_last_pipeline_stage,
        config.account_for_embedding_in_pipeline_split,
        config.account_for_loss_in_pipeline_split,
        config.pipeline_model_parallel_layout,
        mtp_layers=config.mtp_num_layers or 0,
    )


def layers_of_stage(
    config: TransformerConfig, pp_rank: int, pp_size: int, vp_stage: int | None = None
) -> tuple[int, int]:
    """(first layer, number of layers) of a stage's chunk, counted from 0."""
    held = layout_of(config, pp_size).cell(pp_rank, vp_stage).layers
    return held.start, len(held)


def get_num_layers_to_build(config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None) -> int:
    """Layers of this stage's chunk."""
    pp = ProcessGroupCollection.use_mpu_process_groups().pp
    rank = collectives.group_rank(pp) if pp_rank is None else pp_rank
    return layers_of_stage(config, rank, config.pipeline_model_parallel_size, vp_stage)[1]


def get_transformer_layer_offset(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> int:
    """Layers before this stage's chunk."""
    pp = ProcessGroupCollection.use_mpu_process_groups().pp
    rank = collectives.group_rank(pp) if pp_rank is None else pp_rank
    return layers_of_stage(config, rank, config.pipeline_model_parallel_size, vp_stage)[0]


class TransformerBlock(MegatronModule):
    """Layers and, behind the last of them, the final norm.

    Args:
        spec: of one layer (repeated for every layer of the stage), or of a block with the specs of all its layers.
        post_layer_norm: whether the model has a final norm.
        pre_process: this is the first stage: its input comes by argument, not from the stage before.
        post_process: this is the last stage: the final norm is here.
        pg_collection: None = the registered groups.
        vp_stage: which chunk of the stage.
        held: which layers (counted from 0) are here; None: what `layout_of(config)` gives this stage's chunk. For
            models of several blocks, which place their layers themselves.
    """

    def __init__(
        self,
        config: TransformerConfig,
        spec: TransformerBlockSubmodules | ModuleSpec,
        post_layer_norm: bool = True,
        pre_process: bool = True,
        post_process: bool = True,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
        held: range | None = None,
    ):
        log_config_to_disk(config, locals())
        super().__init__(config)
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.post_layer_norm, self.pre_process, self.post_process = post_layer_norm, pre_process, post_process
        self.vp_stage = vp_stage
        self.input_tensor: Tensor | None = None
        if held is None:
            pp_rank = collectives.group_rank(self.pg_collection.pp)
            self.first_layer, count = layers_of_stage(config, pp_rank, config.pipeline_model_parallel_size, vp_stage)
        else:
            self.first_layer, count = held.start, len(held)
        submodules = _block_submodules(spec, count)
        assert submodules.layer_specs is not None

        self.layers = nn.ModuleList(
            build_module(
                layer,
                config=config,
                layer_number=self.first_layer + i + 1,
                pg_collection=self.pg_collection,
                vp_stage=vp_stage,
            )
            for i, layer in enumerate(submodules.layer_specs)
        )
        recipes = [config.fp8_recipe_of(self.first_layer + i + 1) for i in range(len(self.layers))]
        self.fp8_scaling = cast_products(list(self.layers), recipes, self.pg_collection)
        self.num_layers_per_pipeline_rank = len(self.layers)
        self.final_layernorm: nn.Module | None = None
        ends = post_process
        if config.mtp_num_layers:  # further predictions take the normed states: the norm is behind the last layer
            ends = count > 0 and self.first_layer + count == config.num_layers
        if post_layer_norm and ends and submodules.layer_norm is not None:
            self.final_layernorm = build_module(
                submodules.layer_norm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )

    def set_input_tensor(self, input_tensor: Tensor | None) -> None:
        """What the stage before sent; used instead of forward's argument where `pre_process` is False."""
        self.input_tensor = input_tensor

    def forward(
        self,
        hidden_states: Tensor | None,
        attention_mask: Tensor | None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        rotary_pos_cos: Tensor | None = None,
        rotary_pos_sin: Tensor | None = None,
        attention_bias: Tensor | None = None,
        inference_context: InferenceContext | None = None,
        packed_seq_params: Any = None,
        sequence_len_offset: int | None = None,
        *,
        inference_params: InferenceContext | None = None,
    ) -> Tensor:
        """x `[s, b, h]` -> `[s, b, h]`. Arguments as TransformerLayer's."""
        if not self.pre_process:
            hidden_states = self.input_tensor
        assert hidden_states is not None, "a later stage needs set_input_tensor"
        same: dict[str, Any] = {
            "attention_mask": attention_mask,
            "context_mask": context_mask,
            "rotary_pos_emb": rotary_pos_emb,
            "rotary_pos_cos": rotary_pos_cos,
            "rotary_pos_sin": rotary_pos_sin,
            "attention_bias": attention_bias,
            "inference_context": inference_context if inference_context is not None else inference_params,
            "packed_seq_params": packed_seq_params,
            "sequence_len_offset": sequence_len_offset,
        }
        # Sequence shards differ between tensor-parallel ranks, so all dropout inside draws from their own region.
        dropout = self.config.hidden_dropout > 0.0 or self.config.attention_dropout > 0.0
        forked = self.config.sequence_parallel and self.training and dropout
        with get_cuda_rng_tracker().fork() if forked else nullcontext():
            if self.config.recompute_granularity == "full" and self.training and torch.is_grad_enabled():
                hidden_states = self._recomputed(hidden_states, context, same)
            else:
                hidden_states, context = self._run(0, len(self.layers), hidden_states, context, same)
        if self.final_layernorm is not None:
            hidden_states = self.final_layernorm(hidden_states)
        return hidden_states

    def _run(
        self, begin: int, end: int, x: Tensor, context: Tensor | None, same: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Layers [begin, end)."""
        for layer in self.layers[begin:end]:
            x, context = layer(x, context=context, **same)
        return x, context

    def _recomputed(self, x: Tensor, context: Tensor | None, same: dict[str, Any]) -> Tensor:
        """All layers, of which full recompute keeps group inputs only."""
        step, count = self.config.recompute_num_layers, len(self.layers)
        assert step is not None

        # Arguments of `checkpoint`, not of the closure: their gradients, too, come from what is computed again.
        bias = same["attention_bias"]

        def group(begin: int, end: int) -> Any:
            return lambda x, context, bias: self._run(begin, end, x, context, {**same, "attention_bias": bias})

        if self.config.recompute_method == "uniform":
            groups, kept_from = [(begin, min(begin + step, count)) for begin in range(0, count, step)], count
        else:
            groups, kept_from = [(i, i + 1) for i in range(min(step, count))], min(step, count)
        for begin, end in groups:
            x, context = checkpoint(
                group(begin, end),
                self.config.distribute_saved_activations,
                x,
                context,
                bias,
                tp_group=self.pg_collection.tp,
            )
        return self._run(kept_from, count, x, context, same)[0]


def _block_submodules(spec: TransformerBlockSubmodules | ModuleSpec, count: int) -> TransformerBlockSubmodules:
    """A block's specs, from those or from one layer's."""
    if isinstance(spec, TransformerBlockSubmodules):
        return spec
    module = get_module(spec)
    if isinstance(module, type) and issubclass(module, TransformerBlock):
        return spec.submodules
    if isinstance(module, type) and issubclass(module, BaseTransformerLayer):
        return TransformerBlockSubmodules(layer_specs=[spec] * count, layer_norm=WrappedTorchNorm)
    raise ConfigError(
        f"a block of {getattr(module, '__name__', module)}",
        why="a block is made of layers",
        fix="a ModuleSpec of a TransformerLayer (or an heir of BaseTransformerLayer), or a block's submodules",
    )
