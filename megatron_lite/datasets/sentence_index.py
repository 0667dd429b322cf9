"""Which sentences make sample k of a masked language model. Pure numpy and integers.

    documents   |  s0 s1 s2 s3 | s4 | s5 s6 s7 s8 |         a document is a run of sentences, a sentence a sequence
    samples     |   0   |   1  | -- |      2      |         of the .idx; samples do not cross documents
    rows        (first sentence, end sentence, target length), then shuffled

Sentences are packed until the target length is reached; now and then a target is short, so that the model sees short
texts too. Rows equal Megatron-LM's for the same seed, to the element: two Mersenne Twisters are the only chance, the
32-bit one of numpy for the targets, and the 64-bit one (below) for the shuffle.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterator

import numpy as np

# A document of several sentences, one of them longer than this, is left out: it is a table or a list, not prose.
LONG_SENTENCE = 512
_DRAWS = 1 << 16  # random numbers that are drawn together
_DOCUMENTS = 1 << 16  # documents whose bounds are lists of Python at a time

_U64 = np.uint64


def build_mapping(
    docs: np.ndarray,
    sizes: np.ndarray,
    num_epochs: int,
    max_num_samples: int,
    max_seq_length: int,
    short_seq_prob: float,
    seed: int,
    min_num_sent: int,
) -> np.ndarray:
    """The samples of some documents: `[n, 3]` = (first sentence, end sentence, target length), shuffled.

    A sample ends where its length reaches the target, it has `min_num_sent` sentences and more than one is left: a
    last lone sentence is taken along, so a sample may be longer than its target. Whole epochs are kept: the walk stops
    between epochs, once there are `max_num_samples`.

    Args:
        docs: where each document begins in `sizes`, and where the last one ends, `[documents + 1]`.
        sizes: tokens of every sentence of the corpus.
        max_seq_length: the usual target.
        short_seq_prob: part of the samples with a target drawn from 2 to `max_seq_length`.
        seed: of the targets; the shuffle's is the next number.
    Returns: uint32, uint64 where the corpus has more sentences than that holds.
    """
    dtype = np.dtype(np.uint64 if len(sizes) > np.iinfo(np.uint32).max else np.uint32)
    rows = array("Q" if dtype == np.uint64 else "I")
    first = int(docs[0]) if len(docs) else 0
    # Where a sample of the usual length that begins at sentence i would end, if its document went on.
    cum = np.zeros((int(docs[-1]) if len(docs) else 0) - first + 1, np.int64)
    np.cumsum(sizes[first : first + len(cum) - 1], out=cum[1:], dtype=np.int64)
    usual = np.searchsorted(cum, cum[:-1] + max_seq_length, side="left")
    np.maximum(usual, np.arange(min_num_sent, min_num_sent + len(usual)), out=usual)
    bounds = _eligible(docs, sizes, min_num_sent) - first
    targets = _targets(max_seq_length, short_seq_prob, seed)
    ends, tokens = usual.data, cum.data
    for _ in range(num_epochs if len(bounds) else 0):
        if len(rows) >= 3 * max_num_samples:
            break
        for chunk in range(0, len(bounds), _DOCUMENTS):
            for start, document_end in bounds[chunk : chunk + _DOCUMENTS].tolist():
                target = next(targets)
                while start < document_end:
                    if target == max_seq_length:
                        end = ends[start]
                    else:
                        end = bisect_left(tokens, tokens[start] + target, start + 1, document_end + 1)
                        end = max(end, start + min_num_sent)
                    if end > document_end - 2:
                        end = document_end
                    rows.extend((first + start, first + end, target))
                    start, target = end, next(targets)
    return shuffled_rows(np.frombuffer(rows, dtype).reshape(-1, 3), seed + 1)


def _eligible(docs: np.ndarray, sizes: np.ndarray, min_num_sent: int) -> np.ndarray:
    """Begin and end of the documents that give samples, int64 `[n, 2]`."""
    begins, ends = np.asarray(docs[:-1], np.int64), np.asarray(docs[1:], np.int64)
    first = int(begins[0]) if len(begins) else 0
    long = np.zeros((int(ends[-1]) if len(ends) else 0) - first + 1, np.int64)
    np.cumsum(sizes[first : first + len(long) - 1] > LONG_SENTENCE, out=long[1:])
    with_long = long[ends - first] > long[begins - first]
    numbers = ends - begins
    return np.stack([begins, ends], axis=1)[(numbers >= max(1, min_num_sent)) & ~(with_long & (numbers > 1))]


def _targets(max_seq_length: int, short_seq_prob: float, seed: int) -> Iterator[int]:
    """Target lengths, without end: one for each document's first sample, and one more after each sample."""
    ratio = int(1 / short_seq_prob + 0.5) if short_seq_prob else 0
    if not ratio:
        while True:
            yield max_seq_length
    random = np.random.RandomState(seed)
    while True:
        draws = random.randint(0, 1 << 32, size=_DRAWS, dtype=np.uint32)  # the generator's own 32 bits
        yield from np.where(draws % ratio == 0, 2 + draws % max(1, max_seq_length - 1), max_seq_length).tolist()


def shuffled_rows(rows: np.ndarray, seed: int) -> np.ndarray:
    """The rows in random order, a copy: exchanges from the end, with a 64-bit Mersenne Twister of `seed`.

    Source: Fisher and Yates 1938; Durstenfeld 1964, algorithm 235.
    """
    order = np.arange(len(rows), dtype=np.uint32 if len(rows) <= np.iinfo(np.uint32).max else np.uint64)
    places, i = order.data, len(rows) - 1
    for block in mersenne_twister_64(seed):
        if i < 1:
            break
        block = block[:i]
        for j in (block % np.arange(i + 1, i + 1 - len(block), -1, dtype=_U64)).tolist():
            places[i], places[j] = places[j], places[i]
            i -= 1
    return rows[order]


def mersenne_twister_64(seed: int) -> Iterator[np.ndarray]:
    """The numbers of MT19937-64 in blocks of 312, uint64, without end.

    Source: Nishimura 2000, "Tables of 64-bit Mersenne Twisters".
    """
    n, half, mask = 312, 156, (1 << 64) - 1
    words = [seed & mask]
    for i in range(1, n):
        words.append((6364136223846793005 * (words[-1] ^ (words[-1] >> 62)) + i) & mask)
    state = np.array(words, _U64)
    upper, lower, matrix = _U64(0xFFFFFFFF80000000), _U64(0x7FFFFFFF), _U64(0xB5026F5AA96619E9)

    def twisted(words: np.ndarray, following: np.ndarray) -> np.ndarray:
        x = (words & upper) | (following & lower)
        return (x >> _U64(1)) ^ ((x & _U64(1)) * matrix)

    while True:
        # A word needs the one `half` further, which for the later half is one of the new words.
        state[:half] = state[half:] ^ twisted(state[:half], state[1 : half + 1])
        state[half:-1] = state[: half - 1] ^ twisted(state[half:-1], state[half + 1 :])
        state[-1:] = state[half - 1 : half] ^ twisted(state[-1:], state[:1])
        x = state ^ ((state >> _U64(29)) & _U64(0x5555555555555555))
        x ^= (x << _U64(17)) & _U64(0x71D67FFFEDA60000)
        x ^= (x << _U64(37)) & _U64(0xFFF7EEE000000000)
        yield x ^ (x >> _U64(43))
