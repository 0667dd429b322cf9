"""Rotary angles against transformers: Llama 3's stretching, YaRN, the three positions of Qwen2-VL."""

import pytest
import torch

from megatron_lite.errors import ConfigError
from megatron_lite.fusions.rope import rotate
from megatron_lite.models.common.embeddings import MultimodalRotaryEmbedding, RotaryEmbedding, YarnRotaryEmbedding
from megatron_lite.models.gpt import GPTModel, get_gpt_layer_local_spec
from megatron_lite.transformer import TransformerConfig

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

HEAD, LENGTH = 64, 300


def llama_angles(**rope: object) -> tuple[torch.Tensor, float]:
    """(inverse frequencies, factor on cos and sin) of a Llama with these parameters."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(
        hidden_size=4 * HEAD, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=rope
    )
    module = LlamaRotaryEmbedding(config)
    return module.inv_freq, module.attention_scaling


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_frequencies_equal_transformers(factor):
    """Kept, mixed and slowed channels all occur at base 500000 and 64 channels."""
    theirs, scaling = llama_angles(
        rope_type="llama3",
        rope_theta=500000.0,
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    ours = RotaryEmbedding(HEAD, 1.0, rotary_base=500000, rope_scaling=True, rope_scaling_factor=factor)
    torch.testing.assert_close(ours.inv_freq, theirs, atol=0, rtol=1e-6)
    assert scaling == 1.0


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {}),
        ({"beta_fast": 16.0, "beta_slow": 2.0}, {"beta_fast": 16.0, "beta_slow": 2.0}),
        ({"truncate": False}, {"correction_range_round_to_int": False}),
        ({"mscale": 0.707, "mscale_all_dim": 0.5}, {"mscale": 0.707, "mscale_all_dim": 0.5}),
    ],
    ids=["default", "betas", "not rounded", "mscale"],
)
def test_yarn_frequencies_and_factor_equal_transformers(theirs, ours):
    want, scaling = llama_angles(
        rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=512, **theirs
    )
    rope = YarnRotaryEmbedding(HEAD, scaling_factor=4.0, original_max_position_embeddings=512, **ours)
    torch.testing.assert_close(rope.inv_freq, want, atol=0, rtol=1e-6)
    assert rope.mscale == pytest.approx(scaling, rel=1e-12)


def test_three_positions_turn_a_head_as_qwen2_vl_does():
    """Sections in another order, or not doubled for the second half, show at once."""
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding, apply_rotary_pos_emb

    section = [8, 12, 12]
    config = Qwen2VLTextConfig(
        hidden_size=4 * HEAD,
        num_attention_heads=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": section},
    )
    positions = torch.randint(0, LENGTH, (3, 2, 20), generator=torch.Generator().manual_seed(0))
    q = torch.randn(2, 4, 20, HEAD, generator=torch.Generator().manual_seed(1))  # [b, n, s, d]
    cos, sin = Qwen2VLRotaryEmbedding(config)(q, positions)
    want, _ = apply_rotary_pos_emb(q, q, cos, sin)
    freqs = MultimodalRotaryEmbedding(HEAD, 1.0, rotary_base=1000000)(positions, section)
    got = rotate(q.permute(2, 0, 1, 3), freqs).permute(1, 2, 0, 3)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5)


def gpt(kind: str, **more: object) -> GPTModel:
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.2,
        **more,
    )
    return GPTModel(config, get_gpt_layer_local_spec(), 64, 16, position_embedding_type=kind).eval()


@torch.no_grad()
def test_text_has_three_equal_positions_and_so_the_plain_angles():
    """[b, s] positions of the loader and no positions at all (a later stage) mean the same."""
    tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(2))
    positions = torch.arange(12).expand(2, -1)
    want = gpt("rope")(tokens, positions, None)
    model = gpt("mrope", mrope_section=[2, 1, 1])
    torch.testing.assert_close(model(tokens, positions, None), want, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(model(tokens, None, None), want, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(model(tokens, positions.expand(3, -1, -1), None), want, atol=1e-6, rtol=1e-6)
    image = torch.stack([positions, positions // 3, positions % 3])
    assert not torch.allclose(model(tokens, image, None), want, atol=1e-3)


@torch.no_grad()
def test_yarn_with_factor_1_is_plain_rope_and_another_one_is_not():
    tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(2))
    want = gpt("rope")(tokens, None, None)
    torch.testing.assert_close(gpt("yarn", yarn_rotary_scaling_factor=1.0)(tokens, None, None), want)
    longer = gpt("yarn", yarn_rotary_scaling_factor=4.0, yarn_original_max_position_embeddings=8)
    assert not torch.allclose(longer(tokens, None, None), want, atol=1e-4)


def test_what_a_kind_of_positions_lacks_is_said():
    with pytest.raises(ConfigError, match="mrope without --mrope-section"):
        gpt("mrope")
    with pytest.raises(ConfigError, match="YaRN without a factor"):
        gpt("yarn")
    with pytest.raises(ConfigError, match="--mrope-section 1 1 1"):
        gpt("mrope", mrope_section=[1, 1, 1])(torch.zeros(1, 4, dtype=torch.long), None, None)
    with pytest.raises(ConfigError, match="--yarn-beta-fast 1.0 with --yarn-beta-slow 2.0"):
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, yarn_beta_fast=1.0, yarn_beta_slow=2.0)
