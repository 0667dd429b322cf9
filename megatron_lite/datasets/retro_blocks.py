"""Rows of a long table in files of a fixed number of rows, made by several workers, never trusted by their name alone.

    n = 25 rows, blocks of 10      000-010.npy   010-020.npy   020-025.npy       numbers padded to one width
    worker 0 of 2                  block 0                     block 2           the k-th block is worker k mod 2's
    worker 1 of 2                                block 1

Which worker makes a block depends on the block's number alone, so workers that come late or start again agree on it.
A block is written under a temporary name and renamed: a killed worker leaves no half of one. What cannot be opened or
has another number of rows is made anew. `.npy` files hold one array and are mapped, `.npz` files hold several.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lite.errors import DataError

Arrays = Mapping[str, np.ndarray]
ONE = "data"  # the name of the array of an .npy file


@dataclass(frozen=True)
class Block:
    """Rows [start, end) and the file that holds them."""

    number: int
    start: int
    end: int
    path: Path

    @property
    def rows(self) -> int:
        return self.end - self.start


def width_of(rows: int) -> int:
    """Digits of the numbers in file names: 10 rows -> 2, 100 -> 3, 100000 -> 6, 1234567 -> 8."""
    return int(math.ceil(math.log(rows) / math.log(10)) + 1) if rows > 1 else 1


def blocks_of(rows: int, block_size: int, folder: Path, suffix: str = ".npy") -> list[Block]:
    """The blocks of a table of `rows` rows; none of an empty one."""
    width = width_of(rows)
    ranges = [(start, min(start + block_size, rows)) for start in range(0, rows, block_size)]
    return [
        Block(number, start, end, folder / f"{start:0{width}d}-{end:0{width}d}{suffix}")
        for number, (start, end) in enumerate(ranges)
    ]


def blocks_on_disk(folder: Path) -> list[Block]:
    """The blocks that a folder's names tell, from row 0 on as far as they go on from each other."""
    found = []
    for path in folder.glob("[0-9]*-[0-9]*.npy"):
        start, end = path.stem.split("-")
        found.append((int(start), int(end), path))
    blocks: list[Block] = []
    for first, last, path in sorted(found):
        if first != (blocks[-1].end if blocks else 0):
            break
        blocks.append(Block(len(blocks), first, last, path))
    return blocks


def share(blocks: list[Block], worker: int, workers: int) -> list[Block]:
    """The blocks that one of several workers makes."""
    return [block for block in blocks if block.number % workers == worker]


def read_block(block: Block, check: Callable[[Block, Arrays], bool] | None = None) -> Arrays | None:
    """The arrays of a block; None where there is no whole file of this block.

    Args:
        check: whether arrays are this block's. Default: as many rows as the block has.
    """
    try:
        if block.path.suffix == ".npy":
            arrays: Arrays = {ONE: np.load(block.path, mmap_mode="r")}
        else:
            with np.load(block.path) as file:
                arrays = dict(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return None
    good = check(block, arrays) if check is not None else len(arrays[ONE]) == block.rows
    return arrays if good else None


def write_block(path: Path, arrays: Arrays) -> None:
    """Write a file completely, then give it its name. Raises: DataError if the disk is full or cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            if path.suffix == ".npy":
                np.save(file, arrays[ONE])
            else:
                np.savez(file, **dict(arrays))  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise DataError(
            f"cannot write {path}: {error.strerror or error}", fix="free some space; the same command goes on"
        ) from error


class BlockTable:
    """The rows of all blocks as one array `[rows, columns]`, mapped, not loaded.

    Args:
        blocks: all of a table, in order.
    Raises: DataError if one is missing or torn.
    """

    def __init__(self, blocks: list[Block]):
        self.blocks = blocks
        self.rows = blocks[-1].end if blocks else 0
        self.block_size = blocks[0].rows if blocks else 1
        self._open()

    def _open(self) -> None:
        self._maps: list[np.ndarray] = []
        for block in self.blocks:
            arrays = read_block(block)
            if arrays is None:
                raise DataError(
                    f"{block.path} is missing or torn",
                    why=f"it holds rows {block.start} to {block.end}",
                    fix="run `megatron-lite retro preprocess` again: it makes what is missing",
                )
            self._maps.append(arrays[ONE])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_maps"}  # a map would travel as a copy

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> np.ndarray:
        number, at = divmod(row, self.block_size)
        return self._maps[number][at]

    def slices(self, size: int) -> Iterator[tuple[int, np.ndarray]]:
        """(first row, up to `size` rows) over all of it; where slices begin does not depend on the blocks."""
        for start in range(0, self.rows, size):
            yield start, self.rows_between(start, min(start + size, self.rows))

    def rows_between(self, start: int, end: int) -> np.ndarray:
        """Rows [start, end): a view where they lie in one block."""
        parts = []
        while start < end:
            number, at = divmod(start, self.block_size)
            stop = min(end, self.blocks[number].end)
            parts.append(self._maps[number][at : at + stop - start])
            start = stop
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
