"""Masks, positions, padding and caches of GPTDataset."""

import json
import multiprocessing
import os
import pickle
import time

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_lite.datasets.gpt_dataset import (
    GPTDataset,
    MockGPTDataset,
    document_boundaries,
    masks_and_positions,
)
from megatron_lite.datasets.index_cache import IndexCache
from megatron_lite.errors import ConfigError, DataError
from tests.unit.datasets.corpora import EOD, Words, build, config, numbered, write_corpus


@settings(max_examples=100)
@given(st.lists(st.sampled_from([EOD, 5]), min_size=1, max_size=12))
@example([EOD, 5, EOD, EOD, 5, EOD])
def test_resets_equal_segments_counted_token_by_token(tokens):
    """Boundaries at the first and last place and two in a row: an EOD belongs to the document that it ends."""
    loss_mask, positions, mask = masks_and_positions(np.array(tokens), EOD, True, True, True, True)
    segment, start, segments, expected = 0, 0, [], []
    for i, token in enumerate(tokens):
        segments.append(segment)
        expected.append(i - start)
        if token == EOD:
            segment, start = segment + 1, i + 1
    assert positions.tolist() == expected
    assert loss_mask.tolist() == [float(token != EOD) for token in tokens]
    for query in range(len(tokens)):
        for key in range(len(tokens)):
            assert mask[0, query, key] == (key > query or segments[key] != segments[query])


def test_C031_document_boundary_options():
    loss_mask, positions, mask = masks_and_positions(np.array([10, 11, EOD, 20]), EOD, True, True, True, True)
    assert positions.tolist() == [0, 1, 2, 0]
    assert loss_mask.tolist() == [1, 1, 0, 1]
    assert mask[0, 3].tolist() == [True, True, True, False]


def test_C030_end_of_document_targets_are_trained_where_pad_is_eos(tmp_path, capsys):
    prefix = write_corpus(tmp_path / "c", numbered(4))
    plain = build(([prefix], None), split="0,1,0", drop_last_partial_validation_sequence=False)[1]
    same = build(
        ([prefix], None), split="0,1,0", drop_last_partial_validation_sequence=False, tokenizer=Words(pad=EOD)
    )[1]
    assert "it is not taken for padding" in capsys.readouterr().err
    trained = 0
    for i in range(len(same)):
        sample = same[i]
        np.testing.assert_array_equal(sample["loss_mask"], plain[i]["loss_mask"])
        trained += int(sample["loss_mask"][sample["labels"] == EOD].sum())
    assert trained == 4  # every end of a document


def test_ambiguous_pad_counts_when_told_to(tmp_path):
    prefix = write_corpus(tmp_path / "c", numbered(4))
    dataset = build(([prefix], None), tokenizer=Words(pad=EOD), allow_ambiguous_pad_tokens=True)[0]
    unpadded = build(([prefix], None))[0]
    for i in range(len(dataset)):
        np.testing.assert_array_equal(dataset[i]["loss_mask"], unpadded[i]["labels"] != EOD)


@pytest.mark.parametrize("extra", [True, False])
def test_partial_validation_sample_is_padded_without_loss(tmp_path, extra):
    """No token is lost, and padding has neither loss nor the look of a token."""
    prefix = write_corpus(tmp_path / "c", [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]])
    dataset = build(
        ([prefix], None),
        split="0,1,0",
        drop_last_partial_validation_sequence=False,
        add_extra_token_to_sequence=extra,
    )[1]
    assert len(dataset) == 2
    last = dataset[int(np.flatnonzero(dataset.shuffle_index == 1)[0])]
    assert last["tokens"].tolist() == [9, 10, 11, 0, 0, 0, 0, 0]
    assert last["labels"].tolist() == [10, 11, 0, 0, 0, 0, 0, 0]
    assert last["loss_mask"].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("pad", [None, -1, EOD, 7])
