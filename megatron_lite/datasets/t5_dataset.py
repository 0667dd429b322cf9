"""Samples for T5: a text whose runs of words are replaced by sentinels, and what stood there.

the text     the cat sat on the mat and the dog ran
text_enc     the <0> on the <1> the dog ran [PAD] ...           each run became one sentinel
text_dec     [BOS] <0> cat sat <1> mat and [PAD] ...
labels       <0> cat sat <1> mat and [EOS] -1 ...               text_dec, one token ahead
loss_mask    1   1   1   1   1   1   1      0 ...

Walking over text_enc and putting the i-th run of the labels in the place of sentinel i gives the text again.

Source: Raffel et al. 2020, section 3.1.4; runs are whole words with lengths as SpanBERT's (Joshi et al. 2020).
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_lite.datasets.masked_dataset import (
    MaskedWordPieceDataset,
    MaskedWordPieceDatasetConfig,
    special_token,
)
from megatron_lite.datasets.utils import Split
from megatron_lite.errors import ConfigError
from megatron_lite.log import once

Span = tuple[list[int], list[int]]  # positions, tokens


@dataclass(kw_only=True)
class T5MaskedWordPieceDatasetConfig(MaskedWordPieceDatasetConfig):
    """Options of T5MaskedWordPieceDataset. `sequence_length` is the encoder's."""

    sequence_length_encoder: int | None = field(init=False, default=None)
    """The same as `sequence_length`."""

    sequence_length_decoder: int | None = None
    """Tokens of `text_dec`: sentinels and what they stand for, and the token that begins."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sequence_length_encoder = self.sequence_length
        if self.sequence_length_decoder is None:
            raise ConfigError(f"{type(self).__name__}: sequence_length_decoder not given", fix="--decoder-seq-length N")
        if self.sequence_length_decoder < 3:
            raise ConfigError(
                f"--decoder-seq-length {self.sequence_length_decoder}",
                why="the shortest target is a beginning, a sentinel and one token",
                fix="a quarter of --encoder-seq-length or more",
            )
        if not self.tokenizer.additional_special_tokens_ids:
            raise ConfigError(
                "T5 without sentinel tokens (--vocab-extra-ids 0)",
                why="each run of words that is left out of a text is named by one",
                fix="--vocab-extra-ids 100",
            )


class T5MaskedWordPieceDataset(MaskedWordPieceDataset):
    """One split of one corpus as samples for T5. Item i is a dictionary of int64 arrays:

    - `text_enc`, `enc_mask`: `[s_e]`; `text_dec`, `labels`, `loss_mask`, `dec_mask`: `[s_d]`, see the top of this file;
      enc_mask and dec_mask are 1 at tokens, 0 at padding
    - `truncated`: 1 where tokens of the sentences were dropped

    Item None is a filler for the last batch: sample 0 without loss.

    A sample whose runs do not fit into the decoder's length, or outnumber the sentinels, keeps some of them, drawn at
    random; `samples_with_spans_left_out` counts such samples of this process, and it is said once.
    """

    def __init__(
        self,
        indexed_dataset: Any,
        dataset_path: str | None,
        indexed_indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: T5MaskedWordPieceDatasetConfig,
    ):
        # Megatron-LM keeps two places free in the encoder, for a beginning and an end that it does not put there.
        super().__init__(
            indexed_dataset,
            dataset_path,
            indexed_indices,
            num_samples,
            index_split,
            config,
            tokens_apart=2,
            min_sentences=1,
        )
        self.config: T5MaskedWordPieceDatasetConfig = config
        self.samples_with_spans_left_out = 0
        self._sentinels: list[int] = list(config.tokenizer.additional_special_tokens_ids)
        pad = special_token(config.tokenizer, "pad")
        self._filler = pad if pad is not None and pad >= 0 else 0  # any token: masks say that it is none
        self._begin, self._end = first_and_last(config.tokenizer)

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return MaskedWordPieceDataset._key_config_attributes() + ["sequence_length_decoder"]

    def __getitem__(self, idx: int | None) -> dict[str, np.ndarray]:
        filler, idx = idx is None, int(idx or 0)
        rng = self._random_state(idx)
        sentences, target = self._sentences(idx)
        tokens = [token for sentence in sentences for token in sentence.tolist()]
        truncated = len(tokens) > target
        tokens = tokens[:target]
        spans = self._fitting(self._create_masked_lm_predictions(tokens, target, rng).spans, rng)
        encoder, decoder = self._with_sentinels(tokens, spans)

        assert self.config.sequence_length_decoder is not None
        sizes = self.config.sequence_length, self.config.sequence_length_decoder
        text_enc, text_dec = (np.full(size, self._filler, np.int64) for size in sizes)
        enc_mask, dec_mask = (np.zeros(size, np.int64) for size in sizes)
        labels, loss_mask = np.full(sizes[1], -1, np.int64), np.zeros(sizes[1], np.int64)
        text_enc[: len(encoder)] = encoder
        enc_mask[: len(encoder)] = 1
        n = len(decoder) + 1
        text_dec[:n] = [self._begin, *decoder]
        dec_mask[:n] = 1
        if not filler:
            labels[:n] = [*decoder, self._end]
            loss_mask[:n] = 1
        return {
            "text_enc": text_enc,
            "text_dec": text_dec,
            "labels": labels,
            "loss_mask": loss_mask,
            "truncated": np.array(truncated, np.int64),
            "enc_mask": enc_mask,
            "dec_mask": dec_mask,
        }

    def _get_token_mask(self, numpy_random_state: np.random.RandomState) -> int | None:
        """Runs are cut out as a whole: nothing is put in a token's place."""
        return None

    def _fitting(self, spans: list[Span], rng: np.random.RandomState) -> list[Span]:
        """The runs that are left out of the text: all, unless the decoder or the sentinels cannot hold them."""
        assert self.config.sequence_length_decoder is not None
        room = self.config.sequence_length_decoder - 1
        if len(spans) <= len(self._sentinels) and sum(1 + len(run) for run, _ in spans) <= room:
            return spans
        self.samples_with_spans_left_out += 1
        once(
            f"> some T5 samples mask less than --mask-prob says: their runs of words do not fit into "
            f"--decoder-seq-length {room + 1} or outnumber --vocab-extra-ids {len(self._sentinels)}"
        )
        kept: list[int] = []
        for number in rng.permutation(len(spans)).tolist():
            size = 1 + len(spans[number][0])
            if size <= room and len(kept) < len(self._sentinels):
                kept.append(number)
                room -= size
        return [spans[number] for number in sorted(kept)]

    def _with_sentinels(self, tokens: list[int], spans: list[Span]) -> tuple[list[int], list[int]]:
        """The text with a sentinel for each run, and each sentinel with its run."""
        encoder: list[int] = []
        decoder: list[int] = []
        begin = 0
        for sentinel, (run, labels) in zip(self._sentinels, spans, strict=False):
            encoder += [*tokens[begin : run[0]], sentinel]
            decoder += [sentinel, *labels]
            begin = run[-1] + 1
        return encoder + tokens[begin:], decoder


def first_and_last(tokenizer: Any) -> tuple[int, int]:
    """The tokens that the decoder begins with and ends with.

    T5's own vocabulary has no beginning: its decoder begins with the padding token.
    """
    begin = special_token(tokenizer, "bos", "pad", "eod")
    end = special_token(tokenizer, "eos", "eod")
    assert end is not None, "a tokenizer has a token that ends documents"
    return begin if begin is not None and begin >= 0 else end, end
