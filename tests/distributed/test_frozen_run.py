"""`--freeze-all-layers`: losses are those of the weights at the start, under any layout, and no weight moves."""

import pytest
import torch

from tests.distributed.layouts import Layout, Matrix, run

FROZEN = ("--freeze-all-layers",)


@pytest.mark.parametrize(
    "layout",
    [Layout(flags=FROZEN), Layout(dp=2, distributed_optimizer=True, flags=FROZEN), Layout(pp=2, flags=FROZEN)],
    ids=["one", "dp2", "pp2"],
)
def test_a_frozen_run_tells_losses_and_moves_no_weight(world, layout):
    ranks = world(layout.world_size).run(run, layout, 3)
    trained = Matrix(world).record(Layout(), 3)
    for rank in ranks:
        for (_, first), (_, last) in zip(rank.first_weights, rank.last_weights, strict=True):
            assert torch.equal(first, last)
        assert not rank.gradients and rank.grad_norms == [0.0] * 3
    losses, others = ([step["lm loss"] for step in steps] for steps in (ranks[-1].losses, trained.losses))
    assert losses[0] == pytest.approx(others[0], rel=1e-6) and len(losses) == 3
    assert all(abs(mine - other) > 1e-3 for mine, other in zip(losses[1:], others[1:]))
