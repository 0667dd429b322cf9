"""Specs, norms, MLP, layers, blocks and the half-precision wrapper."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron_lite.errors import ConfigError
from megatron_lite.fusions.bias_dropout_add import get_bias_dropout_add
from megatron_lite.models.gpt import GPTModel, get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron_lite.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron_lite.transformer import (
    MLP,
    AttnMaskType,
    CrossAttention,
    CrossAttentionSubmodules,
    DotProductAttention,
    Float16Module,
    IdentityFuncOp,
    IdentityOp,
    LayerNorm,
    MLPSubmodules,
    ModuleSpec,
    RMSNorm,
    TransformerBlock,
    TransformerBlockSubmodules,
    TransformerConfig,
    TransformerLayer,
    WrappedTorchNorm,
    build_module,
)
from megatron_lite.transformer.transformer_block import layers_of_stage

BASE = {
    "num_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.3,
}


def config(**more):
    return TransformerConfig(**{**BASE, **more})


def hidden():
    return torch.randn(5, 2, 16, generator=torch.Generator().manual_seed(0))


def test_a_spec_builds_its_class_with_its_arguments():
    """The call's arguments win over the spec's; a tuple is imported; a function is handed back."""
    linear = build_module(ModuleSpec(module=nn.Linear, params={"in_features": 3, "bias": False}), out_features=2)
    assert linear.weight.shape == (2, 3) and linear.bias is None
    assert build_module(ModuleSpec(nn.Linear, {"in_features": 3}), in_features=4, out_features=2).in_features == 4
    assert isinstance(build_module(ModuleSpec(("torch.nn", "ReLU"))), nn.ReLU)
    assert build_module(get_bias_dropout_add) is get_bias_dropout_add
    with pytest.raises(ImportError, match="torch.nn has no Nothing"):
        build_module(ModuleSpec(("torch.nn", "Nothing")))
    with pytest.raises(TypeError, match="while building Linear"):
        build_module(nn.Linear, 3, 4, wrong=1)


def test_identities_stand_for_missing_parts():
    assert build_module(IdentityOp, config=None, hidden_size=3)(7, mask=1) == 7
    assert build_module(IdentityFuncOp)(True, False)("x", "residual") == "x"


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norms_start_neutral_and_zero_centered_gamma_is_gamma_minus_one(kind):
    """The stored weight differs by 1; the function is the same, and so are the gradients."""
    plain, centered = (
        WrappedTorchNorm(config(normalization=kind, layernorm_zero_centered_gamma=z), 16) for z in (False, True)
    )
    assert isinstance(plain, {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}[kind])
    want = F.layer_norm(hidden(), (16,)) if kind == "LayerNorm" else F.rms_norm(hidden(), (16,), eps=1e-5)
    torch.testing.assert_close(plain(hidden()), want)
    assert not centered.weight.any() and torch.equal(centered(hidden()), plain(hidden()))
    for norm in (plain, centered):
        norm(hidden()).square().sum().backward()
    assert plain.weight.grad.abs().max() > 0 and torch.equal(plain.weight.grad, centered.weight.grad)


@pytest.mark.parametrize("gated", [False, True])
def test_mlp_is_its_formula(gated):
    c = config(gated_linear_unit=gated, activation_func=F.silu, ffn_hidden_size=24)
    mlp = MLP(c, MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
    for bias in (mlp.linear_fc1.bias, mlp.linear_fc2.bias):
        nn.init.normal_(bias)
    inner = F.linear(hidden(), mlp.linear_fc1.weight, mlp.linear_fc1.bias)
    inner = F.silu(inner[..., :24]) * inner[..., 24:] if gated else F.silu(inner)
    y, bias = mlp(hidden())
    torch.testing.assert_close(y + bias, F.linear(inner, mlp.linear_fc2.weight, mlp.linear_fc2.bias))
    scaled, rest = mlp(hidden(), per_token_scale=torch.full((5, 2), 2.0))
    torch.testing.assert_close(scaled, 2 * (y + bias))
    assert rest is None


def layer(**more):
    return build_module(get_gpt_layer_local_spec(), config=config(**more), layer_number=1)


@pytest.mark.parametrize("post", [False, True])
def test_the_residual_is_taken_before_or_after_the_norm_as_the_flag_says(post):
    """`--apply-residual-connection-post-layernorm` is the original BERT's order."""
    one = layer(apply_residual_connection_post_layernorm=post)
    nn.init.normal_(one.input_layernorm.weight)
    x = hidden()
    normed = one.input_layernorm(x)
    y, bias = one.self_attention(normed, None)
    x = (normed if post else x) + y + bias
    normed = one.pre_mlp_layernorm(x)
    y, bias = one.mlp(normed)
    torch.testing.assert_close(one(hidden())[0], (normed if post else x) + y + bias)


