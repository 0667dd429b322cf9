"""Regions of random numbers, and recomputation that draws them again."""

import pytest
import torch
import torch.nn.functional as F

from megatron_lite.errors import ConfigError
from megatron_lite.tensor_parallel import (
    CheckpointWithoutOutput,
    checkpoint,
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
    model_parallel_cuda_manual_seed,
)


@pytest.fixture(autouse=True)
def seeded():
    model_parallel_cuda_manual_seed(1234)
    yield
    get_cuda_rng_tracker().reset()


def test_a_region_advances_by_itself_and_leaves_the_rest():
    """Drawing in a region must not move the default state, nor the other way round."""
    tracker = get_cuda_rng_tracker()
    with tracker.fork():
        first = torch.rand(3)
    default = torch.rand(3)
    with tracker.fork():
        second = torch.rand(3)
    assert not torch.equal(first, second)
    model_parallel_cuda_manual_seed(1234)
    assert torch.equal(torch.rand(3), default)
    with tracker.fork():
        assert torch.equal(torch.rand(3), first)
        assert torch.equal(torch.rand(3), second)


def test_tensor_parallel_ranks_share_the_default_state_and_not_their_own_region():
    draws = []
    for rank in (0, 1):
        model_parallel_cuda_manual_seed(1234, tp_rank=rank)
        with get_cuda_rng_tracker().fork():
            draws.append((torch.rand(4), None))
        draws[-1] = (draws[-1][0], torch.rand(4))
    assert not torch.equal(draws[0][0], draws[1][0])
    assert torch.equal(draws[0][1], draws[1][1])


def test_an_exception_inside_a_region_restores_the_state():
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="inside"), get_cuda_rng_tracker().fork():
        torch.rand(1)
        raise ValueError("inside")
    assert torch.equal(torch.get_rng_state(), before)


def test_names_and_seeds_are_taken_once_and_unknown_regions_named():
    tracker = get_cuda_rng_tracker()
    with pytest.raises(ConfigError, match="region mine"):
        tracker.add("mine", 99)
        tracker.add("mine", 100)
    with pytest.raises(ConfigError, match="seed 99"):
        tracker.add("other", 99)
    tracker.reset()
    with pytest.raises(ConfigError, match="model_parallel_cuda_manual_seed"), tracker.fork():
        pass


def test_states_survive_a_round_trip_through_a_checkpoint():
    tracker = get_cuda_rng_tracker()
    saved = tracker.get_states()
    with tracker.fork(get_data_parallel_rng_tracker_name()):
        want = torch.rand(3)
    tracker.set_states(saved)
    with tracker.fork(get_data_parallel_rng_tracker_name()):
        assert torch.equal(torch.rand(3), want)


def layer(x, weight):
    with get_cuda_rng_tracker().fork():
        x = F.dropout(x @ weight, 0.3)
    return F.dropout(torch.tanh(x), 0.3), weight  # returning a parameter must not make it part of the graph


def run(recompute):
    model_parallel_cuda_manual_seed(7)
    weight = torch.nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2)).requires_grad_()
    y, _ = checkpoint(layer, False, x, weight) if recompute else layer(x, weight)
    after = torch.get_rng_state()
    y.square().sum().backward()
    assert torch.equal(torch.get_rng_state(), after), "backward moved the default state"
    return y, x.grad, weight.grad, torch.rand(2)


def test_recomputed_gradients_are_bit_equal_with_dropout_in_both_states():
    """A new mask in the second run, or a state left advanced, shows here."""
    for got, want in zip(run(True), run(False)):
        assert got.abs().max() > 0
        assert torch.equal(got, want)


def test_without_gradients_nothing_is_kept():
    with torch.no_grad():
        y, _ = checkpoint(layer, False, torch.ones(2, 8), torch.ones(8, 8))
    assert y.grad_fn is None


def test_a_forgotten_output_is_refilled_for_its_consumer():
    """Memory is freed in between; gradients are bit-equal."""

    def grads(forget):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2)).requires_grad_()
        w = torch.randn(8, 8, generator=torch.Generator().manual_seed(3)).requires_grad_()
        keep = CheckpointWithoutOutput()
        y = keep.checkpoint(torch.tanh, x) if forget else torch.tanh(x)
        z = y @ w
        if forget:
            keep.discard_output_and_register_recompute(z)
            assert y.untyped_storage().nbytes() == 0
        z.square().sum().backward()
        return x.grad, w.grad

    for got, want in zip(grads(True), grads(False)):
        assert got.abs().max() > 0
        assert torch.equal(got, want)
