"""Operations of a step equal Megatron's to the last digit."""

from argparse import Namespace

import pytest

from megatron_lite.training.flops import num_floating_point_operations

ROWS = [
    # layers, hidden, ffn, heads, groups, sequence, vocabulary, swiglu, batch, operations
    (2, 64, 256, 4, 4, 32, 256, False, 4, 91_226_112),
    (24, 1024, 4096, 16, 16, 1024, 50304, False, 64, 148_897_926_217_728),
    (96, 12288, 49152, 96, 96, 2048, 51200, False, 1536, 3.340597800e18),
    (32, 4096, 14336, 32, 8, 8192, 128256, True, 128, 53_970_627_761_012_736),
]


@pytest.mark.parametrize("row", ROWS, ids=["tiny", "gpt2-345m", "gpt3-175b", "llama3-8b"])
def test_operations_equal_the_published_values(row):
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
    )
    found = num_floating_point_operations(args, batch)
    assert found == operations or found == pytest.approx(operations, rel=1e-9)
