"""Logits in a number format of their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_lite.initialization import init_method_normal
from megatron_lite.model_parallel_config import ModelParallelConfig
from megatron_lite.models.gpt import GPTModel, get_gpt_layer_local_spec
from megatron_lite.tensor_parallel import ColumnParallelLinear
from megatron_lite.transformer.transformer_config import TransformerConfig


def made(params: torch.dtype, output: torch.dtype | None, fused: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Output, input gradient and weight gradient of one layer."""
    torch.manual_seed(2)
    config = ModelParallelConfig(params_dtype=params, gradient_accumulation_fusion=fused)
    layer = ColumnParallelLinear(64, 40, config=config, init_method=init_method_normal(0.3), bias=False)
    layer.output_dtype = output
    x = torch.randn(6, 2, 64).to(params).requires_grad_()
    y, _ = layer(x)
    y.float().square().sum().backward()
    assert x.grad is not None and layer.weight is not None and layer.weight.grad is not None
    return y.detach(), x.grad, layer.weight.grad


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("params", [torch.bfloat16, torch.float16])
def test_fp32_logits_are_the_sums_before_they_are_rounded(params: torch.dtype, fused: bool) -> None:
    y, dx, dw = made(params, torch.float32, fused)
    narrow, dx_narrow, dw_narrow = made(params, None, fused)
    assert (y.dtype, dx.dtype, dw.dtype, narrow.dtype) == (torch.float32, params, params, params)
    assert torch.equal(y.to(params), narrow) and not torch.equal(y, narrow.float())
    for a, b in ((dx, dx_narrow), (dw, dw_narrow)):
        torch.testing.assert_close(a.float(), b.float(), rtol=0.05, atol=0.02 * float(b.float().abs().max()))


def test_bf16_logits_of_an_fp32_model_are_rounded_once() -> None:
    y, _, dw = made(torch.float32, torch.bfloat16)
    wide, _, _ = made(torch.float32, None)
    assert dw.dtype == torch.float32 and torch.equal(y, wide.bfloat16())


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), (None, None)])
def test_output_logit_dtype_reaches_the_output_layer_alone(name: str | None, dtype: torch.dtype | None) -> None:
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, bf16=True, output_logit_dtype=name)
    model = GPTModel(config, get_gpt_layer_local_spec(), 32, 8).eval()
    others = [m for m in model.modules() if isinstance(m, ColumnParallelLinear) and m is not model.output_layer]
    assert model.output_layer.output_dtype == dtype and all(m.output_dtype is None for m in others)
    tokens = torch.arange(8).view(1, 8)
    assert model(tokens, tokens, None).dtype == (dtype or torch.bfloat16)
