"""Samples for BERT: two runs of sentences of one document, in their order or exchanged, with masked word pieces.

[CLS] A A A [SEP] B B B B [SEP] [PAD] [PAD]     text
  0   0 0 0   0   1 1 1 1   1     0     0       types
  1   1 1 1   1   1 1 1 1   1     0     0       padding_mask
 -1  -1 a -1 -1  -1 b c -1 -1    -1    -1       labels: what stood where something is masked
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_lite.datasets.masked_dataset import MaskedWordPieceDataset, MaskedWordPieceDatasetConfig, special_token
from megatron_lite.datasets.utils import Split
from megatron_lite.errors import ConfigError


@dataclass(kw_only=True)
class BERTMaskedWordPieceDatasetConfig(MaskedWordPieceDatasetConfig):
    """Options of BERTMaskedWordPieceDataset."""

    classification_head: bool | None = None
    """Samples have two segments, and the model tells whether they were exchanged."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classification_head is None:
            raise ConfigError(f"{type(self).__name__}: classification_head not given", fix="give True or False")
        missing = [name for name in ("cls", "sep", "mask", "pad") if special_token(self.tokenizer, name) is None]
        if missing:
            raise ConfigError(
                f"{type(self.tokenizer).__name__} has no token for {', '.join(missing)}",
                why="samples of BERT begin with cls, their segments end with sep, mask is for words, pad for the rest",
                fix="--tokenizer-type BertWordPieceLowerCase --vocab-file FILE (of `megatron-lite train-tokenizer`)",
            )


class BERTMaskedWordPieceDataset(MaskedWordPieceDataset):
    """One split of one corpus as samples for BERT. Item i is a dictionary of int64 arrays:

    - `text`, `types`, `labels`, `loss_mask`, `padding_mask`: `[s]`, see the top of this file; loss_mask is 1 where
      something is masked
    - `is_random`: 1 where the segments were exchanged; `truncated`: 1 where tokens were dropped

    Item None is a filler for the last batch: sample 0 without loss.

    Source: Devlin et al. 2019; Lan et al. 2020 (ALBERT) for the order of sentences.
    """

    def __init__(
        self,
        indexed_dataset: Any,
        dataset_path: str | None,
        indexed_indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: BERTMaskedWordPieceDatasetConfig,
    ):
        super().__init__(
            indexed_dataset,
            dataset_path,
            indexed_indices,
            num_samples,
            index_split,
            config,
            tokens_apart=3,  # [CLS], and a [SEP] behind each segment
            min_sentences=2 if config.classification_head else 1,
        )
        self.config: BERTMaskedWordPieceDatasetConfig = config
        self._sorted_ids = sorted(config.tokenizer.inv_vocab)

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return MaskedWordPieceDataset._key_config_attributes() + ["classification_head"]

    def __getitem__(self, idx: int | None) -> dict[str, np.ndarray]:
        filler, idx = idx is None, int(idx or 0)
        tokenizer, rng = self.config.tokenizer, self._random_state(idx)
        sentences, target = self._sentences(idx)
        a, b, is_random = self._segments(sentences, rng)
        truncated = _truncate(a, b, target, rng)
        tokens = [tokenizer.cls, *a, tokenizer.sep, *b, *([tokenizer.sep] if b else [])]
        masked = self._create_masked_lm_predictions(tokens, target, rng)

        s = self.config.sequence_length
        text, types, padding_mask, loss_mask = (np.zeros(s, np.int64) for _ in range(4))
        labels = np.full(s, -1, np.int64)
        text[: len(tokens)] = masked.tokens
        text[len(tokens) :] = tokenizer.pad
        types[len(a) + 2 : len(tokens)] = 1
        padding_mask[: len(tokens)] = 1
        if not filler:
            labels[masked.positions] = masked.labels
            loss_mask[masked.positions] = 1
        return {
            "text": text,
            "types": types,
            "labels": labels,
            "is_random": np.array(-1 if filler else is_random, np.int64),
            "padding_mask": padding_mask,
            "loss_mask": loss_mask,
            "truncated": np.array(truncated, np.int64),
        }

    def _segments(self, sentences: list[np.ndarray], rng: np.random.RandomState) -> tuple[list[int], list[int], bool]:
        """The tokens of both segments, and whether they were exchanged; without the head all in the first."""
        if not self.config.classification_head:
            return _joined(sentences), [], False
        pivot = int(rng.randint(1, len(sentences))) if len(sentences) >= 3 else 1
        a, b = _joined(sentences[:pivot]), _joined(sentences[pivot:])
        return (b, a, True) if rng.random_sample() < 0.5 else (a, b, False)

    def _get_token_mask(self, numpy_random_state: np.random.RandomState) -> int | None:
        """Of ten masked tokens eight become [MASK], one any token of the vocabulary, and one stays."""
        if numpy_random_state.random_sample() < 0.8:
            return self.config.tokenizer.mask
        if numpy_random_state.random_sample() >= 0.5:
            return self._sorted_ids[numpy_random_state.randint(0, len(self._sorted_ids))]
        return None


def _joined(sentences: list[np.ndarray]) -> list[int]:
    return [token for sentence in sentences for token in sentence.tolist()]


def _truncate(a: list[int], b: list[int], target: int, rng: np.random.RandomState) -> bool:
    """Drop tokens at either end of the longer segment (of `b` on a tie), in place, down to `target` in all."""
    truncated = len(a) + len(b) > target
    while len(a) + len(b) > target:
        longer = a if len(a) > len(b) else b
        del longer[0 if rng.random_sample() < 0.5 else -1]
    return truncated
