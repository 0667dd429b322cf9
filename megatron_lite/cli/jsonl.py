"""Reading records in constant memory: files and globs in, blocks of numbered records out.

    .jsonl .json ...   plain text          a record is a line
    .gz .bz2 .xz       Python's own        }  the same, unpacked on the way
    .zst               needs zstandard     }
    .parquet           needs pyarrow       a record is a row

Every block says where the next one begins, so that reading can go on there in another run.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megatron_lite.cli.optional import installed
from megatron_lite.errors import ConfigError, DataError

# Lines travel to the workers in blocks of about this size: large enough that the trip costs nothing.
BLOCK_BYTES = 256 * 1024

# What a kind of file needs beside Python itself.
_PACKAGES = {".zst": "zstandard", ".parquet": "pyarrow"}

Record = bytes | dict[str, Any]  # a line, or a row that is unpacked already


class BadLine(ValueError):
    """A line that is no record; the text says why."""


@dataclass(frozen=True)
class Position:
    """Where reading goes on: the file's place in the list, and what of it is done."""

    file: int = 0
    line: int = 1  # number of the next line (or row), counted from 1
    offset: int = 0  # unpacked bytes before it


@dataclass(frozen=True)
class Block:
    """Consecutive records of one file."""

    file: str
    first: int  # number of the first line, counted from 1
    lines: Sequence[Record]
    size: int  # bytes of the records
    read: int  # bytes read from the disk, of all files, once this block is done
    next: Position


def find_inputs(patterns: Sequence[str]) -> list[str]:
    """The files that paths and globs name, in the order given; those of a glob sorted.

    Raises: DataError if a pattern matches nothing; ConfigError if a file needs a package that is not installed.
    """
    files: list[str] = []
    for pattern in patterns:
        found = [pattern] if Path(pattern).is_file() else sorted(f for f in glob.glob(pattern) if Path(f).is_file())
        if not found:
            folder = Path(pattern).is_dir()
            raise DataError(
                f"--input {pattern}: {'a folder is no file' if folder else 'there is no such file'}",
                fix=f"--input '{pattern}/*.jsonl'" if folder else "give a .jsonl or .jsonl.gz file, or a glob",
            )
        files += found
    for file in files:
        package = _PACKAGES.get(Path(file).suffix)
        if package is not None and not installed(package):
            raise ConfigError(
                f"--input {file} needs the package {package}, which is not installed",
                why="plain, .gz, .bz2 and .xz files need none",
                fix=f"pip install {package}",
            )
    return files


def size_of(files: Sequence[str]) -> int:
    """Bytes on disk, the total that `Block.read` runs up to."""
    return sum(Path(file).stat().st_size for file in files)


def read_blocks(
    files: Sequence[str],
    block_bytes: int = BLOCK_BYTES,
    start: Position | None = None,
    columns: Sequence[str] | None = None,
) -> Iterator[Block]:
    """All records of all files. Blank lines are kept, so that numbers are those of an editor.

    Args:
        block_bytes: about so much in a block; a longer line is a block of its own.
        start: leave out what lies before (a plain file is not read there, a packed one is unpacked again).
        columns: of .parquet files only these are read; None: all.
    Raises: DataError if a file cannot be read or unpacked.
    """
    start = start or Position()
    before = size_of(files[: start.file])
    for i in range(start.file, len(files)):
        begin = start if i == start.file else Position(i)
        read = _read_parquet if files[i].endswith(".parquet") else _read_text
        yield from read(files[i], begin, before, block_bytes, columns)
        before += Path(files[i]).stat().st_size


def _read_text(
    file: str, begin: Position, before: int, block_bytes: int, columns: Sequence[str] | None
) -> Iterator[Block]:
    try:
        with open(file, "rb") as raw:
            stream: Any = _unpacked(raw, file)
            stream.seek(begin.offset)  # unpackers read up to there
            first, offset = begin.line, begin.offset
            while lines := stream.readlines(block_bytes):
                size = sum(map(len, lines))
                following = Position(begin.file, first + len(lines), offset + size)
                yield Block(file, first, lines, size, before + raw.tell(), following)
                first, offset = following.line, following.offset
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise _unreadable(file, error) from error


def _unpacked(raw: BinaryIO, file: str) -> Any:
    suffix = Path(file).suffix
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if suffix == ".bz2":
        return bz2.BZ2File(raw)
    if suffix == ".xz":
        return lzma.LZMAFile(raw)
    if suffix == ".zst":
        return io.BufferedReader(_Zstandard(raw), 1 << 18)
    return raw


