"""Saved under one layout, loaded under another: the next losses are those of the run that was not interrupted.

A row of LAYOUTS saves and loads. The suite runs some pairs of them, in which every dimension is given up and taken up;
MEGATRON_LITE_WHOLE_TABLE=1 runs all pairs of a model (some minutes).
"""

import os

import pytest

from tests.distributed.layouts import Layout
from tests.distributed.resume import folder_words, losses_of, saver, train

pytestmark = pytest.mark.slow

STEPS = 5  # before the save, and after it
# 4 layers for two chunks on two stages; 12 samples a step are shared by 2 and by 3 ranks
_DENSE = ("--num-layers", "4", "--global-batch-size", "12", "--train-iters", str(2 * STEPS))
_EXPERTS = _DENSE[2:]
LAYOUTS = {
    "one": Layout(flags=_DENSE),
    "dp2": Layout(dp=2, flags=_DENSE),
    "dp2-zero1": Layout(dp=2, distributed_optimizer=True, flags=_DENSE),
    "tp2": Layout(tp=2, flags=_DENSE),
    "tp2-sp": Layout(tp=2, sp=True, flags=_DENSE),
    "pp2": Layout(pp=2, flags=_DENSE),
    "vpp2": Layout(pp=2, vpp=2, flags=_DENSE),
    "tp2-pp2": Layout(tp=2, pp=2, flags=_DENSE),
    "tp2-dp2-zero1": Layout(tp=2, dp=2, distributed_optimizer=True, flags=_DENSE),
    "cp2": Layout(cp=2, flags=_DENSE),
    "cp2-zero1": Layout(cp=2, distributed_optimizer=True, flags=_DENSE),
    "dp3": Layout(dp=3, flags=_DENSE),
    "dp3-zero1": Layout(
        dp=3, distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, flags=_DENSE
    ),
    "moe-one": Layout(model="mixtral", flags=_EXPERTS),
    "moe-ep2": Layout(model="mixtral", ep=2, dp=2, flags=_EXPERTS),
    "moe-ep2-zero1": Layout(model="mixtral", ep=2, dp=2, distributed_optimizer=True, flags=_EXPERTS),
    "moe-tp2-ep2": Layout(model="mixtral", tp=2, sp=True, ep=2, dp=2, distributed_optimizer=True, flags=_EXPERTS),
    "moe-tp4-etp1": Layout(model="mixtral", tp=4, sp=True, etp=1, flags=_EXPERTS),
    "moe-pp2": Layout(model="mixtral", pp=2, flags=_EXPERTS),
    "moe-dp3": Layout(model="mixtral", dp=3, flags=_EXPERTS),
}
PAIRS = [
    ("one", "tp2-pp2"),
    ("tp2-dp2-zero1", "dp3-zero1"),
    ("tp2-dp2-zero1", "vpp2"),
    ("vpp2", "dp2-zero1"),
    ("vpp2", "vpp2"),
    ("cp2-zero1", "pp2"),
    ("tp2-dp2-zero1", "tp2-dp2-zero1"),
    ("moe-tp2-ep2", "moe-one"),
    ("moe-one", "moe-ep2"),
]
if os.environ.get("MEGATRON_LITE_WHOLE_TABLE"):
    PAIRS = [(a, b) for a in LAYOUTS for b in LAYOUTS if LAYOUTS[a].model == LAYOUTS[b].model]


@pytest.fixture(scope="module")
def saved(world, tmp_path_factory):
    """Layout -> (folder of its checkpoint at STEPS, its losses after that)."""
    return saver(world, tmp_path_factory, LAYOUTS, train_and_save, STEPS)


def train_and_save(layout, words):
    return train(layout, words, 2 * STEPS, save_after=STEPS)


def go_on(layout, words):
    return train(layout, words, STEPS)


def check(world, saved, saving, loading, *more):
    """Load what `saving` has saved under `loading` and train on. Returns: what the ranks saw."""
    root, expected = saved(saving)
    ranks = world(LAYOUTS[loading].world_size).run(go_on, LAYOUTS[loading], [*folder_words(load=root), *more])
    assert {seen.iteration for seen in ranks} == {STEPS}
    losses = losses_of(ranks)
    if saving == loading:
        assert losses == expected
    assert losses == pytest.approx(expected, rel=1e-5)
    assert len(set(losses)) == STEPS
    return ranks


@pytest.mark.parametrize("saving, loading", PAIRS)
def test_C116_the_next_losses_do_not_know_of_the_change(world, saved, saving, loading):
    """C116: moments that do not follow their weights, or a part read from the wrong place, show in the second loss."""
    check(world, saved, saving, loading)


@pytest.mark.parametrize("layout", ["moe-ep2", "moe-ep2-zero1"])
def test_C099_the_loss_of_experts_does_not_jump_after_a_resume(world, saved, layout):
    """C099: experts of other ranks, or the bias of a router, that come back as another's show at once."""
    check(world, saved, layout, layout)


@pytest.mark.parametrize("layout", ["moe-tp4-etp1", "moe-tp2-ep2"])
def test_C115_every_shard_of_the_experts_is_on_the_disk(world, saved, layout):
    """C115: with more tensor-parallel ranks than expert shards, no rank felt in charge of some."""
    root, _ = saved(layout)
    files = {path.name for path in (root / f"iter_{STEPS:07d}").glob("*.distcp")}
    assert len(files) == LAYOUTS[layout].world_size
    check(world, saved, layout, layout)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, flags=(*_EXPERTS, "--hidden-dropout", "0.1", "--data-parallel-random-init")),
        Layout(
            model="mixtral", ep=2, dp=2, flags=(*_EXPERTS, "--hidden-dropout", "0.1", "--moe-input-jitter-eps", ".01")
        ),
    ],
    ids=["dp2-own-seeds", "moe-ep2-jitter"],
)
def test_C098_every_rank_gets_its_own_generators_back(world, tmp_path, layout):
    """C098: with rank 0's states on every rank, the masks of dropout are no longer each rank's own."""
    saving = world(2).run(train_and_save, layout, folder_words(save=tmp_path))
    loading = world(2).run(go_on, layout, folder_words(load=tmp_path))
    states = [seen.generators for seen in saving]
    assert [seen.generators for seen in loading] == states and states[0] != states[1]
    assert losses_of(loading) == losses_of(saving)[STEPS:]
