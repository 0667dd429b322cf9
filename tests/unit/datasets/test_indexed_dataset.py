"""The pair of files: what is written comes back, what is damaged is refused, pointers are 64-bit."""

import os
import pickle
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.datasets import bin_reader
from megatron_lite.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder, sequence_pointers
from megatron_lite.errors import DataError

DOCUMENTS = [[[1, 2, 3], [4]], [], [[], [5, 6]]]


def write(prefix, documents=DOCUMENTS, dtype=np.int32, modes=None):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype, multimodal=modes is not None)
    mode = iter(modes or [0] * 1000)
    for document in documents:
        for sequence in document:
            builder.add_item(sequence, next(mode))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@settings(max_examples=40)
@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 127), max_size=5), max_size=4), max_size=6),
    dtype=st.sampled_from([kind.name for kind in DType]),
    multimodal=st.booleans(),
    mmap=st.booleans(),
)
def test_any_documents_come_back(tmp_path_factory, documents, dtype, multimodal, mmap):
    sequences = [sequence for document in documents for sequence in document]
    modes = [i % 3 for i in range(len(sequences))]
    prefix = write(tmp_path_factory.mktemp("pair") / "p", documents, np.dtype(dtype), modes if multimodal else None)
    pair = IndexedDataset(prefix, multimodal=multimodal, mmap=mmap)
    read = pair[:]
    if multimodal:
        read, read_modes = read
        assert read_modes.tolist() == pair.sequence_modes.tolist() == modes
    assert [part.tolist() for part in read] == sequences
    assert all(part.dtype == np.dtype(dtype) for part in read)
    assert np.diff(pair.document_indices).tolist() == [len(document) for document in documents]
    assert [part.tolist() for part in IndexedDataset(prefix)[:]] == sequences  # modes at the end do not disturb


def test_merged_pairs_equal_one_written_in_one_go(tmp_path):
    a, b = write(tmp_path / "a"), write(tmp_path / "b", [[[9]], [[8, 7], [6]]])
    builder = IndexedDatasetBuilder(f"{tmp_path}/merged.bin", np.int32)
    builder.add_index(a)
    builder.add_index(b)
    builder.finalize(f"{tmp_path}/merged.idx")
    write(tmp_path / "whole", [*DOCUMENTS, [[9]], [[8, 7], [6]]])
    for ending in ("bin", "idx"):
        assert (tmp_path / f"merged.{ending}").read_bytes() == (tmp_path / f"whole.{ending}").read_bytes()


def test_many_documents_at_once_equal_one_by_one(tmp_path):
    write(tmp_path / "a")
    builder = IndexedDatasetBuilder(f"{tmp_path}/b.bin", np.int32)
    builder.add_documents(np.arange(1, 7, dtype=np.int32), [3, 1, 0, 2], [2, 0, 2])
    builder.finalize(f"{tmp_path}/b.idx")
    assert (tmp_path / "a.idx").read_bytes() == (tmp_path / "b.idx").read_bytes()


def test_merging_another_type_is_refused(tmp_path):
    a = write(tmp_path / "a", dtype=np.uint16)
    with pytest.raises(DataError, match="uint16"):
        IndexedDatasetBuilder(f"{tmp_path}/m.bin", np.int32).add_index(a)


def damaged_version(data):
    return data[:9] + struct.pack("<Q", 2) + data[17:]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", "not the index"),
        (lambda data: data[:20], "torn"),
        (lambda data: data[:-1], "torn"),
        (lambda data: b"PK\x03\x04" + data[4:], "not the index"),
        (damaged_version, "version 2"),
        (lambda data: data[:17] + b"\x63" + data[18:], "token type 99"),
        (lambda data: data[:-8] + struct.pack("<q", 3), "torn"),
    ],
)
def test_damaged_index_is_refused_with_its_reason(tmp_path, damage, message):
    prefix = write(tmp_path / "p")
    path = tmp_path / "p.idx"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=message) as error:
        IndexedDataset(prefix)
    assert error.value.why and error.value.fix


@pytest.mark.parametrize("change", [-4, 4])
def test_bin_that_does_not_fit_its_index_is_refused(tmp_path, change):
    prefix = write(tmp_path / "p")
    os.truncate(f"{prefix}.bin", os.path.getsize(f"{prefix}.bin") + change)
    with pytest.raises(DataError, match="do not belong together"):
        IndexedDataset(prefix)


def test_missing_pair_is_named(tmp_path):
    with pytest.raises(DataError, match="nothere.idx"):
        IndexedDataset(str(tmp_path / "nothere"))


def test_unfinished_builder_leaves_nothing_that_loads(tmp_path):
    write(tmp_path / "p")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with IndexedDatasetBuilder(f"{tmp_path}/p.bin", np.int32) as builder:
        builder.add_document([1, 2], [2])
        assert not IndexedDataset.exists(f"{tmp_path}/q")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_sequence_after_the_last_document_is_refused(tmp_path):
    builder = IndexedDatasetBuilder(f"{tmp_path}/p.bin", np.int32)
    builder.add_item([1])
    with pytest.raises(DataError, match="after the last"):
        builder.finalize(f"{tmp_path}/p.idx")