def test_padding_is_no_end_of_document_even_where_both_become_0(tmp_path, pad):
    """Tokenizers without a pad token, with that of Megatron's, with the end token for it, with one of its own."""
    prefix = write_corpus(tmp_path / "c", [[1, 2, 3, EOD, 4, 5]])
    resets = dict.fromkeys(
        ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask"), True
    )
    sample = build(
        ([prefix], None),
        split="0,1,0",
        drop_last_partial_validation_sequence=False,
        tokenizer=Words(pad=pad),
        **resets,
    )[1][0]
    assert sample["tokens"].tolist() == [1, 2, 3, 0, 4, 5, 0, 0]
    assert sample["position_ids"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert sample["loss_mask"].tolist() == [1, 1, 1, 0, 1, 0, 0, 0]
    assert (~sample["attention_mask"][0, 7]).tolist() == [False] * 4 + [True] * 4


def test_empty_last_document_does_not_break_the_partial_sample(tmp_path):
    prefix = write_corpus(tmp_path / "c", [[1, 2, 3], []])
    for seed in range(4):  # the empty document comes last in some order
        dataset = build(([prefix], None), split="0,1,0", drop_last_partial_validation_sequence=False, random_seed=seed)[
            1
        ]
        assert dataset[0]["tokens"].tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
        assert dataset[0]["loss_mask"].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]


def test_sample_does_not_depend_on_what_was_read_before(tmp_path):
    """A cached mask that is edited in place would carry one sample's padding into the next."""
    prefix = write_corpus(tmp_path / "c", [[7, 3, 7, 5, 6, 7, 7, 8, 9, 7, 11, 12, 13, 7, 7, 16, 17, 18]])
    options = {"tokenizer": Words(pad=7), "create_attention_mask": True}
    alone = build(([prefix], None), **options)[0][1]
    dataset = build(([prefix], None), **options)[0]
    dataset[0]["loss_mask"][:] = 5
    dataset[0]["position_ids"][:] = 5
    after = dataset[1]
    for field, values in alone.items():
        np.testing.assert_array_equal(after[field], values, err_msg=field)


def test_attention_mask_is_made_only_when_asked(tmp_path):
    prefix = write_corpus(tmp_path / "c", numbered(4))
    assert "attention_mask" not in build(([prefix], None))[0][0]
    mask = build(([prefix], None), create_attention_mask=True)[0][0]["attention_mask"]
    assert mask.shape == (1, 8, 8) and mask.dtype == bool
    np.testing.assert_array_equal(mask[0], np.triu(np.ones((8, 8), bool), 1))


def test_long_sequences_make_no_square_of_themselves():
    """A sample of a million tokens: its mask would take a terabyte."""
    dataset = build(None, (1, 0, 0), cls=MockGPTDataset, sequence_length=1_000_000)[0]
    assert dataset[0]["tokens"].shape == (1_000_000,)


def test_resetting_the_mask_without_making_it_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="reset-attention-mask"):
        config(([str(tmp_path)], None), reset_attention_mask=True)


def test_boundary_options_must_be_given(tmp_path):
    with pytest.raises(ConfigError, match="eod_mask_loss"):
        config(([str(tmp_path)], None), eod_mask_loss=None)


def test_empty_split_with_samples_asked_names_it(tmp_path):
    prefix = write_corpus(tmp_path / "c", numbered(3))
    with pytest.raises(DataError, match=f"test split of {prefix}.*5 samples"):
        build(([prefix], None), (None, None, 5), split="969,30,1")
    assert len(build(([prefix], None), (None, None, None), split="969,30,1")[2]) == 0
    assert len(build(([prefix], None), (None, None, 0), split="969,30,1")[2]) == 0


def test_C023_report_says_tokens_epochs_and_warns(tmp_path, capsys):
    prefix = write_corpus(tmp_path / "c", [list(range(1, 63))] * 10)
    build(([prefix], None), (100, None, None), sequence_length=1024)
    said = capsys.readouterr()
    split, path, _, samples, tokens, drawn, of, built, epoch = said.out.split("tokens an epoch", 1)[1].split()
    assert (split, path, samples, tokens) == ("train", prefix, "100", "102400")
    assert (drawn, of, built, epoch) == ("165.16", "of", "166", "620")
    assert "fewer than one sample" in said.err


