"""The router: which experts each token goes to, and with what weight.

    x [s, b, h] --gating--> logits [T, E] --z-loss--> --choice--> probs, map [T, E] --capacity--> --balancing losses-->

T = s b tokens of this rank. The weight is held by every rank. A rank routes its own tokens, so under sequence and
context parallelism its gradient is a part of a sum, and balance is judged by counts of all ranks that share a sequence.

What a loss weighs, with g = ranks that share the sequences of a micro-batch (tensor x context parallel):

    each rank attaches the part of its own tokens; the sum over the g ranks is the loss of the micro-batch.
    gradients averaged:       the schedule's scale is c / M, and the mean over data-parallel ranks makes the rest
    gradients summed (per token loss): the part is multiplied by the micro-batch's tokens, T g; finalize_model_grads
                              divides by all tokens

Only a training pass that records gradients counts: of a layer that is recomputed the second one, so each once.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite import collectives
from megatron_lite.aux_loss import attach_aux_loss
from megatron_lite.collectives import group_size
from megatron_lite.initialization import Constant, set_init
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.sharding import whole
from megatron_lite.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron_lite.transformer.module import MegatronModule
from megatron_lite.transformer.moe.moe_utils import (
    apply_router_token_dropping,
    compute_routing_scores_for_aux_loss,
    get_updated_expert_bias,
    random_logits,
    router_gating_linear,
    sinkhorn_routing,
    topk_routing_with_score_function,
)
from megatron_lite.transformer.transformer_config import TransformerConfig

_DTYPES = {None: None, "fp32": torch.float32, "fp64": torch.float64}
# kind of loss -> its name in the log
LOG_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
    "z_loss": "z_loss",
}


def _sequence_order(rows: int, cp: int, device: torch.device) -> Tensor:
    """`[rows]`: where each row of what the ranks of a micro-batch gathered lies in the whole sequence.

    Tensor-parallel ranks hold parts that follow each other, of what their context-parallel rank holds: one chunk from
    the front of the sequence and its mirror image from the back. At a position the sequences of the batch lie side by
    side.
    """
    if cp == 1:
        return torch.arange(rows, device=device)
    held = rows // cp
    places = torch.arange(rows, device=device).view(2 * cp, held // 2)  # by chunk
    rank = torch.arange(cp, device=device)
    return torch.stack([places[rank], places[2 * cp - 1 - rank]], 1).reshape(-1)


class Router(MegatronModule):
    """The linear part: `[s, b, h]` -> logits `[s, b, E]`.

    Args:
        pg_collection: None = the registered groups.
        layer_number: global, from 1; names the layer in the log.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        layer_number: int | None = None,
    ):
        super().__init__(config)
        assert config.num_moe_experts is not None, "a router needs config.num_moe_experts"
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.num_experts, self.layer_number = config.num_moe_experts, layer_number
        self.router_dtype = _DTYPES[config.moe_router_dtype]
        self.weight = self._parameter("weight", (self.num_experts, config.hidden_size), config.init_method)
        self.bias = self._parameter("bias", (self.num_experts,), Constant(0.0)) if config.add_bias_linear else None

    def _parameter(self, name: str, shape: tuple[int, ...], method: Any) -> nn.Parameter:
        param = nn.Parameter(torch.empty(shape, dtype=self.config.params_dtype))
        param.shard = whole(name, shape)  # type: ignore[attr-defined]
        param.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]
        set_init(param, method if self.config.perform_initialization else Constant(0.0), name)
        return param

    def set_layer_number(self, layer_number: int) -> None:
        """The layer's name in the log, where it was not known at construction."""
        self.layer_number = layer_number

    def gating(self, x: Tensor) -> Tensor:
        """Logits in `moe_router_dtype`, or in the dtype of x."""
        return router_gating_linear(x, self.weight, self.bias, self.router_dtype)


