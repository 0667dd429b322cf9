"""The data path against arrays, texts and bytes that megatron-core 0.16.1 made: equal, to the element."""

import hashlib
import json
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.datasets.blended_dataset import BlendedDataset
from megatron_lite.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron_lite.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron_lite.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron_lite.datasets.index_building import (
    build_blending_indices,
    build_exhaustive_blending_indices,
    build_sample_index,
)
from megatron_lite.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron_lite.datasets.samplers import MegatronPretrainingRandomSampler, MegatronPretrainingSampler
from megatron_lite.datasets.utils import Split, normalize
from megatron_lite.errors import DataError

GOLDEN = Path(__file__).parents[1] / "golden"


def golden(name: str) -> dict:
    return json.loads((GOLDEN / f"{name}.json").read_text())


class GoldenTokenizer:
    """Stands for the tokenizer that the reference runs were made with."""

    eod = 0
    unique_identifiers = OrderedDict([("class", "GoldenTokenizer"), ("vocab_size", "512")])

    def __init__(self, pad: int | None):
        self._pad = pad

    @property
    def pad(self) -> int:
        if self._pad is None:
            raise NotImplementedError
        return self._pad


# -- the pair of files ----------------------------------------------------------------------------------------------

DTYPES = {"tiny_uint16": np.uint16, "tiny_int32": np.int32, "tiny_int32_big": np.int32, "tiny_multimodal": np.int32}


def write_tiny(name: str, prefix: Path) -> None:
    case = golden("indexed_dataset")[name]
    if name == "tiny_merged":
        builder = IndexedDatasetBuilder(f"{prefix}.bin", np.uint16)
        for other in case["of"]:
            builder.add_index(str(GOLDEN / "data" / other))
    elif name == "tiny_adddoc":
        builder = IndexedDatasetBuilder(f"{prefix}.bin", np.uint16)
        builder.add_document(np.arange(1, 8), case["lengths"][0])
        builder.add_document(np.arange(8, 10), case["lengths"][1])
    else:
        builder = IndexedDatasetBuilder(f"{prefix}.bin", DTYPES[name], multimodal="modes" in case)
        modes = iter(case.get("modes", [0] * 100))
        for document in case["docs"]:
            for sentence in document:
                builder.add_item(sentence, next(modes))
            builder.end_document()
    builder.finalize(f"{prefix}.idx")


@pytest.mark.parametrize("name", golden("indexed_dataset"))
def test_written_pair_has_megatrons_bytes(name, tmp_path):
    write_tiny(name, tmp_path / "pair")
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"pair{ending}").read_bytes() == (GOLDEN / "data" / f"{name}{ending}").read_bytes()
    case = golden("indexed_dataset")[name]
    if "idx_hex" in case:
        assert (tmp_path / "pair.idx").read_bytes().hex() == case["idx_hex"]


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("name", golden("indexed_dataset"))
def test_megatrons_pair_reads_as_megatron_reads_it(name, mmap):
    case = golden("indexed_dataset")[name]
    pair = IndexedDataset(str(GOLDEN / "data" / name), multimodal="modes" in case, mmap=mmap)
    for key in ("sequence_lengths", "document_indices"):
        if key in case:
            assert getattr(pair, key).tolist() == case[key]
    if "sequence_pointers" in case:
        assert pair.index.sequence_pointers.tolist() == case["sequence_pointers"]
    if "modes" in case:
        assert pair.sequence_modes.tolist() == case["modes"]
        assert [int(pair[i][1]) for i in range(len(pair))] == case["modes"]
    elif "docs" in case:
        sentences = [sentence for document in case["docs"] for sentence in document]
        assert [part.tolist() for part in pair[:]] == sentences
        assert [pair[i].tolist() for i in range(len(pair))] == sentences
    if "get_3_offset1_length2" in case:
        assert pair.get(3, offset=1, length=2).tolist() == case["get_3_offset1_length2"]


# -- index maths ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", golden("split")["splits"])
def test_split_text_gives_megatrons_bounds(text):
    want = golden("split")["splits"][text]
    vector = parse_and_normalize_split(text)
    matrix = convert_split_vector_to_split_matrix(vector)
    assert vector == want["vector"]
    assert json.dumps(matrix) == json.dumps(want["matrix"])  # as text: an integer 0 is not 0.0 in a cache's name
    for n, bounds in want["document_bounds"].items():
        assert [b and [int(round(x * float(n))) for x in b] for b in matrix] == bounds


