"""One micro-batch: from the loader to the device, in the form that a model's forward takes.

Rank 0 of a tensor-parallel group reads it, the others receive it. Context-parallel ranks read the same samples and keep
their share of each sequence (`context_parallel.partition`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.collectives import all_reduce, group_rank, group_size
from megatron_lite.context_parallel.partition import split_sequence
from megatron_lite.context_parallel.visibility import SegmentMask
from megatron_lite.errors import DataError
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.tensor_parallel.data import broadcast_tensors
from megatron_lite.training.stage_data import NotNeeded

# What holds ids, and the lowest that may stand there; BERT and T5 label what carries no loss with -1.
_IDS = {"tokens": 0, "labels": 0}
_NAMES = ("tokens", "labels", "position_ids", "loss_mask", "attention_mask", "cu_seqlens")


@dataclass(frozen=True)
class Batch:
    """A micro-batch of a causal language model: this context-parallel rank's share of it.

    tokens, labels, position_ids: `[b, s/cp]` int64; loss_mask: `[b, s/cp]` fp32, 0 where no loss counts;
    attention_mask: bool `[b, 1, s/cp, s]`, True = hidden, or the documents of the whole sequence, or None where it is
    purely causal. All None on a pipeline stage that needs no data.
    """

    tokens: Tensor | None = None
    labels: Tensor | None = None
    loss_mask: Tensor | None = None
    attention_mask: Tensor | SegmentMask | None = None
    position_ids: Tensor | None = None


def get_batch(
    data_iterator: Iterator[dict[str, Any]],
    device: torch.device,
    vocab_size: int | None = None,
    tp_group: ProcessGroup | None = None,
    cp_group: ProcessGroup | None = None,
) -> Batch:
    """The next micro-batch, on `device`.

    Args:
        data_iterator: asked on rank 0 of the tensor-parallel group.
        vocab_size: ids must be below it. Looked at while they are on the host: on a GPU an id that no row of the
            embedding belongs to ends the process without a word.
        tp_group, cp_group: None = the registered groups.
    Raises: as `read_batch`.
    """
    data = read_batch(data_iterator, _NAMES, _IDS, device, vocab_size, tp_group)
    return _batch_of(data, cp_group) if data else Batch()


def get_retro_batch(
    data_iterator: Iterator[dict[str, Any]],
    device: torch.device,
    vocab_size: int | None = None,
    tp_group: ProcessGroup | None = None,
) -> tuple[Batch, Tensor | None]:
    """As `get_batch`, and the tokens of the neighbours, int64 `[b*l*k, r]`: batch, chunk, neighbour; None where nothing
    is retrieved."""
    ids = {**_IDS, "neighbor_tokens": 0}
    data = read_batch(data_iterator, (*_NAMES, "neighbor_tokens"), ids, device, vocab_size, tp_group)
    neighbors = data.pop("neighbor_tokens", None)
    return _batch_of(data), None if neighbors is None else neighbors.view(-1, neighbors.shape[-1])


def _batch_of(data: dict[str, Tensor], cp_group: ProcessGroup | None = None) -> Batch:
    """What was read, with its mask, cut for this context-parallel rank."""
    cp_group = cp_group or ProcessGroupCollection.use_mpu_process_groups().cp
    mask: Tensor | SegmentMask | None = data.pop("attention_mask", None)
    documents = data.pop("cu_seqlens", None)
    if isinstance(mask, Tensor):
        mask = get_batch_on_this_cp_rank({"attention_mask": mask}, cp_group)["attention_mask"]
    elif documents is not None:
        # Where documents begin is a few numbers; the mask that follows from it is made where it is needed: once for all
        # layers, or, where it would have the rows of a part of the sequence, for each part that a layer looks at.
        mask = SegmentMask.of_documents(documents)
        mask = mask if group_size(cp_group) > 1 else mask.dense(causal=True)
    data = get_batch_on_this_cp_rank(data, cp_group)
    return Batch(data["tokens"], data["labels"], data["loss_mask"].float(), mask, data["position_ids"])


def read_batch(
    data_iterator: Iterator[dict[str, Any]],
    names: Sequence[str],
    ids: Mapping[str, int],
    device: torch.device,
    vocab_size: int | None = None,
    tp_group: ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """Some tensors of the next micro-batch by name, on `device`; none on a pipeline stage that needs no data.

    Whole sequences, also under context parallelism: `get_batch_on_this_cp_rank` cuts them.

    Args:
        data_iterator: asked on rank 0 of the tensor-parallel group.
        names: what the model takes; those that the data lack are left out.
        ids: which of them hold token ids, and the lowest number that may stand there.
        vocab_size, tp_group: as in `get_batch`.
    Raises: on every rank of the group StopIteration at the end of the data; DataError for an id outside the vocabulary.
    """

    if isinstance(data_iterator, NotNeeded):
        return {}

    def read() -> dict[str, Tensor]:
        data = next(data_iterator)
        if vocab_size is not None:
            _check_ids(data, ids, vocab_size)
        return data

    return broadcast_tensors(names, read, tp_group, device)


def get_batch_on_this_cp_rank(batch: dict[str, Any], cp_group: ProcessGroup | None = None) -> dict[str, Any]:
    """This context-parallel rank's share: two chunks of every sequence.

    Args:
        batch: tensors `[b, s, ...]` are cut along s, `attention_mask` `[b, 1, s, s]` along its rows; None stays, and so
            does a mask of one row for all queries.
        cp_group: None = the registered group.
    Raises: ConfigError if twice the number of ranks does not divide s.
    """
    group = cp_group or ProcessGroupCollection.use_mpu_process_groups().cp
    rank, size = group_rank(group), group_size(group)
    return {
        name: x if x is None else _share(x, rank, size, 2 if name == "attention_mask" else 1)
        for name, x in batch.items()
    }


def sum_over_context(count: Tensor, cp_group: ProcessGroup | None = None) -> Tensor:
    """A number of this rank's part of some sequences, summed over the ranks that hold the other parts; a copy.

    For loss functions that divide by it themselves. What they return then is this rank's share of the mean.

    Args:
        cp_group: None = the registered group.
    """
    total = count.detach().clone()
    group = cp_group or ProcessGroupCollection.use_mpu_process_groups().cp
    all_reduce(total, group, purpose="tokens of a micro-batch")
    return total


def holds_first_token(cp_group: ProcessGroup | None = None) -> bool:
    """Whether the first token of every sequence is in this context-parallel rank's part.

    Args:
        cp_group: None = the registered group.
    """
    return group_rank(cp_group or ProcessGroupCollection.use_mpu_process_groups().cp) == 0


def _share(x: Tensor, rank: int, size: int, dim: int) -> Tensor:
    return x if dim == 2 and x.shape[2] == 1 else split_sequence(x, rank, size, dim)


def skip_batch(data_iterator: Iterator[Any] | list[Iterator[Any]], tp_group: ProcessGroup | None = None) -> None:
    """Read the next micro-batch and drop it, for every chunk of the model.

    Raises: StopIteration at the end of the data, on every rank of the group.
    """

    for iterator in data_iterator if isinstance(data_iterator, list) else [data_iterator]:
        if isinstance(iterator, NotNeeded):
            continue

        def read(iterator: Iterator[Any] = iterator) -> dict[str, Tensor]:
            next(iterator)
            return {}

        broadcast_tensors((), read, tp_group)


def _check_ids(data: dict[str, Any], ids: Mapping[str, int], vocab_size: int) -> None:
    for name, lowest in ids.items():
        if name not in data:
            continue
        low, high = (int(bound) for bound in data[name].aminmax())
        if low < lowest or high >= vocab_size:
            raise DataError(
                f"the data hold token {low if low < lowest else high}, and the vocabulary has {vocab_size} tokens",
                why="the data were made with another tokenizer than the one of this run",
                fix="--tokenizer-type and --tokenizer-model as when the data were made",
            )
