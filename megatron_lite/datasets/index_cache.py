"""Index arrays on disk: written whole or not at all, used only when they are this dataset's.

    {md5}-{class}-{split}-document_index.npy ...   the arrays          }  Megatron-LM's names and contents: caches
    {md5}-{class}-{split}-description.txt          what was hashed     }  of either are used by the other
    {md5}-{class}-{split}-options.json             what was not: options and corpus that change the arrays without
                                                   changing the description, and size and time of each array file

Every file is written under a temporary name and moved, the description last. Arrays are used at once when description,
options and files agree. Otherwise (Megatron's own cache, another option, a replaced corpus, a torn file) the dataset
builds anew and compares: equal arrays on disk are kept, others replaced.

Two ways to open many caches quickly: `trust` takes the files as they are, without reading what they were made from,
and `defer` maps them at first use. Neither lets an index of another length through.
"""

import contextlib
import hashlib
import json
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lite.errors import DataError
from megatron_lite.log import get_logger

_logger = get_logger(__name__)

# Of an opened array: shape, type and some of its items. Not the file's time: builders at once write equal files.
State = tuple[tuple[int, ...], str, bytes]
_PROBES = 64
_Opened = tuple[tuple[np.ndarray, ...], tuple[State, ...]]


class IndexArrays(Sequence[np.ndarray]):
    """The arrays of one dataset: in memory, or files that are mapped when they are first asked for.

    Pickled, as for a reading process, files stay files: the other side maps them again.

    Args:
        arrays: None: not opened yet.
        files: None: in memory only.
        states: of the files, when they were opened before; None: any will do.
        rows: items that each array has; None: not known beforehand.

    Raises: DataError, when they are asked for, if files are missing, torn, of another length, or no longer those that
        were opened before.
    """

    def __init__(
        self,
        arrays: tuple[np.ndarray, ...] | None,
        files: tuple[str, ...] | None = None,
        states: tuple[State, ...] | None = None,
        rows: tuple[int, ...] | None = None,
    ):
        assert arrays is not None or files is not None
        self._arrays, self._files, self._states, self._rows = arrays, files, states, rows

    def __len__(self) -> int:
        return len(self._files if self._files is not None else self._arrays or ())

    def __getitem__(self, index: Any) -> Any:
        return self.open()[index]

    def open(self) -> tuple[np.ndarray, ...]:
        """The arrays, mapped if they were not yet."""
        if self._arrays is None:
            self._arrays = self._map()
        return self._arrays

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if self._files is not None:
            state["_arrays"] = None
        return state

    def _map(self) -> tuple[np.ndarray, ...]:
        assert self._files is not None
        try:
            arrays, states = _all_mapped(self._files)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(
                f"the index cache cannot be read: {error}",
                why="--dataloader-fast-cache-load and --dataloader-defer-npy-index-mmap count on caches that are there",
                fix="run once without them, on the same data and with the same options",
            ) from error
        if self._states is not None and states != self._states:
            raise DataError(
                f"the index cache {self._files[0]} was replaced while this run reads it",
                why="another run on the same cache folder made it anew, from other data or options",
                fix="give each its own --data-cache-path",
            )
        if self._rows is not None and [len(array) for array in arrays] != list(self._rows):
            raise DataError(
                f"the index cache {self._files[0]} was made from other data or options",
                why=f"its arrays have {', '.join(str(len(array)) for array in arrays)} entries, "
                f"this run needs {', '.join(map(str, self._rows))}",
                fix="leave --dataloader-fast-cache-load out once: the cache is then made anew",
            )
        self._states = states
        return arrays