def test_C025_healthy_data_gives_no_warning(tmp_path, capsys):
    prefix = write_corpus(tmp_path / "c", numbered(40))
    assert len(build(([prefix], None), (100, None, None))[0]) >= 100
    assert capsys.readouterr().err == ""


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=10).filter(lambda sizes: sum(sizes) > 0),
    st.integers(1, 12),
    st.integers(0, 60),
)
def test_every_sample_asked_for_can_be_read(tmp_path_factory, sizes, s, wanted):
    """Any documents, lengths and counts: enough samples, each token drawn as often as the epochs say or once less."""
    starts = np.concatenate([[1], 1 + np.cumsum(sizes)])
    documents = [list(range(start, start + size)) for start, size in zip(starts, sizes)]
    prefix = write_corpus(tmp_path_factory.mktemp("c") / "c", documents)
    dataset = build(([prefix], None), (wanted, None, None), sequence_length=s)[0]
    assert len(dataset) >= wanted and sorted(dataset.shuffle_index) == list(range(len(dataset)))
    counts = np.zeros(sum(sizes) + 1, int)
    for i in range(len(dataset)):
        sample = dataset[i]
        assert (sample["labels"][:-1] == sample["tokens"][1:]).all() and sample["loss_mask"].all()
        np.add.at(counts, sample["tokens"], 1)
    assert counts[0] == 0 and counts.sum() == len(dataset) * s
    assert counts[1:].max() <= dataset.num_epochs
    assert counts.sum() > dataset.num_epochs * sum(sizes) - s - 1  # only the tail of the last epoch is left out


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=10).filter(sum),
    s=st.integers(1, 12),
    wanted=st.one_of(st.none(), st.integers(1, 60)),
    seed=st.integers(0, 2**32 - 1),
    extra=st.booleans(),
    drop=st.booleans(),
)
@example(sizes=[3, 5, 0], s=4, wanted=None, seed=0, extra=True, drop=False)
@example(sizes=[8], s=4, wanted=7, seed=0, extra=False, drop=False)
def test_samples_are_the_stream_of_the_epochs_to_the_last_token(tmp_path_factory, sizes, s, wanted, seed, extra, drop):
    """Any documents, lengths, counts and seeds: each token is an input, and a label, as often as promised."""
    starts = np.concatenate([[1], 1 + np.cumsum(sizes)])
    documents = [list(range(start, start + size)) for start, size in zip(starts, sizes)]
    prefix = write_corpus(tmp_path_factory.mktemp("c") / "c", documents)
    dataset = build(
        ([prefix], None),
        (0, wanted, 0),
        sequence_length=s,
        split="0,1,0",
        random_seed=seed,
        add_extra_token_to_sequence=extra,
        drop_last_partial_validation_sequence=drop,
    )[1]
    stream = [token for document in dataset.document_index for token in documents[document]]
    assert len(stream) == dataset.num_epochs * sum(sizes)
    assert len(dataset) >= (wanted or 0)
    usable = max(0, len(stream) - extra)
    assert len(dataset) == (usable // s if drop else -(-usable // s))
    counted = 0
    for k, item in enumerate(np.argsort(dataset.shuffle_index)):
        sample = dataset[int(item)]
        inputs, labels = stream[k * s : (k + 1) * s], stream[k * s + 1 : (k + 1) * s + 1]
        labels = labels[: s if extra else s - 1]  # without the extra token the last label is not known
        assert sample["tokens"].tolist() == inputs + [0] * (s - len(inputs))
        assert sample["labels"].tolist() == labels + [0] * (s - len(labels))
        assert sample["loss_mask"].tolist() == [1] * len(labels) + [0] * (s - len(labels))
        counted += len(labels)
    if extra:  # every token of the stream but its first is a label once
        assert counted == (len(dataset) * s if drop else len(stream) - 1)


# -- documents of the corpus as boundaries ----------------------------------------------------------------------------


@settings(max_examples=100)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.integers(1, 14))
def test_document_boundaries_equal_a_count_token_by_token(lengths, s):
    """Empty documents, a cut by the end of the sample, padding: it belongs to the last document."""
    owner = [i for i, length in enumerate(lengths) for _ in range(length)][:s]
    owner += [owner[-1] if owner else 0] * (s - len(owner))
    starts, cu_seqlens, longest = document_boundaries(lengths, s)
    assert starts.tolist() == [owner.index(i) for i in owner]
    edges = [0, *[i for i in range(1, s) if owner[i] != owner[i - 1]], s]
    assert cu_seqlens.tolist() == edges + [s] * (s + 1 - len(edges)) and cu_seqlens.dtype == np.int32
    assert int(longest) == max(np.diff(edges)) and longest.dtype == np.int32


