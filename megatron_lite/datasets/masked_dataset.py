"""Samples with masked word pieces, for BERT and T5: what the two have in common.

    sentences of the corpus --sentence_index--> [first, end) and a target length of sample k
        --a subclass-->  tokens of the sample
        --create_masked_lm_predictions-->  some words replaced, and what stood there

Item idx draws from `RandomState(seed + idx)` alone, so that it depends neither on reading order nor on workers. The
draws come in Megatron-LM's order; samples are equal to its, to the element.

Words are masked in runs of 1 to `masking_max_ngram`. A word is a token and, with whole words, the pieces that go on
with it (their text begins with `##`). Source: Devlin et al. 2019; Joshi et al. 2020 for runs of words.
"""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from megatron_lite.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron_lite.datasets.index_cache import IndexArrays, IndexCache, fingerprint
from megatron_lite.datasets.indexed_dataset import IndexedDataset
from megatron_lite.datasets.megatron_dataset import MegatronDataset, object_storage_folder
from megatron_lite.datasets.sentence_index import build_mapping
from megatron_lite.datasets.utils import Split
from megatron_lite.errors import ConfigError, DataError

_UNLIMITED = (1 << 31) - 2  # epochs, and samples of one epoch: Megatron's numbers
_CONTINUES = "##"


