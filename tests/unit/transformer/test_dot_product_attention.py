"""Every attention backend against every other: outputs and gradients, whatever is asked of them."""

import pytest
import torch

from megatron_lite.errors import ConfigError
from megatron_lite.fusions import attention as products
from megatron_lite.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron_lite.transformer import AttnBackend, AttnMaskType, DotProductAttention, TransformerConfig
from megatron_lite.transformer import dot_product_attention as module

S, B, HEADS, SIZE = 9, 2, 4, 8


def attend(
    backend,
    mask=None,
    mask_type=AttnMaskType.causal,
    groups=HEADS,
    dtype=torch.float32,
    sq=S,
    layer=1,
    bias=None,
    **more,
):
    """(output, gradients of q, k, v)."""
    config = TransformerConfig(
        num_layers=4,
        hidden_size=HEADS * SIZE,
        num_attention_heads=HEADS,
        num_query_groups=groups,
        attention_backend=backend,
        **{"attention_dropout": 0.0, **more},
    )
    core = DotProductAttention(config, layer, mask_type)
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(sq, B, HEADS, SIZE, generator=generator).to(dtype).requires_grad_()
    k, v = (torch.randn(S, B, groups, SIZE, generator=generator).to(dtype).requires_grad_() for _ in "kv")
    y = core(q, k, v, mask, attention_bias=bias)
    assert y.shape == (sq, B, HEADS * SIZE) and y.dtype is dtype
    g = torch.randn(y.shape, generator=generator).to(dtype)
    return y.detach(), *torch.autograd.grad(y, (q, k, v), g)


def same(got, want, tolerance=1e-5):
    for a, b in zip(got, want):
        assert a.abs().max() > 0
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


DOCUMENTS = torch.ones(B, 1, S, S, dtype=torch.bool).triu(1)  # causal, and the second document does not see the first
DOCUMENTS[:, :, 5:, :5] = True
PADDED = torch.zeros(B, 1, S, S, dtype=torch.bool)
PADDED[1, :, :, 6:] = True
ASKED = {
    "causal": {},
    "causal, grouped": {"groups": 2},
    "causal, one group": {"groups": 1},
    "documents": {"mask": DOCUMENTS},
    "documents, grouped": {"mask": DOCUMENTS, "groups": 2},
    "padding": {"mask": PADDED, "mask_type": AttnMaskType.padding},
    "no mask": {"mask_type": AttnMaskType.no_mask},
    "window": {"window_size": (3, 0)},
    "window to both sides": {"window_size": (2, 1)},
    "open window": {"window_size": (-1, 0)},
    "fewer queries than keys": {"sq": 3},
    "one query": {"sq": 1},
    "own scale": {"softmax_scale": 0.7},
    "layer scaling": {"apply_query_key_layer_scaling": True, "layer": 3},
}


@pytest.mark.parametrize("backend", ["auto", "flash", "fused", "unfused"])
@pytest.mark.parametrize("asked", list(ASKED))
def test_backends_equal_the_written_out_one(asked, backend):
    """`local` is the formula; it is held against Megatron's numbers in tests/parity."""
    same(attend(backend, **ASKED[asked]), attend("local", **ASKED[asked]))


@pytest.mark.parametrize("backend", ["auto", "fused", "unfused", "local"])
@pytest.mark.parametrize("asked", ["causal", "causal, grouped", "documents", "window"])
def test_bf16_backends_stay_near_fp32(asked, backend):
    same(
        [x.float() for x in attend(backend, dtype=torch.bfloat16, **ASKED[asked])],
        attend("local", **ASKED[asked]),
        6e-2,
    )


def test_bf16_on_a_cpu_that_has_it_takes_the_batched_products(monkeypatch):
    """The choice of `auto`: short bf16 sequences, where torch's flash kernel computes in fp32."""
    calls = []
    monkeypatch.setattr(module, "attention", lambda *a: calls.append(1) or products.attention(*a))
    monkeypatch.setattr(module, "matmul_kernel", lambda dtype, device: "torch")
    attend("auto", dtype=torch.bfloat16)
    assert calls == [1]
    attend("auto")
    assert calls == [1], "fp32 stays with torch"
    monkeypatch.setattr(module, "_PRODUCTS_UP_TO_KEYS", S - 1)
    attend("auto", dtype=torch.bfloat16)
    assert calls == [1], "long sequences stay with torch"


