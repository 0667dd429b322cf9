"""Splits, blends and the builder."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.datasets.blended_dataset import BlendedDataset
from megatron_lite.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron_lite.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron_lite.datasets.gpt_dataset import GPTDataset
from megatron_lite.datasets.utils import get_blend_from_list, normalize
from megatron_lite.errors import ConfigError, DataError
from tests.unit.datasets.corpora import build, config, numbered, write_corpus

# -- words ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1000), min_size=3, max_size=3).filter(lambda v: sum(v) > 1e-3), st.integers(0, 10**6))
def test_split_bounds_cover_all_documents_once(shares, n):
    matrix = convert_split_vector_to_split_matrix(normalize(shares))
    bounds = [(int(round(b[0] * float(n))), int(round(b[1] * float(n)))) for b in matrix if b is not None]
    assert bounds[0][0] == 0 and bounds[-1][1] == n
    assert all(left[1] == right[0] for left, right in zip(bounds, bounds[1:]))


@pytest.mark.parametrize("text", ["'969,30,1'", "969/30/1", '"969, 30, 1"', "[969, 30, 1]"])
def test_split_ignores_stray_quotes_and_separators(text):
    assert parse_and_normalize_split(text) == [0.969, 0.03, 0.001]


@pytest.mark.parametrize("text", ["", "-1,2", "1e-3,1", "0,0,0", "1,2,3,4", "train", "1..2,3", "9,x,1"])
def test_split_that_is_no_shares_is_refused(text):
    with pytest.raises(ConfigError, match="--split"):
        parse_and_normalize_split(text)


def test_blend_words():
    assert get_blend_from_list(["a"]) == (["a"], None)
    assert get_blend_from_list(["a", "b", "c"]) == (["a", "b", "c"], None)
    assert get_blend_from_list(["a", "b"]) == (["a", "b"], None)
    assert get_blend_from_list(["0.3", "a", "7", "b"]) == (["a", "b"], [0.3, 7.0])
    assert get_blend_from_list([]) is None and get_blend_from_list(None) is None


@pytest.mark.parametrize(
    "words", [["1", "a", "x", "b"], ["a", "1", "b", "2"], ["1", "a", "2"], ["0", "a"], ["-1", "a"], ["nan", "a"]]
)
def test_blend_words_that_mix_weights_and_prefixes_are_refused(words):
    with pytest.raises(ConfigError, match="--data-path"):
        get_blend_from_list(words)


def test_weights_are_normalised_twice():
    """The second normalisation changes the last bit of the first weight: part of the cache's name."""
    first = normalize([2, 9, 10])
    assert (first[0], normalize(first)[0]) == (0.09523809523809523, 0.09523809523809525)


def test_C018_both_kinds_of_paths_are_refused_and_either_runs(tmp_path):
    a, b, c = (write_corpus(tmp_path / name, numbered(6, first=first)) for name, first in zip("abc", (1, 200, 400)))
    per_split = [([a], None), ([b], None), ([c], None)]
    for dataset, first in zip(build(None, blend_per_split=per_split), (1, 200, 400)):
        tokens = {int(t) for i in range(len(dataset)) for t in dataset[i]["tokens"]}
        assert tokens - {0} <= set(range(first, first + 48))
    with pytest.raises(ConfigError, match="--data-path and --train-data-path"):
        config(([a], None), blend_per_split=per_split)
    with pytest.raises(ConfigError, match="--split"):
        config(None, blend_per_split=per_split, split="1,1,1")


def test_missing_split_is_969_30_1_with_a_warning(tmp_path, capsys):
    assert config(([str(tmp_path)], None), split=None).split == "969, 30, 1"
    assert "969, 30, 1" in capsys.readouterr().err


# -- blends ---------------------------------------------------------------------------------------------------------


def test_C019_extreme_weights_stay_inside_every_member(tmp_path):
    prefix = write_corpus(tmp_path / "c", numbered(50))
    other = write_corpus(tmp_path / "d", numbered(50))
    blend = build(([prefix, other], [0.001, 0.999]), (1000, None, None))[0]
    assert blend.samples_per_dataset() == [1, 999]
    for i in range(1000):
        assert blend[i]["dataset_id"] in (0, 1)


def test_C021_weights_are_shares_of_the_samples(tmp_path, capsys):
    a, b = write_corpus(tmp_path / "a", numbered(10)), write_corpus(tmp_path / "b", numbered(20))
    assert build(([a, b], [1, 1]), (30, None, None))[0].samples_per_dataset() == [15, 15]
    blend = build(([a, b], [10, 20]), (30, None, None))[0]
    assert blend.samples_per_dataset() == [10, 20]
    header, *rows = capsys.readouterr().out.splitlines()[-3:]
    assert header.split() == "split dataset weight samples tokens epochs tokens an epoch".split()
    assert rows[0].split() == ["train", a, "0.333333", "10", "80", "0.89", "of", "1", "90"]
    assert rows[1].split() == ["train", b, "0.666667", "20", "160", "0.89", "of", "1", "180"]


