"""Masked word pieces: what may be masked, by what it is replaced, and what a sample for BERT is."""

from collections import Counter, OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
from megatron_lite.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron_lite.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron_lite.errors import ConfigError, DataError
from megatron_lite.tokenizers.null import NullTokenizer

WORDS = "[PAD] [CLS] [SEP] [MASK] the cat sat play ##ing ##s on mat a dog ran far and big red sun".split()
SENTENCES = [[4, 5, 6, 10, 4, 11], [12, 13, 14, 15], [4, 18, 19, 7, 8, 16, 7, 9]]


class Tokenizer:
    """The vocabulary above."""

    unique_identifiers = OrderedDict([("class", "Tokenizer")])
    pad, cls, sep, mask, eod = 0, 1, 2, 3, 2
    special_tokens_dict = {"pad": 0, "cls": 1, "sep": 2, "mask": 3}
    additional_special_tokens_ids: list[int] = []
    inv_vocab = dict(enumerate(WORDS))


def config(blend=None, **options) -> BERTMaskedWordPieceDatasetConfig:
    defaults = dict(
        random_seed=1234,
        sequence_length=24,
        split=None if blend is None else "1,0,0",
        tokenizer=Tokenizer(),
        masking_probability=0.15,
        short_sequence_probability=0.0,
        masking_max_ngram=3,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False,
        classification_head=True,
    )
    return BERTMaskedWordPieceDatasetConfig(blend=blend, **{**defaults, **options})


