"""Casts to FP8 and back: against the formats' definitions, and against products in higher precision."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_lite.fusions.fp8 import Casts, Operand, Recipe, largest, rounded, rounded_in_blocks

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ONE = torch.ones(())


def values(dtype: torch.dtype) -> torch.Tensor:
    """All finite numbers of a format, in order."""
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    return every[every.isfinite()].unique()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_cast_goes_to_the_nearest_number_of_the_format(dtype: torch.dtype) -> None:
    x = torch.randn(4000, generator=torch.Generator().manual_seed(0)) * 30
    distance = (x[:, None] - values(dtype)).abs().amin(1)
    assert torch.equal((rounded(x, ONE, dtype) - x).abs(), distance)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_numbers_beyond_the_format_become_its_largest_and_infinity_stays(dtype: torch.dtype) -> None:
    x = torch.tensor([1e6, -1e6, math.inf, -math.inf, math.nan])
    y = rounded(x, ONE, dtype)
    top = torch.finfo(dtype).max
    assert y[:4].tolist() == [top, -top, math.inf, -math.inf] and y[4].isnan()
    blocks = rounded_in_blocks(x.view(1, -1), (1, 32), dtype).view(-1)
    assert (
        blocks[2:4].tolist() == [math.inf, -math.inf] and blocks[4].isnan() and blocks[0] == pytest.approx(1e6, rel=0.1)
    )


def test_the_scale_brings_the_largest_number_to_the_largest_of_the_format() -> None:
    x = torch.tensor([0.003, -0.02])
    plain, delayed = Recipe("tensorwise", margin=3), Recipe("delayed", backward=E5M2, margin=3)
    assert plain.scale(Operand.INPUT, largest(x)) == 448 / largest(x)  # a margin is for scales that lag behind
    assert delayed.scale(Operand.GRAD, largest(x)) == 57344 / largest(x) / 8
    assert plain.scale(Operand.WEIGHT, torch.zeros(())) == 1
    assert largest(torch.tensor([1.0, math.inf, math.nan, -2.0])) == 2.0 and largest(torch.empty(0, 3)) == 0.0


@pytest.mark.parametrize("shape", [(5, 70), (3, 2, 64), (130, 300), (1, 1)])
@pytest.mark.parametrize("block", [(1, 32), (32, 1), (128, 128)])
def test_each_block_is_rounded_by_itself_at_a_power_of_two(shape: tuple[int, ...], block: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator) * torch.logspace(-12, 12, shape[-1])
    y = rounded_in_blocks(x, block, E4M3)
    rows, wanted = x.reshape(-1, shape[-1]), torch.empty(x.numel() // shape[-1], shape[-1])
    for i in range(0, rows.shape[0], block[0]):
        for j in range(0, rows.shape[1], block[1]):
            place = slice(i, i + block[0]), slice(j, j + block[1])
            scale = 2.0 ** -math.ceil(math.log2(rows[place].abs().max().item() / 448))
            wanted[place] = (rows[place] * scale).to(E4M3).float() / scale
    assert torch.equal(y, wanted.view(shape))


def test_a_block_whose_largest_number_is_the_formats_own_is_not_changed() -> None:
    x = torch.tensor([[448.0, 0.5, -1.75, 2.0**-9]])
    assert torch.equal(rounded_in_blocks(x, (1, 32), E4M3), x)
    assert torch.equal(rounded_in_blocks(x * 2.0**40, (1, 32), E4M3), x * 2.0**40)
    assert torch.equal(rounded_in_blocks(torch.zeros(2, 40), (1, 32), E4M3), torch.zeros(2, 40))


def test_blocks_lie_along_the_sum_of_each_product() -> None:
    recipe = Recipe("mxfp8")
    assert [recipe.block(operand, False) for operand in Operand] == [(1, 32)] * 3
    assert [recipe.block(operand, True) for operand in Operand] == [(32, 1)] * 3
    blockwise = Recipe("blockwise")
    assert [blockwise.block(operand, True) for operand in Operand] == [(128, 1), (128, 128), (128, 1)]


@pytest.mark.parametrize("kind", ["tensorwise", "blockwise", "mxfp8"])
def test_products_of_casts_are_near_the_products(kind: str) -> None:
    """A number of e4m3 is off by 1/16 at most, by 1/45 in the mean; errors of a sum cancel."""
    generator = torch.Generator().manual_seed(2)
    x, w, g = (torch.randn(size, generator=generator) for size in ((96, 256), (64, 256), (96, 64)))
    recipe = Recipe(kind)
    scales = None
    if not recipe.by_blocks:
        scales = torch.stack([recipe.scale(operand, largest(one)) for operand, one in zip(Operand, (x, w, g))])
    casts = Casts(recipe, scales)
    a, b = casts.forward(x, w)
    c, d = casts.dgrad(g, w)
    e, f = casts.wgrad(g, x)
    for got, wanted in ((a @ b.t(), x @ w.t()), (c @ d, g @ w), (e.t() @ f, g.t() @ x)):
        error = ((got - wanted).norm() / wanted.norm()).item()
        assert 0.01 < error < 0.06, error
    plain_g, plain_x = Casts(Recipe(kind, wgrad=False), scales).wgrad(g, x)
    assert plain_g is g and plain_x is x
