"""Norms, coefficients and zero counts against plain torch in fp64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.optimizer.clip_grads import clip_coefficient, count_zeros, sum_of_powers


@given(n=st.integers(0, 13000), norm_type=st.sampled_from([1.0, 2.0, 3.0, math.inf]), exact=st.booleans())
def test_norms_of_any_length_and_order_equal_torchs_in_fp64(n, norm_type, exact):
    """Relative 2e-6: 1024 additions in fp32."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    expected = torch.linalg.vector_norm(x.double(), norm_type).item() if n else 0.0
    total = sum_of_powers(x, norm_type, exact).item()
    norm = total if norm_type == math.inf else total ** (1 / norm_type)
    assert norm == pytest.approx(expected, rel=2e-6)


def test_the_norm_of_many_numbers_is_exact():
    """One fp32 sum over 8 million squares is off by more than 1e-4: enough to make layouts differ."""
    x = torch.randn(2**23, generator=torch.Generator().manual_seed(0)) * 1e-3
    assert math.sqrt(sum_of_powers(x)) == pytest.approx(x.double().norm().item(), rel=1e-7)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 1023, 1024, 9999])
def test_one_bad_number_anywhere_makes_the_sum_bad(bad, place):
    x = torch.ones(10000)
    x[place] = bad
    assert not math.isfinite(sum_of_powers(x)) and not math.isfinite(sum_of_powers(x, exact=True))


def test_squares_that_leave_fp32_are_found_finite_by_the_exact_sum():
    x = torch.full((5000,), 1e30)
    assert sum_of_powers(x).item() == math.inf
    assert sum_of_powers(x, exact=True).item() == pytest.approx(5000e60, rel=1e-6)


def test_clipping_follows_megatrons_formula():
    assert clip_coefficient(13.0, 1.0) == pytest.approx(0.0769231, abs=1e-7)
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(5.0, 0.0) == 1.0
    assert clip_coefficient(2.0, 1.0) == 1.0 / 2.000001


def test_padding_does_not_count_as_zeros():
    x = torch.tensor([0.0, 1.0, 0.0, 0.0, 2.0, 0.0])
    assert count_zeros([(x, 6)]).item() == 4
    assert count_zeros([(x, 4), (x[:2], 2)]).item() == 2 + 1
    assert count_zeros([]).item() == 0
