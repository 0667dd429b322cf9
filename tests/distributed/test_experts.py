"""A layer of experts on ranks against the same layer in one process: outputs, gradients, what is sent."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megatron_lite import collectives, parallel_state
from megatron_lite.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron_lite.initialization import deferred_initialization
from megatron_lite.models.common.language_module.language_module import LanguageModule
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.transformer import TransformerConfig
from megatron_lite.transformer.moe import GroupedMLP, MoELayer, MoESubmodules, SequentialMLP, SharedExpertMLP

S, B, H, E, K, F_ = 8, 2, 16, 4, 2, 24
MODES = {
    "dropless": {},
    "drop": {"moe_expert_capacity_factor": 0.75},
    "position": {"moe_expert_capacity_factor": 0.75, "moe_token_drop_policy": "position"},
    "pad": {"moe_expert_capacity_factor": 1.25, "moe_pad_expert_input_to_capacity": True},
}


def config_of(**fields: Any) -> TransformerConfig:
    given = {
        "num_layers": 1,
        "hidden_size": H,
        "num_attention_heads": 4,
        "num_moe_experts": E,
        "moe_router_topk": K,
        "moe_ffn_hidden_size": F_,
        "moe_aux_loss_coeff": 0.0,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "init_method_std": 0.5,
        "gradient_accumulation_fusion": True,
    }
    return TransformerConfig(**{**given, **fields})


class Holder(LanguageModule):
    """A model that is one layer of experts."""

    def __init__(self, config: TransformerConfig, experts: type[nn.Module] = GroupedMLP):
        super().__init__(config)
        with deferred_initialization():
            self.mlp = MoELayer(config, MoESubmodules(experts, SharedExpertMLP), layer_number=1)
        self.name_and_initialize()

    def forward(self, x):
        return self.mlp(x)[0]


def trained(config: TransformerConfig, x: torch.Tensor, g: torch.Tensor, experts: type[nn.Module] = GroupedMLP):
    """Outputs, input gradients, (place, gradient) of each parameter: the mean over data-parallel ranks."""
    torch.manual_seed(5)
    model = Holder(config, experts)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    x = x.clone().requires_grad_()
    before = collectives.counts()
    y = ddp(x)
    (y * g).sum().backward()
    sent = collectives.difference(collectives.counts(), before)
    finalize_model_grads([ddp])
    grads = [(param.shard, param.main_grad.clone()) for param in model.parameters()]
    return y.detach(), x.grad, grads, sent


def whole_input(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one data-parallel rank: hidden states and what the outputs' gradient will be."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(S, B, H, generator=generator), torch.randn(S, B, H, generator=generator)


def on_rank(tp: int, etp: int, ep: int, fields: dict[str, Any], sequential: bool = False):
    parallel_state.initialize_model_parallel(tp, expert_tensor_parallel_size=etp, expert_model_parallel_size=ep)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    config = config_of(
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        expert_tensor_parallel_size=etp,
        expert_model_parallel_size=ep,
        **fields,
    )
    mine = slice(collectives.group_rank(groups.tp) * S // tp, (collectives.group_rank(groups.tp) + 1) * S // tp)
    x, g = (t[mine] for t in whole_input(collectives.group_rank(groups.dp)))
    return trained(config, x, g, SequentialMLP if sequential else GroupedMLP)


@pytest.fixture(scope="module")
def reference():
    """By fields and number of data-parallel ranks: outputs, input gradients, mean parameter gradients."""
    known: dict[Any, Any] = {}

    def get(fields: dict[str, Any], dp: int):
        key = (tuple(sorted(fields.items())), dp)
        if key not in known:
            runs = [trained(config_of(**fields), *whole_input(rank)) for rank in range(dp)]
            grads = {spec.name: sum(run[2][i][1] for run in runs) / dp for i, (spec, _) in enumerate(runs[0][2])}
            known[key] = [run[0] for run in runs], [run[1] for run in runs], grads
        return known[key]

    return get


def check(ranks, tp: int, want) -> None:
    outputs, input_grads, grads = want
    for rank, (y, dx, held, _) in enumerate(ranks):
        dp_rank, tp_rank = divmod(rank, tp)
        mine = slice(tp_rank * S // tp, (tp_rank + 1) * S // tp)
        torch.testing.assert_close(y, outputs[dp_rank][mine], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(dx, input_grads[dp_rank][mine], rtol=1e-5, atol=1e-5)
        for spec, grad in held:
            assert grads[spec.name].abs().max() > 0
            for piece in spec.pieces:
                expected = grads[spec.name][piece.global_slices()]
                torch.testing.assert_close(grad[piece.local_slices()], expected, rtol=1e-5, atol=2e-5, msg=spec.name)


# (tp, expert tp, ep): every way to spread a layer over 4 ranks, and over 2
LAYOUTS = [
    (tp, etp, ep)
    for tp, etp, ep in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4))
    if etp * ep <= 4 and (tp, etp, ep) != (1, 1, 1)
]


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize("mode", list(MODES))
def test_c109_any_layout_gives_the_layer_of_one_process(world, reference, dispatcher, mode):
    """Outputs, input gradients and gradients of router, experts and shared experts, in all layouts of four ranks.

    C109: with expert gradients divided by the ranks that hold an expert (and not by all data-parallel ranks) every
    row with ep > 1 is off by that factor.
    """
    fields = {"moe_token_dispatcher_type": dispatcher, "moe_shared_expert_intermediate_size": 8, **MODES[mode]}
    start = (list(MODES).index(mode) + (dispatcher == "alltoall")) % 2
    for number, (tp, etp, ep) in enumerate(LAYOUTS[start::2]):  # the whole table was run by hand
        ranks = world(4).run(on_rank, tp, etp, ep, fields, number % 3 == 0)
        try:
            check(ranks, tp, reference(fields, 4 // tp))
        except AssertionError as error:
            raise AssertionError(f"tp {tp}, expert tp {etp}, ep {ep}: {error}") from None


# -- what is sent ------------------------------------------------------------------------------------------------


def kinds(sent) -> dict[tuple[str, str], tuple[int, int]]:
    """(kind, purpose) -> calls, bytes, over all groups."""
    total: dict[tuple[str, str], tuple[int, int]] = {}
    for (_, kind, purpose), (calls, size) in sent.items():
        before = total.get((kind, purpose), (0, 0))
        total[kind, purpose] = before[0] + calls, before[1] + size
    return total


def test_alltoall_sends_rows_and_their_weights_there_and_back(world):
    """ep 4, a token to 2 of 4 experts: rows and weights there, rows back, and the gradients of all three.

    Counted is the whole exchange, T k rows, of which 1 - 1/e leave a rank: 4 (1 - 1/e) T k h, as the formula has it.
    """
    rows = S * B * K
    for *_, sent in world(4).run(on_rank, 1, 1, 4, {"moe_token_dispatcher_type": "alltoall"}):
        found = kinds(sent)
        assert sum(size for (kind, _), (_, size) in found.items() if kind == "all_to_all") <= 4 * (
            4 * S * B * K * 4 * H
        )  # a rank may receive more rows than it sends, at most all
        assert found.pop(("all_gather", "rows of each expert")) == (1, 4 * E * 8)
        assert set(found) == {("all_to_all", "all_to_all forward"), ("all_to_all", "all_to_all backward")}
    total = [
        sum(kinds(sent)["all_to_all", f"all_to_all {way}"][1] for *_, sent in ranks)
        for ranks in [world(4).run(on_rank, 1, 1, 4, {"moe_token_dispatcher_type": "alltoall"})]
        for way in ("forward", "backward")
    ]
    # Over all ranks every row goes there and back once a pass, its weight one way.
    assert total == [4 * rows * (2 * H + 1) * 4] * 2


def test_allgather_sends_all_tokens_whatever_the_routing(world):
    """g = 4 ranks: tokens, weights and the map there, results back; backward the same without the map."""
    t = S * B
    for *_, sent in world(4).run(on_rank, 1, 1, 4, {}):
        found = kinds(sent)
        assert found == {
            ("all_gather", "routing map"): (1, 4 * t * E),
            ("all_gather", "gather_from_sequence forward"): (2, 4 * t * (H + E) * 4),
            ("reduce_scatter", "reduce_scatter_to_sequence forward"): (1, 4 * t * H * 4),
            ("all_gather", "reduce_scatter_to_sequence backward"): (1, 4 * t * H * 4),
            ("reduce_scatter", "gather_from_sequence backward"): (2, 4 * t * (H + E) * 4),
        }


def test_padded_experts_need_no_counts_and_a_lone_rank_no_collective(world):
    """Every expert has its capacity: the exchange is known ahead. With ep 1 nothing is sent at all."""
    padded = {"moe_token_dispatcher_type": "alltoall", **MODES["pad"]}
    capacity = 10  # ceil(16 tokens * 2 / 4 experts * 1.25)
    for *_, sent in world(2).run(on_rank, 1, 1, 2, padded):
        size = capacity * E * (2 * H + 1) * 4
        assert kinds(sent) == {("all_to_all", f"all_to_all {way}"): (3, size) for way in ("forward", "backward")}
    for dispatcher in ("alltoall", "allgather"):
        for *_, sent in world(2).run(on_rank, 1, 1, 1, {"moe_token_dispatcher_type": dispatcher}):
            assert sent == {}


def narrow(tp: int, ep: int):
    return on_rank(tp, 1, ep, {"moe_latent_size": 6, "moe_shared_expert_intermediate_size": 8})


def test_a_latent_size_narrows_what_routed_experts_see_and_what_is_sent(world, reference):
    """The projections around the experts are held by all ranks, whose parts of their gradients are summed."""
    fields = {"moe_latent_size": 6, "moe_shared_expert_intermediate_size": 8}
    ranks = world(4).run(narrow, 2, 2)
    check(ranks, 2, reference(fields, 2))
    *_, sent = ranks[0]
    assert kinds(sent)["reduce_scatter", "reduce_scatter_to_sequence forward"][1] == (S // 2) * B * (6 * 2 + H * 2) * 4
    config = config_of(**fields)
    torch.manual_seed(5)
    layer = Holder(config).mlp
    x = whole_input(0)[0]
    probs, _ = layer.router(x)
    inner = layer.fc1_latent_proj(x)[0].view(-1, 6)
    routed = sum(expert(inner)[0] * probs[:, e, None] for e, expert in enumerate(layer.experts.local_experts))
    want = layer.fc2_latent_proj(routed)[0].view_as(x) + layer.shared_experts(x)
    torch.testing.assert_close(layer(x)[0], want)


# -- nothing to do -----------------------------------------------------------------------------------------------


def all_to_expert_0(dispatcher: str, sequential: bool):
    """Outputs, gradients of this rank's experts, and how many parameters have one."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    config = config_of(
        expert_model_parallel_size=2,
        moe_token_dispatcher_type=dispatcher,
        moe_router_topk=1,
        moe_router_pre_softmax=True,
        num_moe_experts=2,
    )
    torch.manual_seed(5)
    model = Holder(config, SequentialMLP if sequential else GroupedMLP)
    settings = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1)
    ddp = DistributedDataParallel(config, settings, model)
    with torch.no_grad():
        model.mlp.router.weight.copy_(torch.stack([torch.ones(H), -torch.ones(H)]))
    x = whole_input(dist.get_rank())[0].abs().requires_grad_()  # logits are +sum and -sum: always expert 0
    for _ in range(2):
        ddp.zero_grad_buffer()
        y = ddp(x)
        y.sum().backward()
        finalize_model_grads([ddp])
    grads = {name: param.main_grad.clone() for name, param in model.named_parameters() if "experts" in name}
    return y.detach(), grads


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_c110_a_rank_whose_experts_get_no_token_goes_on_with_zero_gradients(world, dispatcher, sequential):
    """All tokens to expert 0, on rank 0, with buckets that wait for every gradient: no hang, no crash; idle experts get
    gradient zero."""
    (first, busy), (second, idle) = world(2).run(all_to_expert_0, dispatcher, sequential)
    assert first.abs().max() > 0 and second.abs().max() > 0
    assert all(grad.abs().max() > 0 for grad in busy.values())
    assert len(idle) == 2 and all(grad.abs().max() == 0 for grad in idle.values())


def one_token(dispatcher: str):
    """Rank 1 has as many tokens as rank 0 in an allgather, else one: 1 row of 2."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    config = config_of(expert_model_parallel_size=2, moe_token_dispatcher_type=dispatcher)
    x, g = whole_input(0)
    if dispatcher == "alltoall" and dist.get_rank() == 1:
        x, g = x[:1, :1], g[:1, :1]
    return trained(config, x, g)[:2]


def test_ranks_may_have_different_numbers_of_tokens_in_an_alltoall(world):
    """The first token's output does not depend on who else is routed."""
    (y, dx), (one, done) = world(2).run(one_token, "alltoall")
    torch.testing.assert_close(one, y[:1, :1])
    torch.testing.assert_close(done, dx[:1, :1])
