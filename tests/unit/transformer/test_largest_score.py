"""The largest score that an attention tells is that of the formula, whatever computes it."""

import pytest
import torch

from megatron_lite.fusions.largest_score import LargestScore
from megatron_lite.packed_seq_params import PackedSeqParams
from megatron_lite.transformer import TransformerConfig
from megatron_lite.transformer.dot_product_attention import DotProductAttention
from megatron_lite.transformer.enums import AttnMaskType


def told(backend, mask=None, packed=None, *, mask_type=AttnMaskType.causal, **more):
    """(what an attention tells, its scores `[b, n, s, s]`): 9 queries, 4 heads in 2 groups."""
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, attention_backend=backend, **more
    )
    attention = DotProductAttention(config, 2, mask_type).eval()
    attention.largest_score = LargestScore()
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(9, 1, n, 8, generator=generator) for n in (4, 2, 2))
    attention(q, k, v, mask, packed_seq_params=packed)
    scores = torch.einsum("qbnd,kbnd->bnqk", q, k.repeat_interleave(2, dim=2)) / 8**0.5
    return attention.largest_score.value, scores


def largest(scores, seen):
    return scores.masked_fill(~seen, -torch.inf).max()


CAUSAL = torch.ones(9, 9, dtype=torch.bool).tril()


@pytest.mark.parametrize("backend", ["local", "unfused", "fused", "flash", "auto"])
def test_every_implementation_tells_the_causal_layers_largest_score(backend):
    """torch's kernels give no scores, and a future that counts would be larger."""
    found, scores = told(backend)
    torch.testing.assert_close(found, largest(scores, CAUSAL))
    assert found < scores.max(), "this case would not see a future that counts"


def test_a_window_and_the_scaling_by_layers_are_those_of_the_softmax():
    found, scores = told("auto", window_size=(2, 0))
    torch.testing.assert_close(found, largest(scores, CAUSAL & ~CAUSAL.tril(-3)))
    found, scores = told("local", apply_query_key_layer_scaling=True)
    torch.testing.assert_close(found, largest(scores, CAUSAL))


def test_packed_documents_do_not_see_each_other():
    """Block by block, as under context parallelism."""
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    packed = PackedSeqParams("thd", ends, ends, max_seqlen_q=5, max_seqlen_kv=5)
    found, scores = told("auto", packed=packed, mask_type=AttnMaskType.padding_causal)
    document = (torch.arange(9) >= 4).long()
    torch.testing.assert_close(found, largest(scores, CAUSAL & (document.unsqueeze(1) == document)))
