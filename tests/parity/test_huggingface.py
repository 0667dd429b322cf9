"""GPTModel against Hugging Face's GPT-2 and Llama: random small models, weights copied here, fp32."""

import pytest
import torch
import torch.nn.functional as F

from megatron_lite.models.gpt import GPTModel, get_gpt_layer_local_spec
from megatron_lite.transformer import TransformerConfig

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

VOCABULARY, LENGTH, BATCH = 96, 24, 3
COMMON = {"num_layers": 3, "hidden_size": 48, "num_attention_heads": 6, "hidden_dropout": 0.0, "attention_dropout": 0.0}


def qkv_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: int, size: int) -> torch.Tensor:
    """Rows of three projections in the fused order: per group its query heads, its key, its value."""
    parts = [x.view(groups, -1, size, *x.shape[1:]) for x in (q, k, v)]
    return torch.cat(parts, dim=1).reshape(-1, *q.shape[1:])


def gpt2() -> tuple[torch.nn.Module, GPTModel, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Both models and, for ours, state and gradients under our names, made from theirs."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=48, n_layer=3, n_head=6, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    theirs = transformers.GPT2LMHeadModel(config)
    ours = GPTModel(
        TransformerConfig(**COMMON, bias_activation_fusion=True),  # its gelu_new is the tanh form
        get_gpt_layer_local_spec(),
        VOCABULARY,
        32,
        share_embeddings_and_output_weights=True,
    )

    def translate(get) -> dict[str, torch.Tensor]:
        state = {
            "embedding.word_embeddings.weight": get("transformer.wte.weight"),
            "embedding.position_embeddings.weight": get("transformer.wpe.weight"),
            "decoder.final_layernorm.weight": get("transformer.ln_f.weight"),
            "decoder.final_layernorm.bias": get("transformer.ln_f.bias"),
        }
        for i in range(3):
            for kind in ("weight", "bias"):

                def there(name, i=i, kind=kind):
                    return get(f"transformer.h.{i}.{name}.{kind}").t()  # its Conv1D holds [in, out]

                layer = f"decoder.layers.{i}"
                state[f"{layer}.input_layernorm.{kind}"] = there("ln_1")
                state[f"{layer}.pre_mlp_layernorm.{kind}"] = there("ln_2")
                state[f"{layer}.self_attention.linear_qkv.{kind}"] = qkv_rows(*there("attn.c_attn").chunk(3), 6, 8)
                state[f"{layer}.self_attention.linear_proj.{kind}"] = there("attn.c_proj")
                state[f"{layer}.mlp.linear_fc1.{kind}"] = there("mlp.c_fc")
                state[f"{layer}.mlp.linear_fc2.{kind}"] = there("mlp.c_proj")
        return state

    return theirs, ours, translate(lambda name: theirs.get_parameter(name).detach()), translate


def llama() -> tuple[torch.nn.Module, GPTModel, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The same with rotary positions, RMSNorm, SwiGLU, 2 key/value heads, untied."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    theirs = transformers.LlamaForCausalLM(config)
    ours = GPTModel(
        TransformerConfig(
            **COMMON,
            ffn_hidden_size=80,
            num_query_groups=2,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
        ),
        get_gpt_layer_local_spec(),
        VOCABULARY,
        64,
        position_embedding_type="rope",
    )

    def translate(get) -> dict[str, torch.Tensor]:
        state = {
            "embedding.word_embeddings.weight": get("model.embed_tokens.weight"),
            "decoder.final_layernorm.weight": get("model.norm.weight"),
            "output_layer.weight": get("lm_head.weight"),
        }
        for i in range(3):

            def there(name, i=i):
                return get(f"model.layers.{i}.{name}.weight")

            layer = f"decoder.layers.{i}"
            state[f"{layer}.input_layernorm.weight"] = there("input_layernorm")
            state[f"{layer}.pre_mlp_layernorm.weight"] = there("post_attention_layernorm")
            q, k, v = (there(f"self_attn.{x}_proj") for x in "qkv")
            state[f"{layer}.self_attention.linear_qkv.weight"] = qkv_rows(q, k, v, 2, 8)
            state[f"{layer}.self_attention.linear_proj.weight"] = there("self_attn.o_proj")
            state[f"{layer}.mlp.linear_fc1.weight"] = torch.cat([there("mlp.gate_proj"), there("mlp.up_proj")])
            state[f"{layer}.mlp.linear_fc2.weight"] = there("mlp.down_proj")
        return state

    return theirs, ours, translate(lambda name: theirs.get_parameter(name).detach()), translate


@pytest.mark.parametrize("family", [gpt2, llama])
def test_logits_and_gradients_equal_hugging_faces(family):
    """A weight order, a norm or an angle that differs is off by 1e-2; equal formulas differ by rounding, below 1e-5."""
    theirs, ours, state, translate = family()
    ours.load_state_dict(state)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(2))
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(LENGTH).expand(BATCH, -1)

    their_logits = theirs(input_ids=inputs).logits
    torch.testing.assert_close(ours(inputs, positions, None), their_logits, atol=1e-5, rtol=1e-5)
    their_loss = F.cross_entropy(their_logits.reshape(-1, VOCABULARY), labels.reshape(-1))
    their_loss.backward()
    loss = ours(inputs, positions, None, labels=labels).mean()
    torch.testing.assert_close(loss, their_loss, atol=1e-5, rtol=1e-5)
    loss.backward()
    want = translate(lambda name: theirs.get_parameter(name).grad)
    for name, param in ours.named_parameters():
        assert param.grad is not None and param.grad.abs().max() > 0, f"{name} has no gradient"
        torch.testing.assert_close(
            param.grad, want[name], atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"gradient of {n}: {m}"
        )
    assert set(want) == {name for name, _ in ours.named_parameters()}
