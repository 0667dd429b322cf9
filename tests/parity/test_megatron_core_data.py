"""Each side reads what the other wrote, where megatron-core is installed: pairs of files, index caches, samples.

Without it, the recorded bytes and arrays of `test_golden_data.py` stand for it.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

from megatron_lite.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron_lite.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron_lite.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from tests.unit.datasets.corpora import Words

theirs = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed")

DTYPES = ["uint8", "int8", "int16", "uint16", "int32", "int64", "float32", "float64"]
DOCUMENTS = [[[1, 2, 3], [4]], [], [[], [5, 6, 7, 8]], [[9]]]


def write(builder_class, prefix: str, dtype: str, multimodal: bool) -> str:
    builder = builder_class(f"{prefix}.bin", dtype=np.dtype(dtype).type, multimodal=multimodal)
    for number, document in enumerate(DOCUMENTS):
        for sequence in document:
            tokens = np.array(sequence, dtype)
            builder.add_item(tokens if builder_class is IndexedDatasetBuilder else _tensor(tokens), number % 3)
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix


def _tensor(tokens):
    import torch

    return torch.from_numpy(tokens) if tokens.dtype != np.uint16 else torch.from_numpy(tokens.astype(np.int32))


def content(pair, multimodal: bool) -> tuple:
    items = [pair[i] for i in range(len(pair))]
    modes = [int(item[1]) for item in items] if multimodal else None
    sequences = [np.asarray(item[0] if multimodal else item) for item in items]
    return (
        [sequence.tolist() for sequence in sequences],
        [sequence.dtype.name for sequence in sequences],
        modes,
        np.asarray(pair.sequence_lengths).tolist(),
        np.asarray(pair.document_indices).tolist(),
        np.asarray(pair.get(3, offset=1, length=2)[0] if multimodal else pair.get(3, offset=1, length=2)).tolist(),
    )


@pytest.mark.parametrize("multimodal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_reads_the_others_pair_and_both_write_the_same_bytes(tmp_path, dtype, multimodal):
    ours = write(IndexedDatasetBuilder, str(tmp_path / "ours"), dtype, multimodal)
    other = write(theirs.IndexedDatasetBuilder, str(tmp_path / "theirs"), dtype, multimodal)
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"ours{ending}").read_bytes() == (tmp_path / f"theirs{ending}").read_bytes()
    read = [
        content(reader(prefix, multimodal=multimodal), multimodal)
        for reader in (IndexedDataset, theirs.IndexedDataset)
        for prefix in (ours, other)
    ]
    assert read[0] == read[1] == read[2] == read[3]
    assert read[0][0] == [sequence for document in DOCUMENTS for sequence in document]


class Theirs(Words):
    """The tokenizer under the name that it has in the description on both sides."""


def _dataset(module_config, module_dataset, module_builder, prefix: str, cache: str, tokenizer) -> object:
    config = module_config(
        random_seed=1234,
        sequence_length=16,
        blend=([prefix], None),
        split="80,20,0",
        path_to_cache=cache,
        tokenizer=tokenizer,
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=True,
        create_attention_mask=True,
    )
    return module_builder(module_dataset, [40, 10, None], lambda: True, config).build()


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_each_uses_the_others_index_cache_and_draws_the_same_samples(tmp_path, first):
    gpt = pytest.importorskip("megatron.core.datasets.gpt_dataset")
    builder = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_builder")
    sizes = np.random.default_rng(1).integers(1, 30, size=60)
    prefix = str(tmp_path / "c")
    with IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as corpus:
        for size in sizes:
            corpus.add_document([*np.random.default_rng(size).integers(1, 900, size=size), 0], [size + 1])
        corpus.finalize(f"{prefix}.idx")
    sides = {
        "ours": (GPTDatasetConfig, GPTDataset, BlendedMegatronDatasetBuilder),
        "theirs": (gpt.GPTDatasetConfig, gpt.GPTDataset, builder.BlendedMegatronDatasetBuilder),
    }
    cache = str(tmp_path / "cache")
    second = "theirs" if first == "ours" else "ours"
    built = {first: _dataset(*sides[first], prefix, cache, Theirs())}
    times = {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(cache)}
    built[second] = _dataset(*sides[second], prefix, cache, Theirs())
    arrays = {name: time for name, time in times.items() if not name.endswith("options.json")}
    assert {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(cache) if entry.name in arrays} == arrays
    names = {entry.name for entry in os.scandir(cache) if not entry.name.endswith("options.json")}
    assert names == set(arrays)  # neither side has made a second cache beside the other's
    compared = 0
    for ours, other in zip(built["ours"][:2], built["theirs"][:2]):
        assert len(ours) == len(other)
        for i in range(len(ours)):
            mine, its = ours[i], other[i]
            assert set(mine) == set(its)
            for field in mine:
                np.testing.assert_array_equal(np.asarray(mine[field]), np.asarray(its[field]), err_msg=field)
            compared += 1
    assert compared >= 50
