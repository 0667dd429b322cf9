"""Fill-in-the-middle samples: nothing is lost, nothing depends on the order of reading."""

from collections import OrderedDict

import numpy as np
import pytest

from megatron_lite.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron_lite.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron_lite.errors import ConfigError
from tests.unit.datasets.corpora import build, write_corpus

SPECIAL = {"prefix": "<pre>", "middle": "<mid>", "suffix": "<suf>", "pad": "<fimpad>", "eod": "<eod>"}
IDS = {"<eod>": 0, "<pre>": 200, "<mid>": 201, "<suf>": 202, "<fimpad>": 203, "<file>": 204}
PRE, MID, SUF, PAD, SPLIT = 200, 201, 202, 203, 204


class Letters:
    """A token a character; ids 1 ... 199 are chr(id + 100)."""

    vocab_size = 300
    eod = eos = 0
    pad = -1
    unique_identifiers = OrderedDict([("class", "Letters")])
    vocab = {**IDS, **{chr(i + 100): i for i in range(1, 200)}}

    def __init__(self, front: str = ""):
        self.front = front

    def tokenize(self, text):
        return [ord(c) - 100 for c in self.front + text]

    def detokenize(self, ids):
        return "".join(chr(i + 100) for i in ids)


def documents(count=12, seed=0):
    """Documents of letters that end with <eod>, some of them nothing but it."""
    draw = np.random.RandomState(seed)
    return [[*draw.randint(1, 190, size=draw.randint(0, 12)).tolist(), 0] for _ in range(count)]


