"""A tokenised corpus as a pair of files, `.bin` (the token ids, nothing else) and `.idx` (where each sequence lies).

    .idx   0  "MMIDIDX" 0 0      9 bytes                  34          lengths   i32 [n]   tokens of each sequence
           9  version, 1         u64                      34 +  4 n   pointers  i64 [n]   byte offset in .bin
          17  type code          u8                       34 + 12 n   marks     i64 [d]   0, then the number of
          18  n, sequences       u64                                                      sequences after each document
          26  d, marks           u64                      34 + 12 n + 8 d   modes  i8 [n]   multimodal files only

All little-endian, nothing aligned. The format is Megatron-LM's, to the byte; a reader takes the token type from the
header. `preprocess` writes pairs, `GPTDataset` reads them. A pair appears under its final names when it is complete
(`finalize`), so a killed writer leaves nothing that loads.
"""

import contextlib
import os
import shutil
import struct
from array import array
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron_lite.datasets import object_storage
from megatron_lite.datasets.bin_reader import open_bin
from megatron_lite.datasets.object_storage import is_object_storage_path
from megatron_lite.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER_BYTES = 34


class DType(Enum):
    """The token types that a header can name."""

    uint8 = 1
    int8 = 2
    int16 = 3
    int32 = 4
    int64 = 5
    float64 = 6
    float32 = 7
    uint16 = 8

    @classmethod
    def code_from_dtype(cls, value: Any) -> int:
        """The header's code of a numpy type."""
        name = np.dtype(value).name
        if name not in cls.__members__:
            raise DataError(f"tokens of type {name} cannot be stored", fix=f"use one of {', '.join(cls.__members__)}")
        return cls[name].value

    @classmethod
    def dtype_from_code(cls, value: int) -> np.dtype:
        """The numpy type of a header's code."""
        return np.dtype(cls(value).name).newbyteorder("<")

    @staticmethod
    def size(key: Any) -> int:
        """Bytes of one token, of a type or of a header's code."""
        return DType.dtype_from_code(key).itemsize if isinstance(key, int) else np.dtype(key).itemsize

    @staticmethod
    def optimal_dtype(cardinality: int | None) -> np.dtype:
        """uint16 for vocabularies below 65500, else (or when unknown) int32."""
        return np.dtype(np.uint16 if cardinality is not None and cardinality < 65500 else np.int32)


def get_idx_path(path_prefix: str) -> str:
    return path_prefix + ".idx"


def get_bin_path(path_prefix: str) -> str:
    return path_prefix + ".bin"