class IndexCache:
    """The cache files of one dataset.

    Args:
        folder: where they lie; None: nowhere, every process builds in memory.
        stem: their common beginning, `{md5}-{class}-{split}`.
        description: text of the description file.
        options: what else the arrays depend on (JSON values).
        trust: the files are there and right: look at nothing else. Needs a folder.
        defer: map the files at first use.
    """

    def __init__(
        self,
        folder: str | None,
        stem: str,
        description: str,
        options: dict[str, Any],
        *,
        trust: bool = False,
        defer: bool = False,
    ):
        self.folder, self.stem, self.description, self.options = folder, stem, description, options
        self.trust, self.defer = trust and folder is not None, defer

    def load_or_build(
        self,
        names: tuple[str, ...],
        build: Callable[[], tuple[np.ndarray, ...]],
        rows: tuple[int, ...] | None = None,
    ) -> tuple[IndexArrays, bool]:
        """The arrays `names` (mapped files where there is a folder), and whether they had to be built.

        Safe when several processes do it at once: each writes the same bytes to its own temporary file, and reads
        what it wrote itself.

        Args:
            rows: items that each array must have, for files that are taken as they are.

        Raises: DataError if the folder cannot be written, or `trust` finds no files.
        """
        if self.folder is None:
            return IndexArrays(build()), True
        files = tuple(self._path(f"{name}.npy") for name in names)
        if self.trust:
            trusted_arrays = IndexArrays(None, files, rows=rows)
            if not self.defer:
                trusted_arrays.open()
            return trusted_arrays, False
        found, trusted = self._read(names)
        if found is not None and trusted:
            return self._held(found, files), False
        arrays = build()
        if found is not None and all(map(_equal, found[0], arrays)):
            with contextlib.suppress(OSError):  # a folder that can only be read serves as well
                self._write_text("options.json", self._options_text(names))
            return self._held(found, files), False
        if found is not None:
            _logger.warning("%s in %s was made from other data or options: built anew", self.stem, self.folder)
        try:
            return self._held(self._write(names, arrays), files), True
        except OSError as error:
            raise DataError(
                f"cannot write the index cache {self.folder}: {error.strerror or error}",
                why="the order of the samples is built once and kept beside the corpus",
                fix="--data-cache-path FOLDER, one that this user may write (on all nodes)",
            ) from error

    def _held(self, opened: _Opened, files: tuple[str, ...]) -> IndexArrays:
        held = IndexArrays(opened[0], files, opened[1])
        return pickle.loads(pickle.dumps(held)) if self.defer else held  # the copy has closed the files

    def _path(self, what: str) -> str:
        assert self.folder is not None
        return os.path.join(self.folder, f"{self.stem}-{what}")

    def _read(self, names: tuple[str, ...]) -> tuple[_Opened | None, bool]:
        """The arrays on disk, None if they are not all there and whole; and whether they are known to be right."""
        try:
            if Path(self._path("description.txt")).read_text("utf-8") != self.description:
                return None, False
            try:
                noted = Path(self._path("options.json")).read_text("utf-8")
            except (FileNotFoundError, UnicodeDecodeError):
                noted = ""
            opened = _all_mapped(tuple(self._path(f"{name}.npy") for name in names))
            # Noted before the arrays were opened, looked at after: files that another process put there meanwhile
            # are of another time.
            return opened, noted == self._options_text(names)
        except (OSError, ValueError, EOFError):  # not there, or torn
            return None, False

    def _options_text(self, names: tuple[str, ...]) -> str:
        files = {name: os.stat(self._path(f"{name}.npy")) for name in names}
        noted = {name: [status.st_size, status.st_mtime_ns] for name, status in files.items()}
        return json.dumps({"options": self.options, "files": noted}, indent=4)

    def _write(self, names: tuple[str, ...], arrays: tuple[np.ndarray, ...]) -> _Opened:
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
        return tuple(array for array, _ in mapped), tuple(state for _, state in mapped)

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


def _mapped(path: str) -> tuple[np.ndarray, State]:
    """The array of a file, mapped, and what tells it from another. It is no memmap, whose items are found slower.

    Raises: OSError; ValueError or EOFError for what is no whole array.
    """
    array = np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
    flat = array.reshape(-1)
    return array, (array.shape, array.dtype.str, flat[:: max(1, len(flat) // _PROBES)][:_PROBES].tobytes())


def _all_mapped(paths: Sequence[str]) -> _Opened:
    opened = [_mapped(path) for path in paths]
    return tuple(array for array, _ in opened), tuple(state for _, state in opened)


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and np.array_equal(a, b)


def fingerprint(numbers: np.ndarray) -> str:
    """Of what an index knows of a corpus: the lengths of its sequences, or where its documents begin."""
    dtype = "<i4" if numbers.dtype.itemsize <= 4 else "<i8"
    return hashlib.blake2b(np.ascontiguousarray(numbers, dtype).data, digest_size=16).hexdigest()
