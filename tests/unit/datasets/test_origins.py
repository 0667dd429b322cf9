"""Every data set can say where a sample comes from: a report on a bad batch names documents by it."""

import re

import numpy as np

from megatron_lite.datasets.gpt_dataset import MockGPTDataset
from megatron_lite.datasets.retro_dataset import RetroDataset
from megatron_lite.tokenizers.null import NullTokenizer
from tests.unit.datasets import test_masked_dataset as masked
from tests.unit.datasets import test_sft_dataset as chats
from tests.unit.datasets.corpora import build, write_corpus


def _documents(text):
    """'documents 3, 7 of PREFIX, ...' -> {3, 7}"""
    return set(map(int, re.match(r"documents? ([\d, ]+) of ", text)[1].split(", ")))


def test_a_gpt_sample_names_exactly_the_documents_whose_tokens_it_has(tmp_path):
    """Tokens say which document they are from: their hundreds."""
    prefix = write_corpus(tmp_path / "c", [[100 * d + i for i in range(1, 2 + d)] for d in range(1, 8)])
    dataset = build(([prefix], None), (20, None, None))[0]
    for i in range(len(dataset)):
        owners = {*(dataset[i]["tokens"] // 100), dataset[i]["labels"][-1] // 100}
        assert _documents(dataset.origin(i)) == {int(owner) - 1 for owner in owners}
        assert dataset.origin(i).endswith(
            f"of {prefix}, from token {dataset[i]['tokens'][0] % 100 - 1} of the first on"
        )


def test_a_sample_of_many_documents_names_the_first(tmp_path):
    prefix = write_corpus(tmp_path / "c", [[100 + d] for d in range(30)])
    dataset = build(([prefix], None), sequence_length=16)[0]
    assert re.match(r"documents (\d+, ){7}\d+ and 9 more of ", dataset.origin(0))


def test_a_sample_of_a_blend_names_its_member(tmp_path):
    a, b = (write_corpus(tmp_path / name, [[d + 1] * 9 for d in range(9)]) for name in "ab")
    blend = build(([a, b], [1, 2]), (12, None, None))[0]
    for i in range(12):
        member, sample = int(blend.dataset_index[i]), int(blend.dataset_sample_index[i])
        assert blend.origin(i) == f"sample {sample} of dataset {member}: {blend.datasets[member].origin(sample)}"
        assert (a, b)[member] in blend.origin(i)


def test_a_sample_of_sentences_names_them_and_their_document(tmp_path):
    sentences = [[4, 5, 6], [7, 8, 9], [10, 11, 12]]
    prefix = masked.write(tmp_path / "c", [sentences, sentences])
    dataset = masked.build(([prefix], None), (6, None, None))[0]
    found = {dataset.origin(i) for i in range(len(dataset))}
    assert found == {
        f"sentences 0 to 2, in document 0 of {prefix}",
        f"sentences 3 to 5, in document 1 of {prefix}",
    }


def test_a_conversation_names_its_record(tmp_path):
    path = chats.write(tmp_path / "c.jsonl", [chats.chat("10", "20"), chats.chat("11", "21")])
    dataset = chats.samples(path, sequence_length=8)
    records = [dataset.origin(i) for i in range(len(dataset))]
    for i, text in enumerate(records):
        (record,) = re.findall(r"^record (\d) of ", text)
        assert 10 + int(record) in dataset[i]["tokens"]


def test_a_retro_sample_names_that_of_the_gpt_data():
    class Samples:
        def origin(self, idx):
            return f"number {idx}"

    dataset = RetroDataset(
        3, Samples(), np.zeros((0, 1)), None, chunk_length=2, num_neighbors=1, num_retrieved_chunks=1
    )
    assert dataset.origin(4) == "sample 1 of the GPT data: number 1"


def test_made_up_data_are_named_as_such():
    gpt = build(None, (4, None, None), cls=MockGPTDataset, split=None, tokenizer=NullTokenizer(99))[0]
    sentences = masked.build(None, (4, None, None), split=None)[0]
    assert "of the mock data, from token" in gpt.origin(0) and sentences.origin(0).endswith(" of the mock data")
