"""A corpus that lies in object storage (s3://, gs://, az://, ...), read through fsspec when that package is there.

    <prefix>.idx    fetched whole: to a local folder, from which it is mapped, or into memory
    <prefix>.bin    read by ranges: a document is a request; nothing is mapped

fsspec finds the client of a scheme by itself (s3fs, gcsfs, adlfs, ...) and the credentials where that client looks.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lite.errors import DataError


def is_object_storage_path(path: str) -> bool:
    """Does the prefix name a scheme, as s3://bucket/corpus?"""
    return "://" in path


def _client(path: str) -> Any:
    """The client of the path's scheme. fsspec keeps one a process and looks after forks itself."""
    scheme = path.split("://", 1)[0]
    try:
        import fsspec
    except ImportError as error:
        raise DataError(
            f"{path} needs the package fsspec, which is not installed",
            why="corpora in object storage are read through it",
            fix="pip install fsspec and the client of the scheme (s3fs for s3://), or copy the corpus to a disk",
        ) from error
    try:
        return fsspec.filesystem(scheme)
    except (ImportError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read: {error}",
            why=f"fsspec has no client for {scheme}:// here",
            fix="install the client (s3fs for s3://, gcsfs for gs://), or copy the corpus to a disk",
        ) from error


def exists(path: str) -> bool:
    """Is there an object of this name?"""
    return bool(_client(path).exists(path))


def size(path: str) -> int:
    """Bytes of an object. Raises: OSError if there is none."""
    return int(_client(path).info(path)["size"])


def read_range(path: str, begin: int, end: int) -> bytes:
    """Bytes begin ... end - 1 of an object."""
    return _client(path).cat_file(path, start=begin, end=end)


def fetch(path: str, folder: str | None) -> np.ndarray:
    """A whole object as bytes, uint8: in memory, or mapped from the copy that is kept in `folder`.

    The copy's name holds the object's size and version, so that a replaced object is fetched anew. It appears whole:
    several processes may fetch at once.

    Raises: OSError.
    """
    client = _client(path)
    if folder is None:
        return np.frombuffer(client.cat_file(path), np.uint8)
    info = client.info(path)
    version = [str(info.get(key)) for key in ("size", "ETag", "etag", "mtime", "LastModified", "created")]
    key = hashlib.sha256("\n".join([path, *version]).encode()).hexdigest()[:32]
    local = os.path.join(folder, f"{key}-{os.path.basename(path)}")
    if not os.path.exists(local):
        os.makedirs(folder, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=f"{key}.", suffix=".tmp")
        os.close(handle)
        try:
            client.get_file(path, temporary)
            os.chmod(temporary, 0o644)
            os.replace(temporary, local)
        finally:
            Path(temporary).unlink(missing_ok=True)
    return np.memmap(local, mode="r")
