"""The largest score of an attention equals the largest entry of the whole matrix of visible scores."""

import pytest
import torch

from megatron_lite.fusions import largest_score
from megatron_lite.fusions.block_attention import Arithmetic, block_forward
from megatron_lite.fusions.largest_score import LargestScore


def tensors(heads=4, groups=2, sq=9, sk=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(2, n, s, 8, generator=generator) for n, s in ((heads, sq), (groups, sk)))
    return q, k


def expected(q, k, hidden, scale, bias=0.0):
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = (q @ k.transpose(-1, -2)) * scale + bias
    return scores.masked_fill(hidden, -torch.inf).max() if hidden is not None else scores.max()


@pytest.mark.parametrize("block", [1, 50, 2**20], ids=["a query at a time", "some", "all at once"])
@pytest.mark.parametrize("case", ["everything", "causal", "causal and padding", "a window", "another length", "bias"])
def test_the_largest_score_is_that_of_the_whole_matrix(monkeypatch, case, block):
    """A hidden score that counts, the future of a block's first query, a head that meets another group's keys."""
    monkeypatch.setattr(largest_score, "_BLOCK_ELEMENTS", block)
    for seed in range(4):
        q, k = tensors(sk=5 if case == "another length" else 9, seed=seed)
        causal, hidden, bias = case.startswith("causal"), None, None
        if case == "causal and padding":
            hidden = (torch.arange(9) > 5).view(1, 1, 1, 9)
        elif case == "a window":
            distance = torch.arange(9) - torch.arange(9).unsqueeze(1)
            hidden = ((distance < -2) | (distance > 0)).view(1, 1, 9, 9)
        elif case == "bias":
            bias = torch.randn(1, 4, 9, 9, generator=torch.Generator().manual_seed(seed))
        found = LargestScore()
        found.note(q, k, hidden, causal, 0.3, bias)
        future = torch.ones(9, 9, dtype=torch.bool).triu(1)
        all_hidden = (future | hidden if hidden is not None else future) if causal else hidden
        want = expected(q, k, all_hidden, 0.3, 0.0 if bias is None else bias)
        torch.testing.assert_close(found.value, want, rtol=1e-6, atol=1e-6)


def test_it_keeps_the_largest_of_several_calls_and_of_blocks():
    q, k = tensors()
    found = LargestScore()
    for part in (slice(0, 4), slice(4, 9)):
        block_forward(
            q, k[:, :, part], torch.zeros(2, 2, part.stop - part.start, 8), None, False,
            Arithmetic("products", 0.5, largest=found),
        )  # fmt: skip
    torch.testing.assert_close(found.value, expected(q, k, None, 0.5), rtol=1e-6, atol=1e-6)


def test_nothing_visible_is_minus_infinity():
    q, k = tensors()
    found = LargestScore()
    found.note(q, k, torch.ones(1, 1, 9, 9, dtype=torch.bool), False, 1.0)
    assert found.value == -torch.inf
