"""From the flags to T5's data sets, and from the loader to what its forward takes."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.datasets.megatron_dataset import MegatronDataset
from megatron_lite.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig
from megatron_lite.training.batch import get_batch_on_this_cp_rank, read_batch
from megatron_lite.training.data_loading import masked_options

_NAMES = ("text_enc", "text_dec", "labels", "loss_mask", "enc_mask")
_IDS = {"text_enc": 0, "text_dec": 0, "labels": -1}


def t5_dataset_class(args: Namespace) -> type[MegatronDataset]:
    """The class of the data sets over one corpus."""
    return T5MaskedWordPieceDataset


def t5_dataset_config(args: Namespace, tokenizer: Any) -> T5MaskedWordPieceDatasetConfig:
    """Options of the data sets, for `BlendedMegatronDatasetBuilder`.

    Raises: ConfigError for options that exclude each other; DataError for files of paths that cannot be read.
    """
    return T5MaskedWordPieceDatasetConfig(
        **masked_options(args, tokenizer),
        sequence_length_decoder=args.decoder_seq_length,
        masking_max_ngram=10,
        masking_use_geometric_distribution=True,
    )


@dataclass(frozen=True)
class T5Batch:
    """A micro-batch of an encoder-decoder.

    encoder_ids: `[b, s_e]`; decoder_ids, labels: `[b, s_d]`, all int64 and in the vocabulary; loss_mask: `[b, s_d]`
    fp32, 0 where no loss counts; padding: bool `[b, 1, 1, s_e]`, True where the encoder's text has ended.
    """

    encoder_ids: Tensor
    decoder_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    padding: Tensor


def get_t5_batch(
    data_iterator: Iterator[dict[str, Any]],
    device: torch.device,
    vocab_size: int | None = None,
    tp_group: ProcessGroup | None = None,
    cp_group: ProcessGroup | None = None,
) -> T5Batch:
    """The next micro-batch, on `device`. Arguments and errors as those of `batch.get_batch`.

    Only keys are hidden, never a padded query: its output is read by nobody, and attention stays finite. The decoder's
    padding is behind all its tokens, where a causal mask hides it.
    """
    data = read_batch(data_iterator, _NAMES, _IDS, device, vocab_size, tp_group)
    padding = (data.pop("enc_mask") == 0)[:, None, None]  # of all keys, wherever they are
    data = get_batch_on_this_cp_rank(data, cp_group)
    return T5Batch(
        encoder_ids=data["text_enc"],
        decoder_ids=data["text_dec"],
        labels=data["labels"].clamp(min=0),  # -1 is no row of the vocabulary; its loss is masked
        loss_mask=data["loss_mask"].float(),
        padding=padding,
    )
