"""Reading JSONL in constant memory: files, globs and .gz in, blocks of numbered lines out."""

from __future__ import annotations

import glob
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lite.errors import DataError

# Lines travel to the workers in blocks of about this size: large enough that the trip costs nothing.
BLOCK_BYTES = 256 * 1024


class BadLine(ValueError):
    """A line that is no record; the text says why."""


@dataclass(frozen=True)
class Block:
    """Consecutive lines of one file."""

    file: str
    first: int  # number of the first line, counted from 1
    lines: list[bytes]
    read: int  # bytes read from the disk, of all files, once this block is done


def find_inputs(patterns: Sequence[str]) -> list[str]:
    """The files that paths and globs name, in the order given; those of a glob sorted.

    Raises: DataError if a pattern matches nothing, or a file has a compression that is not read here.
    """
    files: list[str] = []
    for pattern in patterns:
        found = [pattern] if Path(pattern).is_file() else sorted(f for f in glob.glob(pattern) if Path(f).is_file())
        if not found:
            raise DataError(
                f"--input {pattern}: there is no such file", fix="give a .jsonl or .jsonl.gz file, or a glob"
            )
        files += found
    for file in files:
        if file.endswith((".zst", ".bz2", ".xz", ".parquet")):
            raise DataError(
                f"--input {file}: this kind of file cannot be read",
                why="plain and .gz files are",
                fix="unpack it first",
            )
    return files


def size_of(files: Sequence[str]) -> int:
    """Bytes on disk, the total that `Block.read` runs up to."""
    return sum(Path(file).stat().st_size for file in files)


def read_blocks(files: Sequence[str], block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """All lines of all files. Blank lines are kept, so that numbers are those of an editor.

    Raises: DataError if a file cannot be read or unpacked.
    """
    before = 0
    for file in files:
        try:
            with open(file, "rb") as raw:
                stream = gzip.GzipFile(fileobj=raw) if file.endswith(".gz") else raw
                first = 1
                while lines := stream.readlines(block_bytes):
                    yield Block(file, first, lines, before + raw.tell())
                    first += len(lines)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"cannot read {file}: {error}", fix="check the file, or leave it out") from error
        before += Path(file).stat().st_size


def parse(line: bytes, keys: Sequence[str]) -> list[list[str]] | None:
    """For each key the record's texts: one, or the strings of a list. None for a blank line.

    Raises: BadLine.
    """
    if not line.strip():
        return None
    try:
        record: Any = json.loads(line)
    except ValueError as error:  # also for bytes that are no UTF-8
        raise BadLine(f"not JSON ({error})") from None
    if not isinstance(record, dict):
        raise BadLine(f"not a JSON object but {type(record).__name__}")
    texts = []
    for key in keys:
        if key not in record:
            raise BadLine(f"no key {key!r}, the record has {', '.join(map(repr, record)) or 'none'}")
        value = record[key]
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise BadLine(f"{key!r} is neither a text nor a list of texts")
        for text in value:
            if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
                raise BadLine(f"{key!r} holds half a surrogate pair, which is no text")
        texts.append(value)
    return texts
