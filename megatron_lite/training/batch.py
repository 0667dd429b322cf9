"""One micro-batch: from the loader to the device, in the form that a model's forward takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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


def get_batch(data_iterator: Iterator[dict[str, Any]], device: torch.device) -> Batch:
    """The next micro-batch, on `device`.

    Raises: StopIteration at the end of the data.
    """
    data = next(data_iterator)

    def move(name: str) -> Tensor:
        return data[name].to(device, non_blocking=True)

    mask = move("attention_mask") if "attention_mask" in data else None
    return Batch(move("tokens"), move("labels"), move("loss_mask").float(), mask, move("position_ids"))