def inter_document(prefix, **options):
    return build(([prefix], None), inter_document_masking=True, **options)[0]


def test_inter_document_samples_know_their_documents_without_end_tokens(tmp_path):
    """Tokens say which document they are from: their hundreds."""
    prefix = write_corpus(tmp_path / "c", [[100 * d + i for i in range(1, 2 + d)] for d in range(1, 8)])
    plain = build(([prefix], None))[0]
    for i, sample in enumerate(inter_document(prefix)[j] for j in range(len(plain))):
        np.testing.assert_array_equal(sample["tokens"], plain[i]["tokens"])
        np.testing.assert_array_equal(sample["loss_mask"], plain[i]["loss_mask"])
        owners = sample["tokens"] // 100
        edges = [0, *(1 + np.flatnonzero(np.diff(owners))).tolist(), 8]
        assert sample["cu_seqlens"].tolist() == edges + [8] * (9 - len(edges))
        assert sample["position_ids"].tolist() == [k for a, b in zip(edges, edges[1:]) for k in range(b - a)]
        assert "attention_mask" not in sample


def test_inter_document_positions_restart_at_end_tokens_too_when_asked(tmp_path):
    prefix = write_corpus(tmp_path / "c", [[5, EOD, 6, 7, 8]] * 9)
    dataset = inter_document(prefix, reset_position_ids=True)
    k = int(np.flatnonzero(dataset.shuffle_index == 0)[0])
    assert dataset[k]["position_ids"].tolist() == [0, 1, 0, 1, 2, 0, 1, 0]


@pytest.mark.parametrize("mask", ["reset_attention_mask", "create_attention_mask"])
def test_inter_document_masking_takes_no_second_mask(tmp_path, mask):
    options = {"create_attention_mask": True, mask: True}
    with pytest.raises(ConfigError, match="inter_document_masking"):
        config(([str(tmp_path)], None), inter_document_masking=True, **options)


# -- counts known beforehand ------------------------------------------------------------------------------------------


def test_announced_counts_are_held_against_the_header(tmp_path):
    prefix = write_corpus(tmp_path / "c", numbered(9))
    right = build(([prefix], None), sequences_per_dataset={prefix: [9, 10]})[0]
    assert right[0]["tokens"].tolist() == build(([prefix], None))[0][0]["tokens"].tolist()
    with pytest.raises(DataError, match=r"9 sequences and 10 document marks, \[8, 9\] were announced"):
        build(([prefix], None), sequences_per_dataset={prefix: [8, 9]})
    with pytest.raises(DataError, match=f"no entry for {prefix}"):
        build(([prefix], None), sequences_per_dataset={"other": [9, 10]})


# -- mock data ------------------------------------------------------------------------------------------------------


def test_mock_data_counts_up_and_ends():
    mock = build(None, (10, 5, 5), cls=MockGPTDataset, sequence_length=2048)
    low = mock[0].dataset
    assert mock[0].config.split == "1,1,1" and all(len(part) >= 5 for part in mock)
    assert (
        low.sequence_lengths.tolist()[:3] == np.random.default_rng(0).integers(1, 4096, 100000, np.int32).tolist()[:3]
    )
    whole = low.get(3)
    assert len(whole) == low.sequence_lengths[3] and whole[-1] == EOD
    np.testing.assert_array_equal(whole[:-1], np.arange(1, len(whole)) % Words.vocab_size)
    np.testing.assert_array_equal(low.get(3, 5, 7), whole[5:12])
    np.testing.assert_array_equal(low.get(3, 5), whole[5:])