def test_item_says_its_dataset_and_none_is_a_filler(tmp_path):
    a, b = write_corpus(tmp_path / "a", numbered(9)), write_corpus(tmp_path / "b", numbered(9, first=300))
    blend = build(([a, b], [1, 1]), (10, None, None))[0]
    for i in range(10):
        assert blend[i]["dataset_id"] == blend.dataset_index[i] == int(blend[i]["tokens"].max() >= 300)
    assert blend[None]["loss_mask"].sum() == 0


def test_member_without_samples_is_left_out(tmp_path, capsys):
    a = write_corpus(tmp_path / "a", numbered(20))
    short, empty = write_corpus(tmp_path / "short", [[1, 2]]), write_corpus(tmp_path / "empty", [[], []])
    blend = build(([a, short, empty], None), (None, None, None))[0]
    assert [mid.dataset_path for mid in blend.datasets] == [a] and len(blend) == len(blend.datasets[0])
    said = capsys.readouterr().err
    assert "short is left out of the train blend" in said and "empty is left out of the train blend" in said
    weighted = build(([a, empty], [0.5, 0.5]), (12, None, None))[0]
    assert weighted.samples_per_dataset() == [12]


def test_blend_without_any_sample_is_an_error_only_when_samples_are_asked(tmp_path):
    empty = [write_corpus(tmp_path / name, [[]]) for name in "ab"]
    assert build((empty, None), (None, None, None))[0] is None
    with pytest.raises(DataError, match="train split, 4 samples"):
        build((empty, None), (4, None, None))


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_weight_that_is_no_share_is_refused_with_its_prefix(tmp_path, weight):
    with pytest.raises(ConfigError, match="corpus_b the weight"):
        config((["corpus_a", "corpus_b"], [1.0, weight]))


def test_weights_without_a_size_are_refused(tmp_path):
    prefixes = [write_corpus(tmp_path / name, numbered(9)) for name in "ab"]
    with pytest.raises(ConfigError, match="no number of samples"):
        build((prefixes, [1, 2]), (None, None, None))


def test_asking_a_member_for_too_much_tells_which_flag_to_raise(tmp_path):
    a = build(([write_corpus(tmp_path / "a", numbered(9))], None))[0]
    b = build(([write_corpus(tmp_path / "b", numbered(90))], None))[0]
    with pytest.raises(IndexError, match="--mid-level-dataset-surplus"):
        BlendedDataset([a, b], [1, 1], 60, a.config)


def test_validation_sets_can_stay_apart(tmp_path):
    a, b = write_corpus(tmp_path / "a", numbered(40)), write_corpus(tmp_path / "b", numbered(20))
    valid = build(None, (None, 10, None), blend_per_split=[None, ([a, b], None), None], multiple_validation_sets=True)[
        1
    ]
    assert [dataset.dataset_path for dataset in valid] == [a, b]
    alone = build(None, (None, 10, None), blend_per_split=[None, ([a], None), None], multiple_validation_sets=True)[1]
    assert [dataset.dataset_path for dataset in alone] == [a]
    whole = build(None, (None, 3, None), blend_per_split=[None, ([a], None), None], full_validation=True)[1]
    assert whole.num_samples is None and whole.num_epochs == 1


def test_C043_a_validation_set_without_a_sample_is_named(tmp_path, capsys):
    a, short = write_corpus(tmp_path / "a", numbered(40)), write_corpus(tmp_path / "short", [[1, 2, 3]])
    sets = dict(blend_per_split=[None, ([a, short], [1, 2]), None], multiple_validation_sets=True, full_validation=True)
    with pytest.raises(DataError, match=f"validation set {short}"):
        build(None, **sets)
    assert "weights of the validation sets are not used" in capsys.readouterr().err
    with_rest = build(None, **sets, drop_last_partial_validation_sequence=False)[1]
    assert [len(dataset) for dataset in with_rest] == [45, 1]


def test_threads_build_the_same_blend(tmp_path):
    prefixes = [write_corpus(tmp_path / name, numbered(9)) for name in "abcd"]
    one, four = (build((prefixes, [1, 2, 3, 4]), (50, 0, 0), num_dataset_builder_threads=n)[0] for n in (1, 4))
    assert one.unique_description == four.unique_description
    np.testing.assert_array_equal(one.dataset_index, four.dataset_index)


def test_missing_corpus_is_named_before_anything_is_built(tmp_path):
    with pytest.raises(DataError, match="nothere"):
        build(([write_corpus(tmp_path / "a", numbered(9)), str(tmp_path / "nothere")], None))


def test_rank_that_needs_no_data_gets_none(tmp_path):
    prefix = write_corpus(tmp_path / "a", numbered(9))
    built = BlendedMegatronDatasetBuilder(GPTDataset, [5, 5, 5], lambda: False, config(([prefix], None))).build()
    assert built == [None, None, None]
