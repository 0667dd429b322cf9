"""The arithmetic of routing: from logits to weights and a map, what balances, what is dropped. Pure functions.

T tokens, E experts, K = topk of them for each token. A routing is two tensors: `probs` `[T, E]`, 0 where an expert was
not chosen, and `routing_map` `[T, E]`, True where it was.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite.aux_loss import AuxLossAutoScaler as MoEAuxLossAutoScaler

__all__ = [
    "MoEAuxLossAutoScaler",
    "apply_router_token_dropping",
    "compute_routing_scores_for_aux_loss",
    "get_capacity",
    "get_updated_expert_bias",
    "group_limited_topk",
    "random_logits",
    "router_gating_linear",
    "sinkhorn",
    "sinkhorn_routing",
    "switch_load_balancing_loss_func",
    "topk_routing_with_score_function",
    "z_loss_func",
]


# -- logits --------------------------------------------------------------------------------------------------------


def router_gating_linear(x: Tensor, weight: Tensor, bias: Tensor | None, router_dtype: torch.dtype | None) -> Tensor:
    """x `[..., h]` -> logits `[..., E]`, computed and returned in `router_dtype` (None: the dtype of x)."""
    if router_dtype is not None:
        x, weight = x.to(router_dtype), weight.to(router_dtype)
        bias = None if bias is None else bias.to(router_dtype)
    return F.linear(x, weight, bias)


def random_logits(logits: Tensor) -> Tensor:
    """Random numbers in place of logits, to measure speed under even load; the gradient passes as if they were."""
    return torch.rand_like(logits) + (logits - logits.detach())


# -- choice --------------------------------------------------------------------------------------------------------


def top_experts(scores: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """The K best of each row, best first, as (values, indices) `[T, K]`. Of equals the one with the lower index wins,
    on every device: torch.topk leaves that open, and a layout would then change a model whose router is still 0."""
    values, indices = torch.sort(scores, dim=-1, descending=True, stable=True)
    return values[:, :topk], indices[:, :topk]


def group_limited_topk(
    scores: Tensor, topk: int, num_tokens: int, num_experts: int, num_groups: int, group_topk: int
) -> tuple[Tensor, Tensor]:
    """The K best experts of each token within its `group_topk` best groups of consecutive experts.

    A group counts by the sum of its best K // group_topk scores (DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2).
    """
    grouped = scores.view(num_tokens, num_groups, -1)
    of_group = grouped.topk(topk // group_topk, dim=-1).values.sum(-1)
    kept = torch.zeros_like(of_group, dtype=torch.bool).scatter(1, top_experts(of_group, group_topk)[1], True)
    allowed = kept.unsqueeze(-1).expand_as(grouped).reshape(num_tokens, num_experts)
    return top_experts(scores.masked_fill(~allowed, float("-inf")), topk)


def _scores(logits: Tensor, score_function: str) -> Tensor:
    """Scores of which none depends on another, fp32 or wider."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.sigmoid(wide) if score_function == "sigmoid" else F.softplus(wide).sqrt()


def _softmax(logits: Tensor) -> Tensor:
    return torch.softmax(logits, dim=-1, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)


def topk_routing_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: Tensor | None = None,
    fused: bool = False,
) -> tuple[Tensor, Tensor]:
    """Each token to its K best experts.

        softmax               the K greatest logits, softmax over these K
        softmax, pre          softmax over all E, the K greatest, not normalised again
        sigmoid, sqrtsoftplus the K greatest of score + bias; weights are their scores alone, divided by their sum

    Args:
        logits: `[T, E]`.
        num_groups, group_topk: choose within groups, see `group_limited_topk`.
        scaling_factor: multiplies the weights.
        expert_bias: `[E]`, moves the choice and not the weights; not with softmax.
        fused: accepted as Megatron has it; there is no such kernel, and the numbers are the same.
    Returns: (probs `[T, E]` in the dtype of the logits, routing_map bool `[T, E]`).
    """
    num_tokens, num_experts = logits.shape

    def choose(scores: Tensor) -> tuple[Tensor, Tensor]:
        if num_groups is None or group_topk is None:
            return top_experts(scores, topk)
        return group_limited_topk(scores, topk, num_tokens, num_experts, num_groups, group_topk)

    if score_function == "softmax":
        assert expert_bias is None, "a bias moves scores that do not depend on each other: sigmoid or sqrtsoftplus"
        if use_pre_softmax:
            weights, indices = choose(_softmax(logits))
        else:
            best, indices = choose(logits)
            weights = _softmax(best)
    else:
        scores = _scores(logits, score_function)
        _, indices = choose(scores if expert_bias is None else scores + expert_bias.to(scores.dtype))
        weights = scores.gather(1, indices)
        if topk > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    if scaling_factor is not None:
        weights = weights * scaling_factor
    return _spread(weights.to(logits.dtype), indices, logits)