def fim_config(prefix, **options):
    defaults = dict(
        random_seed=1234,
        sequence_length=64,
        split="1,0,0",
        tokenizer=Letters(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        fim_extra_tokens=SPECIAL,
    )
    return GPTFIMDatasetConfig(blend=([prefix], None), **{**defaults, **options})


def fim(prefix, size=20, part=0, **options):
    sizes = [size if i == part else None for i in range(3)]
    config = fim_config(prefix, **options)
    return BlendedMegatronDatasetBuilder(GPTFIMDataset, sizes, lambda: True, config).build()[part]


def text(sample):
    return [*sample["tokens"].tolist(), int(sample["labels"][-1])]


def undo(segment):
    """The document before it was rearranged, either way."""
    if not segment or segment[0] != PRE:
        return segment
    body = segment[1:]
    if body and body[0] == SUF:  # SPM; a PSM with an empty prefix looks the same and reads the same way round
        suffix, rest = body[1 : body.index(MID)], body[body.index(MID) + 1 :]
        return [*rest, *suffix]
    prefix, rest = body[: body.index(SUF)], body[body.index(SUF) + 1 :]
    suffix, middle = rest[: rest.index(MID)], rest[rest.index(MID) + 1 :]
    return [*prefix, *middle, *suffix]


def segments(tokens, at):
    parts, current = [], []
    for token in tokens:
        if token == at:
            parts.append(current)
            current = []
        else:
            current.append(token)
    return [*parts, current]


@pytest.mark.parametrize("spm", [0.0, 0.5, 1.0])
def test_every_document_is_there_rearranged(tmp_path, spm):
    """One sample over a whole corpus, with room for the marks: each document comes back when the order is undone."""
    originals = documents()
    prefix = write_corpus(tmp_path / "c", originals)
    plain = build(([prefix], None), (1, 0, 0), sequence_length=40, tokenizer=Letters())[0]
    changed = fim(prefix, 1, sequence_length=40, fim_rate=1.0, fim_spm_rate=spm)
    marks = 0
    for i in range(len(plain)):
        before, after = segments(text(plain[i]), 0), segments(text(changed[i]), 0)
        # The last segment on either side is cut by the end of the sample.
        for was, got in list(zip(before, after))[:-1]:
            assert undo(got) == was
            assert (got == []) == (was == [])  # documents without text stay so, and so do their ends
            marks += len(got) - len(was)
    assert marks > 0 and marks % 3 == 0


def test_rate_nought_changes_nothing(tmp_path):
    prefix = write_corpus(tmp_path / "c", documents())
    plain = build(([prefix], None), (20, 0, 0), sequence_length=16, tokenizer=Letters())[0]
    same = fim(prefix, 20, sequence_length=16, fim_rate=0.0)
    for i in range(len(plain)):
        assert text(same[i]) == text(plain[i])


def test_sample_does_not_depend_on_what_was_read_before(tmp_path):
    prefix = write_corpus(tmp_path / "c", documents())
    forwards = fim(prefix)
    in_order = [text(forwards[i]) for i in range(len(forwards))]
    backwards = fim(prefix)
    assert [text(backwards[i]) for i in reversed(range(len(backwards)))][::-1] == in_order
    assert [text(forwards[i]) for i in range(len(forwards))] == in_order
    assert [text(s) for s in map(fim(prefix, random_seed=5).__getitem__, range(len(forwards)))] != in_order


def test_deferred_indices_do_not_break_it(tmp_path):
    prefix = write_corpus(tmp_path / "c", documents())
    plain = fim(prefix)
    deferred = fim(prefix, defer_npy_index_mmap=True)
    assert text(deferred[3]) == text(plain[3])


def test_shares_are_kept(tmp_path):
    prefix = write_corpus(tmp_path / "c", [[*range(1, 9), 0]] * 900)
    dataset = fim(prefix, 1, sequence_length=9, fim_rate=0.25, fim_spm_rate=1.0)
    rearranged = sum(PRE in text(dataset[i]) for i in range(len(dataset)))
    whole = len(dataset) * (1 - 0.75**2)  # a sample holds parts of two documents
    assert abs(rearranged - whole) < 5 * (whole * 0.5) ** 0.5


def test_samples_keep_their_length_filled_with_the_pad_token_or_cut(tmp_path):
    prefix = write_corpus(tmp_path / "c", documents())
    for sample in map(fim(prefix, sequence_length=16, fim_rate=1.0).__getitem__, range(10)):
        assert sample["tokens"].shape == (16,)

    class Shorter(Letters):
        def tokenize(self, text):
            return super().tokenize(text)[:1]  # as a tokenizer that joins what was apart

    prefix = write_corpus(tmp_path / "long", [[*range(1, 40), 0]] * 4)
    tokens = fim(prefix, sequence_length=39, fim_rate=1.0, tokenizer=Shorter())[0]["tokens"]
    assert tokens.shape == (39,) and (tokens == PAD).sum() > 20 and tokens[-1] == PAD


def test_partial_validation_sample_is_padded_without_loss(tmp_path):
    prefix = write_corpus(tmp_path / "c", [[5, 6, 7, 8, 9, 0]])
    options = {"split": "0,1,0", "drop_last_partial_validation_sequence": False, "sequence_length": 8}
    sample = fim(prefix, None, 1, fim_rate=1.0, **options)[0]
    assert sample["loss_mask"].tolist() == [1] * 5 + [0] * 3 and not sample["tokens"][6:].any()


def test_split_token_keeps_its_place_between_fragments(tmp_path):
    document = [5, 6, 7, SPLIT, 8, 9, SPLIT, SPLIT, 10, 11, 0]
    prefix = write_corpus(tmp_path / "c", [document] * 8)
    dataset = fim(prefix, sequence_length=32, fim_rate=1.0, fim_split_sample="<file>", fim_fragment_rate=1.0)
    found = 0
    for i in range(len(dataset)):
        for segment in segments(text(dataset[i]), 0)[1:-1]:
            assert [undo(fragment) for fragment in segments(segment, SPLIT)] == [[5, 6, 7], [8, 9], [], [10, 11]]
            found += segment.count(PRE)
    assert found >= 3


def test_text_with_the_exempt_beginning_stays(tmp_path):
    prefix = write_corpus(tmp_path / "c", [[5, 6, 7, 0]] * 30)
    dataset = fim(prefix, fim_rate=1.0, fim_no_prefix=chr(105) + chr(106), sequence_length=16)
    for segment in segments(text(dataset[0]), 0)[1:-1]:
        assert segment == [5, 6, 7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fim_rate": 1.5}, "--fim-rate 1.5"),
        ({"fim_split_sample": "<file>"}, "--fim-fragment-rate"),
        ({"inter_document_masking": True}, "--dataloader-inter-document-masking"),
        ({"fim_extra_tokens": {"prefix": "<pre>"}}, "lacks middle"),
        ({"fim_extra_tokens": {**SPECIAL, "middle": "<nothere>"}}, "--fim-middle-token <nothere>"),
        ({"tokenizer": Letters(front="x")}, "adds special tokens"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, options, message):
    prefix = write_corpus(tmp_path / "c", documents())
    with pytest.raises(ConfigError, match=message):
        fim(prefix, **options)
