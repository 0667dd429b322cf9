"""Multi-latent attention, and what queries and keys may go through beside it: gates, norms without weights."""

import math

import pytest
import torch
import torch.nn.functional as F

from megatron_lite.errors import ConfigError
from megatron_lite.fusions.bias_activation import quick_gelu
from megatron_lite.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron_lite.models.gpt import GPTModel, get_gpt_layer_local_spec
from megatron_lite.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron_lite.training.arguments import core_transformer_config_from_args, parse_args, validate_args
from megatron_lite.transformer import MLP, InferenceContext, MLATransformerConfig, MLPSubmodules, TransformerConfig

COMMON = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0}
SIZES = {"kv_lora_rank": 12, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 5, "add_bias_linear": False}
TOKENS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))


def latent(norms: bool = True, **more: object) -> GPTModel:
    torch.manual_seed(3)
    config = MLATransformerConfig(**{**COMMON, "init_method_std": 0.2, **SIZES, "q_lora_rank": 10, **more})
    spec = get_gpt_layer_local_spec(multi_latent_attention=True, qk_layernorm=norms)
    return GPTModel(config, spec, 64, 16, position_embedding_type="rope")


def dense(spec: dict[str, object] | None = None, **more: object) -> GPTModel:
    torch.manual_seed(3)
    config = TransformerConfig(**{**COMMON, "init_method_std": 0.2, **more})
    return GPTModel(config, get_gpt_layer_local_spec(**(spec or {})), 64, 16, position_embedding_type="rope")


def test_the_layers_parameters_are_as_many_as_the_formula_says():
    """h ql + ql n dq + h (kl + dr) + kl n (dn + dv) + n dv h, and both latent norms."""
    model = latent(num_layers=1)
    held = sum(p.numel() for p in model.decoder.layers[0].self_attention.parameters())
    n, h, ql, kl, dn, dr, dv = 4, 32, 10, 12, 6, 4, 5
    assert held == h * ql + ql * n * (dn + dr) + h * (kl + dr) + kl * n * (dn + dv) + n * dv * h + ql + kl


@pytest.mark.parametrize(
    ("mscale", "all_dim", "on_angles", "scale"), [(1.0, 0.0, 1.36889, 0.0721688), (1.0, 1.0, 1.0, 0.1352338)]
)
def test_yarn_sharpens_by_the_angles_or_by_the_softmax(mscale, all_dim, on_angles, scale):
    """DeepSeek's factor of 40 at 192 channels; the second line is DeepSeek-V3's."""
    config = MLATransformerConfig(**COMMON, mscale=mscale, mscale_all_dim=all_dim)
    spec = get_gpt_layer_local_spec(multi_latent_attention=True)
    attention = GPTModel(config, spec, 64, 16, position_embedding_type="rope").decoder.layers[0].self_attention
    assert attention.rope_mscale == pytest.approx(on_angles, rel=1e-5)
    assert attention.core_attention.softmax_scale == pytest.approx(scale, rel=1e-6)