def test_lengths_that_do_not_add_up_are_refused(tmp_path):
    with pytest.raises(DataError, match="3 tokens"):
        IndexedDatasetBuilder(f"{tmp_path}/p.bin", np.int32).add_document([1, 2, 3], [2])


@pytest.mark.parametrize("token", [-1, 65536, 70000])
def test_token_that_would_wrap_is_refused(tmp_path, token):
    builder = IndexedDatasetBuilder(f"{tmp_path}/p.bin", np.uint16)
    with pytest.raises(DataError, match=str(token)):
        builder.add_item([1, token])
    with pytest.raises(DataError, match=str(token)):
        builder.add_document([1, token], [2])


def test_indexing_is_checked(tmp_path):
    pair = IndexedDataset(write(tmp_path / "p"))
    assert pair[-1].tolist() == [5, 6]
    assert [part.tolist() for part in pair[3:]] == [[5, 6]]
    assert pair[4:] == []
    assert pair.get(0, 1).tolist() == [2, 3]
    for wrong in (4, -5):
        with pytest.raises(IndexError):
            pair[wrong]
    with pytest.raises(IndexError, match="which has 2"):
        pair.get(3, 1, 2)
    with pytest.raises(ValueError, match="step"):
        pair[::2]
    with pytest.raises(TypeError):
        pair["0"]


def test_pickled_reader_opens_again(tmp_path):
    pair = pickle.loads(pickle.dumps(IndexedDataset(write(tmp_path / "p"), mmap=False)))
    assert pair[0].tolist() == [1, 2, 3] and pair.mmap is False


def test_sequence_outlives_its_dataset(tmp_path):
    """A view of a mapping that is closed with the dataset would end the process."""
    sequence = IndexedDataset(write(tmp_path / "p"))[0]
    assert sequence.tolist() == [1, 2, 3]


def test_failing_reads_are_tried_again_then_reported(tmp_path, monkeypatch):
    pair = IndexedDataset(write(tmp_path / "p"), mmap=False)
    pauses = []
    monkeypatch.setattr(bin_reader.time, "sleep", pauses.append)
    os.remove(f"{tmp_path}/p.bin")
    with pytest.raises(DataError, match="cannot read"):
        pair[0]
    assert pauses == [10.0, 20.0, 40.0]


@pytest.mark.parametrize("size", [10_000, 65_499, 65_500, 65_536, 131_072])
def test_C010_every_id_round_trips_in_its_storage(tmp_path, size):
    dtype = DType.optimal_dtype(size)
    assert dtype.itemsize == (2 if size < 65_500 else 4)
    pair = IndexedDataset(write(tmp_path / "p", [[[0, size - 1]]], dtype))
    assert pair.index.dtype == dtype and pair[0].tolist() == [0, size - 1]
    assert DType.size(dtype) == dtype.itemsize == DType.size(DType.code_from_dtype(dtype))


def test_C011_pointers_do_not_wrap():
    pointers = sequence_pointers(np.array([2**31 - 100, 123], np.int32), 4)
    assert pointers.dtype == np.int64 and pointers.tolist() == [0, 8589934192]


def sparse_pair(prefix, lengths):
    """A pair whose .bin is a hole."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.int32)
    builder.sequence_lengths.extend(lengths)
    builder.document_indices.extend(range(1, len(lengths) + 1))
    builder.finalize(f"{prefix}.idx")
    os.truncate(f"{prefix}.bin", sum(lengths) * 4)
    return str(prefix)


def mark(prefix, token, values):
    with open(f"{prefix}.bin", "r+b") as file:
        file.seek(token * 4)
        file.write(np.array(values, "<i4").tobytes())


@pytest.mark.parametrize("mmap", [True, False])
def test_C012_last_document_past_2_gib_is_read(tmp_path, mmap):
    lengths = [300_000_000, 300_000_000, 5]
    prefix = sparse_pair(tmp_path / "big", lengths)
    mark(prefix, 600_000_000, [1, 2, 3, 4, 5])
    pair = IndexedDataset(prefix, mmap=mmap)
    assert pair.index.sequence_pointers.tolist() == [0, 1_200_000_000, 2_400_000_000]
    assert pair[2].tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("mmap", [True, False])
def test_C014_offset_inside_one_long_document_does_not_wrap(tmp_path, mmap):
    prefix = sparse_pair(tmp_path / "long", [600_000_010])
    mark(prefix, 600_000_000, [7, 8, 9])
    pair = IndexedDataset(prefix, mmap=mmap)
    assert pair.get(np.int32(0), np.int32(600_000_000), np.int32(3)).tolist() == [7, 8, 9]


def test_C015_closing_many_documents_takes_little_memory(tmp_path):
    count = 1_000_000
    builder = IndexedDatasetBuilder(f"{tmp_path}/p.bin", np.uint16)
    builder.add_documents(np.zeros(count, np.uint16), [1] * count, [1] * count)
    tracemalloc.start()
    builder.finalize(f"{tmp_path}/p.idx")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 * count
    assert len(IndexedDataset(f"{tmp_path}/p")) == count
