"""Retro's layers against a slow, direct computation, and what may influence what."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.errors import ConfigError, DataError
from megatron_lite.models.gpt import GPTModel, get_gpt_layer_local_spec
from megatron_lite.models.retro import RetroConfig, RetroModel, get_retro_decoder_block_spec
from megatron_lite.models.retro.config import retro_layer_numbers
from megatron_lite.models.retro.decoder_attention import chunks_of, in_sequence, queries_of
from megatron_lite.models.retro.encoder_spec import get_retro_encoder_block_spec
from megatron_lite.transformer.spec_utils import build_module

M, K, HEADS, D = 4, 3, 4, 32


def config(**more):
    return RetroConfig(
        **{
            "num_layers": 4,
            "hidden_size": D,
            "num_attention_heads": HEADS,
            "retro_layers": [2, 4],
            "retro_chunk_length": M,
            "retro_num_neighbors": K,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "retro_encoder_hidden_dropout": 0.0,
            "retro_encoder_attention_dropout": 0.0,
            "init_method_std": 0.3,
            **more,
        }
    )


def shaken(model, seed=0):
    """Norms and biases are generic, too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn(param.shape, generator=generator))
    return model


def build(**more):
    torch.manual_seed(1)
    c = config(**more)
    return shaken(RetroModel(c, get_retro_decoder_block_spec(c), 64, 64))


def cross_attention(encoder=False, **more):
    """A layer's cross attention alone."""
    torch.manual_seed(1)
    c = config(**more)
    spec = get_retro_decoder_block_spec(c).layer_specs[1 if encoder else 3].submodules.cross_attention
    return shaken(build_module(spec, config=c, layer_number=2))


def inputs(ns=12, b=2, model_vocabulary=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    chunks = -(-ns // M)
    tokens = torch.randint(0, model_vocabulary, (b, ns), generator=generator)
    neighbors = torch.randint(0, model_vocabulary, (b * chunks * K, 2 * M), generator=generator)
    return tokens, torch.arange(ns).expand(b, ns), neighbors


# -- which layers ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (6, [6]),
        (8, [6]),
        (9, [6, 9]),
        (12, [6, 9, 12]),
        (15, [6, 9, 12, 15]),
        (16, [9, 12, 15]),
        (24, [9, 12, 15, 18, 21, 24]),
        (32, [9, 12, 15, 18, 21, 24, 27, 30]),
    ],
)
def test_layers_that_retrieve(layers, expected):
    assert retro_layer_numbers(layers) == expected
    specs = get_retro_decoder_block_spec(config(num_layers=layers, retro_layers=None)).layer_specs
    crossing = [spec.submodules.cross_attention for spec in specs]
    found = [i + 1 for i, cross in enumerate(crossing) if hasattr(cross, "params")]
    encoders = [i + 1 for i in [n - 1 for n in found] if crossing[i].params["encoder_block_spec"] is not None]
    assert (found, encoders) == (expected, expected[:1]), "the first one that retrieves owns the encoder"


def test_too_few_layers_to_retrieve_are_an_error_that_names_the_way_out():
    with pytest.raises(ConfigError, match="--retro-layers 2 4 for a small model"):
        config(num_layers=5, retro_layers=None)
    assert config(num_layers=5).retro_layers == [2, 4]


