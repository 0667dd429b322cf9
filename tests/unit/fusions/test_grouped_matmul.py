"""Products of experts by every kernel against one expert after the other in fp64."""

import pytest
import torch
import torch.nn.functional as F

from megatron_lite.fusions import backends, grouped_matmul, matmul, wgrad
from megatron_lite.fusions.bias_activation import gated, weighted
from megatron_lite.fusions.grouped_matmul import grouped_linear
from megatron_lite.fusions.wgrad import WeightGradStore

COUNTS = [3, 0, 5, 1]


@pytest.fixture(params=["torch", "widen", "onednn", "grouped"])
def kernel(request, monkeypatch):
    """Every kernel in turn; the grouped one has a CPU form too, which no run would choose."""
    if request.param == "onednn" and backends.onednn_linear() is None:
        pytest.skip("this torch has no oneDNN linear")
    if request.param == "grouped":
        product = getattr(torch, "_grouped_mm", None)
        if product is None:
            pytest.skip("this torch has no grouped product")
        monkeypatch.setattr(grouped_matmul, "grouped_product", lambda *_: product)
    else:
        for module in (matmul, wgrad, grouped_matmul):
            monkeypatch.setattr(module, "matmul_kernel", lambda dtype, device: request.param)
    return request.param


def inputs(dtype, with_biases):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    x, g = draw(sum(COUNTS), 32), draw(sum(COUNTS), 24).detach()
    return x, [draw(24, 32) for _ in COUNTS], [draw(24) for _ in COUNTS] if with_biases else [], g


@pytest.mark.parametrize("with_biases", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_meet_their_expert_and_gradients_equal_fp64(kernel, dtype, with_biases):
    """An expert without rows has gradient zero, not none: nobody may wait for it."""
    if kernel == "onednn" and dtype is not torch.float32:
        pytest.skip("chosen for fp32 only")
    x, weights, biases, g = inputs(dtype, with_biases)
    leaves = (x, *weights, *biases)
    y = grouped_linear(x, weights, COUNTS, biases)
    got = (y, *torch.autograd.grad(y, leaves, g))
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    parts = wide[0].split(COUNTS)
    want_y = torch.cat(
        [F.linear(part, wide[1 + e], wide[5 + e] if with_biases else None) for e, part in enumerate(parts)]
    )
    want = (want_y, *torch.autograd.grad(want_y, wide, g.double()))
    tolerance = {"atol": 1e-4, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 0.1, "rtol": 2e-2}
    for a, e in zip(got, want, strict=True):
        assert a.dtype is dtype
        torch.testing.assert_close(a.double(), e, **tolerance)
    assert got[3].abs().max() == 0 and all(grad.abs().max() > 0 for grad in (*got[:3], *got[4:6]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [False, True])
def test_weight_gradients_are_added_to_main_grad(kernel, dtype, stored):
    """Two backwards add up in fp32; what a store keeps is added when it runs."""
    if kernel == "onednn" and dtype is not torch.float32:
        pytest.skip("chosen for fp32 only")
    x, weights, _, g = inputs(dtype, False)
    for weight in weights:
        weight.main_grad = torch.zeros(weight.shape)
    store = WeightGradStore() if stored else None
    for _ in range(2):
        y = grouped_linear(x, weights, COUNTS, gradient_accumulation_fusion=True, weight_grad_store=store)
        y.backward(g)
    if store is not None:
        assert all(weight.main_grad.abs().max() == 0 for weight in weights)
        store.end_pass()
        store.run_oldest()
    for weight, part, rows in zip(weights, g.split(COUNTS), x.detach().split(COUNTS)):
        assert weight.grad is None
        want = 2 * part.double().t() @ rows.double()
        torch.testing.assert_close(
            weight.main_grad.double(), want, atol=1e-4 if dtype is torch.float32 else 0.1, rtol=1e-2
        )


def test_no_rows_at_all():
    """A rank to which nobody sends anything."""
    _, weights, biases, _ = inputs(torch.float32, True)
    x = torch.empty(0, 32, requires_grad=True)
    y = grouped_linear(x, weights, [0, 0, 0, 0], biases)
    grads = torch.autograd.grad(y, (x, *weights, *biases), y)
    assert y.shape == (0, 24) and all(grad.abs().sum() == 0 for grad in grads)


@pytest.mark.parametrize("activation", [F.silu, F.gelu])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_weighted_activation_equals_activation_times_weight(activation, is_gated, dtype):
    """Its own backward for silu with a gate; the weights' gradient is what the router learns by."""
    x = torch.randn(5, 12, dtype=dtype, requires_grad=True)
    w = torch.rand(5, dtype=dtype, requires_grad=True)
    wide = [x.detach().double().requires_grad_(), w.detach().double().requires_grad_()]
    y = weighted(activation, x, w, is_gated=is_gated)
    plain = gated(activation, wide[0]) if is_gated else activation(wide[0])
    want = plain * wide[1].unsqueeze(1)
    g = torch.randn_like(y)
    tolerance = {} if dtype is torch.float64 else {"atol": 0.1, "rtol": 3e-2}
    torch.testing.assert_close(y.double(), want, **tolerance)
    for a, b in zip(torch.autograd.grad(y, (x, w), g), torch.autograd.grad(want, wide, g.double())):
        torch.testing.assert_close(a.double(), b, **tolerance)
