"""Which parameter is in which group."""

import json

import pytest
import torch
from torch import nn

from megatron_lite.errors import ConfigError
from megatron_lite.optimizer import OptimizerConfig, get_megatron_optimizer, get_param_groups
from megatron_lite.optimizer_param_scheduler import OptimizerParamScheduler
from tests.unit.optimizer.models import SmallModel, rows_of, train_step, wrap


def _names(model, groups):
    names = {p: name for name, p in model.named_parameters()}
    return [[names[p] for p in group["params"]] for group in groups]


def test_biases_and_1d_parameters_have_no_weight_decay():
    model = SmallModel()
    groups = get_param_groups([model], OptimizerConfig(lr=1.0))
    assert [(group["wd_mult"], group["lr_mult"]) for group in groups] == [(1.0, 1.0), (0.0, 1.0)]
    assert _names(model, groups) == [
        ["embedding.weight", "first.weight", "second.weight"],
        ["first.bias", "norm.weight", "norm.bias", "second.bias"],
    ]


@pytest.mark.parametrize("kind", ["fp32_adam", "fp32_sgd", "bf16_adam"])
def test_groups_of_the_golden_model_equal_megatrons(golden, kind):
    """Shapes in order, from parameters built by the golden names."""
    init = {k.removeprefix("init/"): v for k, v in golden(f"train_{kind}.npz").items() if k.startswith("init/")}
    model = nn.Module()
    for name, value in init.items():
        model.register_parameter(name.replace(".", "_").replace("_bias", "_biased"), nn.Parameter(torch.tensor(value)))
    groups = get_param_groups([model], OptimizerConfig(lr=1.0))
    expected = golden("train.json")[kind]["param_groups"]
    assert [group["wd_mult"] for group in groups] == [group["wd_mult"] for group in expected]
    ours = [sorted(list(p.shape) for p in group["params"]) for group in groups]
    assert ours == [sorted(group["shapes"]) for group in expected]


def test_frozen_parameters_are_in_no_group():
    model = SmallModel()
    model.embedding.weight.requires_grad_(False)
    groups = get_param_groups([model], OptimizerConfig(lr=1.0))
    assert "embedding.weight" not in sum(_names(model, groups), [])


def test_the_embeddings_decay_is_off_when_it_has_its_own_initial_spread():
    model = SmallModel()
    groups = get_param_groups([model], OptimizerConfig(lr=1.0, embedding_init_method_std=1.0))
    assert "embedding.weight" in _names(model, groups)[1]


def test_norms_of_queries_and_keys_decay_when_asked_for():
    model = nn.Module()
    model.q_layernorm, model.other_norm = nn.LayerNorm(4), nn.LayerNorm(4)
    groups = get_param_groups([model], OptimizerConfig(lr=1.0, apply_wd_to_qk_layernorm=True))
    assert _names(model, groups) == [
        ["q_layernorm.weight"],
        ["q_layernorm.bias", "other_norm.weight", "other_norm.bias"],
    ]


def test_decoupled_lr_has_its_own_bounds_for_embedding_and_output_layer():
    model = SmallModel()
    for param in (model.embedding.weight, model.second.weight):
        param.is_embedding_or_output_parameter = True
    config = OptimizerConfig(lr=1.0, min_lr=0.1, decoupled_lr=3.0, decoupled_min_lr=0.3)
    groups = get_param_groups([model], config)
    assert _names(model, groups)[2] == ["embedding.weight", "second.weight"]
    assert (groups[2]["max_lr"], groups[2]["min_lr"], groups[2]["wd_mult"]) == (3.0, 0.3, 1.0)
    assert all("max_lr" not in group for group in groups[:2])
    groups = get_param_groups([model], OptimizerConfig(lr=1.0, min_lr=0.1, decoupled_lr=3.0))
    assert groups[2]["min_lr"] == 0.1


@pytest.mark.parametrize("head", ["first", "second"])
def test_C084_exactly_the_picked_parameters_run_at_the_scaled_learning_rate(head):
    """Whatever place they have among the others: after one AdamW step without decay everything moved by lr * mult."""
    model = SmallModel()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ddp, optimizer = wrap(
        model,
        optimizer={"weight_decay": 0.0, "clip_grad": 0.0, "adam_eps": 1e-30},
        scale_lr_cond=lambda name, _: f"{head}." in name,
        lr_mult=0.1,
    )
    schedule = OptimizerParamScheduler(optimizer, 0.01, 0.01, 0.01, 0, 100, "constant", 0.0, 0.0, 100, "constant")
    assert {group["lr"] for group in optimizer.param_groups} == {0.01, 0.001}
    assert schedule.get_lr({}) == 0.01
    train_step(ddp, optimizer, [rows_of(0, 8)])
    moved = {name: (p - before[name]).abs().max().item() for name, p in model.named_parameters()}
    for name, distance in moved.items():
        assert distance == pytest.approx(0.001 if name.startswith(head + ".") else 0.01, rel=1e-3), name


def test_neighbours_of_one_group_are_stepped_on_as_one_tensor():
    ddp, optimizer = wrap(SmallModel())
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]  # of 3 and 4 parameters
    assert sum(tensor.numel() for group in optimizer.param_groups for tensor in group["params"]) == sum(
        p.numel() for p in ddp.module.parameters()
    )


def test_a_model_that_is_frozen_altogether_steps_without_change():
    model = SmallModel()
    for param in model.parameters():
        param.requires_grad_(False)
    ddp, optimizer = wrap(model)
    assert [len(group["params"]) for group in optimizer.param_groups] == [0]
    ddp.zero_grad_buffer()
    ddp.finish_grad_sync()
    assert optimizer.step() == (True, 0.0, None)


def test_the_map_from_parameters_to_groups_can_be_written(tmp_path):
    path = tmp_path / "map.json"
    ddp, _ = wrap(SmallModel(), dump_param_to_param_group_map=str(path))
    assert json.loads(path.read_text())["first.bias"] == 1
    assert list(json.loads(path.read_text())) == [name for name, _ in ddp.module.named_parameters()]


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(optimizer="soap", lr=1.0), "--optimizer soap"),
        (dict(use_distributed_optimizer=True, lr=1.0), "use_distributed_optimizer is False in Dist"),
        (dict(), "--lr is missing"),
    ],
)
def test_what_cannot_be_built_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        get_megatron_optimizer(OptimizerConfig(**settings), [wrap(SmallModel())[0]])


def test_a_bare_module_is_refused_with_the_wrapper_to_use():
    with pytest.raises(ConfigError, match="DistributedDataParallel"):
        get_megatron_optimizer(OptimizerConfig(lr=1.0), [SmallModel()])