class _Index:
    """The `.idx` of one pair: views on the mapped file, checked as far as O(1) and one pass over the lengths can."""

    def __init__(
        self, path_prefix: str, multimodal: bool, counts: Sequence[int] | None = None, idx_folder: str | None = None
    ):
        path = get_idx_path(path_prefix)
        try:
            buffer = _idx_bytes(path, idx_folder)
        except OSError as error:
            raise _cannot_read(path, error) from error
        header = buffer[:_HEADER_BYTES].tobytes()
        if not header.startswith(_MAGIC[: len(header)]) or not header:
            raise DataError(
                f"{path} is not the index of a tokenised corpus",
                why=f"it begins with {header[:9]!r}, an index with {_MAGIC!r}",
                fix="give the prefix of a pair that `megatron-lite preprocess` wrote, without .bin or .idx",
            )
        if len(header) < _HEADER_BYTES:
            raise _torn(path, f"it ends after {len(header)} bytes, inside its header of {_HEADER_BYTES}")
        version, code, num_sequences, num_marks = struct.unpack("<QBQQ", header[9:])
        if version != _VERSION:
            raise DataError(
                f"{path} has version {version} of the index format",
                why=f"only version {_VERSION} is known; a later writer, or a damaged header",
                fix="preprocess the corpus again",
            )
        if code not in {kind.value for kind in DType}:
            raise DataError(
                f"{path} names the unknown token type {code}",
                why=f"known are {', '.join(f'{kind.value} {kind.name}' for kind in DType)}",
                fix="preprocess the corpus again",
            )
        if counts is not None and tuple(counts) != (num_sequences, num_marks):
            raise DataError(
                f"{path} has {num_sequences} sequences and {num_marks} document marks, {list(counts)} were announced",
                why="the file of --per-dataset-sequences-path was made from another corpus",
                fix="make it again, or leave the flag out",
            )
        needed = _HEADER_BYTES + 12 * num_sequences + 8 * num_marks + (num_sequences if multimodal else 0)
        if len(buffer) < needed:
            what = "with the modes of a multimodal corpus " if multimodal else ""
            raise _torn(
                path,
                f"{num_sequences} sequences and {num_marks} document marks {what}take {needed} bytes, "
                f"the file has {len(buffer)}",
            )
        self.dtype = DType.dtype_from_code(code)
        n, d = num_sequences, num_marks
        # The views keep the mapping alive: it lasts as long as anything that was taken from it.
        self.sequence_lengths = np.frombuffer(buffer, "<i4", n, _HEADER_BYTES) if n else np.empty(0, "<i4")
        self.sequence_pointers = np.frombuffer(buffer, "<i8", n, _HEADER_BYTES + 4 * n) if n else np.empty(0, "<i8")
        self.document_indices = np.frombuffer(buffer, "<i8", d, _HEADER_BYTES + 12 * n) if d else np.empty(0, "<i8")
        self.sequence_modes = None
        if multimodal:
            offset = _HEADER_BYTES + 12 * n + 8 * d
            self.sequence_modes = np.frombuffer(buffer, "<i1", n, offset) if n else np.empty(0, "<i1")
        marks = self.document_indices
        if d == 0 or marks[0] != 0 or marks[-1] != n:
            found = "there are none" if d == 0 else f"they run from {marks[0]} to {marks[-1]}"
            raise _torn(path, f"document marks run from 0 to the number of sequences, {n}; {found}")
        if n and counts is None and self.sequence_lengths.min() < 0:
            raise _torn(path, "a sequence has a negative length")
        last = int(self.sequence_pointers[-1]) + int(self.sequence_lengths[-1]) * self.dtype.itemsize if n else 0
        self.bin_bytes = last