def test_two_split_vectors_overlap_as_megatrons():
    case = golden("split")["two_vectors"]
    assert json.dumps(convert_split_vector_to_split_matrix(case["a"], case["b"])) == json.dumps(case["matrix"])


@pytest.mark.parametrize("name", golden("sample_index"))
def test_sample_index_equals_the_helpers(name):
    arrays, case = np.load(GOLDEN / "sample_index.npz"), golden("sample_index")[name]
    seen = 0
    for key in arrays.files:
        if key.startswith(f"{name}/drop"):
            drop, extra = (bool(int(part[-1])) for part in key.rsplit("/", 1)[1].split("_"))
            index = build_sample_index(
                arrays[f"{name}/sizes"],
                arrays[f"{name}/document_idx"],
                case["sequence_length"],
                case["tokens_per_epoch"],
                case["num_epochs"],
                drop,
                extra,
            )
            assert index.dtype == np.int32
            np.testing.assert_array_equal(index, arrays[key])
            seen += 1
    assert seen == 4


@pytest.mark.parametrize("name", [name for name in golden("blended_dataset") if "/" in name])
def test_blend_indices_equal_the_helpers(name):
    arrays, case = np.load(GOLDEN / "blended_dataset.npz"), golden("blended_dataset")[name]
    if name.startswith("blending"):
        dataset_index, sample_index = build_blending_indices(normalize(case["weights"]), case["size"])
    else:
        dataset_index, sample_index = build_exhaustive_blending_indices(case["weights"])
    assert (dataset_index.dtype, sample_index.dtype) == (np.int16, np.int64)
    np.testing.assert_array_equal(dataset_index, arrays[f"{name}/dataset_index"])
    np.testing.assert_array_equal(sample_index, arrays[f"{name}/dataset_sample_index"])


# -- datasets -------------------------------------------------------------------------------------------------------


def gpt_case(name: str, cache: Path, pad: int | None, **options) -> list:
    case = golden("gpt_dataset")[name]
    config = GPTDatasetConfig(
        blend=(["data/corpus_a"], None),
        tokenizer=GoldenTokenizer(pad),
        path_to_cache=str(cache),
        **case["config"],
        **options,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, case["sizes"], lambda: True, config).build()


@pytest.mark.parametrize("name", golden("gpt_dataset"))
def test_gpt_dataset_equals_megatrons(name, tmp_path, monkeypatch):
    """Indices, samples, masks, description, hash and cache names; read twice, built and from the cache."""
    monkeypatch.chdir(GOLDEN)
    arrays, case = np.load(GOLDEN / "gpt_dataset.npz"), golden("gpt_dataset")[name]
    for reading in ("built", "cached"):
        datasets = gpt_case(name, tmp_path, case["pad"])
        for split, dataset in zip(Split, datasets, strict=True):
            want = case["splits"][split.name]
            if want is None:
                assert dataset is None
                continue
            assert dataset.built_anew_on_cache_miss == (reading == "built")
            for key in ("num_samples", "num_epochs", "tokens_per_epoch", "unique_description"):
                assert getattr(dataset, key) == want[key], key
            assert (len(dataset), dataset.unique_description_hash) == (want["len"], want["hash"])
            check_gpt_arrays(name, split.name, dataset, arrays)
            if "none_error" in want:
                with pytest.raises(IndexError):
                    dataset[None]
        names = {path.name for path in tmp_path.iterdir() if not path.name.endswith("-options.json")}
        assert names == set(case["cache_files"])


def check_gpt_arrays(name: str, split: str, dataset: GPTDataset, arrays) -> None:
    prefix = f"{name}/{split}/"
    keys = [key[len(prefix) :] for key in arrays.files if key.startswith(prefix)]
    assert "document_index" in keys
    for key in keys:
        want = arrays[prefix + key]
        if "/" not in key:
            got = getattr(dataset, key)
            if key != "indices":
                assert got.dtype == want.dtype, key
        else:
            which, field = key.split("/")
            item = {"last": len(dataset) - 1, "none": None}.get(which, which)
            got = dataset[int(item[6:]) if isinstance(item, str) else item][field]
            if name == "pad_in_data" and field == "loss_mask" and which != "sample0":
                want = want.copy()
                want[0] = 1.0  # there the reference leaks sample 0's padding into every later sample
        np.testing.assert_array_equal(got, want, err_msg=key)


