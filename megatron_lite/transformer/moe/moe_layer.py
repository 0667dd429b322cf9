"""A layer of experts: a router, the way to the experts and back, the experts, and those that all tokens pass through.

x [s, b, h] --router--> probs [T, E], map [T, E]            T = s b tokens of this rank, E experts
    |  dispatch     rows to the ranks of their experts       (token_dispatcher)
    |  experts      an MLP each, weighted by probs           (experts)
    |  combine      back, summed for each token
    +  shared experts of x                                   (shared_experts)
y [s, b, h]

With `moe_latent_size` a projection before the dispatch makes tokens narrower, one behind it wide again: less is sent,
and experts are narrower on that side. The router and the shared experts see x itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_lite import collectives
from megatron_lite.errors import ConfigError
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.tensor_parallel.layers import DuplicatedLinear
from megatron_lite.tensor_parallel.random import checkpoint
from megatron_lite.tensor_parallel.utils import divide
from megatron_lite.transformer.module import MegatronModule
from megatron_lite.transformer.moe.router import TopKRouter
from megatron_lite.transformer.moe.token_dispatcher import DISPATCHERS
from megatron_lite.transformer.spec_utils import ModuleSpec, build_module
from megatron_lite.transformer.transformer_config import TransformerConfig


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all layers."""
    return torch.cuda.Stream(device)


@dataclass
class MoESubmodules:
    """The experts, and those that every token passes through (None: none)."""

    experts: ModuleSpec | type | None = None
    shared_experts: ModuleSpec | type | None = None


class MoELayer(MegatronModule):
    """`[s, b, h]` -> (`[s, b, h]`, None), in place of a dense MLP.

    The parts, and how they are built and called:

        experts         build_module(spec, num_local_experts, config, pg_collection=...)
                        (rows [R, h], rows of each expert [E_l], weights [R]) -> ([R, h], bias or None)
        shared_experts  build_module(spec, config=config, pg_collection=..., gate=config.moe_shared_expert_gate)
                        [s, b, h] -> [s, b, h]
        dispatcher      DISPATCHERS[config.moe_token_dispatcher_type](num_local_experts, local_expert_indices, config,
                        pg_collection), see `token_dispatcher`

    Args:
        layer_number: global, from 1; names the layer in the log.
        pg_collection: None = the registered groups.
    Raises: ConfigError in training with several tensor-parallel ranks and no sequence parallelism.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__(config)
        assert config.num_moe_experts is not None, "a layer of experts needs config.num_moe_experts"
        assert submodules is not None and submodules.experts is not None, "a layer of experts needs a spec of experts"
        self.layer_number, self.submodules = layer_number, submodules
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        ep_rank, ep_size = collectives.group_rank(self.pg_collection.ep), collectives.group_size(self.pg_collection.ep)
        self.num_local_experts = divide(config.num_moe_experts, ep_size)
        first = ep_rank * self.num_local_experts
        self.local_expert_indices = list(range(first, first + self.num_local_experts))

        self.router = TopKRouter(config=config, pg_collection=self.pg_collection, layer_number=layer_number)
        self.token_dispatcher = DISPATCHERS[config.moe_token_dispatcher_type](
            self.num_local_experts, self.local_expert_indices, config, self.pg_collection
        )
        self.experts = build_module(
            submodules.experts, self.num_local_experts, config, pg_collection=self.pg_collection
        )
        self.shared_experts: Any = None
        if config.moe_shared_expert_intermediate_size is not None and submodules.shared_experts is not None:
            self.shared_experts = build_module(
                submodules.shared_experts,
                config=config,
                pg_collection=self.pg_collection,
                gate=config.moe_shared_expert_gate,
            )
        self.fc1_latent_proj: Any = None
        self.fc2_latent_proj: Any = None
        if config.moe_latent_size is not None:
            outer, inner = config.hidden_size, config.moe_latent_size
            self.fc1_latent_proj = self._projection(outer, inner, config.init_method)
            self.fc2_latent_proj = self._projection(inner, outer, config.output_layer_init_method)
        self._duplicated = collectives.group_size(self.pg_collection.tp) > 1 and not config.sequence_parallel
        modules = config.recompute_modules or [] if config.recompute_granularity == "selective" else []
        # On a GPU shared experts can run on a stream of their own while tokens travel.
        self.overlaps_shared = config.moe_shared_expert_overlap and torch.cuda.is_available()
        self.recompute = "moe" in modules
        self.recompute_shared_experts = "shared_experts" in modules

    def set_layer_number(self, layer_number: int) -> None:
        """The layer's name in the log, where it was not known at construction."""
        self.layer_number = layer_number
        self.router.set_layer_number(layer_number)

    def _projection(self, inputs: int, outputs: int, init_method: Any) -> DuplicatedLinear:
        return DuplicatedLinear(
            inputs,
            outputs,
            config=self.config,
            init_method=init_method,
            bias=self.config.add_bias_linear,
            tp_group=self.pg_collection.tp,
        )

    def forward(self, hidden_states: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, None]:
        """x `[s, b, h]` -> (y `[s, b, h]`, None: no bias is left to add).

        Args:
            padding_mask: bool `[s, b]`, True = padding: goes to no routed expert, and counts nowhere.
        """
        if self.training and self._duplicated:
            raise ConfigError(
                "a layer of experts with several tensor-parallel ranks and no sequence parallelism",
                why="all of them would route the same tokens, and experts get every token once",
                fix="--sequence-parallel",
            )
        if self.recompute and self.training and torch.is_grad_enabled():
            return checkpoint(self._forward, False, hidden_states, padding_mask), None
        return self._forward(hidden_states, padding_mask), None

    def _forward(self, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        probs, routing_map = self.router(x, padding_mask)
        with self._beside(x) as stream:
            shared = self._shared(x)
        if self.fc1_latent_proj is not None:
            x, _ = self.fc1_latent_proj(x)
        rows, weights = self.token_dispatcher.dispatch_preprocess(x, routing_map, probs)
        rows, weights = self.token_dispatcher.token_dispatch(rows, weights)
        rows, rows_per_expert, weights = self.token_dispatcher.dispatch_postprocess(rows, weights)
        rows, bias = self.experts(rows, rows_per_expert, weights)
        assert bias is None, "experts add their own biases, weighted as their outputs"
        rows = self.token_dispatcher.combine_preprocess(rows)
        rows = self.token_dispatcher.token_combine(rows)
        y = self.token_dispatcher.combine_postprocess(rows)
        if self.fc2_latent_proj is not None:
            y, _ = self.fc2_latent_proj(y)
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)
        return y if shared is None else y + shared

    @contextmanager
    def _beside(self, x: Tensor) -> Iterator[torch.cuda.Stream | None]:
        """A block whose work runs beside what follows it, where that is wanted and there is a GPU."""
        if not self.overlaps_shared or self.shared_experts is None or not x.is_cuda:
            yield None
            return
        stream = _side_stream(x.device)
        stream.wait_stream(torch.cuda.current_stream())
        x.record_stream(stream)
        with torch.cuda.stream(stream):
            yield stream

    def _shared(self, x: Tensor) -> Tensor | None:
        if self.shared_experts is None:
            return None
        if self.recompute_shared_experts and self.training and torch.is_grad_enabled():
            return checkpoint(self.shared_experts, False, x)
        return self.shared_experts(x)
