"""Which tokens make sample k, and which dataset gives item i of a blend. Pure numpy, integers throughout.

    documents of the split     d0 d1 d2            repeated for E epochs, shuffled:  document_index
    their tokens in that order |--d2--|-d0-|---d1---|--d0-|...   one flat stream
    samples of S tokens        |s0 |s1 |s2 |s3 |s4 |s5 ...       row k of sample_index = where s_k starts
    order of reading           shuffle_index: item i is sample shuffle_index[i]

With the extra token (x = 1) the last label of a sample is the first input of the next one. The results equal
Megatron-LM's for the same seed, to the element; `numpy.random.RandomState` (MT19937) is the only source of chance.
"""

import math
from collections.abc import Sequence

import numpy as np

# Entries of document_index that are looked at together: bounds the extra memory of `build_sample_index` (int64 twice).
_CHUNK = 1 << 18
# States that `_greedy` advances side by side, times the number of datasets.
_LANE_CELLS = 1 << 16


# -- how many ---------------------------------------------------------------------------------------------------


def number_of_epochs(num_samples: int | None, tokens_per_epoch: int, sequence_length: int, extra: int) -> int:
    """Smallest E >= 1 whose tokens give `num_samples` samples; 1 for None. `tokens_per_epoch` is above 0 unless 0 or
    None samples are asked for."""
    if not num_samples:
        return 1
    assert tokens_per_epoch > 0, tokens_per_epoch
    return max(1, -(-(num_samples * sequence_length + extra) // tokens_per_epoch))


def number_of_samples(tokens: int, sequence_length: int, extra: int, drop_last_partial_sequence: bool = True) -> int:
    """Samples in a stream of `tokens` tokens; the partial last one counts when it is not dropped."""
    usable = max(0, tokens - extra)
    return usable // sequence_length if drop_last_partial_sequence else -(-usable // sequence_length)


def separate_last_epoch(
    num_samples: int | None, num_epochs: int, tokens_per_epoch: int, sequence_length: int, extra: int
) -> int | None:
    """Samples that are complete without the last epoch, if that epoch is to be shuffled apart; None if not.

    It is, when less than 80 % of its samples are wanted: mixed in, it would be drawn from as often as the full ones.
    """
    if num_epochs == 1 or num_samples is None:
        return None
    before = ((num_epochs - 1) * tokens_per_epoch - extra) // sequence_length
    wanted = num_samples - before
    per_epoch = (tokens_per_epoch - extra) // sequence_length
    assert 0 <= wanted <= per_epoch + 1, (num_samples, before, per_epoch)
    return before if wanted < int(0.80 * per_epoch) else None


# -- the three indices of one corpus ----------------------------------------------------------------------------


def build_document_index(
    documents: np.ndarray, num_epochs: int, random_state: np.random.RandomState, last_epoch_apart: bool
) -> np.ndarray:
    """`documents` repeated `num_epochs` times in random order, `[epochs * n]`, of the same type.

    Epochs are mixed with one another, but for the last one when it is `last_epoch_apart`.
    """
    index = np.tile(documents, num_epochs)
    mixed = len(documents) * (num_epochs - 1 if last_epoch_apart and num_epochs > 1 else num_epochs)
    random_state.shuffle(index[:mixed])  # views, shuffled in place: the index exists once
    if mixed < len(index):
        random_state.shuffle(index[mixed:])
    return index


def build_sample_index(
    sizes: np.ndarray,
    document_index: np.ndarray,
    sequence_length: int,
    tokens_per_epoch: int,
    num_epochs: int,
    drop_last_partial_sequence: bool = True,
    add_extra_token_to_sequence: bool = True,
) -> np.ndarray:
    """Where each sample starts: `[samples + 1, 2]` = (position in `document_index`, token offset in that document).

    Sample k ends where sample k + 1 starts, in the extra token's case one token later. int32, or int64 where needed.

    The flat stream makes it a search: sample k starts at token k * S, which lies in the first document whose end is
    at k * S + x or later. (With x = 1 that is the document which holds token k * S; with x = 0 a sample that begins
    at a boundary starts at the end of the document before, as Megatron has it.) Empty documents are never hit.
    """
    extra = int(add_extra_token_to_sequence)
    tokens = num_epochs * tokens_per_epoch
    samples = number_of_samples(tokens, sequence_length, extra, drop_last_partial_sequence)
    longest = int(sizes.max()) if len(sizes) else 0
    dtype = np.int32 if max(len(document_index), longest) <= np.iinfo(np.int32).max else np.int64
    index = np.zeros((samples + 1, 2), dtype)
    row, stream = 1, 0
    for start in range(0, len(document_index), _CHUNK):
        if row > samples:
            break
        ends = np.cumsum(sizes[document_index[start : start + _CHUNK]], dtype=np.int64)
        ends += stream
        # Rows row ... last - 1 have their boundary in this chunk.
        last = min(samples, max(0, int(ends[-1]) - extra) // sequence_length) + 1
        if start + _CHUNK >= len(document_index):
            last = samples + 1  # the end of a partial sample lies beyond the stream
        for first in range(row, last, _CHUNK):
            boundaries = np.arange(first, min(last, first + _CHUNK), dtype=np.int64) * sequence_length + extra
            np.minimum(boundaries, ends[-1], out=boundaries)
            positions = np.searchsorted(ends, boundaries, side="left")
            begins = np.where(positions > 0, ends[positions - 1], stream)
            index[first : first + len(boundaries), 0] = positions + start
            index[first : first + len(boundaries), 1] = boundaries - extra - begins
        row, stream = max(row, last), int(ends[-1])
    return index


def build_shuffle_index(num_samples: int, total_size: int, random_state: np.random.RandomState) -> np.ndarray:
    """A random order of samples 0 ... num_samples - 1, then one of num_samples ... total_size - 1; uint32 or int64."""
    dtype = np.uint32 if total_size < np.iinfo(np.uint32).max - 1 else np.int64
    index = np.arange(total_size, dtype=dtype)
    random_state.shuffle(index[:num_samples])
    if num_samples != total_size:
        random_state.shuffle(index[num_samples:])
    return index


# -- blends -----------------------------------------------------------------------------------------------------


def build_blending_indices(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """For each of `size` items: which dataset (int16 `[size]`), and which of its samples (int64 `[size]`).

    Greedy: item i goes to the dataset that lags most behind its share, the largest w_j * max(i, 1) - c_j after c_j
    items (float64; the lowest j on a tie). `weights` add up to 1.
    """
    return _greedy(np.asarray(weights, np.float64), size, None)


def build_exhaustive_blending_indices(sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """As `build_blending_indices` with shares sizes / sum(sizes), every sample of every dataset exactly once."""
    limits = np.asarray(sizes, np.int64)
    total = int(limits.sum())
    return _greedy(limits / total, total, limits)


def _greedy(weights: np.ndarray, size: int, limits: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """The greedy rule, item by item, but for many stretches of the blend side by side.

    The rule is a recurrence on the counts c. The blend is cut into `lanes` stretches that advance together, one numpy
    step for one item of each. A stretch's counts at its start are guessed (w * i, rounded), then compared with the
    counts at the end of the stretch before: where they differ, those stretches run again from the right counts, until
    all fit. So every entry is the recurrence's own. The rule forgets its start quickly, hence two rounds usually do.
    """
    datasets = len(weights)
    lanes = max(1, min(_LANE_CELLS // datasets, math.isqrt(size)))
    length = -(-size // lanes) if size else 0
    choice = np.zeros((lanes, length), np.int16)
    sample = np.zeros((lanes, length), np.int64)
    starts = np.stack([_guess(weights, lane * length) for lane in range(lanes)])
    if limits is not None:
        np.minimum(starts, limits, out=starts)
    ends = np.zeros_like(starts)
    todo: np.ndarray = np.arange(lanes)
    while len(todo):
        counts = starts[todo]
        rows = np.arange(len(todo))
        for step in range(length):
            t = np.maximum(todo * length + step, 1).astype(np.float64)
            lag = weights * t[:, None] - counts
            if limits is not None:
                lag[counts >= limits] = -np.inf
            best = lag.argmax(axis=1)
            choice[todo, step] = best
            sample[todo, step] = counts[rows, best]
            counts[rows, best] += 1
        ends[todo] = counts
        todo = 1 + np.flatnonzero((starts[1:] != ends[:-1]).any(axis=1))
        starts[todo] = ends[todo - 1]
    return choice.reshape(-1)[:size], sample.reshape(-1)[:size]


def _guess(weights: np.ndarray, item: int) -> np.ndarray:
    """Counts after `item` items, about: the shares rounded so that they add up."""
    shares = weights * item
    counts = np.floor(shares).astype(np.int64)
    missing = item - int(counts.sum())
    counts[np.argsort(counts - shares, kind="stable")[: max(0, missing)]] += 1
    return counts
