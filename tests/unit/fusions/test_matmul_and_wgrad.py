"""Products by every kernel against fp64, and gradients that go straight into the buffer."""

import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_lite.fusions import backends, matmul, wgrad
from megatron_lite.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce


@pytest.fixture(params=["torch", "widen", "onednn"])
def kernel(request, monkeypatch):
    """Every kernel in turn, whatever this machine would choose."""
    if request.param == "onednn" and backends.onednn_linear() is None:
        pytest.skip("this torch has no oneDNN linear")
    for module in (matmul, wgrad):
        monkeypatch.setattr(module, "matmul_kernel", lambda dtype, device: request.param)
    return request.param


def inputs(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 32, generator=generator).to(dtype).requires_grad_()
    w = torch.randn(24, 32, generator=generator).to(dtype).requires_grad_()
    b = torch.randn(24, generator=generator).to(dtype).requires_grad_()
    return x, w, b, torch.randn(5, 3, 24, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_and_its_gradients_equal_fp64(kernel, dtype):
    """A transposed operand or a lost bias shows here."""
    if kernel == "onednn" and dtype is not torch.float32:
        pytest.skip("chosen for fp32 only")
    x, w, b, g = inputs(dtype)
    y = matmul.linear(x, w, b)
    got = (y, *torch.autograd.grad(y, (x, w, b), g))
    wide = [t.detach().double().requires_grad_() for t in (x, w, b)]
    want_y = torch.nn.functional.linear(*wide)
    want = (want_y, *torch.autograd.grad(want_y, wide, g.double()))
    tolerance = {"atol": 1e-4, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 0.1, "rtol": 2e-2}
    for a, e in zip(got, want):
        assert a.dtype is dtype and a.abs().max() > 0
        torch.testing.assert_close(a.double(), e, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_weight_gradient_is_added_to_main_grad(kernel, dtype):
    """Two backwards add up in fp32, and autograd keeps no gradient of its own."""
    if kernel == "onednn" and dtype is not torch.float32:
        pytest.skip("chosen for fp32 only")
    x, w, b, g = inputs(dtype)
    w.main_grad = torch.zeros(w.shape)
    for _ in range(2):
        y = linear_with_grad_accumulation_and_async_allreduce(x, w, b, True, False, False)
        y.backward(g)
    want = 2 * g.reshape(-1, 24).double().t() @ x.detach().reshape(-1, 32).double()
    assert w.grad is None and w.main_grad.abs().max() > 0
    torch.testing.assert_close(w.main_grad.double(), want, atol=1e-4 if dtype is torch.float32 else 0.1, rtol=1e-2)
    assert b.grad is not None


def test_products_that_wait_are_computed_a_pass_at_a_time():
    """Outside of backward, where an input still has its graph: the buffer must not become a part of it."""
    x, w, _, g = inputs(torch.float32)
    w.main_grad = torch.zeros(w.shape)
    store = wgrad.WeightGradStore()
    product = g.reshape(-1, 24).t() @ x.detach().reshape(-1, 32)
    for factor in (1.0, 10.0):
        y = linear_with_grad_accumulation_and_async_allreduce(
            x * factor, w, None, True, False, False, weight_grad_store=store
        )
        y.backward(g)
        store.end_pass()
    assert w.main_grad.abs().max() == 0 and x.grad.abs().max() > 0
    store.run_oldest()
    torch.testing.assert_close(w.main_grad, product, atol=1e-4, rtol=1e-5)
    store.run_oldest()
    torch.testing.assert_close(w.main_grad, 11 * product, atol=1e-3, rtol=1e-5)
    assert not w.main_grad.requires_grad and w.main_grad.grad_fn is None


@pytest.mark.parametrize(("limit", "at_once"), [(0, 0), (2, 1), (5, 0)])
def test_a_store_with_a_limit_computes_what_is_beyond_it(limit, at_once):
    w = torch.nn.Parameter(torch.zeros(2, 3))
    w.main_grad = torch.zeros(2, 3)
    store = wgrad.WeightGradStore(limit)
    for _ in range(3):
        store.put(w, torch.ones(1, 2), torch.ones(1, 3))
    assert w.main_grad.eq(at_once).all()
    store.end_pass()
    store.run_oldest()
    assert w.main_grad.eq(3).all()


def test_rows_of_a_table_add_up_where_an_id_repeats():
    """Overwriting instead of adding would lose the repeats."""
    w = torch.nn.Parameter(torch.zeros(4, 2))
    w.main_grad = torch.ones(4, 2)
    wgrad.accumulate_rows(w, torch.tensor([1, 3, 1]), torch.tensor([[1.0, 2], [3, 4], [5, 6]]))
    assert torch.equal(w.main_grad, torch.tensor([[1.0, 1], [7, 9], [1, 1], [4, 5]]))


def test_apex_kernels_are_found_at_run_time(monkeypatch):
    """By the name that apex gives them; the package is optional."""
    apex_wgrad = backends.apex_wgrad.__wrapped__
    monkeypatch.setitem(sys.modules, "fused_weight_gradient_mlp_cuda", None)  # not importable
    assert apex_wgrad(torch.float32) is None
    kernels = SimpleNamespace(wgrad_gemm_accum_fp32=print, wgrad_gemm_accum_fp16=max)
    monkeypatch.setitem(sys.modules, "fused_weight_gradient_mlp_cuda", kernels)
    assert apex_wgrad(torch.float32) is print and apex_wgrad(torch.bfloat16) is max


def test_onednn_is_used_only_if_its_products_are_fp32(monkeypatch):
    """A kernel that rounds to bf16 must be found out."""
    monkeypatch.setattr(backends, "onednn_linear", lambda: lambda x, w: (x.bfloat16() @ w.bfloat16().t()).float())
    assert not backends.onednn_keeps_fp32.__wrapped__()
    monkeypatch.setattr(backends, "onednn_linear", lambda: torch.nn.functional.linear)
    assert backends.onednn_keeps_fp32.__wrapped__()
    monkeypatch.setattr(backends, "onednn_linear", lambda: None)
    assert not backends.onednn_keeps_fp32.__wrapped__()


@pytest.mark.parametrize(
    ("flags", "dtype", "want"),
    [
        ({"avx2"}, torch.bfloat16, "widen"),
        ({"avx512f", "avx512_bf16"}, torch.bfloat16, "torch"),
        ({"avx512f", "avx512_bf16"}, torch.float16, "widen"),
        ({"avx512f", "GenuineIntel"}, torch.float32, "torch"),
        ({"avx512f", "AuthenticAMD"}, torch.float32, "onednn"),
        ({"avx2", "AuthenticAMD"}, torch.float32, "torch"),
    ],
)
def test_the_choice_follows_from_the_machine_alone(monkeypatch, flags, dtype, want):
    """Two runs on one machine must compute the same bits, so nothing is timed."""
    monkeypatch.setattr(backends, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(backends, "cpu_has_bf16", backends.cpu_has_bf16.__wrapped__)
    monkeypatch.setattr(backends, "onednn_keeps_fp32", lambda: True)
    monkeypatch.setattr(backends.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(backends, "matmul_kernel", backends.matmul_kernel.__wrapped__)  # nothing of it stays cached
    assert backends.matmul_kernel(dtype, "cpu") == want
    assert backends.matmul_kernel(dtype, "cuda") == "torch"
    assert want == "torch" or len(backends.describe(dtype, "cpu")) > 20


def test_widened_products_by_blocks_of_rows_equal_one_product(monkeypatch):
    """600 rows in blocks of 256: a block that is left out, or counted twice, shows in every product."""
    for module in (matmul, wgrad):
        monkeypatch.setattr(module, "matmul_kernel", lambda dtype, device: "widen")
    monkeypatch.setattr(matmul, "_BLOCK_ELEMENTS", 1)
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(600, n, generator=generator).bfloat16() for n in (16, 24))
    w = torch.randn(24, 16, generator=generator).bfloat16()
    weight = torch.nn.Parameter(w)
    weight.main_grad = torch.zeros(24, 16)
    wgrad.accumulate_product(weight, g, x)
    torch.testing.assert_close(weight.main_grad, g.float().t() @ x.float(), atol=1e-3, rtol=1e-5)
    torch.testing.assert_close(
        matmul.transposed_times(g, x, torch.float32), g.float().t() @ x.float(), atol=1e-3, rtol=1e-5
    )
    assert torch.equal(matmul.times_transposed(x, w), (x.float() @ w.float().t()).bfloat16())
    torch.testing.assert_close(matmul.times(g, w), (g.float() @ w.float()).bfloat16(), atol=1e-2, rtol=1e-2)
