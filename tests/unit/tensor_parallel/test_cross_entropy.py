"""One rank's cross entropy against torch's, and its care with memory. Split vocabularies: tests/distributed."""

import pytest
import torch
import torch.nn.functional as F

from megatron_lite.errors import ConfigError
from megatron_lite.fusions import cross_entropy as kernel
from megatron_lite.tensor_parallel import vocab_parallel_cross_entropy


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(6, 3, 40, generator=generator) * 4).to(dtype).requires_grad_()
    return logits, torch.randint(0, 40, (6, 3), generator=generator), torch.rand(6, 3, generator=generator)


@pytest.mark.parametrize("rows", [1, 4, 1000])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_and_gradients_equal_torchs(monkeypatch, smoothing, rows):
    """Blocks of one row, blocks that do not divide, one block. Torch's smoothing puts a/K on every class."""
    monkeypatch.setattr(kernel, "_rows_per_block", lambda x: rows)
    logits, target, weight = inputs()
    loss = vocab_parallel_cross_entropy(logits, target, smoothing)
    torchs = smoothing * 40 / 39
    want = F.cross_entropy(logits.view(-1, 40), target.view(-1), label_smoothing=torchs, reduction="none").view(6, 3)
    torch.testing.assert_close(loss, want, atol=1e-5, rtol=1e-5)
    got_grad = torch.autograd.grad(loss, logits, weight)[0]
    assert got_grad.abs().max() > 0.01
    torch.testing.assert_close(got_grad, torch.autograd.grad(want, logits, weight)[0], atol=1e-6, rtol=1e-5)


def test_the_written_example():
    """Numbers worked out by hand: smoothing moves a to the other classes."""
    logits = torch.tensor([[[1.0, 2, 0, -1, 0.5, 0, 3, -2]]])
    target = torch.tensor([[6]])
    assert vocab_parallel_cross_entropy(logits, target).item() == pytest.approx(0.53645, abs=1e-5)
    assert vocab_parallel_cross_entropy(logits, target, 0.1).item() == pytest.approx(0.82931, abs=1e-5)


def test_bf16_logits_lose_nothing_but_their_own_rounding():
    """Reduction in fp32; a sure prediction keeps its small gradient (p - 1 would round to 0 in bf16)."""
    logits, target, weight = inputs(torch.bfloat16)
    loss = vocab_parallel_cross_entropy(logits, target)
    wide = logits.detach().float().requires_grad_()
    want = F.cross_entropy(wide.view(-1, 40), target.view(-1), reduction="none").view(6, 3)
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, want, atol=1e-5, rtol=1e-5)
    got = torch.autograd.grad(loss, logits, weight)[0]
    torch.testing.assert_close(got.float(), torch.autograd.grad(want, wide, weight)[0], atol=1e-3, rtol=2e-2)
    sure = torch.tensor([[[8.0, 0.0]]], dtype=torch.bfloat16, requires_grad=True)
    grad = torch.autograd.grad(vocab_parallel_cross_entropy(sure, torch.tensor([[0]])).sum(), sure)[0]
    assert grad[0, 0, 0].item() == pytest.approx(-3.35e-4, rel=1e-2)


def test_the_gradient_may_take_the_logits_memory():
    """The one copy of the logits is used twice; by default they are left alone."""
    logits, target, _ = inputs()
    plain = torch.autograd.grad(vocab_parallel_cross_entropy(logits, target).sum(), logits)[0]
    before = logits.detach().clone()
    assert torch.equal(logits, before)
    copy = before.clone().requires_grad_()
    inner = copy * 1.0
    loss = vocab_parallel_cross_entropy(inner, target, over_logits=True)
    assert not torch.equal(inner.detach(), before)
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), copy)[0], plain)


def test_a_second_backward_is_refused():
    """The gradient was scaled in place: using it again would be wrong without a word."""
    logits, target, _ = inputs()
    loss = vocab_parallel_cross_entropy(logits, target).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="run forward again"):
        loss.backward()


def test_evaluation_leaves_the_logits_alone():
    logits, target, _ = inputs()
    with torch.no_grad():
        before = logits.clone()
        loss = vocab_parallel_cross_entropy(logits, target, over_logits=True)
    assert torch.equal(logits, before) and loss.shape == (6, 3)


def test_bad_smoothing_is_refused():
    logits, target, _ = inputs()
    with pytest.raises(ConfigError, match="label smoothing 1.5"):
        vocab_parallel_cross_entropy(logits, target, 1.5)
