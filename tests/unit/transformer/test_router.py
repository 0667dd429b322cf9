"""Routing against tables worked out by hand, finite differences, and the public reports of what others got wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.aux_loss import AuxLossAutoScaler, attach_aux_loss
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron_lite.transformer import TransformerConfig
from megatron_lite.transformer.moe.moe_utils import (
    apply_router_token_dropping,
    compute_routing_scores_for_aux_loss,
    get_capacity,
    get_updated_expert_bias,
    group_limited_topk,
    sinkhorn,
    switch_load_balancing_loss_func,
    topk_routing_with_score_function,
    z_loss_func,
)
from megatron_lite.transformer.moe.router import TopKRouter

LOGITS = torch.tensor([[2.0, 1, 0, -1], [0, 1, 2, 0.5], [1.5, 1, 0.5, 2]])


@pytest.fixture(autouse=True)
def _loss_scale():
    AuxLossAutoScaler.set_loss_scale(1.0)
    yield
    AuxLossAutoScaler.set_loss_scale(1.0)
    get_cuda_rng_tracker().reset()


def router_of(experts: int = 4, hidden: int = 8, **given: Any) -> TopKRouter:
    torch.manual_seed(5)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=2,
        num_moe_experts=experts,
        add_bias_linear=False,
        init_method_std=0.5,
        **given,
    )
    return TopKRouter(config, ProcessGroupCollection(), layer_number=1)


def inputs(s: int = 6, b: int = 4, hidden: int = 8, seed: int = 0) -> torch.Tensor:
    x = torch.randn(s, b, hidden, generator=torch.Generator().manual_seed(seed))
    return x + 0.5  # so that some experts are liked more than others


def rows(probs: torch.Tensor) -> list[dict[int, float]]:
    return [{e: round(p, 4) for e, p in enumerate(row.tolist()) if p} for row in probs]


# -- choice --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given_", "wanted"),
    [
        ({}, [{0: 0.7311, 1: 0.2689}, {1: 0.2689, 2: 0.7311}, {0: 0.3775, 3: 0.6225}]),
        ({"use_pre_softmax": True}, [{0: 0.6439, 1: 0.2369}, {1: 0.2131, 2: 0.5793}, {0: 0.2760, 3: 0.4551}]),
        (
            {"score_function": "sigmoid", "expert_bias": torch.tensor([0, 0, 0, 0.3])},
            [{0: 0.5464, 1: 0.4536}, {2: 0.5859, 3: 0.4141}, {0: 0.4814, 3: 0.5186}],
        ),
    ],
    ids=["post", "pre", "sigmoid-bias"],
)
def test_c102_softmax_before_or_after_the_choice_and_biased_scores(given_, wanted) -> None:
    """C102: logits 2 1 0 -1 give .731 .269 after and .644 .237 before, not normalised again."""
    probs, routing_map = topk_routing_with_score_function(LOGITS, 2, **given_)
    assert rows(probs) == wanted
    assert torch.equal(routing_map, probs > 0) and routing_map.dtype == torch.bool


def test_sqrtsoftplus_scores() -> None:
    probs, _ = topk_routing_with_score_function(LOGITS[:1], 2, score_function="sqrtsoftplus", scaling_factor=3.0)
    a, b = math.sqrt(math.log1p(math.exp(2))), math.sqrt(math.log1p(math.exp(1)))
    assert probs[0].tolist() == pytest.approx([3 * a / (a + b), 3 * b / (a + b), 0, 0])


def test_groups_count_by_the_sum_of_their_best_scores() -> None:
    scores = torch.tensor([[0.9, 0.1, 0.2, 0.8, 0.5, 0.45, 0.7, 0.05]])
    _, indices = group_limited_topk(scores, 4, 1, 8, num_groups=4, group_topk=2)
    assert indices.tolist() == [[0, 3, 2, 1]]


def test_equal_scores_go_to_the_lower_expert() -> None:
    """torch.topk leaves it open, and takes others on another device."""
    _, routing_map = topk_routing_with_score_function(torch.zeros(5, 64), 3)
    assert routing_map.nonzero()[:, 1].view(5, 3).tolist() == [[0, 1, 2]] * 5


@settings(max_examples=40)
@given(
    st.integers(1, 7),
    st.sampled_from([(4, 1, 1), (8, 2, 1), (8, 4, 2), (12, 3, 3)]),
    st.sampled_from(["softmax", "sigmoid", "sqrtsoftplus"]),
    st.booleans(),
    st.data(),
)
def test_every_token_gets_k_experts_and_weights_add_up(tokens, shape, function, pre, data) -> None:
    experts, groups, kept = shape
    topk = data.draw(st.integers(kept, kept * experts // groups))
    if topk % kept:
        topk = kept
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(tokens))
    limited = (groups, kept) if groups > 1 else (None, None)
    probs, routing_map = topk_routing_with_score_function(
        logits, topk, pre, *limited, scaling_factor=1.5, score_function=function
    )
    assert (routing_map.sum(1) == topk).all()
    assert (probs[~routing_map] == 0).all()
    sums = probs.sum(1) / 1.5
    if function == "softmax" and pre:
        assert (sums <= 1 + 1e-6).all()
    elif topk > 1 or function == "softmax":
        torch.testing.assert_close(sums, torch.ones(tokens))
    if groups > 1:
        assert (routing_map.view(tokens, groups, -1).any(-1).sum(1) <= kept).all()


def test_the_gradient_reaches_logits_of_chosen_experts_alone() -> None:
    logits = LOGITS.clone().requires_grad_()
    probs, routing_map = topk_routing_with_score_function(logits, 2)
    (probs * torch.arange(12.0).view(3, 4)).sum().backward()
    assert (logits.grad[routing_map] != 0).all() and (logits.grad[~routing_map] == 0).all()


def test_sinkhorn_gives_rows_and_columns_equal_sums() -> None:
    plan = sinkhorn(torch.randn(64, 8, generator=torch.Generator().manual_seed(1)) * 2)
    torch.testing.assert_close(plan.sum(0), torch.full((8,), 1 / 8), rtol=1e-3, atol=0)
    torch.testing.assert_close(plan.sum(1), torch.full((64,), 1 / 64), rtol=2e-2, atol=0)


def test_fp64_router_computes_in_fp64() -> None:
    router = router_of(moe_router_dtype="fp64")
    probs, _ = router(inputs())
    logits = inputs().double() @ router.weight.double().T
    wanted, _ = topk_routing_with_score_function(logits.view(-1, 4), 2)
    assert probs.dtype == torch.float64 and torch.equal(probs, wanted)


# -- losses --------------------------------------------------------------------------------------------------------
def test_losses_of_three_tokens_worked_by_hand() -> None:
    routing_map, scores = compute_routing_scores_for_aux_loss(LOGITS, 2, "softmax")
    assert routing_map.sum(0).tolist() == [2, 2, 1, 1]
    assert scores.sum(0).tolist() == pytest.approx([0.9983, 0.6174, 0.7679, 0.6164], abs=1e-4)
    aux = switch_load_balancing_loss_func(scores, routing_map.sum(0), 3, 2, 4, 0.01)
    assert aux.item() == pytest.approx(0.01 * 1.02571, abs=1e-7)
    assert z_loss_func(LOGITS, 0.001).item() == pytest.approx(0.001 * 6.7353, abs=1e-7)


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
def test_even_load_gives_a_loss_of_one(kind: str) -> None:
    """Every sequence of 4 tokens uses each of 4 experts equally, with near equal scores."""
    router = router_of(hidden=4, moe_router_load_balancing_type=kind, moe_aux_loss_coeff=1.0)
    with torch.no_grad():
        router.weight.copy_(torch.eye(4) * 1e-4)
    x = torch.stack([torch.eye(4)[[i, (i + 1) % 4]].sum(0) for i in range(4)]).unsqueeze(1).repeat(1, 3, 1)
    router(x)
    assert [loss.item() for loss in router.losses.values()] == pytest.approx([1.0], abs=1e-6)


def loss_gradient(given_: dict[str, Any], x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """The router's gradient, of its losses alone."""
    router = router_of(**given_)
    AuxLossAutoScaler.set_loss_scale(scale)
    probs, _ = router(x)
    (probs * 0).sum().backward()
    return router.weight.grad


