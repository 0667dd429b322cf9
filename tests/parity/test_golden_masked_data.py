"""Masked word pieces against samples and indices that megatron-core 0.16.1 made: equal, to the element."""

import json
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
from megatron_lite.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron_lite.datasets.indexed_dataset import IndexedDataset
from megatron_lite.datasets.sentence_index import build_mapping
from megatron_lite.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig
from megatron_lite.datasets.utils import Split

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = json.loads((GOLDEN / "masked_dataset.json").read_text())
MAPPINGS = json.loads((GOLDEN / "sentence_index.json").read_text())


class GoldenTokenizer:
    """Stands for the tokenizer that the reference runs were made with."""

    unique_identifiers = OrderedDict([("class", "GoldenTokenizer"), ("vocab_size", "200")])
    pad, cls, sep, mask, bos, eos = 0, 1, 2, 3, 4, 5
    additional_special_tokens_ids = CASES["tokenizer"]["additional_special_tokens_ids"]
    inv_vocab = {
        id: f"##p{id}" if 130 <= id < 200 else f"w{id}" if id < 200 else f"<extra_{id}>"
        for id in range(CASES["tokenizer"]["token_lookup_len"])
    }


@pytest.mark.parametrize("case", [name for name in MAPPINGS if name.startswith("mapping")])
def test_sentence_index_is_megatrons(case):
    """Targets, packing, epochs and the 64-bit shuffle."""
    corpus = IndexedDataset(str(GOLDEN / "data" / "sentences"))
    rows = build_mapping(corpus.document_indices, corpus.sequence_lengths, **MAPPINGS[case])
    expected = np.load(GOLDEN / "sentence_index.npz")[case]
    assert rows.dtype == np.uint32
    np.testing.assert_array_equal(rows, expected)


# kind -> (data set, its config)
KINDS = {
    "bert": (BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig),
    "t5": (T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig),
}


@pytest.mark.parametrize("case", [name for name in CASES if name.split("/")[0] in KINDS])
def test_masked_data_sets_are_megatrons(case, tmp_path, monkeypatch):
    """Lengths, descriptions (so names of caches), sample indices and every field of the samples."""
    monkeypatch.chdir(GOLDEN)  # the description names the corpus by this path
    kind, config_class = KINDS[case.split("/")[0]]
    expected, arrays = CASES[case], np.load(GOLDEN / "masked_dataset.npz")
    config = config_class(
        blend=(["data/sentences"], None),
        tokenizer=GoldenTokenizer(),
        path_to_cache=str(tmp_path),
        **expected["config"],
    )
    built = BlendedMegatronDatasetBuilder(kind, expected["sizes"], lambda: True, config).build()
    assert [len(dataset) for dataset in built] == expected["lens"]
    assert [dataset.unique_description_hash for dataset in built] == expected["hashes"]
    assert built[0].unique_description == expected["unique_description"]
    for split, dataset in zip(Split, built):
        assert (tmp_path / f"{dataset.unique_description_hash}-{kind.__name__}-sample_index.npy").is_file()
        at = f"{case}/{split.name}"
        np.testing.assert_array_equal(dataset.sample_index, arrays[f"{at}/sample_index"])
        samples = {
            name.split("/")[3] for name in arrays.files if name.startswith(f"{at}/sample") and "index" not in name
        }
        assert samples
        for name in samples:
            sample = dataset[int(name.removeprefix("sample"))]
            fields = {key.split("/")[4] for key in arrays.files if key.startswith(f"{at}/{name}/")}
            assert set(sample) == fields
            for field in fields:
                assert sample[field].dtype == np.int64, field
                np.testing.assert_array_equal(sample[field], arrays[f"{at}/{name}/{field}"], f"{name} {field}")