class IndexedDataset:
    """A tokenised corpus, read sequence by sequence.

    Args:
        path_prefix: path of the pair without `.bin` and `.idx`.
        multimodal: the index carries a mode per sequence; items are then (sequence, mode).
        mmap: map `.bin` (default), or read it with ordinary file reads. A prefix in object storage (s3://...) is read
            by ranges in either case.
        counts: sequences and document marks, known beforehand: the header must agree, and the pass over the lengths
            that looks for damage is left out.
        idx_folder: where the `.idx` of a prefix in object storage is kept; None: in memory.

    Sequences are views on the mapped file (read-only), or fresh arrays without `mmap`. Pickling keeps the arguments
    and opens the files again.

    Raises: DataError if the pair is missing, torn, foreign or of another version.
    """

    def __init__(
        self,
        path_prefix: str,
        multimodal: bool = False,
        mmap: bool = True,
        *,
        counts: Sequence[int] | None = None,
        idx_folder: str | None = None,
    ):
        self.path_prefix, self.multimodal, self.mmap = str(path_prefix), multimodal, mmap
        self._counts, self._idx_folder = counts, idx_folder
        self._open()

    def _open(self) -> None:
        self.index = _Index(self.path_prefix, self.multimodal, self._counts, self._idx_folder)
        path = get_bin_path(self.path_prefix)
        try:
            self._bin = open_bin(path, self.mmap)
        except OSError as error:
            raise _cannot_read(path, error) from error
        if self._bin.size != self.index.bin_bytes:
            raise DataError(
                f"{path} and its .idx do not belong together, or one is torn",
                why=f"the index describes {self.index.bin_bytes} bytes, the file has {self._bin.size}",
                fix="preprocess the corpus again, or copy both files again",
            )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("index", "_bin")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def __len__(self) -> int:
        """Sequences, not documents."""
        return len(self.index.sequence_lengths)

    def __getitem__(self, idx: int | np.integer | slice) -> Any:
        """Sequence `idx`, or the list of sequences of a slice of step 1; with their modes when multimodal."""
        if isinstance(idx, (int, np.integer)):
            return self.get(idx)
        if not isinstance(idx, slice):
            raise TypeError(f"a sequence is asked for by an int or a slice, not by {type(idx).__name__}")
        start, stop, step = idx.indices(len(self))
        if step != 1:
            raise ValueError(f"slices of sequences have step 1, not {step}")
        if stop <= start:
            sequences: list[np.ndarray] = []
        else:
            lengths = self.index.sequence_lengths[start:stop]
            tokens = self._read(int(self.index.sequence_pointers[start]), int(lengths.sum(dtype=np.int64)))
            sequences = np.split(tokens, np.cumsum(lengths[:-1], dtype=np.int64))
        if self.index.sequence_modes is not None:
            return sequences, self.index.sequence_modes[start:stop]
        return sequences

    def get(self, idx: int | np.integer, offset: int = 0, length: int | None = None) -> Any:
        """Tokens `offset ... offset + length - 1` of sequence `idx` (None: up to its end), with its mode if multimodal.

        As in Megatron a part may run on into the sequences that follow.

        Raises: IndexError if the sequence does not exist, or the part runs past the end of the corpus.
        """
        idx = int(idx)
        if not -len(self) <= idx < len(self):
            raise IndexError(f"sequence {idx} of {len(self)} in {self.path_prefix}")
        size = int(self.index.sequence_lengths[idx])
        offset = int(offset)
        length = size - offset if length is None else int(length)
        # Python integers: numpy's would wrap at 2**31 inside one long document.
        pointer = int(self.index.sequence_pointers[idx]) + offset * self.index.dtype.itemsize
        if offset < 0 or length < 0 or pointer + length * self.index.dtype.itemsize > self.index.bin_bytes:
            raise IndexError(
                f"tokens {offset} to {offset + length} of sequence {idx} in {self.path_prefix}, which has {size}"
            )
        tokens = self._read(pointer, length)
        if self.index.sequence_modes is not None:
            return tokens, self.index.sequence_modes[idx]
        return tokens

    def _read(self, pointer: int, count: int) -> np.ndarray:
        """`count` tokens from byte `pointer` on."""
        if count == 0:
            return np.empty(0, self.index.dtype)
        path = get_bin_path(self.path_prefix)
        try:
            tokens = self._bin.read(self.index.dtype, count, pointer)
        except DataError:
            raise
        except Exception as error:  # clients of object storage have errors of their own
            raise _cannot_read(path, error) from error
        if len(tokens) != count:
            raise _torn(path, f"{count} tokens from byte {pointer} on were asked for, {len(tokens)} are there")
        return tokens

    @property
    def sequence_lengths(self) -> np.ndarray:
        """int32 [n], tokens of each sequence."""
        return self.index.sequence_lengths

    @property
    def document_indices(self) -> np.ndarray:
        """int64 [documents + 1]: document i is the sequences document_indices[i] ... document_indices[i + 1] - 1."""
        return self.index.document_indices

    def get_document_indices(self) -> np.ndarray:
        return self.index.document_indices

    @property
    def sequence_modes(self) -> np.ndarray:
        """int8 [n], multimodal corpora only."""
        if self.index.sequence_modes is None:
            raise DataError(f"{self.path_prefix} was opened without modes", fix="IndexedDataset(..., multimodal=True)")
        return self.index.sequence_modes

    @staticmethod
    def exists(path_prefix: str) -> bool:
        """Are both files of the pair there?"""
        there = object_storage.exists if is_object_storage_path(path_prefix) else os.path.exists
        return there(get_idx_path(path_prefix)) and there(get_bin_path(path_prefix))