KINDS = {
    "aux": {"moe_aux_loss_coeff": 0.7},
    "sigmoid": {"moe_aux_loss_coeff": 0.7, "moe_router_score_function": "sigmoid"},
    "seq": {"moe_aux_loss_coeff": 0.7, "moe_router_load_balancing_type": "seq_aux_loss"},
    "z": {"moe_z_loss_coeff": 0.3},
    "all": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.1, 0.2, 0.3],
        "moe_z_loss_coeff": 0.05,
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_attached_gradients_equal_finite_differences(kind: str) -> None:
    """Of the losses as they are logged, times their coefficients and the scale."""
    given_ = {**KINDS[kind], "moe_router_dtype": "fp64"}
    x, scale = inputs(), 3.0
    grad = loss_gradient(given_, x, scale)
    router = router_of(**given_)
    coefficients = {
        "load_balancing_loss": router.config.aux_loss_coefficient("aux_loss"),
        "seq_load_balancing_loss": router.config.aux_loss_coefficient("seq_aux_loss"),
        "global_load_balancing_loss": router.config.aux_loss_coefficient("global_aux_loss"),
        "z_loss": router.config.moe_z_loss_coeff or 0.0,
    }

    def total() -> float:
        router.reset_statistics()
        router.after_grad_sync(ProcessGroupCollection())
        router(x)
        return sum(coefficients[name] * value.double().item() for name, value in router.losses.items())

    for e, h in ((0, 0), (1, 3), (3, 7)):
        values = []
        for step in (1e-2, -1e-2):
            with torch.no_grad():
                router.weight[e, h] += step
            values.append(total())
            with torch.no_grad():
                router.weight[e, h] -= step
        assert scale * (values[0] - values[1]) / 2e-2 == pytest.approx(grad[e, h].item(), rel=2e-2, abs=1e-4)