@pytest.mark.parametrize(
    ("more", "flag"),
    [
        ({"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}, "--pipeline-model-parallel-size 2"),
        ({"num_query_groups": 2}, "--num-query-groups 2"),
        ({"retro_attention_gate": 0.5}, "--retro-attention-gate 0.5"),
        ({"retro_layers": [2, 9]}, "--retro-layers 2 9"),
        ({"retro_num_neighbors": 0}, "--retro-num-neighbors 0"),
    ],
)
def test_what_retro_cannot_have_is_refused_with_its_flag(more, flag):
    with pytest.raises(ConfigError, match=flag):
        config(**more)


# -- chunks and queries ------------------------------------------------------------------------------------------------
@settings(max_examples=60)
@given(ns=st.integers(1, 23), m=st.integers(1, 6), b=st.integers(1, 3))
def test_the_last_token_of_a_chunk_is_the_first_to_see_its_neighbours(ns, m, b):
    """By index: what lies in which row and column, for any length."""
    h = torch.arange(1, ns + 1).float().view(ns, 1, 1) + 100 * torch.arange(b).view(1, b, 1).float()
    chunk_count, pad = -(-ns // m), (ns - 1) % m
    chunks, queries = chunks_of(h, m), queries_of(h, m)
    assert chunks.shape == queries.shape == (m, b * chunk_count, 1)
    partial = ns % m or m
    for batch in range(b):
        for u in range(chunk_count):
            column = batch * chunk_count + u
            begin = 0 if u == 0 else partial + (u - 1) * m
            own = [t for t in range(begin, begin + (partial if u == 0 else m))]
            expected = [t + 1 + 100 * batch for t in own] + [0] * (m - len(own))
            assert chunks[:, column, 0].tolist() == expected
            seeing = [t for t in range(pad + u * m, pad + u * m + m) if t < ns]
            assert seeing[0] == own[-1]
            assert queries[: len(seeing), column, 0].tolist() == [t + 1 + 100 * batch for t in seeing]
            assert not queries[len(seeing) :, column].any()
    back = in_sequence(queries, ns, b)
    assert torch.equal(back[pad:], h[pad:]) and not back[:pad].any()


def test_chunked_cross_attention_of_known_numbers():
    """Identity projections, one head of two channels: numbers worked out by hand."""
    c = config(num_layers=2, hidden_size=2, num_attention_heads=1, retro_layers=[1, 2], retro_chunk_length=2,
               retro_num_neighbors=2)  # fmt: skip
    layer = build_module(
        get_retro_decoder_block_spec(c).layer_specs[1].submodules.cross_attention, config=c, layer_number=2
    )
    eye = torch.eye(2)
    with torch.no_grad():
        for name, param in layer.named_parameters():
            param.copy_(torch.cat([eye, eye]) if "linear_kv.weight" in name else eye if param.dim() == 2 else 0 * param)
    h = torch.tensor([[t / 2, 1.0] for t in range(4)]).view(4, 1, 2)
    first = torch.tensor([[0, 0], [-1, 0.5], [1, 0], [0, 0.5]])  # rows token by token, of a token both neighbours
    second = torch.tensor([[0, 1], [-1, 1.5], [1, 1], [0, 1.5]])
    # [r, k*b*l, d]: the neighbour is the outer column
    context = torch.stack([torch.stack([x[0::2], x[1::2]], 1) for x in (first, second)], 2).view(2, 4, 2)
    whole = layer(h, None, key_value_states=context)["attention_output"]
    expected = torch.tensor([[0, 0], [0.08748, 0.25], [0.25724, 0.20626], [0.41258, 1.16512]])
    torch.testing.assert_close(whole[:, 0], expected, atol=1e-5, rtol=0)
    three = layer(h[:3], None, key_value_states=context)["attention_output"]
    expected = torch.tensor([[-0.08748, 0.29374], [0.08748, 0.25], [0.25724, 1.20626]])
    torch.testing.assert_close(three[:, 0], expected, atol=1e-5, rtol=0)


# -- the slow reference ------------------------------------------------------------------------------------------------
def attention(q, k, v):
    """fp64, one column: q `[sq, d]`, k and v `[sk, d]`, all heads."""
    out = []
    for head in range(HEADS):
        part = slice(head * D // HEADS, (head + 1) * D // HEADS)
        scores = q[:, part] @ k[:, part].T / math.sqrt(D // HEADS)
        out.append(scores.softmax(-1) @ v[:, part])
    return torch.cat(out, 1)


def crossed(p, x, keys):
    """Cross attention of x `[sq, d]` to keys `[sk, d]`, by the parameters of a CrossAttention."""
    kv = (keys @ p["linear_kv.weight"].T + p["linear_kv.bias"]).view(-1, HEADS, 2, D // HEADS)
    k, v = kv[:, :, 0].reshape(-1, D), kv[:, :, 1].reshape(-1, D)
    q = x @ p["linear_q.weight"].T + p["linear_q.bias"]
    return attention(q, k, v) @ p["linear_proj.weight"].T + p["linear_proj.bias"]


def encoded(p, x, chunk, residual):
    """One neighbour x `[r, d]`, retrieved for a chunk `[m, d]`, through both layers of the encoder."""

    def norm(name, y):
        return F.layer_norm(y, (D,), p[f"{name}.weight"], p[f"{name}.bias"])

    for i in range(2):
        at = f"layers.{i}."
        mixed = norm(f"{at}input_layernorm", x) @ p[f"{at}self_attention.linear_qkv.weight"].T
        mixed = (mixed + p[f"{at}self_attention.linear_qkv.bias"]).view(-1, HEADS, 3, D // HEADS)
        q, k, v = (mixed[:, :, j].reshape(-1, D) for j in range(3))
        y = attention(q, k, v) @ p[f"{at}self_attention.linear_proj.weight"].T
        x = x + y + p[f"{at}self_attention.linear_proj.bias"]
        if i == 0:
            v = norm(f"{at}pre_cross_attn_layernorm", x)
            own = {name.split(".attn.")[1]: value for name, value in p.items() if ".attn." in name}
            x = (v if residual == "normed" else x) + crossed(own, v, chunk)
        inner = norm(f"{at}pre_mlp_layernorm", x) @ p[f"{at}mlp.linear_fc1.weight"].T + p[f"{at}mlp.linear_fc1.bias"]
        x = x + F.gelu(inner) @ p[f"{at}mlp.linear_fc2.weight"].T + p[f"{at}mlp.linear_fc2.bias"]
    return x


def slow(layer, h, neighbors, residual):
    """Chunked cross attention, token by token in fp64. neighbors `[b, l, k, r, d]`."""
    p = {name: param.detach().double() for name, param in layer.named_parameters()}
    own = {name.removeprefix("attn."): value for name, value in p.items() if name.startswith("attn.")}
    encoder = {name.removeprefix("encoder."): value for name, value in p.items() if name.startswith("encoder.")}
    h = h.double()
    ns, b, _ = h.shape
    out = torch.zeros_like(h)
    chunks, partial, pad = -(-ns // M), ns % M or M, (ns - 1) % M
    for batch in range(b):
        for u in range(chunks):
            begin, end = (0, partial) if u == 0 else (partial + (u - 1) * M, partial + u * M)
            chunk = F.pad(h[begin:end, batch], (0, 0, 0, M - (end - begin)))
            keys = [encoded(encoder, x, chunk, residual) if encoder else x for x in neighbors[batch, u].double()]
            for t in range(pad + u * M, min(pad + (u + 1) * M, ns)):
                out[t, batch] = crossed(own, h[t : t + 1, batch], torch.cat(keys))[0]
    return out


@pytest.mark.parametrize("ns", [12, 10, 5, 4, 3])
@pytest.mark.parametrize(("with_encoder", "residual"), [(True, "normed"), (True, "stream"), (False, "normed")])
def test_chunked_cross_attention_equals_the_slow_reference(ns, with_encoder, residual):
    layer = cross_attention(with_encoder, retro_encoder_residual=residual, init_method_std=0.05).eval()
    b, chunks, r = 2, -(-ns // M), 2 * M
    torch.manual_seed(2)
    h, neighbors = torch.randn(ns, b, D), 0.5 * torch.randn(b, chunks, K, r, D)
    if with_encoder:
        context = neighbors.permute(3, 0, 1, 2, 4).reshape(r, -1, D)
    else:
        context = neighbors.permute(3, 2, 0, 1, 4).reshape(r, -1, D)
    got = layer(h, None, key_value_states=context)
    torch.testing.assert_close(
        got["attention_output"].double(), slow(layer, h, neighbors, residual), atol=1e-6, rtol=1e-6
    )


def test_keys_of_a_column_are_the_neighbours_of_its_chunk():
    """A wrong reshape would mix neighbours of two chunks, and still train."""
    layer = cross_attention()
    b, chunks = 2, 3
    context = torch.zeros(2 * M, K * b * chunks, D)
    for k in range(K):
        for column in range(b * chunks):
            context[:, k * b * chunks + column] = column + k / 10
    seen = {}
    layer.attn.forward = lambda x, mask, key_value_states: (seen.update(kv=key_value_states), (x, None))[1]
    layer(torch.zeros(3 * M, b, D), None, key_value_states=context)
    for column in range(b * chunks):
        found = sorted(set(round(value, 4) for value in seen["kv"][:, column].flatten().tolist()))
        assert found == [round(column + k / 10, 4) for k in range(K)]


# -- causality ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ns", [8, 7, 6])
def test_neighbours_of_a_chunk_reach_its_last_token_and_those_behind_it_alone(ns):
    layer = cross_attention(encoder=True)
    b, chunks, pad = 2, 2, (ns - 1) % M
    context = torch.randn(2 * M, b * chunks * K, D, requires_grad=True)
    out = layer(torch.randn(ns, b, D), None, key_value_states=context)["attention_output"]
    for t in range(ns):
        for batch in range(b):
            (grad,) = torch.autograd.grad(out[t, batch].square().sum(), context, retain_graph=True)
            reached = grad.view(2 * M, b, chunks, K, D).abs().sum((0, 3, 4)) > 0
            for other in range(b):
                for u in range(chunks):
                    expected = other == batch and pad + u * M <= t < pad + (u + 1) * M
                    assert reached[other, u] == expected, (t, batch, other, u)


def test_no_token_sees_what_comes_later_through_neighbours():
    """By gradients through the whole model: neither later tokens nor neighbours that were found by them."""
    model, ns, b = build(), 12, 2
    tokens, positions, neighbors = inputs(ns, b)
    embedded = []
    model.embedding.register_forward_hook(lambda module, args, y: (embedded.append(y), y.retain_grad())[1])
    logits = model(tokens, positions, None, neighbors)
    context, hidden = embedded
    for t in range(ns):
        by_context, by_hidden = torch.autograd.grad(
            logits[:, t].square().sum(), [context, hidden], retain_graph=True, allow_unused=True
        )
        reached = by_context.view(2 * M, b, ns // M, K, D).abs().sum((0, 3, 4)) > 0
        for u in range(ns // M):
            assert bool(reached[:, u].any()) == (u * M + M - 1 <= t), (t, u)
        assert not by_hidden[t + 1 :].any() and by_hidden[t].any()


def test_later_tokens_and_their_neighbours_change_nothing_before_them():
    model = build().eval()
    tokens, positions, neighbors = inputs(12, 2)
    before = model(tokens, positions, None, neighbors)
    changed_tokens, changed = tokens.clone(), neighbors.view(2, 3, K, -1).clone()
    changed_tokens[:, 8:] = (tokens[:, 8:] + 1) % 64
    changed[:, 2] = (changed[:, 2] + 1) % 64
    after = model(changed_tokens, positions, None, changed.view_as(neighbors))
    assert torch.equal(before[:, :8], after[:, :8]) and not torch.equal(before[:, 8:], after[:, 8:])


# -- beside GPT --------------------------------------------------------------------------------------------------------
def gpt_like(retro):
    torch.manual_seed(1)
    model = GPTModel(config(), get_gpt_layer_local_spec(), 64, 64)
    model.load_state_dict(retro.state_dict(), strict=False)
    return model


def test_without_what_was_found_retro_is_gpt_to_the_bit():
    """Zeroed projections, and --retro-off."""
    model = build().eval()
    tokens, positions, neighbors = inputs()
    expected = gpt_like(model).eval()(tokens, positions, None)
    off = build(retro_off=True).eval()
    assert torch.equal(off(tokens, positions, None, neighbors), expected)
    assert not torch.equal(model(tokens, positions, None, neighbors), expected)
    with torch.no_grad():
        for number in (1, 3):
            for param in model.decoder.layers[number].cross_attention.attn.linear_proj.parameters():
                param.zero_()
    assert torch.equal(model(tokens, positions, None, neighbors), expected)


def test_parameters_have_megatrons_names():
    names = dict(build().named_parameters())
    for name in (
        "decoder.layers.1.cross_attention.attn.linear_kv.weight",
        "decoder.layers.1.cross_attention.encoder.layers.0.cross_attention.attn.linear_q.bias",
        "decoder.layers.1.cross_attention.encoder.layers.1.mlp.linear_fc2.weight",
        "decoder.layers.3.pre_cross_attn_layernorm.weight",
    ):
        assert names[name].shard.name == name
    assert not any("layers.3.cross_attention.encoder" in name for name in names)


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_recomputed_layers_hand_on_the_encoded_context(granularity):
    """Losses and gradients as without; a group that forgot the second output would feed raw neighbours to layer 4."""
    tokens, positions, neighbors = inputs()
    more = {"recompute_granularity": granularity}
    if granularity == "full":
        more |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    grads = []
    for options in ({}, more):
        model = build(**options)
        model(tokens, positions, None, neighbors, labels=tokens).mean().backward()
        grads.append({name: param.grad for name, param in model.named_parameters()})
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, atol=1e-7, rtol=1e-5, msg=name)


def test_the_wrong_number_of_neighbours_is_said():
    model = build()
    tokens, positions, neighbors = inputs()
    with pytest.raises(DataError, match="--retro-num-neighbors k"):
        model(tokens, positions, None, neighbors[: 2 * 3 * 2])


def test_bf16_and_fp32_residual_run():
    model = build(fp32_residual_connection=True, bf16=True, params_dtype=torch.bfloat16)
    tokens, positions, neighbors = inputs()
    loss = model(tokens, positions, None, neighbors, labels=tokens).mean()
    loss.backward()
    assert loss.isfinite()


def test_a_copy_with_replace_and_a_block_spec_of_one_layer():
    c = replace(config(), retro_encoder_num_layers=1)
    assert len(get_retro_encoder_block_spec(c).layer_specs) == 1