class IndexedDatasetBuilder:
    """Writes a pair, sequence by sequence, in memory of 12 bytes a sequence.

    Everything goes to temporary names beside the final ones; `finalize` moves both into place. A builder that is not
    finalized leaves no pair (and as a context manager no temporary file either).

    Args:
        bin_path: the final `.bin`.
        dtype: type of the stored tokens, see `DType.optimal_dtype`.
        multimodal: keep a mode per sequence.
    """

    def __init__(self, bin_path: str, dtype: Any = np.int32, multimodal: bool = False):
        self.bin_path, self.dtype, self.multimodal = str(bin_path), np.dtype(dtype), multimodal
        DType.code_from_dtype(self.dtype)
        self._stored = self.dtype.newbyteorder("<")
        self.sequence_lengths = array("i")
        self.document_indices = array("q", [0])
        self.sequence_modes = array("b") if multimodal else None
        self._temporary = f"{self.bin_path}.{os.getpid()}.tmp"
        try:
            Path(self.bin_path).absolute().parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = open(self._temporary, "wb", buffering=1 << 20)  # noqa: SIM115 closed by finalize
        except OSError as error:
            raise _cannot_write(self.bin_path, error) from error

    def __enter__(self) -> "IndexedDatasetBuilder":
        return self

    def __exit__(self, *exception: object) -> None:
        self.abort()

    def add_item(self, tokens: Any, mode: int = 0) -> None:
        """One sequence (may be empty) of the current document. `end_document` makes the mark."""
        items = self._cast(tokens)
        self._write(items)
        self.sequence_lengths.append(len(items))
        if self.sequence_modes is not None:
            self.sequence_modes.append(mode)

    def end_document(self) -> None:
        """The sequences since the last mark are one document (none: an empty document)."""
        self.document_indices.append(len(self.sequence_lengths))

    def add_document(self, tokens: Any, lengths: Sequence[int], modes: Sequence[int] | None = None) -> None:
        """A whole document: its tokens and the lengths of its sequences, which must add up to them."""
        items = self._cast(tokens)
        if sum(lengths) != len(items):
            raise DataError(f"a document of {len(items)} tokens was given with lengths of {sum(lengths)} in all")
        self._write(items)
        self.sequence_lengths.extend(lengths)
        if self.sequence_modes is not None:
            self.sequence_modes.extend(modes if modes is not None else [0] * len(lengths))
        self.end_document()

    def add_documents(self, tokens: np.ndarray, lengths: Sequence[int], sequences: Sequence[int]) -> None:
        """Many documents: all tokens, the length of every sequence, and the number of sequences of each document."""
        items = self._cast(tokens)
        assert sum(lengths) == len(items) and sum(sequences) == len(lengths), (len(items), sum(lengths), sum(sequences))
        assert self.sequence_modes is None
        self._write(items)
        marks = len(self.sequence_lengths) + np.cumsum(sequences, dtype=np.int64)
        self.sequence_lengths.extend(lengths)
        self.document_indices.extend(marks.tolist())

    def add_index(self, path_prefix: str) -> None:
        """Append a whole pair: equal to having written its documents here."""
        other = IndexedDataset(path_prefix, multimodal=self.multimodal)
        if other.index.dtype != self._stored:
            raise DataError(
                f"{path_prefix} holds tokens of type {other.index.dtype.name}, {self.bin_path} of {self.dtype.name}",
                why="a pair has one type",
                fix="preprocess both with the same tokenizer",
            )
        shift = len(self.sequence_lengths)
        self.sequence_lengths.frombytes(np.ascontiguousarray(other.sequence_lengths, np.int32).tobytes())
        self.document_indices.frombytes((other.document_indices[1:] + shift).astype(np.int64).tobytes())
        if self.sequence_modes is not None:
            self.sequence_modes.frombytes(other.sequence_modes.tobytes())
        with open(get_bin_path(path_prefix), "rb") as source, self._as_data_error():
            shutil.copyfileobj(source, self._file, 1 << 24)

    def finalize(self, idx_path: str) -> None:
        """Write the index and move both files to their final names, the index last."""
        if self.document_indices[-1] != len(self.sequence_lengths):
            raise DataError(
                f"{self.bin_path}: {len(self.sequence_lengths) - self.document_indices[-1]} sequences after the last "
                "end of a document",
                why="no reader would find them",
                fix="call end_document() after the last add_item()",
            )
        temporary_idx = f"{idx_path}.{os.getpid()}.tmp"
        lengths = np.frombuffer(self.sequence_lengths, np.int32)
        marks = np.frombuffer(self.document_indices, np.int64)
        modes = None if self.sequence_modes is None else np.frombuffer(self.sequence_modes, np.int8)
        with self._as_data_error():
            _sync_and_close(self._file)
            try:
                write_index(temporary_idx, self.dtype, lengths, marks, modes)
                move_pair(self._temporary, self.bin_path, temporary_idx, idx_path)
            finally:
                Path(temporary_idx).unlink(missing_ok=True)

    def abort(self) -> None:
        """Drop what was written; nothing to do after `finalize`."""
        with contextlib.suppress(OSError):
            self._file.close()
        Path(self._temporary).unlink(missing_ok=True)

    def _cast(self, tokens: Any) -> np.ndarray:
        """Tokens in the stored type. Raises DataError if one does not fit: it would wrap silently."""
        items = np.asarray(tokens)
        if items.dtype == self.dtype or not items.size:
            return items.astype(self._stored, copy=False).reshape(-1)
        if self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype)
            low, high = int(items.min()), int(items.max())
            if low < limits.min or high > limits.max or items.dtype.kind not in "iub":
                raise DataError(
                    f"token {low if low < limits.min else high} ({items.dtype}) cannot be stored as {self.dtype.name}",
                    why=f"{self.dtype.name} holds {limits.min} to {limits.max}",
                    fix="use int32, or check the tokenizer's vocabulary size",
                )
        return items.astype(self._stored).reshape(-1)

    def _write(self, items: np.ndarray) -> None:
        with self._as_data_error():
            self._file.write(items.tobytes())

    @contextlib.contextmanager
    def _as_data_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _cannot_write(self.bin_path, error) from error


