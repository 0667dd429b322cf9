"""Initial values depend on (seed, name, global shape, method), not on the cut."""

import pytest
import torch
from torch import nn

from megatron_lite.initialization import (
    Constant,
    deferred_initialization,
    fill,
    init_method_normal,
    scaled_init_method_normal,
    set_init,
    xavier_uniform,
)
from megatron_lite.sharding import split, whole


@pytest.mark.parametrize("method", [init_method_normal(0.5), xavier_uniform, Constant(3.0)], ids=str)
@pytest.mark.parametrize("dim, stride", [(0, 1), (1, 1), (0, 2), (1, 4)])
@pytest.mark.parametrize("size", [2, 4])
def test_every_cut_is_a_part_of_the_whole(method, dim, stride, size):
    """Drawing per rank, or seeding by rank, makes tensor-parallel runs start from another model."""
    shape = (304, 448)  # more than one block of random numbers
    full = torch.empty(shape)
    fill(full, whole("decoder.weight", shape), method, seed=7)
    for rank in range(size):
        local = [n // size if d == dim else n for d, n in enumerate(shape)]
        shard = split("decoder.weight", tuple(local), dim, rank, size, stride)
        part = torch.empty(local)
        fill(part, shard, method, seed=7)
        for piece in shard.pieces:
            assert torch.equal(part[piece.local_slices()], full[piece.global_slices()])


def test_values_are_normal_and_differ_by_name_and_seed():
    """One generator state for all parameters would start every layer alike."""
    draws = {}
    for name, seed in (("a", 1), ("b", 1), ("a", 2)):
        draws[name, seed] = torch.empty(400, 400)
        fill(draws[name, seed], whole(name, (400, 400)), init_method_normal(2.0), seed)
        assert abs(draws[name, seed].mean()) < 0.02 and abs(draws[name, seed].std() - 2) < 0.02
    values = list(draws.values())
    correlation = torch.corrcoef(torch.stack([v.flatten() for v in values]))
    assert (correlation - torch.eye(3)).abs().max() < 0.02


def test_output_projections_start_smaller():
    """std / sqrt(2 L), as GPT-2 has it."""
    assert scaled_init_method_normal(0.02, 8).std == pytest.approx(0.005)


def test_a_layer_alone_is_filled_and_one_in_a_model_waits():
    """A lone layer with uninitialised memory would train on garbage."""
    param = nn.Parameter(torch.full((4, 4), float("nan")))
    with deferred_initialization():
        set_init(param, init_method_normal(1.0), "weight")
    assert param.isnan().all()
    set_init(param, init_method_normal(1.0), "weight")
    assert param.isfinite().all()


def test_low_precision_values_are_the_rounded_fp32_ones():
    """Drawing in bf16 would make a bf16 run start elsewhere than its fp32 twin."""
    full, half = torch.empty(50, 50), torch.empty(50, 50, dtype=torch.bfloat16)
    for tensor in (full, half):
        fill(tensor, whole("w", (50, 50)), init_method_normal(1.0), seed=3)
    assert torch.equal(half, full.bfloat16())
