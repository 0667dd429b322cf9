"""T5's samples: sentinels for runs of words, and the text back from them."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron_lite.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron_lite.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig
from megatron_lite.errors import ConfigError
from megatron_lite.tokenizers.null import NullTokenizer

WORDS = "[PAD] [CLS] [SEP] [MASK] the cat sat play ##ing ##s on mat a dog ran far and big red sun".split()
SENTENCES = [[4, 5, 6, 10, 4, 11], [12, 13, 14, 15], [4, 18, 19, 7, 8, 16, 7, 9]]
TEXT = [token for sentence in SENTENCES for token in sentence]


class Tokenizer:
    """The vocabulary above, a beginning and an end, and six sentinels."""

    unique_identifiers = OrderedDict([("class", "Tokenizer")])
    pad, cls, sep, mask, bos, eos, eod = 0, 1, 2, 3, 20, 21, 21
    special_tokens_dict = {"pad": 0, "cls": 1, "sep": 2, "mask": 3}
    additional_special_tokens_ids = list(range(22, 28))
    inv_vocab = dict(enumerate(WORDS))


def config(blend=None, **options) -> T5MaskedWordPieceDatasetConfig:
    defaults = dict(
        random_seed=1234,
        sequence_length=24,
        sequence_length_decoder=12,
        split=None if blend is None else "1,0,0",
        tokenizer=Tokenizer(),
        masking_probability=0.15,
        short_sequence_probability=0.0,
        masking_max_ngram=10,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=True,
    )
    return T5MaskedWordPieceDatasetConfig(blend=blend, **{**defaults, **options})


def build(folder, documents, size=40, **options) -> T5MaskedWordPieceDataset:
    builder = IndexedDatasetBuilder(f"{folder}/corpus.bin", np.uint16)
    for sentences in documents:
        builder.add_document([t for sentence in sentences for t in sentence], [len(sentence) for sentence in sentences])
    builder.finalize(f"{folder}/corpus.idx")
    given = config(([f"{folder}/corpus"], None), **options)
    return BlendedMegatronDatasetBuilder(T5MaskedWordPieceDataset, [size, None, None], lambda: True, given).build()[0]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """One sample an epoch, of three sentences; read at other numbers it is another draw."""
    return build(tmp_path_factory.mktemp("corpus"), [SENTENCES])


def test_the_worked_samples(dataset):
    first, second = dataset[0], dataset[1]
    assert first["text_enc"].tolist() == [4, 5, 6, 10, 4, 11, 12, 13, 14, 15, 4, 18, 19, 22, 7, 9, *[0] * 8]
    assert first["text_dec"].tolist() == [20, 22, 7, 8, 16, *[0] * 7]
    assert first["labels"].tolist() == [22, 7, 8, 16, 21, *[-1] * 7]
    assert first["loss_mask"].tolist() == first["dec_mask"].tolist() == [1] * 5 + [0] * 7
    assert first["enc_mask"].tolist() == [1] * 16 + [0] * 8 and first["truncated"] == 0
    assert second["text_enc"].tolist() == [4, 22, 4, 11, 12, 13, 14, 15, 4, 18, 19, 7, 8, 16, 7, 9, *[0] * 8]
    assert second["labels"].tolist() == [22, 5, 6, 10, 21, *[-1] * 7]
    assert all(array.dtype == np.int64 for array in first.values())


def test_a_filler_has_no_loss(dataset):
    sample = dataset[None]
    assert not sample["loss_mask"].any() and (sample["labels"] == -1).all()
    assert sample["text_enc"].tolist() == dataset[0]["text_enc"].tolist()


def text_of(sample, sentinels) -> list[int]:
    """The inverse rule: each sentinel of the encoder's text gives way to its run."""
    runs: dict[int, list[int]] = {}
    for token in sample["labels"][sample["loss_mask"] == 1][:-1].tolist():
        if token in sentinels:
            runs[token] = []
            last = token
        else:
            runs[last].append(token)
    out: list[int] = []
    for token in sample["text_enc"][sample["enc_mask"] == 1].tolist():
        out += runs.pop(token) if token in sentinels else [token]
    assert not runs, "the decoder names a sentinel that the encoder has not"
    return out


