"""Attention as batched products against the formula in fp64."""

import pytest
import torch

from megatron_lite.fusions import attention as module
from megatron_lite.fusions.attention import MASKED, attention


def formula(q, k, v, mask, keep=None, bias=0.0):
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias
    if mask is not None:
        scores = scores.masked_fill(mask, MASKED)
    p = scores.softmax(-1)
    return (p if keep is None else p * keep) @ v


def tensors(groups, sq=5, sk=5, b=2, n=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(groups)
    q = torch.randn(sq, b, n, 8, generator=generator, dtype=torch.float64).permute(1, 2, 0, 3)
    k, v = (torch.randn(sk, b, groups, 8, generator=generator, dtype=torch.float64).permute(1, 2, 0, 3) for _ in "kv")
    return [x.to(dtype).requires_grad_() for x in (q, k, v)]


MASKS = {
    "none": None,
    "causal": torch.ones(5, 5, dtype=torch.bool).triu(1)[None, None],
    "per sample": torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(3)) < 0.4,
    "nothing seen": torch.tensor([False, True, True, False, True])[None, None, :, None].expand(1, 1, 5, 5),
}


@pytest.mark.parametrize("one_at_a_time", [False, True])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("mask", list(MASKS))
def test_outputs_and_gradients_equal_the_formula(monkeypatch, groups, mask, one_at_a_time):
    """Heads in a wrong group, a mask on the wrong row, a block left out: each is off by 0.1."""
    if one_at_a_time:
        monkeypatch.setattr(module, "_BLOCK_BYTES", 1)
    q, k, v = tensors(groups)
    hidden = MASKS[mask]
    got, want = attention(q, k, v, hidden), formula(q, k, v, hidden)
    torch.testing.assert_close(got, want)
    g = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for a, b in zip(torch.autograd.grad(got, (q, k, v), g), torch.autograd.grad(want, (q, k, v), g)):
        assert a.abs().max() > 0
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("one_at_a_time", [False, True])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("shape", [(1, 4, 5, 5), (2, 4, 5, 5), (2, 1, 5, 5)], ids=str)
def test_a_bias_is_added_after_scaling_and_its_gradient_is_summed_over_who_shares_it(
    monkeypatch, groups, shape, one_at_a_time
):
    """Relative positions: one bias for all sequences; hidden places stay hidden whatever the bias says."""
    if one_at_a_time:
        monkeypatch.setattr(module, "_BLOCK_BYTES", 1)
    q, k, v = tensors(groups)
    hidden = MASKS["per sample"]
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).mul_(3).requires_grad_()
    got, want = attention(q, k, v, hidden, bias=bias), formula(q, k, v, hidden, bias=bias)
    torch.testing.assert_close(got, want)
    g = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for a, b in zip(torch.autograd.grad(got, (q, k, v, bias), g), torch.autograd.grad(want, (q, k, v, bias), g)):
        assert a.abs().max() > 0
        torch.testing.assert_close(a, b)


def test_fewer_queries_than_keys():
    """As in decoding with a cache."""
    q, k, v = tensors(2, sq=2, sk=7)
    torch.testing.assert_close(attention(q, k, v, None), formula(q, k, v, None))


def test_dropout_drops_probabilities_and_backward_uses_the_same_mask():
    """Values that are one-hot show the kept probabilities; finite differences see the same mask."""
    q, k, _ = tensors(2, b=1, n=2)
    v = torch.eye(5, dtype=torch.float64).expand(1, 2, 5, 5).contiguous().requires_grad_()

    def run(*x):
        torch.manual_seed(7)
        return attention(*x, None, 8**-0.5, 0.4)

    p = formula(q, k, v, None)
    kept = run(q, k, v) / p
    assert set(kept.detach().round(decimals=6).unique().tolist()) == {0.0, round(1 / 0.6, 6)}
    assert torch.autograd.gradcheck(run, (q, k, v))


def test_bf16_is_as_near_to_fp64_as_bf16_can_be():
    q, k, v = tensors(2, dtype=torch.bfloat16)
    want = formula(q.double(), k.double(), v.double(), MASKS["causal"])
    torch.testing.assert_close(attention(q, k, v, MASKS["causal"]).double(), want, atol=2e-2, rtol=2e-2)
