"""A window and a mask together: what either hides stays hidden, under every implementation of attention."""

import pytest
import torch

from megatron_lite.transformer.dot_product_attention import DotProductAttention
from megatron_lite.transformer.enums import AttnMaskType
from megatron_lite.transformer.transformer_config import TransformerConfig

S, B, NP, HN = 12, 2, 2, 8
BACKENDS = ("auto", "flash", "fused", "unfused", "local")


def attend(backend, q, k, v, mask, window, mask_type=AttnMaskType.causal):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=NP * HN,
        num_attention_heads=NP,
        attention_dropout=0.0,
        attention_backend=backend,
        window_size=window,
    )
    return DotProductAttention(config, 1, mask_type)(q, k, v, mask)


def qkv():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(S, B, NP, HN, generator=generator) for _ in range(3)]


def two_documents(first: int) -> torch.Tensor:
    """`[1, 1, S, S]`, True = hidden: causal, and no look across the border."""
    document = (torch.arange(S) >= first).int()
    return (torch.ones(S, S).triu(1).bool() | (document[:, None] != document[None, :])).view(1, 1, S, S)


@pytest.mark.parametrize("window", [None, (6, 0), (-1, 0)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_C032_a_document_does_not_see_the_one_before(backend, window):
    """The mask of --reset-attention-mask must survive --window-size: else documents leak into each other, silently."""
    q, k, v = qkv()
    mask = two_documents(5)
    before = attend(backend, q, k, v, mask, window)
    k[:5] += 1.0
    v[:5] -= 3.0
    after = attend(backend, q, k, v, mask, window)
    assert torch.equal(before[5:], after[5:])
    assert not torch.allclose(before[:5], after[:5])


@pytest.mark.parametrize("backend", BACKENDS)
def test_window_and_mask_equal_torch_with_both_hidden(backend):
    """Reference: torch's own attention with the union. fp32, 1e-5."""
    q, k, v = qkv()
    distance = torch.arange(S)[None, :] - torch.arange(S)[:, None]
    hidden = two_documents(5) | (distance < -3) | (distance > 0)
    expected = torch.nn.functional.scaled_dot_product_attention(*(x.permute(1, 2, 0, 3) for x in (q, k, v)), ~hidden)
    expected = expected.permute(2, 0, 1, 3).reshape(S, B, NP * HN)
    torch.testing.assert_close(attend(backend, q, k, v, two_documents(5), (3, 0)), expected, rtol=1e-5, atol=1e-5)


def test_a_query_that_sees_nothing_means_the_same_behind_a_window():
    """Padding: `auto` must not take a kernel that hides with minus infinity, which gives 0 there, not the mean."""
    q, k, v = qkv()
    hidden = torch.zeros(1, 1, S, S, dtype=torch.bool)
    hidden[..., 4, :] = True
    y, expected = (attend(backend, q, k, v, hidden, (3, 3), AttnMaskType.padding) for backend in ("auto", "local"))
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    assert y[4].abs().max() > 0
