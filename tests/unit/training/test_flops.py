"""Operations of a step equal Megatron's to the last digit."""

import copy
from argparse import Namespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_lite.models.bert import BertModel, get_bert_layer_local_spec
from megatron_lite.models.gpt import GPTModel, get_gpt_layer_local_spec
from megatron_lite.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron_lite.models.retro import RetroConfig, RetroModel, get_retro_decoder_block_spec
from megatron_lite.models.T5 import (
    T5Model,
    get_t5_decoder_with_local_block_spec,
    get_t5_encoder_with_local_block_spec,
)
from megatron_lite.training.flops import num_floating_point_operations
from megatron_lite.transformer import MLATransformerConfig, TransformerConfig
from megatron_lite.transformer.moe.moe_rules import moe_layers

DRY = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
PLAIN = {
    "multi_latent_attention": False,
    "attention_output_gate": False,
    "mtp_num_layers": None,
    "moe_latent_size": None,
    "geglu": False,
}
ROWS = [
    # layers, hidden, ffn, heads, groups, sequence, vocabulary, swiglu, batch, operations
    (2, 64, 256, 4, 4, 32, 256, False, 4, 91_226_112),
    (24, 1024, 4096, 16, 16, 1024, 50304, False, 64, 148_897_926_217_728),
    (96, 12288, 49152, 96, 96, 2048, 51200, False, 1536, 3.340597800e18),
    (32, 4096, 14336, 32, 8, 8192, 128256, True, 128, 53_970_627_761_012_736),
    # C133, C134: the reports' products of weights, the logits among them, and the causal half of attention's 12,582,912
    (2, 64, 128, 4, 2, 32, 256, True, 8, 138_412_032 + 12_582_912 // 2),
    (2, 64, 256, 4, 4, 32, 256, False, 8, 188_743_680 - 12_582_912 // 2),
]


@pytest.mark.parametrize("row", ROWS, ids=["tiny", "gpt2-345m", "gpt3-175b", "llama3-8b", "C133", "C134"])
def test_c133_c134_operations_equal_the_published_values(row):
    """Counting recomputation, or full instead of half attention, would inflate every throughput figure."""
    layers, hidden, ffn, heads, groups, sequence, vocabulary, swiglu, batch, operations = row
    args = Namespace(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        group_query_attention=groups != heads,
        num_query_groups=groups,
        kv_channels=hidden // heads,
        seq_length=sequence,
        padded_vocab_size=vocabulary,
        swiglu=swiglu,
        quick_geglu=False,
        num_experts=None,
        moe_layer_freq=1,
        **PLAIN,
    )
    found = num_floating_point_operations(args, batch)
    assert found == operations or found == pytest.approx(operations, rel=1e-9)


@pytest.mark.parametrize(
    ("model", "batch", "operations"),
    [
        (
            {
                "num_layers": 32,
                "hidden_size": 4096,
                "ffn_hidden_size": 14336,
                "num_attention_heads": 32,
                "num_query_groups": 8,
                "kv_channels": 128,
                "seq_length": 4096,
                "padded_vocab_size": 32000,
                "num_experts": 8,
                "moe_ffn_hidden_size": 14336,
                "moe_layer_freq": 1,
                "moe_shared_expert_intermediate_size": None,
            },
            256,
            83_578_276_873_764_864,
        ),
        (
            {
                "num_layers": 4,
                "hidden_size": 64,
                "ffn_hidden_size": 256,
                "num_attention_heads": 4,
                "num_query_groups": 2,
                "kv_channels": 16,
                "seq_length": 32,
                "padded_vocab_size": 256,
                "num_experts": 4,
                "moe_ffn_hidden_size": 96,
                "moe_layer_freq": 2,
                "moe_shared_expert_intermediate_size": 48,
                "mtp_num_layers": 1,
            },
            8,
            541_360_128,
        ),
    ],
    ids=["mixtral-8x7b", "tiny"],
)
def test_operations_of_experts_equal_the_published_values(model, batch, operations):
    """Counting all experts, not the chosen ones, would inflate them fourfold."""
    model = {**PLAIN, **model}
    args = Namespace(**model, moe_router_topk=2, group_query_attention=True, swiglu=True, quick_geglu=False)
    assert num_floating_point_operations(args, batch) == operations


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"num_query_groups": 2, "gated_linear_unit": True, "ffn_hidden_size": 352},
        {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 192, "moe_layer_freq": [0, 1, 1]},
        {
            "num_moe_experts": 8,
            "moe_router_topk": 3,
            "moe_ffn_hidden_size": 64,
            "moe_shared_expert_intermediate_size": 96,
            "gated_linear_unit": True,
            "num_query_groups": 2,
        },
    ],
    ids=["plain", "shared keys, gated", "experts in some layers", "shared experts, gated"],
)
def test_operations_of_a_gpt_are_those_that_torch_counts(sizes):
    """All matrix products of a forward pass on real tensors, three times; of which the causal half of the scores does
    not count, nor the router (h times experts a token)."""
    given = {"num_layers": 3, "hidden_size": 256, "num_attention_heads": 8, "ffn_hidden_size": 512, **sizes}
    batch, length, vocabulary = 2, 64, 512
    config = TransformerConfig(**given, **DRY, attention_backend="local", add_bias_linear=False)
    experts = given.get("num_moe_experts")
    spec = get_gpt_decoder_block_spec(config) if experts else get_gpt_layer_local_spec()
    model = GPTModel(config, spec, vocabulary, length, position_embedding_type="rope")
    ids = torch.arange(batch * length).view(batch, length)
    with FlopCounterMode(display=False) as counter:
        model(ids, None, None, labels=ids)
    layers_with = sum(moe_layers(3, experts, config.moe_layer_freq)) if experts else 0
    left_out = batch * 3 * 2 * length**2 * 256 + layers_with * batch * length * 2 * 256 * (experts or 0)
    args = Namespace(
        **PLAIN | {key: value for key, value in given.items() if key not in ("num_moe_experts", "num_query_groups")},
        num_query_groups=given.get("num_query_groups", 1),
        group_query_attention="num_query_groups" in given,
        kv_channels=32,
        seq_length=length,
        padded_vocab_size=vocabulary,
        swiglu="gated_linear_unit" in given,
        quick_geglu=False,
        num_experts=experts,
    )
    for name, default in (("moe_layer_freq", 1), ("moe_shared_expert_intermediate_size", None)):
        vars(args).setdefault(name, default)
    assert num_floating_point_operations(args, batch) == pytest.approx(3 * (counter.get_total_flops() - left_out), 1e-3)