def test_c103_padding_to_capacity_leaves_the_sequence_loss_alone() -> None:
    """C103: experts padded to their capacity all look evenly loaded; the loss judges the choice before."""
    found = []
    for extra in ({}, {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}):
        router = router_of(moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=1.0, **extra)
        with torch.no_grad():
            router.weight[0] += 2.0
        router(inputs())
        found.append(router.losses["seq_load_balancing_loss"].item())
    assert found[0] == found[1] > 1.05


@pytest.mark.parametrize("size", [1, 2, 4])
def test_c104_sequence_loss_does_not_depend_on_the_micro_batch(size: int) -> None:
    """C104: per-token loss, a global batch of 4: gradients are sums, divided by all tokens in the end."""
    given_ = {**KINDS["seq"], "calculate_per_token_loss": True}
    x = inputs(b=4)
    total = sum(loss_gradient(given_, part) for part in x.split(size, dim=1)) / (x.shape[0] * x.shape[1])
    torch.testing.assert_close(total, loss_gradient(KINDS["seq"], x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["aux", "seq", "z"])
def test_c106_losses_are_averaged_over_micro_batches_and_are_attached(kind: str) -> None:
    """C106: 8 micro-batches weigh as one batch of 8 (of equal parts: only the sequence loss is the same for any); with
    the coefficient 0 there is nothing."""
    x = inputs(b=1).repeat(1, 8, 1)
    whole = loss_gradient(KINDS[kind], x)
    parts = sum(loss_gradient(KINDS[kind], part, scale=1 / 8) for part in x.split(1, dim=1))
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-7)
    assert whole.abs().max() > 1e-4
    assert not loss_gradient({}, x).any()


