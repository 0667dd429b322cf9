"""Samples of `sequence_length` tokens for a language model, cut from the stream of a shuffled corpus.

`index_building` says which tokens make sample k; this file reads them and adds labels, loss mask, positions and
attention mask. The unit that is shuffled is the sequence of the `.idx`, called document here: for corpora that were
not split into sentences they are the same.

Two ways to keep attention inside a document:

    reset_attention_mask      boundaries are end-of-document tokens; the sample carries its mask         [1, s, s]
    inter_document_masking    boundaries are where the corpus' documents meet; it carries where they do  cu_seqlens
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_lite.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron_lite.datasets.index_building import (
    build_document_index,
    build_sample_index,
    build_shuffle_index,
    number_of_epochs,
    number_of_samples,
    separate_last_epoch,
)
from megatron_lite.datasets.index_cache import IndexArrays, IndexCache, fingerprint
from megatron_lite.datasets.indexed_dataset import IndexedDataset
from megatron_lite.datasets.megatron_dataset import MegatronDataset, object_storage_folder
from megatron_lite.datasets.utils import Split
from megatron_lite.errors import ConfigError, DataError
from megatron_lite.log import warn_rank_0

# Never in a corpus: with it as pad id nothing of the data is taken for padding.
_NO_PAD = -1


@dataclass(kw_only=True)
class GPTDatasetConfig(BlendedMegatronDatasetConfig):
    """Options of GPTDataset. The three about document boundaries have no default: say what is meant."""

    reset_position_ids: bool | None = None
    """Positions start again after each end-of-document token."""

    reset_attention_mask: bool | None = None
    """No attention across end-of-document tokens."""

    eod_mask_loss: bool | None = None
    """No loss where the input is an end-of-document token."""

    create_attention_mask: bool = True
    """Give every sample its `[1, s, s]` mask; False where the attention is causal by itself."""

    drop_last_partial_validation_sequence: bool = True
    """False: the valid split ends with a padded sample, so that no token is lost."""

    add_extra_token_to_sequence: bool = True
    """Read one token more than `sequence_length`, so that the last label is a real one."""

    inter_document_masking: bool = False
    """Samples say where their documents begin (`cu_seqlens`), and positions restart there."""

    sequences_per_dataset: dict[str, list[int]] | None = None
    """Prefix -> [sequences, document marks] of each corpus, known beforehand: the headers are held against them, and
    no index is searched for damage."""

    object_storage_cache_path: str | None = None
    """Folder for the `.idx` of corpora in object storage; None: below `path_to_cache`, or in memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokenizer is None:
            raise ConfigError("GPTDatasetConfig needs a tokenizer", fix="give tokenizer=")
        unset = [n for n in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss") if getattr(self, n) is None]
        if unset:
            raise ConfigError(f"GPTDatasetConfig: {', '.join(unset)} not given", fix="give True or False")
        if self.sequence_length < 1:
            raise ConfigError(f"--seq-length {self.sequence_length}", fix="give 1 or more")
        if self.reset_attention_mask and not self.create_attention_mask:
            raise ConfigError(
                "--reset-attention-mask with --no-create-attention-mask-in-dataloader",
                why="without the mask of each sample, attention would cross documents",
                fix="leave one of the two out",
            )
        if self.inter_document_masking and (self.reset_attention_mask or self.create_attention_mask):
            raise ConfigError(
                "inter_document_masking with "
                + ("reset_attention_mask" if self.reset_attention_mask else "create_attention_mask"),
                why="documents are told apart either by the corpus or by end-of-document tokens, and the mask is then "
                "made from cu_seqlens, not in the loader",
                fix="create_attention_mask=False, reset_attention_mask=False",
            )


class GPTDataset(MegatronDataset):
    """One split of one corpus as language-model samples. Item i is a dictionary of numpy arrays:

    - `tokens`, `labels`, `position_ids`: int64 `[s]`
    - `loss_mask`: float32 `[s]`, 0 where the label is padding (and as `eod_mask_loss` says)
    - `attention_mask`: bool `[1, s, s]`, True = hidden; only with `create_attention_mask`. Without resets all samples
      share one array: copy it before you change it.
    - `cu_seqlens`: int32 `[s + 1]`, 0, then where each document of the sample ends, then s up to the end; `max_seqlen`:
      int32, the longest of them. Only with `inter_document_masking`. Padding belongs to the last document.

    Item None is a filler for the last batch: sample 0 without loss.

    `len()` is usually more than `num_samples`: whole epochs are kept.
    """

    def __init__(
        self,
        indexed_dataset: Any,
        dataset_path: str | None,
        indexed_indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ):
        super().__init__(indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config)
        self.config: GPTDatasetConfig = config
        self._extra = int(config.add_extra_token_to_sequence)
        self._pad = _pad_id(config)
        self._eod = None
        if config.reset_position_ids or config.reset_attention_mask or config.eod_mask_loss:
            self._eod = config.tokenizer.eod
        self._plain_mask: np.ndarray | None = None
        self.tokens_per_epoch = self.num_tokens(indexed_dataset, indexed_indices)
        if self.tokens_per_epoch == 0 and num_samples:
            raise DataError(
                f"the {index_split.name} split of {dataset_path} has no tokens, {num_samples} samples were asked for",
                why=f"{len(indexed_indices)} of {self.numel_low_level_dataset(indexed_dataset)} sequences belong to it "
                f"(--split {config.split})",
                fix="give this split a larger share, or ask for no samples of it",
            )
        self.num_epochs = number_of_epochs(num_samples, self.tokens_per_epoch, config.sequence_length, self._extra)
        self._drop = config.drop_last_partial_validation_sequence or index_split is not Split.valid
        self._length = number_of_samples(
            self.num_epochs * self.tokens_per_epoch, config.sequence_length, self._extra, self._drop
        )
        self._arrays, self.built_anew_on_cache_miss = self._indices()

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: GPTDatasetConfig) -> IndexedDataset:
        assert dataset_path is not None
        counts = None
        if config.sequences_per_dataset is not None:
            counts = config.sequences_per_dataset.get(dataset_path)
            if counts is None:
                raise DataError(
                    f"--per-dataset-sequences-path has no entry for {dataset_path}",
                    why="it lists [sequences, document marks] of every prefix, spelt as in --data-path",
                    fix="add it, or leave the flag out",
                )
        idx_folder = config.object_storage_cache_path or object_storage_folder(config)
        return IndexedDataset(
            dataset_path, multimodal=False, mmap=config.mmap_bin_files, counts=counts, idx_folder=idx_folder
        )

    @staticmethod
    def num_tokens(low_level_dataset: Any, indices: np.ndarray) -> int:
        lengths = low_level_dataset.sequence_lengths
        if len(indices) and indices[-1] - indices[0] == len(indices) - 1:  # the usual range: no copy
            lengths = lengths[indices[0] : indices[-1] + 1]
        else:
            lengths = lengths[indices]
        return int(lengths.sum(dtype=np.int64))

    @property
    def document_index(self) -> np.ndarray:
        """int32 `[epochs * documents]`: the documents in the order of the stream."""
        return self._arrays[0]

    @property
    def sample_index(self) -> np.ndarray:
        """`[samples + 1, 2]`: where each sample of the stream begins, see `build_sample_index`."""
        return self._arrays[1]

    @property
    def shuffle_index(self) -> np.ndarray:
        """`[samples]`: item i is sample shuffle_index[i] of the stream."""
        return self._arrays[2]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, idx: int | None) -> dict[str, np.ndarray]:
        text, lengths = self._text(0 if idx is None else int(idx))
        if self._extra:
            tokens, labels = text[:-1].copy(), text[1:].copy()
        else:
            tokens, labels = text, np.append(text[1:], self._pad)
        # Masks and positions know the tokens as they are: padding that becomes 0 below is no end of document.
        loss_mask, position_ids, attention_mask = self._masks_and_positions(tokens)
        padding = labels == self._pad
        loss_mask[padding] = 0.0
        labels[padding] = 0
        tokens[tokens == self._pad] = 0
        if idx is None:
            loss_mask[:] = 0.0
        sample = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": position_ids}
        if attention_mask is not None:
            sample["attention_mask"] = attention_mask
        if self.config.inter_document_masking:
            starts, sample["cu_seqlens"], sample["max_seqlen"] = document_boundaries(lengths, len(tokens))
            # Both kinds of restart, where end-of-document tokens restart positions as well.
            np.minimum(position_ids, np.arange(len(tokens)) - starts, out=position_ids)
        return sample

    def origin(self, idx: int) -> str:
        """For people: which documents (sequences of the `.idx`) item `idx` is cut from."""
        k = int(self.shuffle_index[idx])
        (first, begin), (last, end) = self.sample_index[k].tolist(), self.sample_index[k + 1].tolist()
        last -= last > first and end + self._extra == 0
        documents = self.document_index[first : last + 1].tolist()
        shown = ", ".join(map(str, documents[:8])) + (f" and {len(documents) - 8} more" if len(documents) > 8 else "")
        corpus = self.dataset_path or "the mock data"
        return f"document{'s' * (len(documents) > 1)} {shown} of {corpus}, from token {begin} of the first on"

    def _text(self, idx: int) -> tuple[np.ndarray, list[int]]:
        """The tokens of item `idx`, int64 `[s + x]`, padded on the right where the corpus ends before; and how many of
        them each document gave, in order (0: it is empty, or all of it belongs to the sample before)."""
        k = int(self.shuffle_index[idx])
        first, begin = self.sample_index[k].tolist()
        last, end = self.sample_index[k + 1].tolist()
        end += self._extra
        text = np.full(self.config.sequence_length + self._extra, self._pad, np.int64)
        filled, lengths = 0, []
        for position in range(first, last + 1):
            start = begin if position == first else 0
            length = end - start if position == last else None
            part = self.dataset.get(self.document_index[position], start, length)
            text[filled : filled + len(part)] = part
            filled += len(part)
            lengths.append(len(part))
        return text, lengths

    def _masks_and_positions(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Loss mask, position ids (both the caller's own) and the attention mask or None. See `masks_and_positions`."""
        config = self.config
        if self._eod is not None:
            return masks_and_positions(
                tokens,
                self._eod,
                bool(config.reset_position_ids),
                bool(config.reset_attention_mask),
                bool(config.eod_mask_loss),
                config.create_attention_mask,
            )
        if config.create_attention_mask and self._plain_mask is None:
            self._plain_mask = _causal_mask(len(tokens))[None]
        return np.ones(len(tokens), np.float32), np.arange(len(tokens), dtype=np.int64), self._plain_mask

    def _indices(self) -> tuple[IndexArrays, bool]:
        config = self.config
        lengths = self.dataset.sequence_lengths

        def build() -> tuple[np.ndarray, ...]:
            random_state = np.random.RandomState(config.random_seed)
            before = separate_last_epoch(
                self.num_samples, self.num_epochs, self.tokens_per_epoch, config.sequence_length, self._extra
            )
            documents = build_document_index(self.indices, self.num_epochs, random_state, before is not None)
            samples = build_sample_index(
                lengths,
                documents,
                config.sequence_length,
                self.tokens_per_epoch,
                self.num_epochs,
                self._drop,
                config.add_extra_token_to_sequence,
            )
            total = len(samples) - 1
            assert total == self._length, (total, self._length)
            return documents, samples, build_shuffle_index(total if before is None else before, total, random_state)

        folder = self.cache_folder()
        trust = config.fast_cache_load and folder is not None
        cache = IndexCache(
            folder,
            f"{self.unique_description_hash}-{type(self).__name__}-{self.index_split.name}",
            self.unique_description,
            {
                "add_extra_token_to_sequence": config.add_extra_token_to_sequence,
                "drop_last_partial_sequence": self._drop,
                "sequence_lengths": "" if folder is None or trust else fingerprint(lengths),
            },
            trust=trust,
            defer=config.defer_npy_index_mmap,
        )
        return cache.load_or_build(
            ("document_index", "sample_index", "shuffle_index"),
            build,
            (self.num_epochs * len(self.indices), self._length + 1, self._length),
        )


def document_boundaries(lengths: Sequence[int], s: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where the documents of a sample of `s` inputs begin and end.

    Args:
        lengths: tokens that each document gave to the sample; the extra label token, which is no input, may be among
            the last document's. What is missing to `s` is padding of the last document.
    Returns: for each input where its document begins, int64 `[s]`; `cu_seqlens` int32 `[s + 1]`; `max_seqlen` int32.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    inner = np.unique(ends[(ends > 0) & (ends < s)])
    # A padded sample's last document ends at s, not where its tokens do.
    if int(ends[-1]) < s:
        inner = inner[inner < ends[-1]]
    cu_seqlens = np.full(s + 1, s, np.int32)
    cu_seqlens[0] = 0
    cu_seqlens[1 : len(inner) + 1] = inner
    starts = np.zeros(s, np.int64)
    starts[inner] = inner
    np.maximum.accumulate(starts, out=starts)
    edges = np.concatenate(([0], inner, [s]))
    return starts, cu_seqlens, np.array(np.diff(edges).max(), np.int32)


def masks_and_positions(
    tokens: np.ndarray,
    eod: int,
    reset_position_ids: bool,
    reset_attention_mask: bool,
    eod_mask_loss: bool,
    create_attention_mask: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Loss mask float32 `[s]`, positions int64 `[s]`, attention mask bool `[1, s, s]` (True = hidden) or None.

    An end-of-document token belongs to the document that it ends. Only these tokens are boundaries.
    """
    s = len(tokens)
    is_eod = tokens == eod
    loss_mask = np.ones(s, np.float32)
    if eod_mask_loss:
        loss_mask[is_eod] = 0.0
    position_ids = np.arange(s, dtype=np.int64)
    if reset_position_ids:
        starts = np.zeros(s, np.int64)
        starts[1:] = np.where(is_eod[:-1], position_ids[1:], 0)
        position_ids = position_ids - np.maximum.accumulate(starts)
    if not create_attention_mask:
        return loss_mask, position_ids, None
    mask = _causal_mask(s)
    if reset_attention_mask:
        segment = np.cumsum(is_eod) - is_eod  # end-of-document tokens strictly before
        mask |= segment[:, None] != segment[None, :]
    return loss_mask, position_ids, mask[None]


def _causal_mask(s: int) -> np.ndarray:
    """bool `[s, s]`, True where the key is later than the query."""
    return ~np.tri(s, dtype=bool)


def _pad_id(config: GPTDatasetConfig) -> int:
    """The token that is padding wherever it stands, `_NO_PAD` if there is none or it means something else as well."""
    tokenizer = config.tokenizer
    pad = _token(tokenizer, "pad")
    if pad is None or pad < 0:
        return _NO_PAD
    if config.allow_ambiguous_pad_tokens:
        return pad
    named = getattr(tokenizer, "special_tokens_dict", None)
    if named is not None:
        others = {name: value for name, value in named.items() if name not in ("pad", "pad_token")}
    else:
        others = {name: _token(tokenizer, name) for name in ("eos", "eod")}
    same = [str(name) for name, value in others.items() if value == pad]
    if same:
        warn_rank_0(
            f"the tokenizer's pad token {pad} is also its {', '.join(same)}: it is not taken for padding "
            "(--allow-ambiguous-pad-tokens to do so)"
        )
        return _NO_PAD
    return pad


def _token(tokenizer: Any, name: str) -> int | None:
    """A special token's id, None where the tokenizer has none (it may raise to say so)."""
    try:
        return getattr(tokenizer, name)
    except (AttributeError, NotImplementedError, DataError, ConfigError):
        return None


class MockGPTLowLevelDataset:
    """100,000 sequences of 1, 2, 3, ... and an end-of-document token, of lengths drawn once and for all."""

    seed = 0
    size = 100000
    max_sequence_length = 4096

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        generator = np.random.default_rng(self.seed)
        self.sequence_lengths = generator.integers(1, self.max_sequence_length, size=self.size, dtype=np.int32)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, idx: int) -> np.ndarray:
        return self.get(idx)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens of sequence `idx` from `offset` on, int64."""
        size = int(self.sequence_lengths[idx])
        end = size if length is None else offset + length
        tokens = np.arange(offset + 1, end + 1, dtype=np.int64) % self.tokenizer.vocab_size
        if end == size and end > offset:
            tokens[-1] = self.tokenizer.eod
        return tokens


class MockGPTDataset(GPTDataset):
    """GPTDataset over generated data, for tests and benchmarks. Cached only where a cache folder is given."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: GPTDatasetConfig) -> Any:
        return MockGPTLowLevelDataset(config.tokenizer)