def test_operations_of_an_encoder_and_a_decoder_equal_those_that_torch_counts():
    """On meta tensors, where every product is counted; causal attention is counted in full there."""
    layers, behind, h, heads, s, t, vocabulary = 3, 2, 32, 4, 24, 8, 64
    config = TransformerConfig(
        num_layers=behind, hidden_size=h, num_attention_heads=heads, hidden_dropout=0.0, attention_dropout=0.0
    )
    encoder = copy.deepcopy(config)
    encoder.num_layers = layers
    specs = get_t5_encoder_with_local_block_spec(layers), get_t5_decoder_with_local_block_spec(behind)
    with torch.device("meta"):
        model = T5Model(config, encoder, *specs, vocabulary, s, share_embeddings_and_output_weights=True)
        text, gaps = torch.zeros(5, s, dtype=torch.int64), torch.zeros(5, t, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(text, gaps, None, None, None)
    args = Namespace(
        model_family="t5",
        num_layers=layers,
        decoder_num_layers=behind,
        hidden_size=h,
        ffn_hidden_size=4 * h,
        num_attention_heads=heads,
        group_query_attention=False,
        kv_channels=h // heads,
        seq_length=s,
        decoder_seq_length=t,
        padded_vocab_size=vocabulary,
        swiglu=False,
        quick_geglu=False,
        geglu=False,
    )
    hidden_half = 5 * 2 * behind * t * t * h  # of the scores and of their products with values, two operations each
    assert num_floating_point_operations(args, 5) == 3 * (counter.get_total_flops() - hidden_half)


def test_operations_of_bert_equal_those_that_torch_counts():
    """Attention to both sides in full, and the matrix between the encoder and the vocabulary."""
    layers, h, heads, s, vocabulary = 3, 32, 4, 24, 64
    config = TransformerConfig(
        num_layers=layers, hidden_size=h, num_attention_heads=heads, hidden_dropout=0.0, attention_dropout=0.0
    )
    with torch.device("meta"):
        model = BertModel(
            config, 0, get_bert_layer_local_spec(), vocabulary, s, True, True, False, True, True, add_binary_head=False
        )
        tokens = torch.zeros(5, s, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens, torch.ones_like(tokens))
    args = Namespace(
        model_family="bert",
        **PLAIN,
        num_layers=layers,
        hidden_size=h,
        ffn_hidden_size=4 * h,
        num_attention_heads=heads,
        group_query_attention=False,
        kv_channels=h // heads,
        seq_length=s,
        padded_vocab_size=vocabulary,
        swiglu=False,
        quick_geglu=False,
        num_experts=None,
        moe_layer_freq=1,
    )
    assert num_floating_point_operations(args, 5) == 3 * counter.get_total_flops()


def test_operations_of_retrieval_equal_those_that_torch_counts():
    """The encoder of neighbours, its look at the chunks, and the layers that attend to neighbours."""
    layers, h, heads, b, s, m, k, vocabulary = 3, 32, 4, 2, 24, 4, 2, 64
    config = RetroConfig(
        num_layers=layers,
        hidden_size=h,
        num_attention_heads=heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        retro_encoder_hidden_dropout=0.0,
        retro_encoder_attention_dropout=0.0,
        retro_layers=[1, 3],
        retro_chunk_length=m,
    )
    with torch.device("meta"):
        model = RetroModel(config, get_retro_decoder_block_spec(config), vocabulary, s)
        text = torch.zeros(b, s, dtype=torch.int64)
        neighbors = torch.zeros(b * s // m * k, 2 * m, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(text, torch.zeros_like(text), None, neighbors)
    args = Namespace(
        model_family="retro",
        **PLAIN,
        retro_add_retriever=True,
        retro_layers=[1, 3],
        retro_chunk_length=m,
        retro_num_neighbors=k,
        retro_num_retrieved_chunks=2,
        retro_encoder_layers=2,
        num_layers=layers,
        hidden_size=h,
        ffn_hidden_size=4 * h,
        num_attention_heads=heads,
        group_query_attention=False,
        kv_channels=h // heads,
        seq_length=s,
        padded_vocab_size=vocabulary,
        swiglu=False,
        quick_geglu=False,
        num_experts=None,
        moe_layer_freq=1,
    )
    hidden_half = b * 2 * layers * s * s * h
    assert num_floating_point_operations(args, b) == 3 * (counter.get_total_flops() - hidden_half)


@pytest.mark.parametrize(
    "sizes",
    [
        {"multi_latent_attention": True, "q_lora_rank": 48, "mtp_num_layers": 2},
        {"multi_latent_attention": True, "q_lora_rank": None, "mtp_num_layers": None},
        {"attention_output_gate": True, "mtp_num_layers": 1},
    ],
    ids=["latent, two further tokens", "latent without a rank of queries", "gate, one further token"],
)
def test_operations_of_latent_attention_and_further_tokens_are_those_that_torch_counts(sizes):
    """All matrix products of a training forward pass, of which the causal half of the scores does not count."""
    given = {**PLAIN, "num_layers": 2, "hidden_size": 256, "ffn_hidden_size": 320, "num_attention_heads": 4, **sizes}
    latent = {"kv_lora_rank": 32, "qk_head_dim": 24, "qk_pos_emb_head_dim": 8, "v_head_dim": 20}
    batch, length, vocabulary = 2, 32, 512
    del given["geglu"]  # of the arguments alone
    kind = TransformerConfig
    if given["multi_latent_attention"]:
        kind, given = MLATransformerConfig, given | latent
    config = kind(**given, **DRY, gated_linear_unit=True, attention_backend="local", add_bias_linear=False)
    spec = get_gpt_layer_local_spec(multi_latent_attention=given["multi_latent_attention"])
    further = get_gpt_mtp_block_spec(config, spec)
    model = GPTModel(config, spec, vocabulary, length, position_embedding_type="rope", mtp_block_spec=further)
    ids = torch.zeros(batch, length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(ids, None, None, labels=ids)
    depth = 2 + (given["mtp_num_layers"] or 0)
    head = 24 + 8 + 20 if given["multi_latent_attention"] else 2 * 64
    hidden_half = batch * depth * 4 * length**2 * head  # of the scores, and of their products with values
    args = Namespace(
        **PLAIN | given,
        group_query_attention=False,
        kv_channels=64,
        seq_length=length,
        padded_vocab_size=vocabulary,
        swiglu=True,
        quick_geglu=False,
        num_experts=None,
        moe_layer_freq=1,
    )
    counted = 3 * (counter.get_total_flops() - hidden_half)
    assert num_floating_point_operations(args, batch) == pytest.approx(counted, rel=1e-3)
