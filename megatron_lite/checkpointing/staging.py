"""Images of a rank's files in memory that the writing process shares: what a save costs the training is this copy.

    memory   | file 0: head data tail | head data tail | object | file 1: ...      each item as torch.save writes it
                          ^ tensors are copied here, and nowhere else

An archive of torch.save has the same bytes before and after the values for all tensors of one shape and type, so these
are made once. The memory grows to the largest save and is used again; with CUDA it is pinned, so that copies from the
device run at full speed. It has no name: when the last process that uses it is gone, so is the memory.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType

from megatron_lite.checkpointing.dcp_files import frame, shares, size_of
from megatron_lite.errors import CheckpointError

_ALIGNMENT = 64  # of items: torch reads tensors of any type in place


@dataclass
class Image:
    """A file to be: its bytes are `[start, start + length)` of the memory. places: of its items, from its beginning."""

    name: str
    start: int
    length: int
    places: list[tuple[MetadataIndex, int, int]]


class Staging:
    """The memory of one rank."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("checkpoint", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())
        self._memory: mmap.mmap | None = None
        self._pinned = 0

    def fill(self, plan: SavePlan, planner: SavePlanner, files: int) -> list[Image]:
        """Copy all items of a plan. Returns: the files they make, at most `files` of them.

        Raises: CheckpointError when there is not enough memory.
        """
        objects = {
            place: bytes(planner.resolve_data(item).getbuffer())  # type: ignore[union-attr]
            for place, item in enumerate(plan.items)
            if item.type == WriteItemType.BYTE_IO
        }
        sizes = [
            len(objects[place]) if place in objects else _archive_size(item) for place, item in enumerate(plan.items)
        ]
        images, starts, end = [], [0] * len(sizes), 0
        for number, dealt in enumerate(shares(sizes, files)):
            image = Image(f"{plan.storage_data.prefix}{number}.distcp", end, 0, [])
            for place in dealt:
                starts[place] = end
                image.places.append((plan.items[place].index, end - image.start, sizes[place]))
                end = _aligned(end + sizes[place])
            image.length = end - image.start
            images.append(image)
        self._reserve(end)
        devices = set()
        for place, item in enumerate(plan.items):
            if place in objects:
                self._put(starts[place], objects[place])
            else:
                data = planner.resolve_data(item)
                assert isinstance(data, Tensor), item
                self._put_tensor(starts[place], data)
                devices.add(data.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return images

    def close(self) -> None:
        """Give the memory back."""
        self._unmap()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    # -- items -----------------------------------------------------------------------------------------------------

    def _put(self, start: int, data: bytes) -> None:
        assert self._memory is not None
        self._memory[start : start + len(data)] = data

    def _put_tensor(self, start: int, data: Tensor) -> None:
        assert self._memory is not None
        head, tail = frame(data.shape, data.dtype)
        self._put(start, head)
        start += len(head)
        if data.numel():
            values = torch.frombuffer(self._memory, dtype=data.dtype, count=data.numel(), offset=start)
            values.view(data.shape).copy_(data.detach(), non_blocking=True)
        self._put(start + data.nbytes, tail)

    # -- memory ----------------------------------------------------------------------------------------------------

    def _reserve(self, size: int) -> None:
        if self._memory is not None and len(self._memory) >= size:
            return
        self._unmap()
        try:
            os.ftruncate(self.fd, size)
            self._memory = mmap.mmap(self.fd, max(size, 1))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"no memory for a copy of this rank's part of the checkpoint, {size / 1e6:.1f} MB: {error}",
                why="--async-save writes from a copy, which counts as a file for `ulimit -f`",
                fix="leave --async-save out, or raise the limit",
            ) from error
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
            if int(torch.cuda.cudart().cudaHostRegister(address, len(self._memory), 0)) == 0:
                self._pinned = address

    def _unmap(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned)
            self._pinned = 0
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def _archive_size(item: Any) -> int:
    head, tail = frame(item.tensor_data.chunk.sizes, item.tensor_data.properties.dtype)
    return len(head) + size_of(item) + len(tail)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def folder_job(folder: Path, images: list[Image]) -> dict[str, Any]:
    """What the writing process is told."""
    return {
        "folder": str(folder),
        "files": [{"name": image.name, "start": image.start, "length": image.length} for image in images],
    }
