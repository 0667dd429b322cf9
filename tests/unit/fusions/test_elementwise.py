"""Written-out forwards and backwards against autograd through the plain formula."""

import pytest
import torch
import torch.nn.functional as F

from megatron_lite.fusions.bias_activation import (
    bias_geglu,
    bias_gelu,
    bias_swiglu,
    gated,
    quick_gelu,
    squared_relu,
    swiglu,
)
from megatron_lite.fusions.bias_dropout_add import bias_dropout_add, get_bias_dropout_add
from megatron_lite.fusions.norm import layer_norm, rms_norm
from megatron_lite.fusions.rope import rotate


def same(got, want, inputs, tolerance=1e-5):
    """Equal outputs and equal, non-zero gradients of a random functional."""
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
    g = torch.randn(got.shape, generator=torch.Generator().manual_seed(9)).to(got.dtype)
    for a, b in zip(torch.autograd.grad(got, inputs, g), torch.autograd.grad(want, inputs, g)):
        assert a.abs().max() > 0
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


def test_swiglu_equals_its_formula():
    x = random(4, 3, 10)
    same(swiglu(x), F.silu(x[..., :5]) * x[..., 5:], [x])
    assert torch.autograd.gradcheck(swiglu, x.double().detach().requires_grad_())


def test_bias_and_gate_equal_their_formulas():
    """The gate is the first half; the fused GELUs are the tanh form."""
    x, b = random(4, 3, 10), random(10)
    y = x + b
    same(bias_swiglu(x, b), F.silu(y[..., :5]) * y[..., 5:], [x, b])
    same(bias_gelu(x, b), F.gelu(y, approximate="tanh"), [x, b])
    same(bias_geglu(x, b), F.gelu(y[..., :5], approximate="tanh") * y[..., 5:], [x, b])
    same(gated(torch.sigmoid, x), torch.sigmoid(x[..., :5]) * x[..., 5:], [x])
    same(squared_relu(x), torch.clamp(x, min=0) ** 2, [x])
    same(quick_gelu(x), x / (1 + torch.exp(-1.702 * x)), [x])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_torchs(dtype):
    x, w = random(5, 3, 16).to(dtype), random(16).to(dtype)
    want = F.rms_norm(x.float(), (16,), w.float(), 1e-5).to(dtype)
    same(rms_norm(x, w, 1e-5), want, [x, w], 1e-5 if dtype is torch.float32 else 3e-2)


def test_norms_of_an_fp32_stream_come_out_in_the_weights_dtype():
    """fp32 residual, bf16 layers: the norm is where the number format changes, and its arithmetic stays fp32."""
    x = random(5, 16) * 1000
    w, b = torch.ones(16, dtype=torch.bfloat16), torch.zeros(16, dtype=torch.bfloat16)
    for got, want in (
        (rms_norm(x, w, 1e-5), F.rms_norm(x, (16,), None, 1e-5)),
        (layer_norm(x, w, b, 1e-5), F.layer_norm(x, (16,), None, None, 1e-5)),
    ):
        assert got.dtype is torch.bfloat16
        assert torch.equal(got, want.bfloat16())


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [8, 4])
def test_rope_turns_pairs_by_the_angle(interleaved, rotated):
    """Against complex multiplication; channels beyond the rotated ones pass; backward is autograd's."""
    t = random(6, 2, 3, 8)
    angles = torch.rand(6, 1, 1, rotated // 2, generator=torch.Generator().manual_seed(1)) * 6
    freqs = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
    head = t[..., :rotated]
    pairs = head.unflatten(-1, (-1, 2)) if interleaved else torch.stack(head.chunk(2, -1), -1)
    turned = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
    )
    turned = turned.flatten(-2) if interleaved else torch.cat(turned.unbind(-1), -1)
    same(rotate(t, freqs, interleaved), torch.cat([turned, t[..., rotated:]], -1), [t])
    torch.testing.assert_close(rotate(t, freqs, interleaved, mscale=2.0)[..., :rotated], 2 * turned)


def test_bias_dropout_add_drops_and_rescales_only_what_is_added():
    """The residual is never dropped; in evaluation nothing is."""
    x, b, r = random(40, 50), random(50), random(40, 50)
    same(bias_dropout_add((x, b), r, 0.3, False), r + x + b, [x, b, r])
    torch.manual_seed(0)
    y = get_bias_dropout_add(True, True)((x, b), r, 0.25)
    kept = (y - r) / (x + b)
    dropped = kept.abs() < 1e-4
    assert 0.2 < dropped.float().mean() < 0.3
    torch.testing.assert_close(kept[~dropped], torch.full_like(kept[~dropped], 1 / 0.75), atol=1e-2, rtol=1e-2)


def test_the_sum_keeps_an_fp32_residual():
    x, r = random(4, 4).bfloat16(), random(4, 4)
    assert bias_dropout_add((x, None), r, 0.0, True).dtype is torch.float32
