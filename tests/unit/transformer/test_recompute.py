"""Recomputation changes memory only: gradients are bit-equal, with dropout too."""

import pytest
import torch

from megatron_lite.models.gpt import GPTModel, get_gpt_layer_local_spec
from megatron_lite.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron_lite.transformer import TransformerConfig

LAYERS = 4


@pytest.fixture(autouse=True)
def forget_regions():
    yield
    get_cuda_rng_tracker().reset()


def forward(dropout: float = 0.0, training: bool = True, **recompute):
    """The model and its loss per token."""
    torch.manual_seed(11)
    model_parallel_cuda_manual_seed(11)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        init_method_std=0.3,
        **recompute,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), 48, 16, share_embeddings_and_output_weights=True)
    model.train(training)
    tokens = torch.randint(0, 48, (2, 13), generator=torch.Generator().manual_seed(0))
    return model, model(tokens[:, :-1], torch.arange(12).expand(2, -1), None, labels=tokens[:, 1:])


def grads(dropout: float = 0.0, training: bool = True, **recompute):
    """Loss per token, gradients, and a draw after the step."""
    model, loss = forward(dropout, training, **recompute)
    loss.mean().backward()
    found = {name: param.grad for name, param in model.named_parameters()}
    assert all(grad.abs().max() > 0 for grad in found.values())
    return loss.detach(), found, torch.rand(3)


KINDS = [
    *(
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": n}
        for n in (1, 2, 3, 9)
    ),
    *({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": n} for n in (1, 3, 9)),
    *(
        {"recompute_granularity": "selective", "recompute_modules": modules}
        for modules in (["core_attn"], ["mlp"], ["layernorm"], ["core_attn", "layernorm", "mlp"])
    ),
]


def same(a, b):
    assert torch.equal(a[0], b[0])
    for name, grad in a[1].items():
        assert torch.equal(grad, b[1][name]), name
    assert torch.equal(a[2], b[2]), "the random state after the step differs"


def test_C096_every_group_of_uniform_recompute_starts_from_its_own_input():
    """4 layers in groups of 2: feeding all groups the first input would still give a loss, and wrong gradients."""
    same(grads(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2), grads())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(str(value) for value in kind.values()))
def test_C097_recompute_draws_the_same_dropout_masks(kind):
    """Dropout 0.1 everywhere; also the state after the step is that of no recompute."""
    same(grads(0.1, **kind), grads(0.1))


def test_dropout_reaches_the_loss():
    """Else the tests above would compare nothing."""
    assert not torch.equal(grads(0.1)[0], grads(0.0)[0])


@pytest.mark.parametrize("kind", KINDS[:1] + KINDS[-1:], ids=["full", "selective"])
def test_evaluation_recomputes_nothing(kind):
    same(grads(0.1, training=False, **kind), grads(0.0))


def kept_bytes(**recompute) -> int:
    """What the graph holds when forward is over, parameters apart."""
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model, _ = forward(**recompute)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return sum(storage.nbytes() for pointer, storage in storages.items() if pointer not in weights)


@pytest.mark.parametrize(
    ("kind", "share"),
    [
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}, 0.25),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}, 0.7),
        ({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, 0.7),
        ({"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}, 0.95),
    ],
    ids=["uniform", "block", "mlp", "layernorm"],
)
def test_recompute_keeps_less_memory(kind, share):
    """Else it would only cost time."""
    assert kept_bytes(**kind) < share * kept_bytes()


EXPERTS = {
    "num_moe_experts": 4,
    "moe_shared_expert_intermediate_size": 24,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_input_jitter_eps": 0.1,
    "moe_aux_loss_coeff": 0.3,
    "moe_z_loss_coeff": 0.1,
    "add_bias_linear": False,
}
MODULES = ["moe"], ["shared_experts"], ["layernorm", "moe"], ["core_attn", "mlp", "moe", "shared_experts"]
OF_EXPERTS = [KINDS[1], KINDS[4], *({"recompute_granularity": "selective", "recompute_modules": m} for m in MODULES)]


def with_experts(**recompute):
    """Gradients, and what the routers counted."""
    torch.manual_seed(11)
    model_parallel_cuda_manual_seed(11)
    shape = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "init_method_std": 0.3}
    config = TransformerConfig(**shape, hidden_dropout=0.1, attention_dropout=0.1, **EXPERTS, **recompute)
    model = GPTModel(config, get_gpt_layer_local_spec(num_experts=4), 48, 16)
    tokens = torch.randint(0, 48, (2, 13), generator=torch.Generator().manual_seed(0))
    model(tokens[:, :-1], torch.arange(12).expand(2, -1), None, labels=tokens[:, 1:]).mean().backward()
    routers = [layer.mlp.router for layer in model.decoder.layers]
    counted = [router.local_tokens_per_expert for router in routers] + [router.load for router in routers]
    counted += [loss for router in routers for loss in router.losses.values()]
    return torch.stack([c.sum() for c in counted]), {n: p.grad for n, p in model.named_parameters()}, torch.rand(3)


@pytest.mark.parametrize("kind", OF_EXPERTS, ids=lambda kind: "-".join(str(value) for value in kind.values()))
def test_recomputed_experts_count_tokens_and_losses_once(kind):
    """Gradients (in which balancing losses are), loads, logged losses and jitter: those of no recompute, bit by bit."""
    plain = with_experts()
    assert plain[0][:3].tolist() == [2.0 * 24] * 3
    same(with_experts(**kind), plain)
