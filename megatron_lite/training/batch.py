"""One micro-batch: from the loader to the device, in the form that a model's forward takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lite.errors import DataError


@dataclass(frozen=True)
class Batch:
    """A micro-batch of a causal language model.

    tokens, labels, position_ids: `[b, s]` int64; loss_mask: `[b, s]` fp32, 0 where no loss counts;
    attention_mask: `[b, 1, s, s]` bool, True = hidden, or None where it is purely causal.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    attention_mask: Tensor | None
    position_ids: Tensor


def get_batch(data_iterator: Iterator[dict[str, Any]], device: torch.device, vocab_size: int | None = None) -> Batch:
    """The next micro-batch, on `device`.

    Args:
        vocab_size: ids must be below it. Looked at while they are on the host: on a GPU an id that no row of the
            embedding belongs to ends the process without a word.
    Raises: StopIteration at the end of the data; DataError for an id outside the vocabulary.
    """
    data = next(data_iterator)
    if vocab_size is not None:
        _check_ids(data, vocab_size)

    def move(name: str) -> Tensor:
        return data[name].to(device, non_blocking=True)

    mask = move("attention_mask") if "attention_mask" in data else None
    return Batch(move("tokens"), move("labels"), move("loss_mask").float(), mask, move("position_ids"))


def _check_ids(data: dict[str, Any], vocab_size: int) -> None:
    for name in ("tokens", "labels"):
        low, high = (int(bound) for bound in data[name].aminmax())
        if low < 0 or high >= vocab_size:
            raise DataError(
                f"the data hold token {low if low < 0 else high}, and the vocabulary has {vocab_size} tokens",
                why="the data were made with another tokenizer than the one of this run",
                fix="--tokenizer-type and --tokenizer-model as when the data were made",
            )