def write(prefix, documents) -> str:
    """A corpus of documents of sentences."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.uint16)
    for sentences in documents:
        builder.add_document([t for sentence in sentences for t in sentence], [len(sentence) for sentence in sentences])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def build(blend, sizes=(None, None, None), **options):
    made = BlendedMegatronDatasetBuilder(
        BERTMaskedWordPieceDataset, list(sizes), lambda: True, config(blend, **options)
    )
    return made.build()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """One sample an epoch, of three sentences; read at other numbers it is another draw."""
    prefix = write(tmp_path_factory.mktemp("corpus") / "three", [SENTENCES])
    return build(([prefix], None), (40, None, None))[0]


def test_the_worked_samples(dataset):
    """Pivot, order, masks and what stood there, of three draws of one sample."""
    first, second, third = (dataset[i] for i in range(3))
    assert first["text"].tolist() == [1, 4, 18, 19, 7, 8, 16, 7, 9, 2, 4, 5, 6, 10, 4, 3, 3, 13, 14, 3, 2, 0, 0, 0]
    assert first["types"].tolist() == [0] * 10 + [1] * 11 + [0] * 3 and first["is_random"] == 1
    assert {i: v for i, v in enumerate(first["labels"].tolist()) if v >= 0} == {15: 11, 16: 12, 19: 15}
    assert second["text"].tolist() == [1, 4, 3, 3, 3, 4, 11, 12, 13, 14, 15, 2, 4, 18, 19, 7, 8, 16, 7, 9, 2, 0, 0, 0]
    assert {i: v for i, v in enumerate(second["labels"].tolist()) if v >= 0} == {2: 5, 3: 6, 4: 10}
    assert {i: v for i, v in enumerate(third["labels"].tolist()) if v >= 0} == {1: 4, 6: 11, 7: 12}
    assert second["is_random"] == third["is_random"] == 0 and first["truncated"] == 0


def masked(dataset, tokens, target, seed=0):
    return dataset._create_masked_lm_predictions(tokens, target, np.random.RandomState(seed))


@settings(max_examples=150)
@given(
    body=st.lists(st.integers(4, 19), min_size=1, max_size=40),
    target=st.integers(2, 40),
    probability=st.sampled_from([0.15, 0.3, 0.6]),
    ngram=st.integers(1, 10),
    whole=st.booleans(),
    longer=st.booleans(),
    geometric=st.booleans(),
    permute=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_masks_stay_in_their_budget_off_special_tokens_and_cover_whole_words(
    dataset, body, target, probability, ngram, whole, longer, geometric, permute, seed
):
    dataset = BERTMaskedWordPieceDataset(
        dataset.dataset,
        None,
        dataset.indices,
        None,
        dataset.index_split,
        config(
            masking_probability=probability,
            masking_max_ngram=ngram,
            masking_do_full_word=whole,
            masking_use_longer_ngrams=longer,
            masking_use_geometric_distribution=geometric,
            masking_do_permutation=permute and not geometric,
        ),
    )
    tokens = [1, *body, 2]
    result = masked(dataset, tokens, target, seed)
    budget = min(probability * target, max(1, round(probability * len(tokens))))
    in_spans = [position for run, _ in result.spans for position in run]
    assert len(in_spans) == len(set(in_spans)) <= budget and set(in_spans) <= set(result.positions)
    assert result.labels == [tokens[position] for position in result.positions]
    assert not {0, len(tokens) - 1} & set(result.positions)
    untouched = set(range(len(tokens))) - set(result.positions)
    assert all(result.tokens[position] == tokens[position] for position in untouched)
    assert result.boundaries == [0 if token in (8, 9) else 1 for token in tokens]
    if whole:
        for position, token in enumerate(tokens[1:-1], start=1):
            joined = token in (8, 9) and position > 1
            assert not joined or (position in result.positions) == (position - 1 in result.positions)


def test_c131_of_what_is_masked_eight_in_ten_become_mask_one_any_token_and_one_stays(dataset):
    """10,000 draws over one text, whole words: shares within four standard deviations, no position replaced twice, and
    labels that are the tokens of the text."""
    tokens = [1, *[4, 5, 6, 7, 8, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19] * 4, 2]
    kinds: Counter = Counter()
    total = 0
    for seed in range(10_000):
        result = masked(dataset, tokens, 60, seed)
        total += len(result.positions)
        assert len(set(result.positions)) == len(result.positions) == sum(len(run) for run, _ in result.spans)
        for position, label in zip(result.positions, result.labels):
            assert label == tokens[position]
            now = result.tokens[position]
            kinds["mask" if now == 3 else "kept" if now == label else "other"] += 1
    assert abs(total / (10_000 * len(tokens)) - 0.15) < 0.01
    # a random token is [MASK] or the token itself in two of 20 cases
    for kind, share in (("mask", 0.8 + 0.1 / 20), ("kept", 0.1 + 0.1 / 20), ("other", 0.1 * 18 / 20)):
        assert abs(kinds[kind] - share * total) < 4 * (share * (1 - share) * total) ** 0.5, kinds


def test_runs_of_words_have_lengths_of_p_1_over_n(dataset):
    """4 standard deviations; the first run of each draw, which nothing stops."""
    tokens = [1, *[4, 5, 6, 10, 11, 12, 13, 14] * 12, 2]
    lengths = Counter()
    for seed in range(4000):
        starts = [run for run, _ in masked(dataset, tokens, 400, seed).spans if 20 < run[0] < 90]
        lengths.update(len(run) for run in starts[:1])
    total = sum(lengths.values())
    for n, share in ((1, 0.54545), (2, 0.27273), (3, 0.18182)):
        # Touching runs are passed over, and long ones touch more often: 3 % is far less than another rule would give.
        assert abs(lengths[n] / total - share) < 0.03 + 4 * (share * (1 - share) / total) ** 0.5, lengths


@settings(max_examples=60)
@given(a=st.integers(0, 30), b=st.integers(0, 30), target=st.integers(2, 40), seed=st.integers(0, 1000))
def test_truncation_keeps_the_target_and_prefers_the_longer_segment(a, b, target, seed):
    from megatron_lite.datasets.bert_dataset import _truncate

    left, right = list(range(a)), list(range(100, 100 + b))
    truncated = _truncate(left, right, target, np.random.RandomState(seed))
    assert truncated == (a + b > target)
    assert len(left) + len(right) == min(a + b, target)
    if truncated and min(len(left), len(right)) < min(a, b):  # both were cut: they are as long, b is cut on a tie
        assert 0 <= len(left) - len(right) <= 1
    for part in (left, right):
        assert part == list(range(part[0], part[0] + len(part))) if part else True


def test_samples_depend_on_their_number_alone(dataset, tmp_path):
    """Not on what was read before, also where tokens are exchanged."""
    prefix = write(tmp_path / "c", [SENTENCES] * 5)
    made = [build(([prefix], None), masking_do_permutation=True, masking_probability=0.3)[0] for _ in range(2)]
    forwards = [made[0][i] for i in range(len(made[0]))]
    for i in reversed(range(len(made[1]))):
        for name, values in made[1][i].items():
            np.testing.assert_array_equal(values, forwards[i][name])


def test_c124_two_weighted_prefixes_give_samples_by_their_weights(tmp_path):
    a = write(tmp_path / "a", [SENTENCES] * 30)
    b = write(tmp_path / "b", [[[17] * 5, [17] * 4, [17] * 6]] * 30)
    train = build(([a, b], [0.7, 0.3]), (100, None, None), path_to_cache=str(tmp_path / "cache"))[0]
    from_b = sum(17 in sample["text"] for sample in map(train.__getitem__, range(100)))
    assert abs(from_b - 30) <= 1


def test_without_the_head_single_sentences_are_samples_and_have_one_segment(tmp_path):
    prefix = write(tmp_path / "c", [[SENTENCES[0]], SENTENCES])
    assert len(build(([prefix], None))[0]) == 1
    both = build(([prefix], None), classification_head=False)[0]
    assert len(both) == 2
    for i in range(2):
        sample = both[i]
        assert not sample["types"].any() and sample["is_random"] == 0 and (sample["text"] == 2).sum() == 1


def test_a_filler_counts_nowhere(dataset):
    """The last batch of a full validation is filled with it."""
    filler, sample = dataset[None], dataset[0]
    assert (filler["labels"] == -1).all() and not filler["loss_mask"].any() and filler["is_random"] == -1
    np.testing.assert_array_equal(filler["text"], sample["text"])


def test_a_corpus_that_was_not_split_into_sentences_is_told(tmp_path):
    prefix = write(tmp_path / "c", [[[5, 6, 7]]] * 9)
    with pytest.raises(DataError, match="--split-sentences"):
        build(([prefix], None), (10, None, None))


@pytest.mark.parametrize(
    "options",
    [
        dict(masking_probability=0.0),
        dict(masking_probability=1.0),
        dict(short_sequence_probability=1.5),
        dict(masking_max_ngram=0),
        dict(masking_do_full_word=None),
        dict(classification_head=None),
        dict(tokenizer=None),
        dict(masking_do_permutation=True, masking_use_geometric_distribution=True),
    ],
)
def test_options_that_mean_nothing_are_refused(options):
    with pytest.raises(ConfigError):
        config(**options)


def test_mock_data_have_samples_for_all_splits_and_no_special_tokens_but_those_of_bert():
    train, valid, test = build(None, (20, 10, 10), split=None)
    assert len(train) >= 20 and len(valid) >= 10 and len(test) >= 10
    sample = train[0]
    assert sample["text"][0] == 1 and sample["padding_mask"].sum() > 4
    originals = np.where(sample["labels"] >= 0, sample["labels"], sample["text"])[sample["padding_mask"] == 1]
    assert (originals == 2).sum() == 2 and not (originals == 3).any() and not (originals == 0).any()


def test_a_tokenizer_without_the_tokens_of_bert_is_refused_before_a_sample_is_made():
    """A worker of the loader met the missing token, and its traceback named no flag."""
    with pytest.raises(ConfigError, match="NullTokenizer has no token for cls, sep, mask") as error:
        config(tokenizer=NullTokenizer(100))
    assert "--tokenizer-type BertWordPieceLowerCase" in error.value.fix