class TopKRouter(Router):
    """`[s, b, h]` -> (probs `[T, E]`, routing_map bool `[T, E]`): each token to `moe_router_topk` experts.

    Attributes:
        expert_bias: fp32 `[E]`, whatever the model's dtype; saved. None without `moe_router_enable_expert_bias`.
        local_tokens_per_expert: tokens of this rank since the last update of that bias, fp32 `[E]`; not saved.
        losses: name in the log -> sum over micro-batches of this rank's part of the loss, without its coefficient.
        load: `[2, E]` tokens to each expert since the log last asked: as chosen, and after dropping.
        tokens: how many tokens were routed since then.
    """

    expert_bias: Tensor | None
    local_tokens_per_expert: Tensor | None

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        layer_number: int | None = None,
    ):
        super().__init__(config, pg_collection, layer_number)
        self.topk, self.balancing = config.moe_router_topk, config.balancing_types
        self.score_function = config.moe_router_score_function
        self.enable_expert_bias = config.moe_router_enable_expert_bias
        counts = torch.zeros(self.num_experts, dtype=torch.float32)
        self.register_buffer("expert_bias", counts.clone() if self.enable_expert_bias else None)
        self.register_buffer(
            "local_tokens_per_expert", counts.clone() if self.enable_expert_bias else None, persistent=False
        )
        self.losses: dict[str, Tensor] = {}
        self.load: Tensor | None = None
        self.tokens: Tensor | float = 0.0
        self.microbatches = 0
        self._global_counts: Tensor | None = None  # of `global_aux_loss`, summed over this step's micro-batches
        self._global_microbatches = 0

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """`.to(bf16)` narrows parameters; bias and counts stay fp32: steps of 1e-3 on top of 1 would be lost."""
        kept = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            after = self._buffers[name]
            assert after is not None
            if after.dtype != before.dtype:
                after = before.to(after.device)
            if hasattr(before, "shard"):
                after.shard = before.shard  # type: ignore[attr-defined]
            self._buffers[name] = after
        return self

    def forward(self, hidden_states: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x `[s, b, h]` -> (probs `[T, E]`, routing_map bool `[T, E]`), token number s_i * b + b_i.

        Args:
            padding_mask: bool `[s, b]`, True = padding: goes to no expert and counts nowhere.
        """
        logits = self.gating(self._jittered(hidden_states))
        if self.config.moe_router_force_load_balancing:
            with self._own_random_numbers():
                logits = random_logits(logits)
        return self.routing(logits, padding_mask)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits `[s, b, E]` -> (probs, routing_map) `[T, E]`; attaches the losses, counts the load."""
        config, (s, b, experts) = self.config, logits.shape
        logits = logits.reshape(-1, experts)
        real = None if padding_mask is None else ~padding_mask.reshape(-1)
        counted = self.training and torch.is_grad_enabled()
        if counted and config.moe_z_loss_coeff:
            logits = self._with_z_loss(logits, real)

        if self.balancing == ["sinkhorn"]:
            probs, routing_map = sinkhorn_routing(logits, self.topk, self.training)
        else:
            probs, routing_map = topk_routing_with_score_function(
                logits,
                self.topk,
                use_pre_softmax=config.moe_router_pre_softmax,
                num_groups=config.moe_router_num_groups,
                group_topk=config.moe_router_group_topk,
                scaling_factor=config.moe_router_topk_scaling_factor,
                score_function=self.score_function,
                expert_bias=self.expert_bias,
            )
        if real is not None:
            probs, routing_map = probs * real.unsqueeze(1), routing_map & real.unsqueeze(1)
        chosen = routing_map
        if config.moe_expert_capacity_factor is not None:
            probs, routing_map = self._dropped(probs, routing_map, real)
        if counted:
            probs = self._with_balancing_losses(probs, logits, real, s, b)
            self._count(chosen, routing_map & chosen, real)
        return probs, routing_map

    def _dropped(self, probs: Tensor, routing_map: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """The routing with every expert at its capacity, which is that of the whole micro-batch.

        The ranks that share it look at all of its tokens, in the order of the sequence: each one's own part would drop
        other tokens than one rank does, and tensor or context parallelism would change the model.
        """
        config, groups = self.config, self.pg_collection
        group = groups.tp_cp if config.sequence_parallel else groups.cp  # else all tp ranks route the same tokens
        pad = config.moe_pad_expert_input_to_capacity
        ranks = group_size(group)
        # Padded to the capacity all is known ahead, so the capacity must not depend on which tokens are real.
        count = None if real is None or pad else real.sum()
        scores, mine = probs.detach().masked_fill(~routing_map, -1.0), None
        if ranks > 1:
            everyone = scores.new_empty(ranks * len(scores), self.num_experts)
            collectives.all_gather(everyone, scores, group, purpose="routing before dropping")
            if count is not None:
                collectives.all_reduce(count, group, purpose="router tokens")
            order = _sequence_order(len(everyone), group_size(groups.cp), everyone.device)
            mine = order.view(ranks, -1)[collectives.group_rank(group)]
            scores = torch.empty_like(everyone).index_copy_(0, order, everyone)
        kept = apply_router_token_dropping(
            scores.clamp(min=0.0),
            scores >= 0.0,
            self.topk,
            config.moe_expert_capacity_factor,
            config.moe_token_drop_policy,
            pad,
            None if count is None else int(count),
        )[1]
        kept = kept if mine is None else kept.index_select(0, mine)
        return probs * (kept & routing_map), kept

    # -- noise

    def _jittered(self, x: Tensor) -> Tensor:
        eps = self.config.moe_input_jitter_eps
        if not eps or not self.training:
            return x
        with self._own_random_numbers():
            return x * torch.empty_like(x).uniform_(1.0 - eps, 1.0 + eps)

    def _own_random_numbers(self) -> Any:
        """Ranks that split a sequence draw different numbers for their different tokens."""
        tracker, region = get_cuda_rng_tracker(), get_expert_parallel_rng_tracker_name()
        return tracker.fork(region) if region in tracker.states_ else nullcontext()

    # -- losses

    def _attach(self, x: Tensor, kind: str, loss: Tensor, coefficient: float, tokens: Tensor | int) -> Tensor:
        """Let this rank's part of a loss ride on `x`, and remember it for the log.

        Args:
            loss: without its coefficient. tokens: of the micro-batch, over all ranks that share it.
        """
        name = LOG_NAMES[kind]
        value = loss.detach().float()
        self.losses[name] = value if name not in self.losses else self.losses[name] + value
        weight = loss * coefficient
        if self.config.calculate_per_token_loss:
            weight = weight * tokens
        return attach_aux_loss(x, weight)

    def _with_z_loss(self, logits: Tensor, real: Tensor | None) -> Tensor:
        """The logits, with the mean over tokens of logsumexp(logits)^2 attached (Zoph et al. 2022, section 3.3)."""
        squares = torch.logsumexp(logits if logits.dtype == torch.float64 else logits.float(), dim=-1).square()
        squares = squares if real is None else squares * real
        tokens = self._shared_tokens(real, logits)
        coefficient = self.config.moe_z_loss_coeff
        return self._attach(logits, "z_loss", squares.sum() / tokens, coefficient, tokens)

    def _shared_tokens(self, real: Tensor | None, logits: Tensor) -> Tensor | int:
        """Tokens of the micro-batch over the ranks that share it, padding left out."""
        group = self.pg_collection.tp_cp
        if real is None:
            return logits.shape[0] * group_size(group)
        tokens = real.sum().float()
        collectives.all_reduce(tokens, group, purpose="router tokens")
        return tokens.clamp(min=1)

    def _with_balancing_losses(self, probs: Tensor, logits: Tensor, real: Tensor | None, s: int, b: int) -> Tensor:
        kinds = [kind for kind in self.balancing if kind in LOG_NAMES and self.config.aux_loss_coefficient(kind) > 0]
        if not kinds:
            return probs
        routing_map, scores = compute_routing_scores_for_aux_loss(logits, self.topk, self.score_function)
        if real is not None:
            routing_map, scores = routing_map & real.unsqueeze(1), scores * real.unsqueeze(1)
        # Counts of each sequence, and its tokens in the last column; what the losses need are sums of these.
        tokens = torch.full((s * b,), 1.0, device=scores.device) if real is None else real.float()
        table = torch.cat([routing_map.float(), tokens.unsqueeze(1)], 1).view(s, b, -1).sum(0)  # [b, E + 1]
        if kinds != ["seq_aux_loss"]:
            table = table if "seq_aux_loss" in kinds else table.sum(0, keepdim=True)
        collectives.all_reduce(table, self.pg_collection.tp_cp, purpose="tokens per expert")
        table = table.to(scores.dtype)
        total = table[:, -1].sum()
        for kind in kinds:
            coefficient = self.config.aux_loss_coefficient(kind)
            if kind == "seq_aux_loss":
                counts, of_sequence = table[:, :-1], table[:, -1].clamp(min=1)
                sums = scores.view(s, b, -1).sum(0)  # [b, E]
                loss = ((sums * counts).sum(1) / of_sequence.square()).mean()
            elif kind == "aux_loss":
                loss = (scores.sum(0) * table[:, :-1].sum(0)).sum() / total.clamp(min=1).square()
            else:
                loss = self._global_loss(scores, table)
            loss = loss * (self.num_experts / self.topk)
            probs = self._attach(probs, kind, loss, coefficient, total.detach())
        return probs

    def _global_loss(self, scores: Tensor, table: Tensor) -> Tensor:
        """Balance judged over all data-parallel ranks, and over the micro-batches of this step so far.

        Gradients are averaged over data-parallel ranks afterwards, while this loss is already one of all of them: it is
        multiplied by their number (Megatron leaves the quotient, so that there the loss weighs less with more ranks).
        """
        counts = table.sum(0)
        dp = group_size(self.pg_collection.tp_dp_cp) // group_size(self.pg_collection.tp_cp)
        if dp > 1:
            collectives.all_reduce(counts, self.pg_collection.dp, purpose="tokens per expert")
        self._global_counts = counts if self._global_counts is None else self._global_counts + counts
        self._global_microbatches += 1
        mean = self._global_counts / self._global_microbatches
        return (scores.sum(0) * mean[:-1]).sum() * dp / mean[-1].clamp(min=1).square()

    # -- load

    @torch.no_grad()
    def _count(self, chosen: Tensor, kept: Tensor, real: Tensor | None) -> None:
        counts = chosen.sum(0).float()
        if self.local_tokens_per_expert is not None:
            self.local_tokens_per_expert += counts
        same = self.config.moe_expert_capacity_factor is None
        both = torch.stack([counts, counts if same else kept.sum(0).float()])
        self.load = both if self.load is None else self.load + both
        self.tokens = self.tokens + (float(chosen.shape[0]) if real is None else real.sum().float())
        self.microbatches += 1

    @torch.no_grad()
    def after_grad_sync(self, pg_collection: ProcessGroupCollection) -> None:
        """Once per global batch: the expert bias follows the load, counts start again."""
        if self.expert_bias is not None and self.local_tokens_per_expert is not None:
            collectives.all_reduce(self.local_tokens_per_expert, pg_collection.tp_dp_cp, purpose="tokens per expert")
            rate = self.config.moe_router_bias_update_rate
            self.expert_bias.copy_(get_updated_expert_bias(self.local_tokens_per_expert, self.expert_bias, rate))
            self.local_tokens_per_expert.zero_()
        self._global_counts, self._global_microbatches = None, 0

    def reset_statistics(self) -> None:
        """What the log has read is forgotten."""
        self.losses, self.load, self.tokens, self.microbatches = {}, None, 0.0, 0
