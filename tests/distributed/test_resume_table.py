"""Saved under one layout, loaded under another: the next losses are those of the run that was not interrupted.

A row of LAYOUTS is a layout that saves and one that loads. The suite runs a part of the table in which every layout
saves, loads its own and loads another's; MEGATRON_LITE_WHOLE_TABLE=1 runs all pairs (some minutes).
"""

import os
from dataclasses import replace

import pytest

from tests.distributed.layouts import Layout
from tests.distributed.resume import folder_words, losses_of, train

pytestmark = pytest.mark.slow

STEPS = 5  # before the save, and after it
# 4 layers for two chunks on two stages; 12 samples a step are shared by 2 and by 3 ranks
_MORE = ("--num-layers", "4", "--global-batch-size", "12", "--train-iters", str(2 * STEPS))
LAYOUTS = {
    "one": Layout(),
    "dp2": Layout(dp=2),
    "dp2-zero1": Layout(dp=2, distributed_optimizer=True),
    "tp2": Layout(tp=2),
    "tp2-sp": Layout(tp=2, sp=True),
    "pp2": Layout(pp=2),
    "vpp2": Layout(pp=2, vpp=2),
    "tp2-pp2": Layout(tp=2, pp=2),
    "tp2-dp2-zero1": Layout(tp=2, dp=2, distributed_optimizer=True),
    "dp3": Layout(dp=3),
    "dp3-zero1": Layout(dp=3, distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True),
}
NAMES = list(LAYOUTS)
PAIRS = [(saving, loading) for saving in NAMES for loading in NAMES]
if not os.environ.get("MEGATRON_LITE_WHOLE_TABLE"):
    step = len(NAMES) // 2
    PAIRS = [(name, NAMES[(place + step) % len(NAMES)]) for place, name in enumerate(NAMES)]
    PAIRS += [(name, name) for name in ("one", "dp2-zero1", "vpp2", "tp2-pp2")]


@pytest.fixture(scope="module")
def saved(world, tmp_path_factory):
    """Layout -> (folder of its checkpoint at STEPS, its losses after that)."""
    done = {}

    def save(name):
        if name not in done:
            root = tmp_path_factory.mktemp(name)
            layout = replace(LAYOUTS[name], flags=_MORE)
            seen = world(layout.world_size).run(train_and_save, layout, folder_words(save=root))
            done[name] = root, losses_of(seen)[STEPS:]
        return done[name]

    return save


def train_and_save(layout, words):
    return train(layout, words, 2 * STEPS, save_after=STEPS)


def go_on(layout, words):
    return train(layout, words, STEPS)


@pytest.mark.parametrize("saving, loading", PAIRS)
def test_C116_the_next_losses_do_not_know_of_the_change(world, saved, saving, loading):
    """C116: moments that do not follow their weights, or a part read from the wrong place, show in the second loss."""
    root, expected = saved(saving)
    layout = replace(LAYOUTS[loading], flags=_MORE)
    ranks = world(layout.world_size).run(go_on, layout, folder_words(load=root))
    assert {seen.iteration for seen in ranks} == {STEPS}
    losses = losses_of(ranks)
    if saving == loading:
        assert losses == expected
    assert losses == pytest.approx(expected, rel=1e-5)
    assert len(set(losses)) == STEPS
