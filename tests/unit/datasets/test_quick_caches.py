"""Blends whose caches are taken as they are, or opened late: the same items, and no file opened before it is needed."""

import numpy as np
import pytest

from megatron_lite.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron_lite.datasets.gpt_dataset import GPTDataset
from megatron_lite.errors import DataError
from tests.unit.datasets.corpora import config, numbered, write_corpus


def blend(tmp_path, weights, **options):
    prefixes = [str(tmp_path / name) for name in "ab"]
    made = config((prefixes, weights), path_to_cache=str(tmp_path / "cache"), **options)
    # What the builder does on a rank, without the table of the log, which counts the items of rank 0.
    return BlendedMegatronDatasetBuilder(
        GPTDataset, [40 if weights else None, None, None], lambda: True, made
    )._build_all()[0]


@pytest.fixture
def corpora(tmp_path):
    for name, count in (("a", 9), ("b", 30)):
        write_corpus(tmp_path / name, numbered(count))
    return tmp_path


@pytest.mark.parametrize("weights", [None, [0.3, 0.7]], ids=["exhaustive", "weighted"])
@pytest.mark.parametrize("trust", [True, False], ids=["trusted", "compared"])
def test_blend_opened_late_is_the_same_blend(corpora, monkeypatch, weights, trust):
    plain = blend(corpora, weights)
    opened: list[str] = []
    load = np.load
    monkeypatch.setattr(np, "load", lambda path, *a, **k: opened.append(str(path)) or load(path, *a, **k))
    late = blend(corpora, weights, defer_npy_index_mmap=True, fast_cache_load=trust)
    assert len(late) == len(plain) >= 39 and not late.built_anew_on_cache_miss
    assert not (trust and opened)
    for i in range(len(plain)):
        assert late[i]["dataset_id"] == plain[i]["dataset_id"]
        np.testing.assert_array_equal(late[i]["tokens"], plain[i]["tokens"])


def test_trusted_blend_of_another_size_is_refused(corpora):
    blend(corpora, None)
    write_corpus(corpora / "b", numbered(31))
    with pytest.raises(DataError, match="index cache"):
        blend(corpora, None, fast_cache_load=True)
