"""Corpora behind a scheme of fsspec: tokens as from a disk, few bytes read, errors that say what is missing."""

import os
import pickle
import sys

import numpy as np
import pytest

from megatron_lite.datasets import bin_reader, object_storage
from megatron_lite.datasets.indexed_dataset import IndexedDataset
from megatron_lite.errors import DataError
from tests.unit.datasets.corpora import build, numbered, write_corpus

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def bucket(tmp_path):
    """(a prefix in fsspec's storage in memory, the same corpus on disk)."""
    local = write_corpus(tmp_path / "c", numbered(9))
    memory = fsspec.filesystem("memory")
    for ending in ("bin", "idx"):
        memory.pipe(f"/{tmp_path.name}/c.{ending}", (tmp_path / f"c.{ending}").read_bytes())
    yield f"memory://{tmp_path.name}/c", local
    memory.rm(f"/{tmp_path.name}", recursive=True)


@pytest.mark.parametrize("kept", [True, False], ids=["idx-on-disk", "idx-in-memory"])
def test_remote_corpus_reads_as_the_local_one(bucket, tmp_path, kept):
    remote, local = bucket
    assert IndexedDataset.exists(remote) and not IndexedDataset.exists(remote + "x")
    folder = str(tmp_path / "idx") if kept else None
    pair, same = IndexedDataset(remote, idx_folder=folder), IndexedDataset(local)
    assert [part.tolist() for part in pair[:]] == [part.tolist() for part in same[:]]
    assert pair.get(4, 2, 3).tolist() == same.get(4, 2, 3).tolist()
    again = pickle.loads(pickle.dumps(pair))
    assert again[8].tolist() == same[8].tolist()
    assert len(os.listdir(folder)) == 1 if kept else True


def test_only_the_documents_range_is_read(bucket, monkeypatch):
    pair = IndexedDataset(bucket[0])
    ranges = []
    read = object_storage.read_range
    monkeypatch.setattr(object_storage, "read_range", lambda *a: ranges.append(a[1:]) or read(*a))
    pair.get(3, 2, 4)
    assert ranges == [((3 * 9 + 2) * 2, (3 * 9 + 6) * 2)]


def test_replaced_index_is_fetched_anew(bucket, tmp_path):
    remote, _ = bucket
    folder = str(tmp_path / "idx")
    assert len(IndexedDataset(remote, idx_folder=folder)) == 9
    write_corpus(tmp_path / "d", numbered(4))
    memory = fsspec.filesystem("memory")
    for ending in ("bin", "idx"):
        memory.pipe(f"/{tmp_path.name}/c.{ending}", (tmp_path / f"d.{ending}").read_bytes())
    assert len(IndexedDataset(remote, idx_folder=folder)) == 4


def test_samples_of_a_remote_corpus_equal_the_local_ones(bucket, tmp_path):
    remote, local = bucket
    cache = {"path_to_cache": str(tmp_path / "cache")}
    from_remote, from_local = (build(([prefix], None), (30, None, None), **cache)[0] for prefix in bucket)
    assert len(from_remote) == len(from_local) >= 30
    for i in range(len(from_local)):
        np.testing.assert_array_equal(from_remote[i]["tokens"], from_local[i]["tokens"])
    assert os.listdir(tmp_path / "cache" / "object_storage")
    assert remote not in os.listdir(".") and not os.path.exists(remote.split("://")[0] + ":")


def test_remote_corpus_without_a_cache_folder_says_so(bucket):
    with pytest.raises(DataError, match="needs a folder") as error:
        build(([bucket[0]], None))
    assert "--data-cache-path" in error.value.fix


def test_failing_requests_are_tried_again_then_reported(bucket, monkeypatch):
    pair, pauses = IndexedDataset(bucket[0]), []
    monkeypatch.setattr(bin_reader.time, "sleep", pauses.append)
    failures = iter([TimeoutError("slow down"), KeyError("throttled")])
    read = object_storage.read_range

    def flaky(*args):
        error = next(failures, None)
        if error is not None:
            raise error
        return read(*args)

    monkeypatch.setattr(object_storage, "read_range", flaky)
    assert pair[0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 0]
    assert pauses == [10.0, 20.0]
    monkeypatch.setattr(object_storage, "read_range", lambda *a: (_ for _ in ()).throw(KeyError("gone")))
    with pytest.raises(DataError, match=r"cannot read memory://.*gone"):
        pair[0]


def test_missing_object_and_unknown_scheme_are_named(tmp_path):
    with pytest.raises(DataError, match=r"memory://nothere/c\.idx"):
        IndexedDataset("memory://nothere/c")
    with pytest.raises(DataError, match="nosuchscheme"):
        IndexedDataset("nosuchscheme://bucket/c")


def test_missing_package_is_named_with_its_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(DataError, match="fsspec") as error:
        IndexedDataset("s3://bucket/c")
    assert "pip install fsspec" in error.value.fix
