"""The files of torch Distributed Checkpoint (DCP): a writer that sums what it writes, an index that runs no code.

__0_0.distcp    tensors and objects of rank 0, one after the other, each as torch.save writes it; __0_1: its second file
.metadata       the index: a pickle of DCP's classes, written by DCP
"""

from __future__ import annotations

import io
import math
import os
import pickle
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_lite.checkpointing.folders import explain
from megatron_lite.errors import CheckpointError


@contextmanager
def no_checksums_of_records() -> Iterator[None]:
    """torch.save puts a checksum into each record of its archive, which torch.load never looks at: saves that pass.

    The manifest has a checksum of the whole file instead, so that each byte is still summed once.
    """
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class _Recorder:
    """A file that keeps what is around the values, which torch only seeks over."""

    def __init__(self) -> None:
        self.head, self.tail, self._skipped, self._size = bytearray(), bytearray(), False, 0

    def write(self, data: Any) -> int:
        (self.tail if self._skipped else self.head).extend(data)
        self._size += len(data)
        return len(data)

    def seek(self, offset: int, whence: int) -> int:
        assert whence == os.SEEK_CUR, whence
        self._skipped = True
        self._size += offset
        return self._size

    def tell(self) -> int:
        return self._size

    def flush(self) -> None: ...


@lru_cache(maxsize=4096)
def frame(shape: torch.Size, dtype: torch.dtype) -> tuple[bytes, bytes]:
    """What torch.save writes before and after the values of such a tensor, row by row; the same for all of them."""
    recorder = _Recorder()
    with no_checksums_of_records(), torch.serialization.skip_data():
        torch.save(torch.empty(shape, dtype=dtype), recorder)  # type: ignore[arg-type]
    return bytes(recorder.head), bytes(recorder.tail)


@dataclass(frozen=True)
class _Written(WriteResult):
    """What a rank tells rank 0 of an item: its place, and the checksum of the file that holds it."""

    checksum: str = ""


class SummedFile:
    """A new file that sums its bytes as they pass."""

    def __init__(self, file: io.BufferedWriter):
        self._file, self._sum = file, 0

    def write(self, data: Any) -> int:
        self._sum = zlib.crc32(data, self._sum)
        return self._file.write(data)

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        self._file.flush()

    @property
    def checksum(self) -> str:
        return f"{self._sum:08x}"


def shares(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Places of items, dealt into at most `count` files of about equal size; each file keeps the order of the items."""
    loads, dealt = [0] * count, [[] for _ in range(count)]  # type: ignore[var-annotated]
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        least = loads.index(min(loads))
        loads[least] += sizes[place] + 1
        dealt[least].append(place)
    return [sorted(places) for places in dealt if places]


def size_of(item: WriteItem) -> int:
    """Bytes of an item's values; 0 for an object, which is not made yet."""
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


class Writer(FileSystemWriter):
    """DCP's writer: files of a rank flushed and summed, with errors that say what the file system did.

    Tensors are made, written and dropped one by one, where DCP's own loop keeps them all until the file ends.

    Args:
        files: of this rank, written at the same time.
    """

    def __init__(self, folder: Path, files: int = 1):
        super().__init__(folder, single_file_per_rank=True, sync_files=True, overwrite=False)
        self._folder, self._files = folder, files
        self.checksums: dict[str, str] = {}  # on rank 0, after the save

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if not self._folder.is_dir():
            raise CheckpointError(
                f"cannot save to {self._folder.parent}: this machine does not see the folder that rank 0 made",
                why="every rank writes its own part of a checkpoint, so all machines need the same file system",
                fix="--save PATH on a shared file system",
            )
        return plan

    def storage_meta(self) -> StorageMeta | None:
        return None  # it would only hold the temporary name

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        dealt = shares([size_of(item) for item in plan.items], self._files)
        names = [f"{plan.storage_data.prefix}{number}.distcp" for number in range(len(dealt))]
        items = [[plan.items[place] for place in places] for places in dealt]
        try:
            if len(items) <= 1:
                written = [self._write_file(name, part, planner) for name, part in zip(names, items)]
            else:
                with ThreadPoolExecutor(len(items)) as threads:
                    written = list(threads.map(self._write_file, names, items, repeat(planner)))
        except (OSError, RuntimeError) as error:
            raise _explain_write(error, self._folder) from error
        done.set_result([result for of_file in written for result in of_file])
        return done

    def _write_file(self, name: str, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        places = []
        with open(self._folder / name, "wb") as raw:
            file = SummedFile(raw)
            for item in items:
                begin = file.tell()
                data = planner.resolve_data(item)
                if isinstance(data, Tensor):
                    data = data.detach().cpu()
                    if data.untyped_storage().nbytes() != data.nbytes:
                        data = data.clone()  # a view: torch.save would write all of what it looks at
                    torch.save(data, file)  # type: ignore[arg-type]
                else:
                    file.write(data.getbuffer())
                del data
                places.append((item.index, begin, file.tell() - begin))
            raw.flush()
            os.fsync(raw.fileno())
        return written(name, places, file.checksum)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        for result in (result for of_rank in results for result in of_rank):
            assert isinstance(result, _Written), type(result)
            self.checksums[result.storage_data.relative_path] = result.checksum
        try:
            super().finish(metadata, results)
        except (OSError, RuntimeError) as error:
            raise _explain_write(error, self._folder) from error


def written(name: str, places: Iterable[tuple[MetadataIndex, int, int]], checksum: str) -> list[WriteResult]:
    """What a rank tells rank 0 of the items (where, begin, length) of one of its files."""
    return [_Written(index, length, _StorageInfo(name, begin, length), checksum) for index, begin, length in places]


def _explain_write(error: BaseException, folder: Path) -> CheckpointError:
    """torch's file writer answers a failed write with an error of its own; the first cause is in its context."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return explain(cause, f"save to {folder.parent}")
        cause = cause.__cause__ or cause.__context__
    return CheckpointError(f"cannot save to {folder.parent}: {error}")


_INDEX_CLASSES = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(  # Megatron keeps its plans there too: they are tables of numbers
        ("torch.distributed.checkpoint.planner", name)
        for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")
    ),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
}


class IndexUnpickler(pickle.Unpickler):
    """Reads an index and refuses every class that no index needs: a pickle can otherwise run anything."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _INDEX_CLASSES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no index needs")
