"""Choosing the next token, against the definitions written out in numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.cli.sampling import Sampling, keep_top_k, next_token, next_token_probabilities
from megatron_lite.errors import ConfigError


def reference(logits, temperature, top_k, top_p):
    """Probabilities by sorting, one token after another, in float64."""
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    if top_k:
        order = order[:top_k]
    weights = np.exp(scaled[order] - scaled[order].max())
    weights /= weights.sum()
    if 0 < top_p < 1:
        kept, total = [], 0.0
        for position, weight in enumerate(weights):
            if total >= top_p:
                break
            kept.append(position)
            total += weight
        order, weights = order[kept], weights[kept]
    result = np.zeros(len(logits))
    result[order] = weights / weights.sum()
    return result


@settings(max_examples=200)
@given(
    st.integers(0, 10_000),
    st.integers(2, 60),
    st.floats(0.2, 5.0),
    st.integers(0, 70),
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.99, 1.0]),
)
def test_probabilities_equal_the_definition(seed, size, temperature, top_k, top_p):
    logits = np.random.default_rng(seed).normal(size=size).astype(np.float32) * 3
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    ours = next_token_probabilities(torch.from_numpy(logits), sampling).numpy()
    expected = np.eye(size)[logits.argmax()] if top_k == 1 else reference(logits, temperature, top_k, top_p)
    np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_exactly_k_tokens_stay_even_among_equals():
    assert torch.isfinite(keep_top_k(torch.zeros(10), 3)).sum() == 3


def test_the_likeliest_token_stays_under_the_smallest_top_p():
    probabilities = next_token_probabilities(torch.tensor([0.0, 5.0, 1.0]), Sampling(top_p=1e-9))
    assert probabilities.tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("temperature", [1e-30, 1e-46, 5e-324])
@pytest.mark.parametrize("more", [{}, {"top_k": 2}, {"top_p": 0.9}])
def test_a_temperature_that_fp32_cannot_hold_leaves_the_likeliest(temperature, more):
    probabilities = next_token_probabilities(torch.tensor([0.0, 5.0, 1.0]), Sampling(temperature=temperature, **more))
    assert probabilities.tolist() == [0.0, 1.0, 0.0]


def test_draws_follow_the_probabilities_and_the_seed():
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0])
    sampling = Sampling(temperature=0.7, top_k=3)

    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        return [next_token(logits, sampling, generator) for _ in range(4000)]

    first = draw(1)
    assert first == draw(1) and first != draw(2)
    frequencies = np.bincount(first, minlength=4) / 4000
    np.testing.assert_allclose(frequencies, reference(logits.numpy(), 0.7, 3, 0.0), atol=0.03)  # 4 sigma of 4000 draws


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(top_k=1)])
def test_greedy_takes_the_likeliest_and_no_draw(sampling):
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    assert next_token(torch.tensor([0.0, 3.0, 2.0]), sampling, generator) == 1
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 1.5}])
def test_values_outside_their_range_are_refused_by_name(wrong):
    with pytest.raises(ConfigError, match="--" + next(iter(wrong))):
        Sampling(**wrong)
