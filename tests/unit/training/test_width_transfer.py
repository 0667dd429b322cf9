"""muP: at the base width nothing changes; from there on sizes of activations, and the best learning rate, stay."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron_lite.errors import ConfigError
from megatron_lite.models.gpt import GPTModel, get_gpt_layer_local_spec
from megatron_lite.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron_lite.training.width_transfer import width_transfer
from megatron_lite.transformer.transformer_config import MLATransformerConfig, TransformerConfig

BASE, HEADS, VOCABULARY, LENGTH = 32, 2, 64, 16


def config_of(width: int, mup: bool = True, **settings: Any) -> TransformerConfig:
    """Wider models have wider heads: the case in which attention's scale matters."""
    if mup:
        settings = {"use_mup": True, "mup_base_hidden_size": BASE, "mup_base_head_dim": BASE / HEADS, **settings}
    return TransformerConfig(num_layers=2, hidden_size=width, num_attention_heads=HEADS, init_method_std=0.1,
                             hidden_dropout=0.0, attention_dropout=0.0, **settings)  # fmt: skip


def gpt(width: int, mup: bool = True, tied: bool = False, **settings: Any) -> GPTModel:
    torch.manual_seed(1)
    config = config_of(width, mup, **settings)
    return GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH, share_embeddings_and_output_weights=tied)


def batch() -> tuple[Tensor, Tensor]:
    """Sequences in which a token says what follows."""
    generator = torch.Generator().manual_seed(9)
    rows = [torch.randint(0, VOCABULARY, (8, 1), generator=generator)]
    for _ in range(LENGTH):
        rows.append((rows[-1] * 5 + 3) % VOCABULARY)
    tokens = torch.cat(rows, dim=1)
    return tokens[:, :-1], tokens[:, 1:]


def train(model: GPTModel, lr: float, steps: int, optimizer: str = "adam") -> list[float]:
    """Losses, the first before any step and the last after the last one."""
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    which, factor = width_transfer(model.config, optimizer)
    settings = OptimizerConfig(optimizer=optimizer, lr=lr, weight_decay=0.0, clip_grad=0.0, adam_beta2=0.95)
    stepper = get_megatron_optimizer(settings, [wrapped], scale_lr_cond=which, lr_mult=factor)
    inputs, labels = batch()
    losses = []
    for step in range(steps + 1):
        wrapped.zero_grad_buffer()
        loss = wrapped(inputs, torch.arange(LENGTH).expand(8, -1), None, labels=labels).mean()
        losses.append(loss.item())
        if step < steps:
            loss.backward()
            wrapped.finish_grad_sync()
            stepper.step()
    return losses


@pytest.mark.parametrize("tied", [False, True])
def test_at_the_base_width_it_is_the_ordinary_parametrisation_bit_for_bit(tied: bool) -> None:
    transfer, ordinary = gpt(BASE, True, tied), gpt(BASE, False, tied)
    for (name, a), (_, b) in zip(transfer.named_parameters(), ordinary.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert train(transfer, 1e-2, 3) == train(ordinary, 1e-2, 3)
    assert torch.equal(next(transfer.parameters()), next(ordinary.parameters()))


def test_initial_values_follow_the_table() -> None:
    wide = gpt(8 * BASE)
    spread = {name: param.std().item() for name, param in wide.named_parameters() if param.dim() == 2}
    hidden = 0.1 / math.sqrt(8)
    for part, wanted in {
        "embedding.word_embeddings": 0.1,
        "embedding.position_embeddings": 0.1,
        "output_layer": 0.1,
        "decoder.layers.0.self_attention.linear_qkv": hidden,
        "decoder.layers.1.mlp.linear_fc1": hidden,
        "decoder.layers.1.mlp.linear_fc2": hidden / math.sqrt(2 * 2),
    }.items():
        assert spread[f"{part}.weight"] == pytest.approx(wanted, rel=0.06), part


def test_scores_and_factors_follow_the_table() -> None:
    config = config_of(8 * BASE)
    assert (config.width_multiplier, config.output_multiplier, config.embedding_multiplier) == (8.0, 1 / 8, 1.0)
    assert config.score_scale(128) == math.sqrt(16) / 128
    assert config_of(BASE, mup_base_head_dim=None).score_scale(16) == 1 / 16
    assert config_of(BASE, mup_attn_scale_power=0.5, mup_base_head_dim=None).score_scale(16) == 1 / 4
    assert config_of(4 * BASE, mup_output_mult=0.5).output_multiplier == 0.5
    assert config_of(BASE, softmax_scale=0.3).score_scale(16) == 0.3
    latent = MLATransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=2, use_mup=True,
                                  mup_base_hidden_size=16, mup_base_head_dim=4.0)  # fmt: skip
    assert latent.score_scale(192) == 2 / 192 and latent.width_multiplier == 4.0