class _Zstandard(io.RawIOBase):
    """A .zst file, unpacked; one that ends inside a frame is an error, which the package's own reader passes over."""

    def __init__(self, raw: BinaryIO):
        import zstandard  # the one place that needs it; find_inputs has looked for it

        # Files packed with `--long=31` need so large a window.
        self._new = lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        self._error = zstandard.ZstdError
        self._raw, self._frame, self._inside = raw, self._new(), False
        self._ready = memoryview(b"")
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            packed = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame, self._inside = self._new(), False
            packed = packed or self._raw.read(1 << 16)
            if not packed:
                if self._inside:
                    raise EOFError("the file ends inside a compressed frame")
                return 0
            self._inside = True
            try:
                self._ready = memoryview(self._frame.decompress(packed))
            except self._error as error:
                raise EOFError(f"not a Zstandard file, or a torn one ({error})") from error
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        self._at += count
        return count

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Forward only: what lies between is unpacked."""
        if whence != io.SEEK_SET or offset < self._at:
            raise io.UnsupportedOperation("a packed file is read forward")
        scratch = bytearray(1 << 18)
        while self._at < offset and self.readinto(memoryview(scratch)[: offset - self._at]):
            pass
        return self._at


def _read_parquet(
    file: str, begin: Position, before: int, block_bytes: int, columns: Sequence[str] | None
) -> Iterator[Block]:
    import pyarrow  # the one place that needs it; find_inputs has looked for it
    import pyarrow.parquet

    on_disk = Path(file).stat().st_size
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            named = None if columns is None else list(columns)
            if named is not None and not set(named) <= set(table.schema_arrow.names):
                named = None  # its rows are bad: with all their columns they say what there is instead
            total, done, offset = table.metadata.num_rows, 0, begin.offset
            for group in range(table.num_row_groups):
                about = table.metadata.row_group(group)
                if done + about.num_rows < begin.line:  # all of it lies before
                    done += about.num_rows
                    continue
                rows = min(max(1, block_bytes * about.num_rows // max(about.total_byte_size, 1)), 1 << 14)
                for batch in table.iter_batches(rows, row_groups=[group], columns=named):
                    skipped = min(max(begin.line - 1 - done, 0), batch.num_rows)
                    done += batch.num_rows
                    batch = batch.slice(skipped)
                    if batch.num_rows:
                        offset += batch.nbytes
                        following = Position(begin.file, done + 1, offset)
                        first = done - batch.num_rows + 1
                        at = before + on_disk * done // max(total, 1)
                        yield Block(file, first, batch.to_pylist(), batch.nbytes, at, following)
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: str, error: Exception) -> DataError:
    return DataError(f"cannot read {file}: {error}", fix="check the file, or leave it out")


def parse(line: Record, keys: Sequence[str], cut: Callable[[str], list[str]] | None = None) -> list[list[str]] | None:
    """For each key the record's texts: one, or the strings of a list. None for a blank line.

    Args:
        cut: makes the texts of a plain one; a list has been cut before.
    Raises: BadLine.
    """
    if isinstance(line, dict):
        record: Any = line
    else:
        if not line.strip():
            return None
        try:
            record = json.loads(line)
        except ValueError as error:  # also for bytes that are no UTF-8
            raise BadLine(f"not JSON ({error})") from None
        except RecursionError:
            raise BadLine("not JSON that can be read: nested too deeply") from None
        if not isinstance(record, dict):
            raise BadLine(f"not a JSON object but {type(record).__name__}")
    texts = []
    for key in keys:
        if key not in record:
            raise BadLine(f"no key {key!r}, the record has {', '.join(map(repr, record)) or 'none'}")
        value = record[key]
        pieces = [value] if isinstance(value, str) else value
        if not isinstance(pieces, list) or not all(isinstance(text, str) for text in pieces):
            raise BadLine(f"{key!r} is neither a text nor a list of texts")
        for text in pieces:
            if not text.isascii():
                try:
                    text.encode("utf-8")
                except UnicodeEncodeError:
                    raise BadLine(f"{key!r} holds half a surrogate pair, which is no text") from None
        texts.append(cut(value) if cut is not None and isinstance(value, str) else pieces)
    return texts
