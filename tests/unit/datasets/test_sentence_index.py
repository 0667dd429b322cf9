"""Which sentences make a sample, against a walk sentence by sentence."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.datasets.sentence_index import build_mapping, mersenne_twister_64, shuffled_rows

WORKED_DOCS, WORKED_SIZES = np.array([0, 4, 5, 9]), np.array([10, 12, 8, 9, 30, 5, 5, 20, 6], np.int32)


def walk(docs, sizes, epochs, wanted, longest, short, seed, least):
    """The plain meaning of the rows, before their shuffle."""
    random = np.random.RandomState(seed)
    ratio = round(1 / short) if short else 0

    def target():
        if not ratio:
            return longest
        r = int(random.randint(0, 1 << 32, dtype=np.uint32))
        return 2 + r % (longest - 1) if r % ratio == 0 else longest

    rows = []
    for _ in range(epochs):
        if len(rows) >= wanted:
            break
        for begin, end in zip(docs[:-1], docs[1:]):
            if end - begin < least or (end - begin > 1 and max(sizes[begin:end]) > 512):
                continue
            goal, first, length = target(), begin, 0
            for sentence in range(begin, end):
                length += sizes[sentence]
                left = end - sentence - 1
                if (length >= goal and left > 1 and sentence + 1 - first >= least) or left == 0:
                    rows.append((first, sentence + 1, goal))
                    goal, first, length = target(), sentence + 1, 0
    return rows


@settings(max_examples=60)
@given(
    lengths=st.lists(st.lists(st.sampled_from([0, 1, 3, 7, 12, 40, 513]), max_size=9), min_size=1, max_size=9),
    longest=st.integers(2, 60),
    short=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 2**31),
    least=st.integers(1, 2),
    wanted=st.integers(0, 30),
)
def test_the_rows_are_those_of_a_walk_and_an_epoch_holds_every_sentence_at_most_once(
    lengths, longest, short, seed, least, wanted
):
    sizes = np.array([size for document in lengths for size in document], np.int32)
    docs = np.cumsum([0] + [len(document) for document in lengths])
    expected = walk(docs, sizes, 3, wanted, longest, short, seed, least)
    rows = build_mapping(docs, sizes, 3, wanted, longest, short, seed, least)
    assert sorted(map(tuple, rows.tolist())) == sorted(expected)
    one = build_mapping(docs, sizes, 1, 1, longest, short, seed, least)
    used = [sentence for first, end, _ in one.tolist() for sentence in range(first, end)]
    assert len(used) == len(set(used))
    document_of = np.repeat(np.arange(len(lengths)), [len(document) for document in lengths])
    assert all(document_of[first] == document_of[end - 1] and end - first >= least for first, end, _ in one.tolist())


def test_a_part_of_the_documents_keeps_the_corpus_own_sentence_numbers():
    """Splits other than train: `docs` begins somewhere inside."""
    part = build_mapping(WORKED_DOCS[1:], WORKED_SIZES, 1, 100, 29, 0.0, 1, 2)
    assert part.tolist() == [[5, 9, 29]]


def test_the_worked_rows():
    """Documents of 4, 1 and 4 sentences: without short samples, with half of them, over epochs."""

    def rows(epochs, wanted, short):
        return build_mapping(WORKED_DOCS, WORKED_SIZES, epochs, wanted, 29, short, 1234, 2).tolist()

    assert rows(1, 100, 0.0) == rows(1, 100, 0.1) == [[0, 4, 29], [5, 9, 29]]
    assert rows(1, 100, 0.5) == [[0, 4, 29], [5, 9, 16]]
    a, b = [0, 4, 29], [5, 9, 29]
    assert rows(1 << 30, 6, 0.1) == [b, b, a, a, a, b]


def test_the_64_bit_mersenne_twister_gives_the_published_numbers():
    """std::mt19937_64's 10000th number of the default seed is part of the C++ standard."""
    assert next(mersenne_twister_64(1235))[:2].tolist() == [12475983374653888083, 573922149886606219]
    numbers = mersenne_twister_64(5489)
    blocks = [next(numbers) for _ in range(-(-10000 // 312))]
    assert int(np.concatenate(blocks)[9999]) == 9981545732273789042


def test_a_shuffle_keeps_every_row():
    for n in (0, 1, 2, 313, 1000):
        rows = np.arange(3 * n, dtype=np.uint32).reshape(-1, 3)
        shuffled = shuffled_rows(rows, 7)
        assert sorted(shuffled[:, 0].tolist()) == rows[:, 0].tolist()
        assert n < 300 or (shuffled != rows).any()