def test_deepseeks_angles_are_kept_mixed_and_slowed_where_the_paper_says():
    """64 channels, context of 4096 times 40: pairs up to 10 are kept, from 23 on slowed by 40."""
    share = YarnRotaryEmbedding(64, scaling_factor=40).inv_freq * 10000 ** (torch.arange(0, 64, 2) / 64)
    torch.testing.assert_close(
        share[[0, 10, 11, 16, 22, 23, 31]], torch.tensor([1, 1, 0.925, 0.55, 0.1, 0.025, 0.025]), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("more", [{}, {"q_lora_rank": None}, {"rope_type": "rope", "no_rope_freq": 2}])
@torch.no_grad()
def test_decoding_keeps_the_latent_vectors_alone_and_gives_the_logits_of_the_whole(more):
    """kv rank + rotary channels for a token, whatever the number of heads."""
    model = latent(**more).eval()
    positions = torch.arange(12).expand(2, -1)
    want = model(TOKENS, positions, None)
    context = InferenceContext(max_batch_size=2, max_sequence_length=12)
    got = []
    for begin, end in [(0, 5), (5, 7), *((i, i + 1) for i in range(7, 12))]:
        got.append(model(TOKENS[:, begin:end], positions[:, begin:end], None, inference_context=context))
        context.increment_sequence_len_offset(end - begin)
    torch.testing.assert_close(torch.cat(got, dim=1), want, atol=1e-5, rtol=1e-5)
    stored = [tensor.shape[2:].numel() for pair in context.key_value_memory_dict.values() for tensor in pair]
    assert stored == [12, 4, 12, 4]


@pytest.mark.parametrize("sizes", [{"v_head_dim": 16}, {"v_head_dim": 5}])
@pytest.mark.parametrize("backend", ["flash", "fused", "unfused", "auto"])
def test_every_implementation_takes_values_of_another_size(backend, sizes):
    """Wider and narrower than queries and keys (10): output and all gradients are those of the written-out formula."""

    def gradients(backend: str) -> list[torch.Tensor]:
        model = latent(attention_backend=backend, **sizes)
        loss = model(TOKENS, None, None, labels=TOKENS).mean()
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    for got, want in zip(gradients(backend), gradients("local"), strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("modules", [["mla_up_proj"], ["mla_up_proj", "core_attn", "layernorm"]])
def test_queries_keys_and_values_can_be_made_again_in_backward(modules):
    def gradients(**more: object) -> list[torch.Tensor]:
        model = latent(**more)
        model(TOKENS, None, None, labels=TOKENS).mean().backward()
        return [p.grad for p in model.parameters()]

    again = gradients(recompute_granularity="selective", recompute_modules=modules)
    assert all(torch.equal(a, b) for a, b in zip(again, gradients(), strict=True))
    with pytest.raises(ConfigError, match="mla_up_proj without --multi-latent-attention"):
        TransformerConfig(**COMMON, recompute_granularity="selective", recompute_modules=["mla_up_proj"])


def test_what_latent_attention_cannot_be_is_said():
    spec = get_gpt_layer_local_spec(multi_latent_attention=True)
    config = MLATransformerConfig(**COMMON, **SIZES)
    with pytest.raises(ConfigError, match="--position-embedding-type none with --multi-latent-attention"):
        GPTModel(config, spec, 64, 16, position_embedding_type="none")
    with pytest.raises(ConfigError, match="without rotary positions"):
        latent().decoder(torch.zeros(4, 1, 32), None)
    for wrong, message in (
        ({"rope_type": "long"}, "--rope-type long"),
        ({"qk_pos_emb_head_dim": 3}, "channels turn in pairs"),
        ({"attention_output_gate": True}, "--attention-output-gate with --multi-latent-attention"),
        ({"qk_l2_norm": True}, "--qk-l2-norm with --multi-latent-attention"),
        ({"rotary_interleaved": True}, "--rotary-interleaved with"),
    ):
        with pytest.raises(ConfigError, match=message):
            MLATransformerConfig(**COMMON, **{**SIZES, **wrong})


# -- a gate on the output, norms without weights ------------------------------------------------------------------


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_a_gate_multiplies_every_heads_output(groups):
    """The rows of gates lie behind those of queries, group by group. Against the same layer written out."""
    model = dense(attention_output_gate=True, num_query_groups=groups)
    layer = model.decoder.layers[0].self_attention
    per = 4 // groups
    assert layer.linear_qkv.weight.shape == (groups * (2 * per + 2) * 8, 32)
    x = torch.randn(6, 2, 32)
    got, bias = layer(x, None)

    rows = layer.linear_qkv.weight.view(groups, 2 * per + 2, 8, 32)
    parts = [rows[:, :per], rows[:, per : 2 * per], rows[:, 2 * per : 2 * per + 1], rows[:, 2 * per + 1 :]]
    q, gate, k, v = (torch.einsum("sbh,gndh->bgnsd", x, part).flatten(1, 2) for part in parts)
    k, v = k.repeat_interleave(per, 1), v.repeat_interleave(per, 1)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True) * torch.sigmoid(gate)
    want = y.permute(2, 0, 1, 3).flatten(2) @ layer.linear_proj.weight.t()
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
    assert bias is layer.linear_proj.bias


def test_queries_and_keys_without_a_length_of_their_own():
    """Scores do not change when the projection of queries grows, but for epsilon."""
    model = dense({"qk_l2_norm": True}, qk_l2_norm=True)
    layer = model.decoder.layers[0].self_attention
    x = torch.randn(6, 2, 32)
    q, k, _ = layer.get_query_key_value_tensors(x)
    for tensor in (q, k):
        torch.testing.assert_close(tensor.square().mean(-1), torch.ones(6, 2, 4), atol=1e-4, rtol=0)
    assert not [name for name, _ in layer.named_parameters() if "layernorm" in name]
    mixed = torch.randn(3, 8)
    want = mixed / (mixed.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(layer.q_layernorm(mixed), want)


def test_scores_of_long_contexts_are_finite_in_half_precision():
    """The mean square is taken in fp32: 300^2 is no fp16 number."""
    layer = dense({"qk_l2_norm": True}, qk_l2_norm=True).decoder.layers[0].self_attention
    out = layer.q_layernorm(torch.full((1, 8), 300.0, dtype=torch.float16))
    assert out.dtype is torch.float16 and math.isclose(out[0, 0].item(), 1.0, rel_tol=1e-3)


# -- GPT-OSS --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [None, 2.0])
def test_a_bounded_gate_is_gpt_oss_formula(scale):
    """The gate is bounded from above alone, the other half on both sides and shifted by 1."""
    config = TransformerConfig(
        **COMMON,
        ffn_hidden_size=8,
        gated_linear_unit=True,
        activation_func=quick_gelu,
        activation_func_clamp_value=1.5,
        glu_linear_offset=1.0,
    )
    mlp = MLP(config, MLPSubmodules(ColumnParallelLinear, RowParallelLinear))
    x = torch.tensor([[-9.0, 9.0, 1.0, -1.0, 9.0, -9.0, 0.5, 0.2]]).requires_grad_()
    gate, up = x[:, :4].clamp(max=1.5), x[:, 4:].clamp(-1.5, 1.5)
    want = (up + 1.0) * gate * torch.sigmoid(1.702 * gate) * (scale or 1.0)
    got = mlp.activate(x, None if scale is None else torch.tensor([scale]))
    torch.testing.assert_close(got, want)
    for wrong in ({"activation_func_clamp_value": 0.0}, {"glu_linear_offset": 1.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong)).replace("_", "-")):
            TransformerConfig(**COMMON, **wrong)


def test_the_recipe_of_gpt_oss_sets_what_is_not_typed():
    words = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8 "
        "--micro-batch-size 1 --lr 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 7 --train-iters 1 "
    )
    args = validate_args(parse_args(f"{words} --enable-gpt-oss --window-size 3,0".split()), 1)
    config = core_transformer_config_from_args(args)
    assert (config.window_size, config.window_attn_skip_freq, config.softmax_type) == ((3, 0), 2, "learnable")
    assert (config.yarn_rotary_scaling_factor, config.glu_linear_offset) == (32.0, 1.0)
    assert config.activation_func is quick_gelu and config.gated_linear_unit and not args.swiglu
    assert not config.yarn_correction_range_round_to_int and config.activation_func_clamp_value == 7.0