@settings(max_examples=100)
@given(
    idx=st.integers(0, 39),
    probability=st.sampled_from([0.15, 0.3, 0.6]),
    ngram=st.integers(1, 10),
    geometric=st.booleans(),
    decoder=st.integers(3, 30),
    sentinels=st.integers(1, 6),
    seed=st.integers(1, 1000),
)
def test_the_text_comes_back_from_every_sample_also_where_runs_do_not_fit(
    dataset, idx, probability, ngram, geometric, decoder, sentinels, seed
):
    tokenizer = Tokenizer()
    tokenizer.additional_special_tokens_ids = list(range(22, 22 + sentinels))
    given = config(
        random_seed=seed,
        masking_probability=probability,
        masking_max_ngram=ngram,
        masking_use_geometric_distribution=geometric,
        sequence_length_decoder=decoder,
        tokenizer=tokenizer,
    )
    other = T5MaskedWordPieceDataset(dataset.dataset, None, dataset.indices, 40, dataset.index_split, given)
    sample = other[idx]
    ids = set(tokenizer.additional_special_tokens_ids)
    assert text_of(sample, ids) == TEXT
    used = [token for token in sample["text_enc"].tolist() if token in ids]
    assert used == sorted(used) == list(range(22, 22 + len(used)))
    n = int(sample["dec_mask"].sum())
    assert sample["text_dec"][1:n].tolist() == sample["labels"][: n - 1].tolist() and sample["labels"][n - 1] == 21


def test_runs_that_do_not_fit_are_left_in_the_text_and_counted(tmp_path, capsys):
    """Megatron stops with a bare assertion. 76 one-word runs of 512 tokens want 153 places in the decoder."""
    sentence = [int(t) for t in np.random.default_rng(0).choice([4, 5, 6, 10, 11, 12, 13], 510)]
    options = dict(sequence_length=512, masking_max_ngram=1, masking_use_geometric_distribution=False)
    tight = build(tmp_path, [[sentence[:250], sentence[250:]]], 8, sequence_length_decoder=8, **options)
    sample = tight[0]
    assert text_of(sample, set(Tokenizer.additional_special_tokens_ids)) == sentence
    assert tight.samples_with_spans_left_out == 1
    assert int(sample["dec_mask"].sum()) in (7, 8), "the decoder is full but for a part of a run"
    tight[1]
    said = capsys.readouterr().out
    assert said.count("mask less than --mask-prob") <= 1  # once a process
    scarce = build(tmp_path, [[sentence[:250], sentence[250:]]], 8, sequence_length_decoder=200, **options)
    assert sum(token in range(22, 28) for token in scarce[0]["text_enc"].tolist()) == 6
    places = [scarce[i]["text_enc"].tolist().index(27) for i in range(8)]
    assert max(places) > 250, "not only the beginning of the text is masked"


def test_runs_are_of_4_463_words_in_the_mean(tmp_path):
    """min(Geom(0.2), 10): (1 - 0.8^10) / 0.2. Runs that the budget or the end cut short are kept rare by size."""
    sentence = [4, 5, 6, 10, 11, 12, 13, 14] * 500
    tokenizer = Tokenizer()
    tokenizer.additional_special_tokens_ids = list(range(22, 400))
    data = build(
        tmp_path,
        [[sentence[at : at + 400] for at in range(0, 4000, 400)]],
        40,
        sequence_length=4002,
        sequence_length_decoder=900,
        tokenizer=tokenizer,
    )
    runs = []
    for idx in range(40):
        labels = data[idx]["labels"]
        at = np.flatnonzero((labels >= 22) & (labels < 400))
        end = int((labels >= 0).sum()) - 1
        runs += np.diff([*at, end]).tolist()
    assert data.samples_with_spans_left_out == 0 and len(runs) > 3000
    words = np.array(runs) - 1
    # A run that touches another is passed over, which takes long ones oftener than short ones.
    assert words.max() == 10 and abs(words.mean() - 4.463) < 0.35


def test_sentences_are_cut_at_the_target_length(tmp_path):
    long = [[4, 5, 6, 10] * 5, [11, 12, 13] * 4]
    sample = build(tmp_path, [long])[0]
    assert sample["truncated"] == 1
    assert text_of(sample, set(Tokenizer.additional_special_tokens_ids)) == [t for s in long for t in s][:22]


def test_c125_padding_is_a_token_of_the_vocabulary_also_where_the_tokenizer_has_none(tmp_path):
    """A tokenizer whose padding is -1, and short documents: what is no token has weight 0."""
    tokenizer = NullTokenizer(100, vocab_extra_ids=10)
    data = build(tmp_path, [[[1, 2, 3], [4, 5]]], tokenizer=tokenizer)
    sample = data[0]
    for name in ("text_enc", "text_dec"):
        assert sample[name].min() >= 0 and sample[name].max() < tokenizer.vocab_size
    counted = sample["labels"][sample["loss_mask"] == 1]
    assert counted.min() >= 0 and not sample["loss_mask"][sample["dec_mask"] == 0].any()


def test_c126_without_sentinels_there_is_no_t5():
    with pytest.raises(ConfigError, match="--vocab-extra-ids 100"):
        config(tokenizer=NullTokenizer(100))


@pytest.mark.parametrize(
    "length, message", [(None, "sequence_length_decoder not given"), (2, "--decoder-seq-length 2")]
)
def test_lengths_that_cannot_be(length, message):
    with pytest.raises(ConfigError, match=message):
        config(sequence_length_decoder=length)