def write_index(
    path: str, dtype: np.dtype, lengths: np.ndarray, marks: np.ndarray, modes: np.ndarray | None = None
) -> None:
    """A whole `.idx`, on the disk when this returns; chunk by chunk, so that the arrays may be mapped files.

    Args:
        lengths: tokens of each sequence, int32 [n].
        marks: 0, then the number of sequences after each document, int64 [d].
        modes: int8 [n] of a multimodal corpus.
    """
    with open(path, "wb") as file:
        file.write(_MAGIC)
        file.write(struct.pack("<QBQQ", _VERSION, DType.code_from_dtype(dtype), len(lengths), len(marks)))
        for part in _chunks(lengths):
            file.write(part.astype("<i4").tobytes())
        begin = 0
        for part in _chunks(lengths):
            pointers = sequence_pointers(part, dtype.itemsize) + begin
            file.write(pointers.tobytes())
            begin = int(pointers[-1]) + int(part[-1]) * dtype.itemsize
        for part in _chunks(marks):
            file.write(part.astype("<i8").tobytes())
        if modes is not None:
            file.write(modes.astype("<i1").tobytes())
        _sync_and_close(file)


def move_pair(temporary_bin: str, bin_path: str, temporary_idx: str, idx_path: str) -> None:
    """Both files to their final names. Without an index nothing loads: the old one goes first, the new comes last."""
    Path(idx_path).unlink(missing_ok=True)
    os.replace(temporary_bin, bin_path)
    os.replace(temporary_idx, idx_path)


def _chunks(values: np.ndarray, size: int = 1 << 18) -> Iterator[np.ndarray]:
    return (values[begin : begin + size] for begin in range(0, len(values), size))


def sequence_pointers(lengths: np.ndarray, itemsize: int) -> np.ndarray:
    """Byte offset of each sequence, int64: the running sum of the lengths before it.

    The sum is 64-bit from the first addition on; numpy would keep the lengths' 32 bits for the product.
    """
    pointers = np.zeros(len(lengths), "<i8")
    np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
    pointers *= itemsize
    return pointers


def _sync_and_close(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _idx_bytes(path: str, folder: str | None) -> np.ndarray:
    """A whole `.idx` as uint8, mapped where it lies on a disk."""
    if is_object_storage_path(path):
        return object_storage.fetch(path, folder)
    return np.memmap(path, mode="r") if os.path.getsize(path) else np.empty(0, np.uint8)  # nothing cannot be mapped


def _torn(path: str, why: str) -> DataError:
    return DataError(f"{path} is torn", why=why, fix="preprocess the corpus again, or copy the pair again")


def _cannot_read(path: str, error: Exception) -> DataError:
    return DataError(
        f"cannot read {path}: {getattr(error, 'strerror', None) or error}",
        why="a corpus is a pair of files, <prefix>.bin and <prefix>.idx",
        fix="give the prefix that `megatron-lite preprocess` printed, without .bin or .idx",
    )


def _cannot_write(path: str, error: OSError) -> DataError:
    return DataError(f"cannot write {path}: {error.strerror or error}", fix="free some space, or write elsewhere")
