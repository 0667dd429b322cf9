"""Attention inside documents, from the data set to the logits: a document is computed as if it were alone."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from megatron_lite.context_parallel.visibility import SegmentMask
from megatron_lite.datasets.gpt_dataset import document_boundaries
from megatron_lite.models.gpt import GPTModel, get_gpt_layer_local_spec
from megatron_lite.training.batch import get_batch
from megatron_lite.transformer import TransformerConfig
from tests.unit.datasets.corpora import build, numbered, write_corpus


def test_document_mask_equals_a_look_at_every_pair():
    lengths = [[3, 1, 4], [8], [1] * 8, [2, 0, 5]]
    ends = torch.stack([torch.from_numpy(document_boundaries(part, 8)[1]) for part in lengths])
    mask = SegmentMask.of_documents(ends).dense(causal=True)
    assert mask.shape == (4, 1, 8, 8) and mask.dtype == torch.bool
    for row, part in zip(mask, lengths):
        owner = [i for i, length in enumerate(part) for _ in range(length)]
        owner += [owner[-1]] * (8 - len(owner))
        for query in range(8):
            for key in range(8):
                assert row[0, query, key] == (key > query or owner[key] != owner[query])


@pytest.mark.parametrize("positions", ["learned_absolute", "rope"])
@pytest.mark.parametrize("backend", ["local", "unfused", "fused", "auto"])
def test_c032_every_document_of_a_sample_has_the_logits_it_has_alone(tmp_path, backend, positions):
    """Documents without end tokens between them: only the corpus knows where they meet."""
    corpus = write_corpus(tmp_path / "c", [list(range(1 + 10 * d, 4 + 10 * d + d)) for d in range(5)])
    dataset = build(([corpus], None), sequence_length=12, inter_document_masking=True)[0]
    batch = get_batch(iter(DataLoader(dataset, batch_size=2)), torch.device("cpu"))
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.2,
        attention_backend=backend,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), 64, 16, position_embedding_type=positions)
    with torch.no_grad():
        together = model(batch.tokens, batch.position_ids, batch.attention_mask)
        seen = 0
        for row in range(2):
            edges = [0, *np.flatnonzero(batch.position_ids[row] == 0)[1:].tolist(), 12]
            for begin, end in zip(edges, edges[1:]):
                part = slice(begin, end)
                assert len({int(token) // 10 for token in batch.tokens[row, part] - 1}) == 1
                alone = model(batch.tokens[row : row + 1, part], torch.arange(end - begin).unsqueeze(0), None)
                torch.testing.assert_close(together[row, part], alone[0], atol=2e-6, rtol=1e-5)
                seen += 1
    assert seen > 4


def test_batch_without_boundaries_keeps_its_mask(tmp_path):
    corpus = write_corpus(tmp_path / "c", numbered(4))
    for create in (True, False):
        dataset = build(([corpus], None), create_attention_mask=create)[0]
        batch = get_batch(iter(DataLoader(dataset, batch_size=2)), torch.device("cpu"))
        assert (batch.attention_mask is not None) == create