def test_a_query_that_sees_nothing_looks_at_everything_equally():
    """A padded position under a padding mask: the mean of the values, not NaN."""
    mask = PADDED.clone()
    mask[0, :, 2, :] = True
    got = attend("auto", mask=mask, mask_type=AttnMaskType.padding)
    same(got, attend("local", mask=mask, mask_type=AttnMaskType.padding))
    assert all(torch.isfinite(x).all() for x in got)


@pytest.mark.parametrize("kind", ["off-by-one", "learnable"])
def test_sinks_take_probability_and_are_refused_where_no_kernel_has_them(kind):
    got, plain = attend("auto", softmax_type=kind)[0], attend("auto")[0]
    same([got], [attend("unfused", softmax_type=kind)[0]])
    assert (got - plain).abs().max() > 1e-2
    for backend in ("flash", "fused"):
        with pytest.raises(ConfigError, match=f"--attention-backend {backend} with --softmax-type {kind}"):
            attend(backend, softmax_type=kind)


def test_a_bias_is_added_to_the_scaled_scores():
    bias = torch.randn(1, HEADS, S, S, generator=torch.Generator().manual_seed(1))
    hide = torch.zeros(1, HEADS, S, S).masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -1e9)
    same(attend("auto", bias=hide, mask_type=AttnMaskType.no_mask), attend("local"))
    assert (attend("auto", bias=bias)[0] - attend("auto")[0]).abs().max() > 1e-2
    with pytest.raises(ConfigError, match="attention bias"):
        attend("flash", bias=bias)


def test_windows_may_skip_layers():
    """Every second layer sees everything; a list says it layer by layer."""
    full, window = attend("auto"), attend("auto", window_size=(2, 0))
    same(attend("auto", window_size=(2, 0), window_attn_skip_freq=2, layer=2), full)
    same(attend("auto", window_size=(2, 0), window_attn_skip_freq=2, layer=3), window)
    same(attend("auto", window_size=(2, 0), window_attn_skip_freq=[1, 0, 0, 1], layer=1), window)
    same(attend("auto", window_size=(2, 0), window_attn_skip_freq=[1, 0, 0, 1], layer=2), full)


def test_dropout_draws_from_its_region_and_flash_refuses_it_on_a_cpu():
    """The default state stays where it was; two calls draw two masks; means stay."""
    model_parallel_cuda_manual_seed(5)
    try:
        default = torch.get_rng_state()
        for backend in ("auto", "unfused", "local", "fused"):
            first, second = (attend(backend, attention_dropout=0.5)[0] for _ in range(2))
            assert not torch.equal(first, second), backend
        assert torch.equal(torch.get_rng_state(), default)
        with pytest.raises(ConfigError, match="--attention-backend flash with --attention-dropout 0.5 on a CPU"):
            attend("flash", attention_dropout=0.5)
    finally:
        get_cuda_rng_tracker().reset()
    with pytest.raises(ConfigError, match="no seed"):
        attend("auto", attention_dropout=0.5)


def test_softmax_runs_in_fp32_where_asked():
    """bf16 scores of 300 differ by whole units: the fp32 softmax sees the scores unrounded."""
    want = attend("local", softmax_scale=20.0)[0]
    off = {
        in_fp32: (
            attend("local", dtype=torch.bfloat16, softmax_scale=20.0, attention_softmax_in_fp32=in_fp32)[0].float()
            - want
        )
        .abs()
        .mean()
        for in_fp32 in (True, False)
    }
    assert off[True] <= off[False]


def test_a_backend_is_named_by_text_too():
    assert (
        TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=1, attention_backend="flash"
        ).attention_backend
        is AttnBackend.flash
    )