@dataclass(kw_only=True)
class MaskedWordPieceDatasetConfig(BlendedMegatronDatasetConfig):
    """How words are masked. None of it has a default: say what is meant."""

    masking_probability: float | None = None
    """Part of the tokens of a sample that is masked."""

    short_sequence_probability: float | None = None
    """Part of the samples that are meant to be shorter than the sequence length."""

    masking_max_ngram: int | None = None
    """Most words that are masked in a run."""

    masking_do_full_word: bool | None = None
    """Mask all pieces of a word, or none."""

    masking_do_permutation: bool | None = None
    """After the masking, exchange as many tokens again with one another."""

    masking_use_longer_ngrams: bool | None = None
    """Prefer longer runs."""

    masking_use_geometric_distribution: bool | None = None
    """Lengths of runs are geometric with mean 5, cut at `masking_max_ngram` (SpanBERT), instead of p ~ 1 / n."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokenizer is None:
            raise ConfigError(f"{type(self).__name__} needs a tokenizer", fix="give tokenizer=")
        unset = [name for name in MASKING if getattr(self, name) is None]
        if unset:
            raise ConfigError(f"{type(self).__name__}: {', '.join(unset)} not given", fix="give a value")
        assert self.masking_probability is not None and self.short_sequence_probability is not None
        assert self.masking_max_ngram is not None
        if not 0 < self.masking_probability < 1:
            raise ConfigError(
                f"--mask-prob {self.masking_probability:g}",
                why="it is the part of the tokens that is masked",
                fix=".15",
            )
        if not 0 <= self.short_sequence_probability <= 1:
            raise ConfigError(
                f"--short-seq-prob {self.short_sequence_probability:g}", why="it is a part of the samples", fix=".1"
            )
        if self.masking_max_ngram < 1:
            raise ConfigError(f"masking_max_ngram={self.masking_max_ngram}", fix="give 1 or more")
        if self.masking_use_geometric_distribution and self.masking_do_permutation:
            raise ConfigError(
                "masking_do_permutation with masking_use_geometric_distribution",
                why="tokens are exchanged in runs whose length has p ~ 1 / n",
                fix="leave one of the two out",
            )


MASKING = (
    "masking_probability",
    "short_sequence_probability",
    "masking_max_ngram",
    "masking_do_full_word",
    "masking_do_permutation",
    "masking_use_longer_ngrams",
    "masking_use_geometric_distribution",
)


class Masked(NamedTuple):
    """A sample after its masking.

    tokens: the whole sample. positions, labels: what was masked, by position, and what stood there. boundaries: 1
    where a word or a special token begins, 0 at a piece that goes on. spans: the runs as (positions, labels), by their
    first position.
    """

    tokens: list[int]
    positions: list[int]
    labels: list[int]
    boundaries: list[int]
    spans: list[tuple[list[int], list[int]]]


class MaskedWordPieceDataset(MegatronDataset):
    """One split of one corpus of sentences. A subclass makes the samples: `__getitem__` and `_get_token_mask`.

    Args:
        indexed_indices: document numbers of this split.
        tokens_apart: tokens that the subclass adds to a sample of `sequence_length`: they are no sentence's.
        min_sentences: of a sample.
    """

    def __init__(
        self,
        indexed_dataset: Any,
        dataset_path: str | None,
        indexed_indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: MaskedWordPieceDatasetConfig,
        *,
        tokens_apart: int,
        min_sentences: int,
    ):
        super().__init__(indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config)
        self.config: MaskedWordPieceDatasetConfig = config
        self._max_length = config.sequence_length - tokens_apart
        self._min_sentences = min_sentences
        if self._max_length < 2:
            raise ConfigError(
                f"--seq-length {config.sequence_length}",
                why=f"{tokens_apart} of its tokens are special ones, and a sample has two others or more",
                fix=f"--seq-length {tokens_apart + 2} or more",
            )
        self._arrays, self.built_anew_on_cache_miss = self._index()
        if len(self) == 0 and num_samples:
            raise DataError(
                f"the {index_split.name} split of {dataset_path} has no sample, {num_samples} were asked for",
                why=f"{len(indexed_indices)} of {self.numel_low_level_dataset(indexed_dataset)} documents belong to it "
                f"(--split {config.split}); a document needs {min_sentences} sentence(s) or more",
                fix="prepare the corpus with --split-sentences, or give this split a larger share",
            )

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """Documents: they are not cut by `--split`."""
        return len(low_level_dataset.document_indices) - 1

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: MaskedWordPieceDatasetConfig) -> Any:
        if dataset_path is None:
            return MockSentences(config.tokenizer)
        return IndexedDataset(
            dataset_path, multimodal=False, mmap=config.mmap_bin_files, idx_folder=object_storage_folder(config)
        )

    @staticmethod
    def num_tokens(low_level_dataset: Any, indices: np.ndarray) -> int:
        if not len(indices):
            return 0
        docs = low_level_dataset.document_indices
        lengths = low_level_dataset.sequence_lengths[docs[indices[0]] : docs[indices[-1] + 1]]
        return int(lengths.sum(dtype=np.int64))

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return MegatronDataset._key_config_attributes() + list(MASKING)

    @property
    def sample_index(self) -> np.ndarray:
        """`[samples, 3]`: first sentence, end sentence, target length."""
        return self._arrays[0]

    def __len__(self) -> int:
        return len(self.sample_index)

    def _index(self) -> tuple[IndexArrays, bool]:
        config, lengths, docs = self.config, self.dataset.sequence_lengths, self.dataset.document_indices
        if len(self.indices):
            docs = docs[self.indices[0] : self.indices[-1] + 2]
        else:
            docs = docs[:0]

        def build() -> tuple[np.ndarray, ...]:
            assert config.short_sequence_probability is not None
            return (
                build_mapping(
                    docs,
                    lengths,
                    1 if self.num_samples is None else _UNLIMITED,
                    _UNLIMITED if self.num_samples is None else self.num_samples,
                    self._max_length,
                    config.short_sequence_probability,
                    config.random_seed,
                    self._min_sentences,
                ),
            )

        folder = self.cache_folder()
        trust = config.fast_cache_load and folder is not None
        cache = IndexCache(
            folder,
            f"{self.unique_description_hash}-{type(self).__name__}",
            self.unique_description,
            {}
            if folder is None or trust
            else {"sequence_lengths": fingerprint(lengths), "document_indices": fingerprint(docs)},
            trust=trust,
            defer=config.defer_npy_index_mmap,
        )
        return cache.load_or_build(("sample_index",), build)

    # -- a sample -----------------------------------------------------------------------------------------------

    def _random_state(self, idx: int) -> np.random.RandomState:
        return np.random.RandomState((self.config.random_seed + idx) % (1 << 32))

    def origin(self, idx: int) -> str:
        """For people: which sentences item `idx` is made of, and of which document."""
        first, end, _ = self.sample_index[idx].tolist()
        document = int(np.searchsorted(self.dataset.document_indices, first, side="right")) - 1
        return f"sentences {first} to {end - 1}, in document {document} of {self.dataset_path or 'the mock data'}"

    def _sentences(self, idx: int) -> tuple[list[np.ndarray], int]:
        """The sentences of sample `idx`, and its target length."""
        first, end, target = self.sample_index[idx].tolist()
        return self.dataset[first:end], target

    @abstractmethod
    def _get_token_mask(self, numpy_random_state: np.random.RandomState) -> int | None:
        """What to put in the place of one masked token; None: the token itself."""

    @cached_property
    def _continuing(self) -> frozenset[int]:
        return frozenset(id for id, text in self.config.tokenizer.inv_vocab.items() if text.startswith(_CONTINUES))

    def _candidates(self, tokens: Sequence[int]) -> tuple[list[list[int]], list[int]]:
        """The words that may be masked, as lists of positions; and `boundaries` of `Masked`."""
        tokenizer, whole_words = self.config.tokenizer, self.config.masking_do_full_word
        special = {special_token(tokenizer, name) for name in ("cls", "sep")}
        words: list[list[int]] = []
        boundaries = [1] * len(tokens)
        for position, token in enumerate(tokens):
            if token in special:
                continue
            if token in self._continuing:
                boundaries[position] = 0
                if whole_words and words:
                    words[-1].append(position)
                    continue
            words.append([position])
        return words, boundaries

    def _create_masked_lm_predictions(
        self, token_ids: Sequence[int], target_sequence_length: int, numpy_random_state: np.random.RandomState
    ) -> Masked:
        """Mask about `masking_probability` of the tokens, never more than that part of the target length.

        Runs begin at words in random order. One that is too long for what is left is cut; one that touches a masked
        token is passed over.
        """
        config, rng = self.config, numpy_random_state
        assert config.masking_probability is not None and config.masking_max_ngram is not None
        tokens = list(token_ids)
        words, boundaries = self._candidates(tokens)
        budget = min(
            config.masking_probability * target_sequence_length,
            max(1, round(len(tokens) * config.masking_probability)),
        )
        order = list(range(len(words)))
        rng.shuffle(order)
        masked: dict[int, int] = {}
        spans: list[tuple[list[int], list[int]]] = []
        for start in order:
            if len(masked) >= budget:
                break
            if config.masking_use_geometric_distribution:
                n = min(int(rng.geometric(0.2)), config.masking_max_ngram)
            else:
                n = 1 + int(np.searchsorted(self._lengths, rng.random_sample(), side="right"))
            run = _longest_run(words, start, n, budget - len(masked))
            if not run or any(position in masked for position in run):
                continue
            labels = [tokens[position] for position in run]
            for position, label in zip(run, labels):
                masked[position] = label
                replacement = self._get_token_mask(rng)
                if replacement is not None:
                    tokens[position] = replacement
            spans.append((run, labels))
        if config.masking_do_permutation:
            masked.update(self._permute(tokens, words, order, masked, budget, rng))
        spans.sort(key=lambda span: span[0][0])
        positions = sorted(masked)
        return Masked(tokens, positions, [masked[position] for position in positions], boundaries, spans)

    @cached_property
    def _lengths(self) -> np.ndarray:
        """Of the runs: probability of 1, of 2 or less, ... p ~ 1 / n, or the other way round."""
        assert self.config.masking_max_ngram is not None
        return _cumulative(self.config.masking_max_ngram, bool(self.config.masking_use_longer_ngrams))

    def _permute(
        self,
        tokens: list[int],
        words: list[list[int]],
        order: list[int],
        masked: dict[int, int],
        budget: float,
        rng: np.random.RandomState,
    ) -> dict[int, int]:
        """Exchange tokens that are not masked with one another, in place. Returns: what stood there, by position.

        Megatron-LM draws the lengths of these runs from numpy's global generator. Here a generator of its own begins
        anew with every sample, so that a sample stays the same whatever was read before it.
        """
        assert self.config.masking_max_ngram is not None
        rng.shuffle(order)
        others = np.random.RandomState(0)
        lengths = _cumulative(self.config.masking_max_ngram, longer=False)
        chosen: set[int] = set()
        for start in order:
            if len(chosen) >= budget:
                break
            n = 1 + int(np.searchsorted(lengths, others.random_sample(), side="right"))
            run = _longest_run(words, start, n, budget - len(chosen))
            if not any(position in masked or position in chosen for position in run):
                chosen.update(run)
        places = sorted(chosen)
        partners = list(places)
        rng.shuffle(partners)
        before = {place: tokens[place] for place in places}
        for place, partner in zip(places, partners):
            tokens[place] = before[partner]
        return before


def special_token(tokenizer: Any, *names: str) -> int | None:
    """The first of these special tokens that the tokenizer has; None: it has none of them."""
    for name in names:
        with suppress(NotImplementedError, AttributeError):
            return int(getattr(tokenizer, name))
    return None


def _cumulative(max_ngram: int, longer: bool) -> np.ndarray:
    """As `RandomState.choice` makes it of p ~ 1 / n, so that the same draw gives the same length."""
    p = 1.0 / np.arange(1, max_ngram + 1)
    p /= p.sum(keepdims=True)
    cumulative = (p[::-1] if longer else p).cumsum()
    return cumulative / cumulative[-1]


def _longest_run(words: list[list[int]], start: int, n: int, room: float) -> list[int]:
    """The positions of `n` words from `start` on (fewer at the end of the sample), of fewer where they do not fit into
    `room`; none where not even one does."""
    for length in range(n, 0, -1):
        run = [position for word in words[start : start + length] for position in word]
        if len(run) <= room:
            return run
    return []


class MockSentences:
    """Made-up documents of 1 to 8 sentences of 4 to 40 tokens, as an `IndexedDataset` gives them.

    A sentence counts upwards from a random token: there is something to learn. Special tokens do not occur.
    """

    documents, seed, path_prefix = 10000, 0, None

    def __init__(self, tokenizer: Any):
        generator = np.random.default_rng(self.seed)
        sentences = generator.integers(1, 9, size=self.documents)
        self.document_indices = np.concatenate([[0], np.cumsum(sentences)])
        self.sequence_lengths = generator.integers(4, 41, size=int(sentences.sum()), dtype=np.int32)
        special = set(tokenizer.special_tokens_dict.values()) | set(tokenizer.additional_special_tokens_ids)
        self._ids = np.array(sorted(set(tokenizer.inv_vocab) - special), np.int64)
        if not len(self._ids):
            raise DataError("the vocabulary has special tokens only", fix="give another vocabulary")
        self._first = generator.integers(0, len(self._ids), size=len(self))

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, idx: Any) -> Any:
        if isinstance(idx, slice):
            return [self[i] for i in range(*idx.indices(len(self)))]
        return self._ids[(self._first[idx] + np.arange(self.sequence_lengths[idx])) % len(self._ids)]