def _spread(weights: Tensor, indices: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    probs = torch.zeros_like(logits).scatter(1, indices, weights)
    return probs, torch.zeros_like(logits, dtype=torch.bool).scatter(1, indices, True)


@torch.no_grad()
def sinkhorn(cost: Tensor, tol: float = 1e-4) -> Tensor:
    """Scale rows and columns of exp(cost) `[T, E]` until both have equal sums: an even assignment, without gradient.

    Sinkhorn and Knopp 1967. Ends when the columns' factors change by at most `tol` on average.
    """
    kernel = torch.exp(cost)
    tokens, experts = kernel.shape
    of_column = kernel.new_ones(experts)
    while True:
        of_row = 1.0 / (tokens * (kernel @ of_column + 1e-8))
        before, of_column = of_column, 1.0 / (experts * (of_row @ kernel + 1e-8))
        if (of_column - before).abs().mean() <= tol:
            return of_row.unsqueeze(1) * kernel * of_column


def sinkhorn_routing(logits: Tensor, topk: int, training: bool) -> tuple[Tensor, Tensor]:
    """The choice by `sinkhorn` in training, by the weights in evaluation; weights by sigmoid (K = 1) or softmax.

    Returns: (probs `[T, E]`, routing_map `[T, E]`); weights are not normalised over the chosen.
    """
    weights = (torch.sigmoid(logits) if topk == 1 else _softmax(logits)).to(logits.dtype)
    scores = sinkhorn(logits.detach().float()) if training else weights.detach()
    _, indices = top_experts(scores, topk)
    routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, indices, True)
    return weights * routing_map, routing_map


# -- balance -------------------------------------------------------------------------------------------------------


def compute_routing_scores_for_aux_loss(
    logits: Tensor, topk: int, score_function: str, fused: bool = False
) -> tuple[Tensor, Tensor]:
    """What balancing losses look at: scores that sum to 1 over all experts, and the K greatest of them, whatever bias
    and groups made of the real choice.

    Returns: (routing_map bool `[T, E]`, scores `[T, E]` in fp32 or wider).
    """
    if score_function == "softmax":
        scores = _softmax(logits)
    else:
        scores = _scores(logits, score_function)
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    _, indices = top_experts(scores.detach(), topk)
    return torch.zeros_like(logits, dtype=torch.bool).scatter(1, indices, True), scores


def switch_load_balancing_loss_func(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int | Tensor,
    topk: int,
    num_experts: int,
    moe_aux_loss_coeff: float,
    fused: bool = False,
) -> Tensor:
    """coeff * E / (K T^2) * sum over experts of (sum of scores) * (number of tokens); even load gives coeff.

    Args:
        probs: scores of the tokens here `[t, E]`; sums over ranks of the result are the loss of all T tokens.
        tokens_per_expert: `[E]`, over all T tokens.
    Source: Fedus et al. 2021, "Switch Transformers", section 2.2, for K = 1.
    """
    factor = num_experts * moe_aux_loss_coeff / topk
    return (probs.sum(0) * tokens_per_expert).sum() * (factor / (total_num_tokens * total_num_tokens))


def z_loss_func(logits: Tensor, z_loss_coeff: float) -> Tensor:
    """coeff * mean over tokens of logsumexp(logits)^2 (Zoph et al. 2022, "ST-MoE", section 3.3)."""
    return torch.logsumexp(logits, dim=-1).square().mean() * z_loss_coeff


def get_updated_expert_bias(tokens_per_expert: Tensor, expert_bias: Tensor, expert_bias_update_rate: float) -> Tensor:
    """Experts with fewer tokens than the mean gain `rate`, those with more lose it (Wang et al. 2024, "Auxiliary-loss-
    free load balancing", section 3.1). `[..., E]`."""
    mean = tokens_per_expert.mean(-1, keepdim=True)
    return expert_bias + expert_bias_update_rate * torch.sign(mean - tokens_per_expert)


# -- capacity ------------------------------------------------------------------------------------------------------


def get_capacity(num_tokens: int, num_experts: int, capacity_factor: float, min_capacity: int | None = None) -> int:
    """ceil(tokens / experts * factor); `num_tokens` counts a token once for each of its K experts."""
    capacity = math.ceil(num_tokens / num_experts * capacity_factor)
    return capacity if min_capacity is None else max(capacity, min_capacity)


def apply_router_token_dropping(
    routing_probs: Tensor,
    routing_map: Tensor,
    router_topk: int,
    capacity_factor: float,
    drop_policy: str = "probs",
    pad_to_capacity: bool = False,
    num_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """At most `capacity` tokens to each expert: the ones with the greatest weights, or the first ones.

    What is dropped loses its weight and its place in the map; the token keeps its other experts, and weights are not
    normalised again.

    Args:
        pad_to_capacity: every expert's column of the map has exactly `capacity` entries, some of weight 0.
        num_tokens: tokens that count for the capacity; None = all T.
    Returns: (probs, routing_map).
    """
    rows, experts = routing_map.shape
    capacity = get_capacity((rows if num_tokens is None else num_tokens) * router_topk, experts, capacity_factor)
    if capacity >= rows and not pad_to_capacity:
        return routing_probs, routing_map
    capacity = min(capacity, rows)
    # A chosen expert of weight 0 (underflow) still comes before one that was not chosen.
    rank = routing_map if drop_policy == "position" else routing_probs.detach().masked_fill(~routing_map, -1.0)
    order = torch.sort(rank.to(torch.int8) if drop_policy == "position" else rank, dim=0, descending=True, stable=True)
    taken = torch.zeros_like(routing_map).scatter(0, order.indices[:capacity], True)
    kept = taken & routing_map
    return routing_probs * kept, taken if pad_to_capacity else kept
