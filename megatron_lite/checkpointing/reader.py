"""DCP's files, read without running code, and no more of them than is wanted.

    index --> boxes that overlap the wanted ones --> file: a small box whole; of a large one the runs of values wanted

A box is an archive of torch.save. What that writes before the values is known for a shape and a type (`frame`): where
the file has just that, values are read from their place; where it has not, the archive is read as torch.load reads it.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from itertools import groupby, product
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from megatron_lite.checkpointing.dcp_files import IndexUnpickler, frame
from megatron_lite.checkpointing.folders import explain
from megatron_lite.checkpointing.plain_values import from_bytes
from megatron_lite.errors import CheckpointError

INDEX = ".metadata"
_SMALL = 1 << 16  # bytes that are read as fast as a few


class Reader(FileSystemReader):
    """DCP's reader that runs no code, reads a saved box once, and names the file that is damaged."""

    _index: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._index is not None:
            return self._index
        path = Path(self.path) / INDEX
        try:
            with open(path, "rb") as file:
                metadata = IndexUnpickler(file).load()
            if not isinstance(metadata, Metadata):
                raise pickle.UnpicklingError("it holds something else")
        except OSError as error:
            raise explain(error, f"load {self.path}") from error
        except Exception as error:  # a damaged pickle raises nearly anything
            raise CheckpointError(
                f"cannot read {path}: {error}",
                why="it is not an index as torch.distributed.checkpoint writes it, or it is damaged",
                fix="--ckpt-step with another checkpoint",
            ) from error
        self._index = metadata
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        def place(item: ReadItem) -> tuple[str, int]:
            stored = self.storage_data[item.storage_index]
            return stored.relative_path, stored.offset

        folder = Path(self.path)
        for (name, _), group in groupby(sorted(plan.items, key=place), key=place):
            items, path = list(group), folder / name
            try:
                with open(path, "rb") as file:
                    boxes = self._boxes(file, items, path)
            except OSError as error:
                raise explain(error, f"load {folder}") from error
            for item, box in zip(items, boxes):
                target = planner.resolve_tensor(item)
                if box.shape != target.shape:
                    raise CheckpointError(f"{item.storage_index.fqn} in {path} has not the shape that the index gives")
                target.copy_(box)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _boxes(self, file: BinaryIO, items: Sequence[ReadItem], path: Path) -> list[Tensor]:
        """What the items, which are parts of one saved box, want of it; of a large box only what they want is read."""
        assert self._index is not None
        index = items[0].storage_index
        saved, stored = self._index.state_dict_metadata[index.fqn], self.storage_data[index]
        assert isinstance(saved, TensorStorageMetadata) and index.offset is not None
        chunk = next(chunk for chunk in saved.chunks if chunk.offsets == index.offset)
        size, wanted = math.prod(chunk.sizes), sum(math.prod(item.lengths) for item in items)
        if wanted * 2 < size and stored.length > _SMALL:
            head, _ = frame(chunk.sizes, saved.properties.dtype)
            file.seek(stored.offset)
            if file.read(len(head)) == head:  # the values follow row by row: our writers see to it, others may not
                begin = stored.offset + len(head)
                return [read_part(file, begin, chunk.sizes, saved.properties.dtype, item) for item in items]
        file.seek(stored.offset)
        box = from_bytes(file.read(stored.length), f"{index.fqn} in {path}")
        return [box[tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths))] for item in items]


def read_part(file: BinaryIO, begin: int, shape: torch.Size, dtype: torch.dtype, item: ReadItem) -> Tensor:
    """A box of a tensor whose values lie in the file from `begin` on, row by row.

    The box is made of runs of values. Where they are long each is read by itself, else what lies between them as well.
    """
    tail = len(shape)  # dimensions from here on are whole
    while tail and item.lengths[tail - 1] == shape[tail - 1]:
        tail -= 1
    outer, run = max(tail - 1, 0), math.prod(item.lengths[max(tail - 1, 0) :])
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    starts = [
        sum(stride * (offset + place) for stride, offset, place in zip(strides, item.storage_offsets, places))
        + sum(stride * offset for stride, offset in zip(strides[outer:], item.storage_offsets[outer:]))
        for places in product(*(range(length) for length in item.lengths[:outer]))
    ]
    itemsize = dtype.itemsize

    def values(first: int, count: int) -> Tensor:
        file.seek(begin + first * itemsize)
        data = bytearray(count * itemsize)
        if file.readinto(data) != len(data):  # type: ignore[attr-defined]
            raise CheckpointError(f"{file.name} ends within a tensor", why="the file is damaged")
        return torch.frombuffer(data, dtype=dtype)

    if run * itemsize >= _SMALL or len(starts) == 1:
        return torch.cat([values(start, run) for start in starts]).view(tuple(item.lengths))
    span = values(starts[0], starts[-1] + run - starts[0])
    return torch.as_strided(span, tuple(item.lengths), strides)
