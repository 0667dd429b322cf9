"""Checkpoints of models with experts: saved with experts spread in one way, read in another."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lite.checkpointing import folders
from megatron_lite.checkpointing.sharded import saved_tensors
from tests.distributed.layouts import Layout
from tests.distributed.resume import Seen, folder_words, losses_of, train

pytestmark = pytest.mark.slow

STEPS = 3  # before the save, and after it
_GROUPED = ("--moe-grouped-gemm",)
_ALLTOALL = ("--moe-token-dispatcher-type", "alltoall")


def train_and_save(layout: Layout, words: list[str]) -> Seen:
    return train(layout, words, 2 * STEPS, save_after=STEPS)


def go_on(layout: Layout, words: list[str]) -> Seen:
    return train(layout, words, STEPS)


def padded(**fields: Any) -> Layout:
    """The vocabulary is padded to 512 by the same rule with one and with two tensor-parallel ranks."""
    flags = fields.pop("flags", ())
    return Layout(model="deepseek", flags=("--make-vocab-size-divisible-by", "128", *flags), **fields)


@pytest.fixture(scope="module")
def saved(world, tmp_path_factory):
    """(folder, losses after the save) of a run of layers of experts one by one, two expert-parallel ranks."""
    root = tmp_path_factory.mktemp("ep2")
    layout = padded(ep=2, dp=2, distributed_optimizer=True)
    return root, losses_of(world(2).run(train_and_save, layout, folder_words(save=root)))[STEPS:]


LOADING = {
    "as saved": padded(ep=2, dp=2, distributed_optimizer=True),
    "grouped, one process": padded(flags=_GROUPED),
    "grouped, ep 4": padded(ep=4, dp=4, distributed_optimizer=True, flags=_GROUPED + _ALLTOALL),
    "expert tp 2": padded(etp=2, dp=2, flags=_GROUPED),
    "dp 2": padded(dp=2, distributed_optimizer=True),
    "tp 2, ep 2, pp 2": padded(tp=2, sp=True, ep=2, etp=1, pp=2, distributed_optimizer=True, flags=_ALLTOALL),
}


@pytest.mark.parametrize("loading", list(LOADING))
def test_experts_are_found_under_their_global_number(world, saved, loading):
    """Weights, moments and expert biases follow their expert to another rank, another cut, another implementation.

    Under the layout that saved the losses are bit-equal."""
    root, expected = saved
    layout = LOADING[loading]
    losses = losses_of(world(layout.world_size).run(go_on, layout, folder_words(load=root)))
    if loading == "as saved":
        assert losses == expected
    assert losses == pytest.approx(expected, rel=1e-5) and len(set(losses)) == STEPS


def test_the_names_on_disk_count_experts_through(saved):
    """Eight experts in two layers, each a tensor of its own whatever rank held it."""
    tensors = saved_tensors(folders.find(saved[0], STEPS))
    experts = {name for name in tensors if ".local_experts." in name and not name.startswith("optimizer.")}
    assert experts == {
        f"decoder.layers.{layer}.mlp.experts.local_experts.{number}.linear_fc{i}.weight"
        for layer in (0, 1)
        for number in range(8)
        for i in (1, 2)
    }
    assert tensors["decoder.layers.1.mlp.experts.local_experts.7.linear_fc1.weight"].shape == (48, 32)
    assert "decoder.layers.1.mlp.router.expert_bias" in tensors