def test_pad_in_data_masks_only_padding(tmp_path, monkeypatch):
    """The right values where the reference leaks: loss is off where the label was the pad id, and nowhere else."""
    monkeypatch.chdir(GOLDEN)
    right = gpt_case("pad_in_data", tmp_path, 226)[0]
    unpadded = gpt_case("pad_in_data", tmp_path, None)[0]
    masked = 0
    for i in range(len(right)):
        labels = unpadded[i]["labels"]
        np.testing.assert_array_equal(right[i]["loss_mask"], (labels != 226).astype(np.float32))
        masked += int((labels == 226).sum())
    assert masked > 0


@pytest.mark.parametrize("name", [name for name in golden("blended_dataset") if "/" not in name])
def test_blended_dataset_equals_megatrons(name, tmp_path, monkeypatch):
    """Where the reference fails on a member without samples, the member is left out and the rest is exhaustive."""
    monkeypatch.chdir(GOLDEN)
    arrays, case = np.load(GOLDEN / "blended_dataset.npz"), golden("blended_dataset")[name]
    given = case["kw"]
    for key in ("blend", "blend_per_split"):
        if key in given:
            blends = given[key] if key == "blend_per_split" else [given[key]]
            blends = [b and (b[0], b[1]) for b in blends]
            given = {**given, key: blends if key == "blend_per_split" else blends[0]}
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=32,
        tokenizer=GoldenTokenizer(None),
        create_attention_mask=False,
        mid_level_dataset_surplus=0.05,
        path_to_cache=str(tmp_path),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        **given,
    )
    for _ in ("built", "cached"):
        datasets = BlendedMegatronDatasetBuilder(GPTDataset, case["sizes"], lambda: True, config).build()
        if "error" in case:
            for dataset in datasets:
                assert all(used <= len(mid) for used, mid in zip(dataset.samples_per_dataset(), dataset.datasets))
            continue
        for split, dataset in zip(Split, datasets, strict=True):
            check_blend(f"{name}/{split.name}/", dataset, case["splits"][split.name], arrays)


def check_blend(prefix: str, dataset, want: dict | None, arrays) -> None:
    if want is None:
        assert dataset is None
        return
    assert type(dataset).__name__ == want["type"]
    assert (len(dataset), dataset.unique_description_hash) == (want["len"], want["hash"])
    if isinstance(dataset, BlendedDataset):
        assert (dataset.weights, dataset.size) == (want["weights"], want["size"])
        assert dataset.unique_description == want["unique_description"]
        assert hashlib.md5(dataset.unique_description.encode()).hexdigest() == want["hash"]
        mids = [(len(m), m.num_samples, m.unique_description_hash) for m in dataset.datasets]
        assert mids == [(m["len"], m["num_samples"], m["hash"]) for m in want["mid"]]
    keys = [key for key in arrays.files if key.startswith(prefix)]
    assert keys
    for key in keys:
        what = key[len(prefix) :]
        got = dataset[int(what[6:].split("/")[0])]["tokens"] if "/" in what else getattr(dataset, what)
        np.testing.assert_array_equal(got, arrays[key], err_msg=key)


# -- samplers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", golden("samplers"), ids=lambda case: f"{case['kind']}-{case['total_samples']}")
def test_samplers_yield_megatrons_batches(case):
    sizes = [case[key] for key in ("total_samples", "consumed_samples", "micro_batch_size")]
    ranks = case["data_parallel_size"]

    def sampler(rank: int):
        if case["kind"] == "single":
            return MegatronPretrainingSampler(*sizes, rank, ranks, drop_last=case["drop_last"])
        return MegatronPretrainingRandomSampler(None, *sizes, rank, ranks, case["data_sharding"])

    if "error" in case:
        with pytest.raises(DataError, match="no samples left to consume"):
            sampler(0)
        return
    for rank, batches in enumerate(case["batches_of_rank"]):
        assert len(sampler(rank)) == len(batches)
        assert list(sampler(rank)) == batches