def test_embedding_mult_multiplies_the_embedding_and_output_mult_the_logits() -> None:
    ids = torch.arange(LENGTH).view(1, -1)
    plain, scaled = gpt(BASE), gpt(BASE, mup_embedding_mult=3.0, mup_output_mult=0.25)
    assert torch.equal(scaled.embedding(ids, ids), plain.embedding(ids, ids) * 3.0)
    scaled.config.mup_embedding_mult = 1.0
    with torch.no_grad():
        torch.testing.assert_close(scaled.eval()(ids, ids, None), plain.eval()(ids, ids, None) * 0.25)


@pytest.mark.parametrize(
    ("optimizer", "hidden", "rest"), [("adam", 1 / 4, 1.0), ("lion", 1 / 4, 1.0), ("sgd", 1.0, 4.0)]
)
def test_learning_rates_follow_the_table(optimizer: str, hidden: float, rest: float) -> None:
    model = gpt(4 * BASE)
    which, factor = width_transfer(model.config, optimizer)
    assert which is not None
    found = {name: factor if which(name, param) else 1.0 for name, param in model.named_parameters()}
    matrices = {name for name in found if "linear_" in name and name.endswith("weight")}
    assert len(matrices) == 2 * 4
    assert {name for name, rate in found.items() if rate == hidden} == matrices
    assert {rate for name, rate in found.items() if name not in matrices} == {rest}


def test_the_optimizer_has_the_learning_rates_in_its_groups() -> None:
    model = gpt(4 * BASE)
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    which, factor = width_transfer(model.config, "adam")
    stepper = get_megatron_optimizer(OptimizerConfig(lr=1.0), [wrapped], scale_lr_cond=which, lr_mult=factor)
    assert sorted((group["lr"], group["wd_mult"]) for group in stepper.param_groups) == [(0.25, 1), (1, 0), (1, 1)]


def test_without_mup_all_learn_at_one_rate_and_muon_refuses() -> None:
    assert width_transfer(config_of(BASE, mup=False), "adam") == (None, 1.0)
    with pytest.raises(ConfigError, match="--use-mup with --optimizer muon"):
        width_transfer(config_of(BASE), "muon")


def test_numbers_of_mup_without_mup_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--mup-base-hidden-size 8 --mup-output-mult 2.0 without --use-mup"):
        config_of(BASE, mup=False, mup_base_hidden_size=8, mup_output_mult=2.0)
    with pytest.raises(ConfigError, match="--mup-embedding-mult 0"):
        config_of(BASE, mup_embedding_mult=0)


def sizes_after(width: int, mup: bool, steps: int) -> dict[str, float]:
    """How far activations moved in some steps of training: root mean squares by place."""
    before, after = ({}, {})
    for places, trained in ((before, 0), (after, steps)):
        model = gpt(width, mup)
        train(model, 1e-2, trained)
        for name in (
            "decoder.layers.0.self_attention",
            "decoder.layers.1.mlp",
            "decoder.final_layernorm",
            "output_layer",
        ):
            model.get_submodule(name).register_forward_hook(
                lambda _, __, y, name=name, places=places: places.update({name: (y[0] if isinstance(y, tuple) else y)})
            )
        with torch.no_grad():
            model(batch()[0], torch.arange(LENGTH).expand(8, -1), None)
    return {name: (after[name] - before[name]).square().mean().sqrt().item() for name in before}


@pytest.mark.slow
def test_activations_move_as_far_at_every_width_and_without_mup_ever_farther() -> None:
    """The coordinate check of Yang et al. 2022, appendix D.1."""
    widths, steps = (BASE, 4 * BASE, 16 * BASE), 3
    growth: dict[bool, dict[str, float]] = defaultdict(dict)
    for mup in (True, False):
        seen = [sizes_after(width, mup, steps) for width in widths]
        for name in seen[0]:
            growth[mup][name] = seen[-1][name] / seen[0][name]
    assert all(0.4 < ratio < 2.0 for ratio in growth[True].values()), growth[True]
    assert max(growth[False].values()) > 6.0, growth[False]


@pytest.mark.slow
def test_the_best_learning_rate_is_the_same_at_eight_times_the_width() -> None:
    rates = [2.0**-power for power in range(3, 11)]

    def best(width: int, mup: bool) -> int:
        losses = [train(gpt(width, mup), rate, 12)[-1] for rate in rates]
        return min(range(len(rates)), key=lambda i: losses[i] if math.isfinite(losses[i]) else math.inf)

    base = best(BASE, False)
    assert abs(best(8 * BASE, True) - base) <= 1
    assert best(8 * BASE, False) - base >= 2