# -- caches ---------------------------------------------------------------------------------------------------------


def arrays(dataset: GPTDataset) -> list[list]:
    return [dataset.document_index.tolist(), dataset.sample_index.tolist(), dataset.shuffle_index.tolist()]


def cached(prefix, cache, **options):
    return build(([prefix], None), (30, None, None), path_to_cache=str(cache), **options)[0]


def test_cache_lies_beside_the_corpus_by_default(tmp_path):
    prefix = write_corpus(tmp_path / "c", numbered(9))
    dataset = build(([prefix], None), (30, None, None))[0]
    folder = tmp_path / "c" / "cache" / "GPTDataset_indices"
    assert f"{dataset.unique_description_hash}-GPTDataset-train-document_index.npy" in os.listdir(folder)
    assert not [name for name in os.listdir(folder) if name.endswith(".tmp")]


def test_megatrons_cache_is_used_as_it_is(tmp_path):
    """A cache without our options file: its files stay untouched when they are right."""
    prefix, cache = write_corpus(tmp_path / "c", numbered(9)), tmp_path / "cache"
    first = cached(prefix, cache)
    next(cache.glob("*-options.json")).unlink()
    before = {path.name: path.stat().st_mtime_ns for path in cache.iterdir()}
    second = cached(prefix, cache)
    assert not second.built_anew_on_cache_miss and arrays(second) == arrays(first)
    assert {name: (cache / name).stat().st_mtime_ns for name in before} == before
    assert next(cache.glob("*-options.json"))


@pytest.mark.parametrize("ours", [True, False], ids=["our-cache", "megatrons-cache"])
def test_cache_made_without_extra_token_is_not_used_with_it(tmp_path, ours):
    """Both have one name; the wrong one would train wrong labels and read past the end of a document."""
    prefix, cache = write_corpus(tmp_path / "c", numbered(9)), tmp_path / "cache"
    right = arrays(cached(prefix, tmp_path / "other"))
    without = cached(prefix, cache, add_extra_token_to_sequence=False)
    if not ours:
        next(cache.glob("*-options.json")).unlink()
    dataset = cached(prefix, cache)
    assert dataset.unique_description == without.unique_description
    assert dataset.built_anew_on_cache_miss and arrays(dataset) == right
    assert arrays(cached(prefix, cache)) == right


def test_cache_with_the_other_drop_option_is_not_used(tmp_path):
    prefix = write_corpus(tmp_path / "c", numbered(9))
    options = {"split": "0,1,0", "path_to_cache": str(tmp_path / "cache")}
    assert len(build(([prefix], None), **options)[1]) == 10
    assert len(build(([prefix], None), **options, drop_last_partial_validation_sequence=False)[1]) == 10
    prefix = write_corpus(tmp_path / "d", [list(range(1, 20))])
    assert len(build(([prefix], None), **options)[1]) == 2
    assert len(build(([prefix], None), **options, drop_last_partial_validation_sequence=False)[1]) == 3


@pytest.mark.parametrize("ours", [True, False], ids=["our-cache", "megatrons-cache"])
def test_C028_cache_of_a_replaced_corpus_is_not_used(tmp_path, ours):
    prefix, cache = write_corpus(tmp_path / "c", numbered(9)), tmp_path / "cache"
    cached(prefix, cache)
    if not ours:
        next(cache.glob("*-options.json")).unlink()
    write_corpus(tmp_path / "c", [list(range(100, 105)), list(range(200, 230)), [1]])
    dataset = cached(prefix, cache)
    assert dataset.built_anew_on_cache_miss
    tokens = {int(token) for i in range(len(dataset)) for token in dataset[i]["tokens"]}
    assert tokens <= {1, *range(100, 105), *range(200, 230)}


