"""Index arrays on disk: written whole or not at all, used only when they are this dataset's.

    {md5}-{class}-{split}-document_index.npy ...   the arrays          }  Megatron-LM's names and contents: caches
    {md5}-{class}-{split}-description.txt          what was hashed     }  of either are used by the other
    {md5}-{class}-{split}-options.json             what was not: options and corpus that change the arrays without
                                                   changing the description, and size and time of each array file

Every file is written under a temporary name and moved, the description last. Arrays are used at once when description,
options and files agree. Otherwise (Megatron's own cache, another option, a replaced corpus, a torn file) the dataset
builds anew and compares: equal arrays on disk are kept, others replaced.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lite.errors import DataError
from megatron_lite.log import get_logger

_logger = get_logger(__name__)


class IndexCache:
    """The cache files of one dataset.

    Args:
        folder: where they lie; None: nowhere, every process builds in memory.
        stem: their common beginning, `{md5}-{class}-{split}`.
        description: text of the description file.
        options: what else the arrays depend on (JSON values).
    """

    def __init__(self, folder: str | None, stem: str, description: str, options: dict[str, Any]):
        self.folder, self.stem, self.description, self.options = folder, stem, description, options

    def load_or_build(
        self, names: tuple[str, ...], build: Callable[[], tuple[np.ndarray, ...]]
    ) -> tuple[tuple[np.ndarray, ...], bool]:
        """The arrays `names` (mapped files where there is a folder), and whether they had to be built.

        Safe when several processes do it at once: each writes the same bytes to its own temporary file, and reads
        what it wrote itself.

        Raises: DataError if the folder cannot be written.
        """
        if self.folder is None:
            return build(), True
        found, trusted = self._read(names)
        if found is not None and trusted:
            return found, False
        arrays = build()
        if found is not None and all(map(_equal, found, arrays)):
            with contextlib.suppress(OSError):  # a folder that can only be read serves as well
                self._write_text("options.json", self._options_text(names))
            return found, False
        if found is not None:
            _logger.warning("%s in %s was made from other data or options: built anew", self.stem, self.folder)
        try:
            return self._write(names, arrays), True
        except OSError as error:
            raise DataError(
                f"cannot write the index cache {self.folder}: {error.strerror or error}",
                why="the order of the samples is built once and kept beside the corpus",
                fix="--data-cache-path FOLDER, one that this user may write (on all nodes)",
            ) from error

    def _path(self, what: str) -> str:
        assert self.folder is not None
        return os.path.join(self.folder, f"{self.stem}-{what}")

    def _read(self, names: tuple[str, ...]) -> tuple[tuple[np.ndarray, ...] | None, bool]:
        """The arrays on disk, None if they are not all there and whole; and whether they are known to be right."""
        try:
            if Path(self._path("description.txt")).read_text("utf-8") != self.description:
                return None, False
            try:
                noted = Path(self._path("options.json")).read_text("utf-8")
            except (FileNotFoundError, UnicodeDecodeError):
                noted = ""
            arrays = tuple(_mapped(self._path(f"{name}.npy")) for name in names)
            # Noted before the arrays were opened, looked at after: files that another process put there meanwhile
            # are of another time.
            return arrays, noted == self._options_text(names)
        except (OSError, ValueError, EOFError):  # not there, or torn
            return None, False

    def _options_text(self, names: tuple[str, ...]) -> str:
        files = {name: os.stat(self._path(f"{name}.npy")) for name in names}
        noted = {name: [status.st_size, status.st_mtime_ns] for name, status in files.items()}
        return json.dumps({"options": self.options, "files": noted}, indent=4)

    def _write(self, names: tuple[str, ...], arrays: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        assert self.folder is not None
        os.makedirs(self.folder, exist_ok=True)
        Path(self._path("description.txt")).unlink(missing_ok=True)  # from here to the last line nothing loads
        mapped = []
        for name, values in zip(names, arrays, strict=True):
            with self._replacing(f"{name}.npy") as temporary:
                with open(temporary, "wb") as file:
                    np.save(file, values, allow_pickle=False)
                    file.flush()
                    os.fsync(file.fileno())
                # Mapped before it moves: another process that replaces the name cannot change what we read.
                mapped.append(_mapped(temporary))
        self._write_text("options.json", self._options_text(names))
        self._write_text("description.txt", self.description)
        return tuple(mapped)

    def _write_text(self, what: str, text: str) -> None:
        with self._replacing(what) as temporary:
            Path(temporary).write_text(text, "utf-8")

    @contextlib.contextmanager
    def _replacing(self, what: str) -> Iterator[str]:
        """A temporary path in the folder that becomes `what` when the block ends well."""
        handle, temporary = tempfile.mkstemp(dir=self.folder, prefix=f"{self.stem}-{what}.", suffix=".tmp")
        os.close(handle)
        try:
            yield temporary
            os.chmod(temporary, 0o644)
            os.replace(temporary, self._path(what))
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def _mapped(path: str) -> np.ndarray:
    """The array of a file, mapped; as a plain array, whose items are found faster than a memmap's."""
    return np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and np.array_equal(a, b)
