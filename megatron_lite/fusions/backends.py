"""What this machine has, and which kernel each operation takes because of it.

    fp32 products on a CPU   oneDNN on AMD with AVX-512 (MKL stays at half that rate there), else torch (MKL)
    bf16 products on a CPU   torch where the CPU has bf16 instructions, else fp32 products of widened operands
    anything on a GPU        torch (cuBLAS)

The choice depends on the machine alone and is made once, so that two runs on one machine compute the same bits. oneDNN
is used only after its products were compared with fp64 at the first use: on a CPU with AMX it could be told to round
to bf16, and that must never happen silently.
"""

from __future__ import annotations

import functools
import importlib
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from megatron_lite.log import get_logger

MatmulKernel = Literal["torch", "onednn", "widen"]
logger = get_logger(__name__)


@functools.cache
def cpu_flags() -> frozenset[str]:
    """The instruction sets that Linux reports for this CPU and its vendor; empty elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    words: set[str] = set()
    for line in text.split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features", "vendor_id"):
            words.update(value.split())
    return frozenset(words)


@functools.cache
def cpu_has_bf16() -> bool:
    """Whether the CPU multiplies bf16 itself. Without it bf16 kernels emulate, 5 to 40 times slower than fp32."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        return bool(cpu_flags() & {"avx512_bf16", "amx_bf16"})
    return not cpu_flags() or "bf16" in cpu_flags()  # Arm says "bf16"; what says nothing is left to torch


@functools.cache
def matmul_kernel(dtype: torch.dtype, device_type: str) -> MatmulKernel:
    """The kernel for products of `dtype` on `device_type`."""
    if device_type != "cpu":
        return "torch"
    if dtype in (torch.bfloat16, torch.float16):
        # fp16 has no fast kernel on any CPU that torch 2.13 knows (measured: 10 times slower than bf16).
        return "widen" if dtype == torch.float16 or not cpu_has_bf16() else "torch"
    slow_mkl = "AuthenticAMD" in cpu_flags() and "avx512f" in cpu_flags()
    if dtype == torch.float32 and slow_mkl and onednn_keeps_fp32():
        return "onednn"
    return "torch"


@functools.cache
def onednn_keeps_fp32() -> bool:
    """Whether oneDNN's linear exists here and its sums of 1024 fp32 products are as near to fp64 as fp32 is.

    bf16 arithmetic would be off by 0.1; fp32 is off by 1e-4.
    """
    linear = onednn_linear()
    if linear is None:
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 1024, generator=generator)
    w = torch.randn(64, 1024, generator=generator)
    g = torch.randn(1024, 48, generator=generator)
    products = [(linear(x, w), x, w), (linear(g.t(), w), g.t(), w), (linear(w, g.t()), w, g.t())]
    worst = max((got.double() - a.double() @ b.double().t()).abs().max().item() for got, a, b in products)
    if worst > 2e-3:
        logger.warning("oneDNN's fp32 products are off by %.1e: not used", worst)
    return worst <= 2e-3


def onednn_linear():
    """`f(x, w) = x @ w.T` by oneDNN, without autograd; None where this torch has no such operator.

    The operator is private to torch, hence this one place and the plain product as the fallback.
    """
    if not torch.backends.mkldnn.is_available():
        return None
    operator = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return None if operator is None else lambda x, w: operator(x, w, None, "none", [], "")


@functools.cache
def apex_wgrad(main_grad_dtype: torch.dtype) -> Callable[[Tensor, Tensor, Tensor], None] | None:
    """`f(x, g, main_grad)` that adds g^T x to a gradient of this dtype, by apex's kernel; None where there is none.

    The kernel multiplies half-precision operands and adds in fp32, in one pass over the gradient.
    """
    try:
        kernels = importlib.import_module("fused_weight_gradient_mlp_cuda")  # a part of apex, built apart from it
    except ImportError:
        return None
    name = "wgrad_gemm_accum_fp32" if main_grad_dtype == torch.float32 else "wgrad_gemm_accum_fp16"
    return getattr(kernels, name, None)


def grouped_product(device_type: str, dtype: torch.dtype, *sizes: int) -> Callable[..., Tensor] | None:
    """`f(a, b, offs=ends)`: products of groups of rows in one kernel; None where one after the other is the choice.

    Args:
        sizes: of one group's matrix; the kernel wants rows of whole 16 bytes.

    torch has the kernel for bf16 on GPUs of compute capability 8.0 and up. Its CPU form is a loop itself.
    """
    if device_type != "cuda" or dtype != torch.bfloat16 or any(n % 8 for n in sizes):
        return None
    if torch.cuda.get_device_capability() < (8, 0):
        return None
    return getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def describe(dtype: torch.dtype, device_type: str) -> str:
    """One line for the start-up output: what computes the products, and why."""
    reasons = {
        "torch": "torch's default",
        "onednn": "oneDNN (MKL is slower on this CPU; checked against fp64)",
        "widen": f"fp32 products of widened operands (this CPU has no fast {dtype} product)",
    }
    return f"matrix products: {reasons[matmul_kernel(dtype, device_type)]}"
