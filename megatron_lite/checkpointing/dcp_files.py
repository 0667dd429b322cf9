"""The files of torch Distributed Checkpoint (DCP): a writer that sums what it writes, an index that runs no code.

__0_0.distcp    tensors and objects of rank 0, one after the other, each as torch.save writes it
.metadata       the index: a pickle of DCP's classes, written by DCP
"""

from __future__ import annotations

import io
import os
import pickle
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
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


class Writer(FileSystemWriter):
    """DCP's writer, one file a rank, flushed and summed, with errors that say what the file system did.

    Tensors are made, written and dropped one by one, where DCP's own loop keeps them all until the file ends.
    """

    def __init__(self, folder: Path):
        super().__init__(folder, single_file_per_rank=True, sync_files=True, overwrite=False)
        self._folder = folder
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
        try:
            done.set_result(self._write_items(plan, planner))
        except (OSError, RuntimeError) as error:
            raise _explain_write(error, self._folder) from error
        return done

    def _write_items(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        if not plan.items:
            return []
        name = f"{plan.storage_data.prefix}0.distcp"
        places = []
        with open(self._folder / name, "wb") as raw:
            file = SummedFile(raw)
            for item in plan.items:
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
        return [
            _Written(index, length, _StorageInfo(name, begin, length), file.checksum) for index, begin, length in places
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        for result in (result for of_rank in results for result in of_rank):
            assert isinstance(result, _Written), type(result)
            self.checksums[result.storage_data.relative_path] = result.checksum
        try:
            super().finish(metadata, results)
        except (OSError, RuntimeError) as error:
            raise _explain_write(error, self._folder) from error


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