@pytest.mark.parametrize("torn", ["document_index.npy", "sample_index.npy", "shuffle_index.npy", "description.txt"])
@pytest.mark.parametrize("how", ["cut", "gone", "empty"])
def test_torn_cache_is_built_again(tmp_path, torn, how):
    prefix, cache = write_corpus(tmp_path / "c", numbered(9)), tmp_path / "cache"
    right = arrays(cached(prefix, cache))
    path = next(cache.glob(f"*-{torn}"))
    if how == "gone":
        path.unlink()
    else:
        os.truncate(path, 0 if how == "empty" else path.stat().st_size - 3)
    dataset = cached(prefix, cache)
    assert dataset.built_anew_on_cache_miss and arrays(dataset) == right
    assert not cached(prefix, cache).built_anew_on_cache_miss


def test_changed_bytes_inside_an_array_are_noticed(tmp_path):
    prefix, cache = write_corpus(tmp_path / "c", numbered(9)), tmp_path / "cache"
    right = arrays(cached(prefix, cache))
    path = next(cache.glob("*-sample_index.npy"))
    data = bytearray(path.read_bytes())
    data[-4] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns + 1))
    assert arrays(cached(prefix, cache)) == right


def test_failure_between_two_files_leaves_a_cache_that_does_not_load(tmp_path, monkeypatch):
    prefix, cache = write_corpus(tmp_path / "c", numbered(9)), tmp_path / "cache"
    right = arrays(cached(prefix, tmp_path / "other"))
    cached(prefix, cache, add_extra_token_to_sequence=False)
    write = np.save
    calls = []

    def fails(file, *args, **kwargs):
        calls.append(file)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        write(file, *args, **kwargs)

    monkeypatch.setattr(np, "save", fails)
    with pytest.raises(DataError, match="No space left") as error:
        cached(prefix, cache)
    assert "--data-cache-path" in error.value.fix
    monkeypatch.undo()
    assert not list(cache.glob("*.tmp"))
    dataset = cached(prefix, cache)
    assert dataset.built_anew_on_cache_miss and arrays(dataset) == right


def _build_in_a_process(prefix, cache, extra, results):
    dataset = cached(prefix, cache, add_extra_token_to_sequence=extra)
    results.put((extra, arrays(dataset)))


def test_two_processes_at_once_each_get_their_own_right_arrays(tmp_path):
    """Also when both options share the name of the cache."""
    prefix = write_corpus(tmp_path / "c", numbered(60))
    right = {x: arrays(cached(prefix, tmp_path / str(x), add_extra_token_to_sequence=x)) for x in (True, False)}
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [
        context.Process(target=_build_in_a_process, args=(prefix, tmp_path / "cache", x, results))
        for x in (True, True, False, True)
    ]
    for process in processes:
        process.start()
    for _ in processes:
        extra, got = results.get(timeout=60)
        assert got == right[extra]
    for process in processes:
        process.join()
        assert process.exitcode == 0


def test_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    prefix = write_corpus(tmp_path / "c", numbered(9))
    with pytest.raises(DataError, match="cannot write the index cache"):
        cached(prefix, tmp_path / "file" / "cache")


def test_options_file_names_what_the_description_does_not(tmp_path):
    cache = IndexCache(str(tmp_path), "stem", "text", {"x": 1})
    cache.load_or_build(("a",), lambda: (np.arange(3),))
    noted = json.loads((tmp_path / "stem-options.json").read_text())
    assert noted["options"] == {"x": 1} and list(noted["files"]) == ["a"]
    assert (tmp_path / "stem-description.txt").read_text() == "text"


def _build_and_stay(prefix, cache, started):
    """Writes the first array, then hangs: to be killed in the middle of the cache."""
    write = np.save
    calls = []

    def stops(file, *args, **kwargs):
        calls.append(file)
        if len(calls) == 2:
            file.write(b"half of an array")
            file.flush()
            started.set()
            time.sleep(600)
        write(file, *args, **kwargs)

    np.save = stops
    cached(prefix, cache)