def test_cross_attention_looks_at_the_other_sequence():
    """Queries of one length, keys of another, a padding mask on the keys."""
    spec = CrossAttentionSubmodules(ColumnParallelLinear, ColumnParallelLinear, DotProductAttention, RowParallelLinear)
    cross = CrossAttention(config(), spec, 1, AttnMaskType.padding)
    other = torch.randn(7, 2, 16, generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(2, 1, 5, 7, dtype=torch.bool)
    mask[..., 4:] = True
    y, bias = cross(hidden(), mask, key_value_states=other)
    torch.testing.assert_close(y, cross(hidden(), mask[..., :4], key_value_states=other[:4])[0])
    q = F.linear(hidden(), cross.linear_q.weight).view(5, 2, 2, 8).permute(1, 2, 0, 3)
    k, v = F.linear(other[:4], cross.linear_kv.weight).view(4, 2, 2, 16).permute(1, 2, 0, 3).split(8, -1)
    want = F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).reshape(5, 2, 16)
    torch.testing.assert_close(y, F.linear(want, cross.linear_proj.weight))
    with pytest.raises(ConfigError, match="cross attention"):
        CrossAttention(config(num_query_groups=1), spec, 1)


def test_a_block_takes_one_spec_for_all_layers_or_one_for_each():
    """A user's own layer order, without a final norm."""
    block = TransformerBlock(config(), get_gpt_layer_local_spec())
    assert [one.layer_number for one in block.layers] == [1, 2, 3, 4] and block.final_layernorm is not None
    specs = [get_gpt_layer_local_spec(), get_gpt_layer_local_spec(qk_layernorm=True)]
    mixed = TransformerBlock(config(), TransformerBlockSubmodules(layer_specs=specs))
    assert mixed.final_layernorm is None and mixed.layers[1].self_attention.q_layernorm is not None
    assert mixed.layers[0].self_attention.q_layernorm is None
    with pytest.raises(ConfigError, match="a block of Linear"):
        TransformerBlock(config(), ModuleSpec(nn.Linear))


def test_a_users_layer_can_replace_ours():
    """Swapping a part is naming another class."""

    class Doubled(TransformerLayer):
        def forward(self, hidden_states, *args, **kwargs):
            y, context = super().forward(hidden_states, *args, **kwargs)
            return 2 * y, context

    spec = get_gpt_layer_local_spec()
    ours = TransformerBlock(config(num_layers=1), spec, post_layer_norm=False)
    theirs = TransformerBlock(
        config(num_layers=1), ModuleSpec(Doubled, submodules=spec.submodules), post_layer_norm=False
    )
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(theirs(hidden(), None), 2 * ours(hidden(), None))


def test_layers_of_stages_cover_every_layer_once():
    c = config(num_layers=8, virtual_pipeline_model_parallel_size=None)
    assert [layers_of_stage(c, rank, 2) for rank in (0, 1)] == [(0, 4), (4, 4)]
    c.virtual_pipeline_model_parallel_size = 2
    assert [layers_of_stage(c, rank, 2, v) for rank in (0, 1) for v in (0, 1)] == [(0, 2), (4, 2), (2, 2), (6, 2)]
    with pytest.raises(ConfigError, match="--num-layers 8 over 3 stages"):
        layers_of_stage(c, 0, 3)


@pytest.mark.parametrize("fp32_residual", [False, True])
def test_a_bf16_model_keeps_its_attributes_and_answers_in_fp32(fp32_residual):
    """Weights in bf16 with their shards; logits near the fp32 model's; the residual in fp32 where asked."""
    c = config(bf16=True, fp32_residual_connection=fp32_residual)
    model = Float16Module(c, GPTModel(c, get_gpt_layer_local_spec(), 32, 8))
    wide = GPTModel(config(), get_gpt_layer_local_spec(), 32, 8)
    wide.load_state_dict(model.state_dict())
    streams = []
    model.module.decoder.layers[1].register_forward_pre_hook(lambda _, args: streams.append(args[0].dtype))
    tokens = torch.arange(8).view(1, 8)
    logits = model(tokens, tokens, None)
    assert streams == [torch.float32 if fp32_residual else torch.bfloat16]
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits, wide(tokens, tokens, None), atol=0.15, rtol=0.1)
    loss = model(tokens, tokens, None, labels=tokens)
    assert loss.dtype is torch.float32
    loss.mean().backward()
    for name, param in model.named_parameters():
        assert param.dtype is torch.bfloat16 and param.shard.name == name.removeprefix("module.")
        assert param.grad.abs().max() > 0, name


def test_layers_that_are_not_built_are_refused():
    with pytest.raises(ConfigError, match="fp8"):
        get_gpt_layer_local_spec(fp8="hybrid")
    with pytest.raises(ConfigError, match="--transformer-impl local"):
        get_gpt_layer_with_transformer_engine_spec()
    with pytest.raises(ConfigError, match="--num-query-groups 3"):
        config(num_attention_heads=4, num_query_groups=3)
