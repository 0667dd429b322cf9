"""Tokens out of a `.bin`: mapped, by ordinary file reads, or by ranges from object storage.

A read that fails is tried again: a network file system, or a bucket, may answer the second time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np

from megatron_lite.datasets import object_storage

READ_RETRY_PAUSES_S: tuple[float, ...] = (10.0, 20.0, 40.0)

_T = TypeVar("_T")


class BinReader(Protocol):
    """`read` gives `count` items of `dtype` from byte `pointer` on, fewer where the file ends before.

    Raises: OSError, or an error of the storage's client.
    """

    size: int

    def read(self, dtype: np.dtype, count: int, pointer: int) -> np.ndarray: ...


class MappedBin:
    """Arrays are views of the mapping, which lives as long as any of them."""

    def __init__(self, path: str):
        self.size = os.path.getsize(path)
        self._bytes: Any = np.memmap(path, mode="r") if self.size else np.empty(0, np.uint8)  # nothing cannot be mapped

    def read(self, dtype: np.dtype, count: int, pointer: int) -> np.ndarray:
        return np.frombuffer(self._bytes, dtype, count, pointer)


class PlainBin:
    """The file is opened for each read, so that nothing is kept open across forks and remounts."""

    def __init__(self, path: str):
        self.path, self.size = path, os.path.getsize(path)

    def read(self, dtype: np.dtype, count: int, pointer: int) -> np.ndarray:
        def once() -> np.ndarray:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(pointer)
                return np.fromfile(file, dtype, count)

        return again_and_again(once, OSError)


class RemoteBin:
    """A request for each read: samples are read in random order, so blocks around them would be read for nothing."""

    def __init__(self, path: str):
        self.path, self.size = path, object_storage.size(path)

    def read(self, dtype: np.dtype, count: int, pointer: int) -> np.ndarray:
        end = pointer + count * dtype.itemsize
        # The clients' own errors are of many kinds, not all of them OSError.
        data = again_and_again(lambda: object_storage.read_range(self.path, pointer, end), Exception)
        return np.frombuffer(data, dtype, len(data) // dtype.itemsize)


def open_bin(path: str, mmap: bool) -> BinReader:
    """The reader of a `.bin`. What lies in object storage is never mapped. Raises: OSError."""
    if object_storage.is_object_storage_path(path):
        return RemoteBin(path)
    return MappedBin(path) if mmap else PlainBin(path)


def again_and_again(read: Callable[[], _T], errors: type[Exception]) -> _T:
    """`read()`, tried again after each pause when it fails."""
    for pause in READ_RETRY_PAUSES_S:
        try:
            return read()
        except errors:
            time.sleep(pause)
    return read()