def test_the_scale_applies_to_the_loss_and_not_to_what_it_rides_on() -> None:
    x, loss = torch.ones(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    AuxLossAutoScaler.set_loss_scale(torch.tensor([8.0]))
    y = attach_aux_loss(x * 1.0, loss * 0.5)
    assert torch.equal(y, x)
    (y * 3).sum().backward()
    assert x.grad.tolist() == [3.0] * 3 and loss.grad.item() == 4.0


def test_evaluation_and_the_first_pass_of_recompute_count_nothing() -> None:
    router = router_of(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, **KINDS["z"])
    with torch.no_grad():
        router(inputs())
    router.eval()
    router(inputs())
    assert not router.losses and router.load is None and not router.local_tokens_per_expert.any()
    router.train()
    router(inputs())
    assert router.losses and router.local_tokens_per_expert.sum() == router.load[0].sum() == 2 * 24


# -- expert bias ---------------------------------------------------------------------------------------------------
def test_bias_moves_towards_even_load_and_stays_where_it_is_even() -> None:
    bias = torch.tensor([0.5, 0.5, 0.5, 0.5])
    moved = get_updated_expert_bias(torch.tensor([10.0, 2, 5, 7]), bias, 1e-3) - bias
    assert moved.tolist() == pytest.approx([-1e-3, 1e-3, 1e-3, -1e-3], abs=1e-7)
    assert torch.equal(get_updated_expert_bias(torch.tensor([3.0, 3, 5, 1]), bias, 1e-3)[:2], bias[:2])


def test_bias_keeps_fp32_in_a_bf16_model() -> None:
    """0.7 + 1e-3 is 0.7 in bf16: the bias would never move."""
    router = router_of(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    router.expert_bias.fill_(0.7 + 1e-3)
    router.to(torch.bfloat16)
    assert router.weight.dtype == torch.bfloat16 and router.expert_bias.dtype == torch.float32
    assert router.expert_bias[0].item() == pytest.approx(0.701, abs=1e-7)
    assert [name for name in router.state_dict()] == ["weight", "expert_bias"]


# -- capacity ------------------------------------------------------------------------------------------------------
def test_capacity_numbers() -> None:
    assert get_capacity(8 * 2, 4, 1.0) == 4
    assert get_capacity(8 * 2, 4, 1.25) == 5
    assert get_capacity(10 * 2, 4, 1.0) == 5


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("pad", [False, True])
def test_c100_a_capacity_above_the_tokens_drops_nothing(policy: str, pad: bool) -> None:
    """C100: 4 tokens, 2 experts, top-2, factor 8: a capacity of 32 rows of 4."""
    probs, routing_map = topk_routing_with_score_function(LOGITS[:, :2].repeat(2, 1)[:4], 2)
    kept, kept_map = apply_router_token_dropping(probs, routing_map, 2, 8.0, policy, pad)
    assert torch.equal(kept, probs) and torch.equal(kept_map, routing_map)


@pytest.mark.parametrize(("policy", "wanted"), [("probs", [1, 3]), ("position", [0, 1])])
def test_c101_the_default_policy_drops_the_least_weights(policy: str, wanted: list[int]) -> None:
    """C101: `--moe-expert-capacity-factor 1.0` alone is policy `probs`; 4 tokens want expert 0, 2 may."""
    config = router_of(moe_expert_capacity_factor=1.0, moe_aux_loss_coeff=0.01).config
    assert config.moe_token_drop_policy == "probs"
    probs = torch.tensor([[0.3, 0.7], [0.9, 0.0], [0.4, 0.6], [0.8, 0.0]])
    kept, kept_map = apply_router_token_dropping(probs, probs > 0, 1, 1.0, policy)
    assert kept_map[:, 0].nonzero().flatten().tolist() == wanted and kept_map.sum(0).tolist() == [2, 2]
    assert (kept[~kept_map] == 0).all() and torch.equal(kept[kept_map], probs[kept_map])


def test_dropped_pairs_have_no_gradient_and_keep_other_experts() -> None:
    logits = inputs().view(-1, 8)[:, :4].clone().requires_grad_()
    probs, routing_map = topk_routing_with_score_function(logits, 2, score_function="sigmoid")
    kept, kept_map = apply_router_token_dropping(probs, routing_map, 2, 0.5)
    assert (kept_map.sum(0) <= get_capacity(48, 4, 0.5)).all() and kept_map.sum() < routing_map.sum()
    half = (kept_map.sum(1) == 1).nonzero().flatten()
    assert len(half) and torch.equal(kept[half].sum(1), (probs * kept_map)[half].sum(1))
    gone = kept_map.sum(1) == 0
    kept.sum().backward()
    assert not logits.grad[gone].any()


def test_padding_to_capacity_fills_every_expert_with_rows_of_weight_zero() -> None:
    probs, routing_map = topk_routing_with_score_function(inputs().view(-1, 8)[:, :4], 2)
    kept, kept_map = apply_router_token_dropping(probs, routing_map, 2, 1.5, pad_to_capacity=True)
    dropped, dropped_map = apply_router_token_dropping(probs, routing_map, 2, 1.5)
    assert (kept_map.sum(0) == 18).all() and torch.equal(kept, dropped) and (kept_map | dropped_map == kept_map).all()


@pytest.mark.parametrize("capacity", [None, 1.0])
def test_c108_padding_goes_to_no_expert_and_counts_nowhere(capacity: float | None) -> None:
    """C108: more experts than tokens, an expert bias, a mask: counts, capacity, losses use the real tokens."""
    given_: dict[str, Any] = {
        "experts": 16,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_expert_capacity_factor": capacity,
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.1, 0.2, 0.3],
        "moe_z_loss_coeff": 0.1,
    }
    x = inputs(s=5, b=1)
    mask = torch.tensor([[False], [False], [False], [True], [True]])
    router, short = router_of(**given_), router_of(**given_)
    probs, routing_map = router(x, mask)
    wanted, wanted_map = short(x[:3])
    assert not probs[3:].any() and not routing_map[3:].any()
    assert torch.equal(probs[:3], wanted) and torch.equal(routing_map[:3], wanted_map)
    assert torch.equal(router.local_tokens_per_expert, short.local_tokens_per_expert)
    assert {name: loss.item() for name, loss in router.losses.items()} == pytest.approx(
        {name: loss.item() for name, loss in short.losses.items()}
    )
    (probs[:3] ** 2).sum().backward()
    (wanted**2).sum().backward()
    torch.testing.assert_close(router.weight.grad, short.weight.grad)


# -- noise ---------------------------------------------------------------------------------------------------------
def test_jitter_moves_training_alone_and_draws_from_its_own_region() -> None:
    model_parallel_cuda_manual_seed(3)
    router, plain, x = router_of(moe_input_jitter_eps=0.3), router_of(), inputs()
    before = torch.get_rng_state()
    first, second = router(x)[0], router(x)[0]
    assert torch.equal(torch.get_rng_state(), before), "dropout elsewhere would draw other numbers"
    assert not torch.equal(first, second) and not torch.equal(first, plain(x)[0])
    router.eval()
    assert torch.equal(router(x)[0], plain(x)[0])


def test_forced_balance_is_even_and_lets_gradients_through() -> None:
    router = router_of(moe_router_force_load_balancing=True)
    with torch.no_grad():
        router.weight[0] += 5.0
    probs, routing_map = router(inputs(s=64, b=16))
    load = routing_map.sum(0) / routing_map.sum()
    assert (load - 0.25).abs().max() < 0.03
    (probs * torch.arange(4)).sum().backward()
    assert router.weight.grad.abs().max() > 0