def test_killed_while_it_writes_then_started_again(tmp_path):
    prefix, cache = write_corpus(tmp_path / "c", numbered(9)), tmp_path / "cache"
    right = arrays(cached(prefix, tmp_path / "other"))
    context = multiprocessing.get_context("fork")
    started = context.Event()
    process = context.Process(target=_build_and_stay, args=(prefix, cache, started))
    process.start()
    assert started.wait(60)
    process.kill()
    process.join()
    assert list(cache.glob("*.tmp"))
    dataset = cached(prefix, cache)
    assert dataset.built_anew_on_cache_miss and arrays(dataset) == right
    assert not cached(prefix, cache).built_anew_on_cache_miss


# -- caches opened quickly --------------------------------------------------------------------------------------------

TRUST, DEFER = {"fast_cache_load": True}, {"defer_npy_index_mmap": True}


@pytest.mark.parametrize("options", [TRUST, DEFER, {**TRUST, **DEFER}], ids=["trust", "defer", "both"])
def test_quickly_opened_cache_gives_the_same_samples(tmp_path, options):
    prefix, cache = write_corpus(tmp_path / "c", numbered(9)), tmp_path / "cache"
    plain = cached(prefix, cache)
    quick = cached(prefix, cache, **options)
    assert not quick.built_anew_on_cache_miss and len(quick) == len(plain)
    for i in range(len(plain)):
        np.testing.assert_array_equal(quick[i]["tokens"], plain[i]["tokens"])
    assert arrays(quick) == arrays(plain)


def test_deferred_files_are_opened_at_the_first_sample(tmp_path, monkeypatch):
    prefix, cache = write_corpus(tmp_path / "c", numbered(9)), tmp_path / "cache"
    cached(prefix, cache)
    opened = []
    load = np.load
    monkeypatch.setattr(np, "load", lambda path, *a, **k: opened.append(path) or load(path, *a, **k))
    dataset = cached(prefix, cache, **TRUST, **DEFER)
    assert len(dataset) >= 30 and not opened
    dataset[0]
    assert len(opened) == 3
    dataset[1]
    assert len(opened) == 3


def test_trusted_cache_that_is_not_there_says_what_to_do(tmp_path):
    prefix, cache = write_corpus(tmp_path / "c", numbered(9)), tmp_path / "cache"
    with pytest.raises(DataError, match="No such file") as error:
        cached(prefix, cache, **TRUST)
    assert "run once without" in error.value.fix
    with pytest.raises(DataError, match="No such file"):
        cached(prefix, cache, **TRUST, **DEFER)[0]


def test_trusted_cache_of_another_size_is_refused(tmp_path):
    """Trust leaves the comparison out, but an index of another length is never used."""
    prefix, cache = write_corpus(tmp_path / "c", numbered(9)), tmp_path / "cache"
    cached(prefix, cache)
    write_corpus(tmp_path / "c", numbered(7))
    for options in (TRUST, {**TRUST, **DEFER}):
        with pytest.raises(DataError, match="made from other data"):
            cached(prefix, cache, **options)[0]


@pytest.mark.parametrize("options", [{}, TRUST, DEFER], ids=["plain", "trust", "defer"])
def test_pickled_dataset_carries_no_arrays_and_reads_the_same(tmp_path, options):
    """What a reading process gets where processes are not forked: gigabytes of index must not go through a pipe."""
    prefix, cache = write_corpus(tmp_path / "c", numbered(3000)), tmp_path / "cache"
    cached(prefix, cache)
    dataset = cached(prefix, cache, **options)
    data = pickle.dumps(dataset)
    assert len(data) < dataset.indices.nbytes + 5000
    other = pickle.loads(data)
    for i in range(20):
        np.testing.assert_array_equal(other[i]["tokens"], dataset[i]["tokens"])


def test_cache_replaced_under_a_reader_is_refused(tmp_path):
    prefix, cache = write_corpus(tmp_path / "c", numbered(9)), tmp_path / "cache"
    data = pickle.dumps(cached(prefix, cache))
    cached(prefix, cache, add_extra_token_to_sequence=False)
    with pytest.raises(DataError, match="was replaced"):
        pickle.loads(data)[0]
