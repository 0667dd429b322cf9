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
def test_any_layout_gives_the_layer_of_one_process(world, reference, dispatcher, mode):
    """Outputs, input gradients and gradients of router, experts and shared experts, in all layouts of four ranks.

    C109: with expert gradients divided by the ranks that hold an expert (and not by all data-parallel ranks) every
    row with ep > 1 is off by that factor.
    """
    fields = {"moe_token_dispatcher_type": dispatcher, "moe_shared_expert_intermediate_size": 8, **MODES[mode]}
    for number, (tp, etp, ep) in enumerate(LAYOUTS):
        ranks = world(4).run(on_rank, tp, etp, ep, fields, number % 3 == 0)
        try:
            check(ranks, tp, reference(fields, 4 // tp))
        except AssertionError as error:
            raise AssertionError(f"tp {tp}, expert tp {etp}, ep {ep}: {error}") from None
