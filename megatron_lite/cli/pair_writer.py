"""A pair that grows on the disk and can be cut back: what `preprocess` writes until a run is complete.

    stem.bin       tokens            }  sizes() says how long each is after a whole block; opened again with these
    stem.lengths   i32, a sequence   }  sizes, what a killed run wrote behind them is cut off
    stem.marks     i64, a document   }

Nothing of it has a name that a reader would take for a corpus. `finish` makes the index of it and moves the pair to its
place. Memory does not grow with the corpus.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megatron_lite.cli.encoder import Documents
from megatron_lite.datasets.indexed_dataset import get_bin_path, get_idx_path, move_pair, write_index

_KINDS = ("bin", "lengths", "marks")


class PairWriter:
    """Args:
        stem: path of the growing files, without their endings.
        dtype: type of the tokens.
        sizes: go on after so many bytes of each file; None: begin.

    Raises: OSError if a file cannot be opened, or is shorter than it should be.
    """

    def __init__(self, stem: str, dtype: np.dtype, sizes: list[int] | None = None):
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._paths = [f"{stem}.{kind}" for kind in _KINDS]
        self._files: list[BinaryIO] = []
        for path, size in zip(self._paths, sizes or [0] * len(_KINDS)):
            file = open(path, "r+b" if sizes else "w+b", buffering=1 << 20)  # noqa: SIM115 closed by close
            self._files.append(file)
            if os.fstat(file.fileno()).st_size < size:
                raise OSError(f"{path} is shorter than {size} bytes")
            file.truncate(size)
            file.seek(size)
        if sizes is None:
            self._files[2].write(np.zeros(1, "<i8").tobytes())
        self.num_sequences = self._files[1].tell() // 4

    def add(self, documents: Documents) -> None:
        marks = self.num_sequences + np.cumsum(documents.sequences, dtype=np.int64)
        for file, values, dtype in zip(
            self._files, (documents.tokens, documents.lengths, marks), (self.dtype, "<i4", "<i8")
        ):
            file.write(np.ascontiguousarray(values, dtype).data)
        self.num_sequences += len(documents.lengths)

    def sizes(self) -> list[int]:
        """Bytes of each file, with those that are not on the disk yet."""
        return [file.tell() for file in self._files]

    def flush(self) -> None:
        """All that was added can be read."""
        for file in self._files:
            file.flush()

    def sync(self) -> None:
        """All that was added is on the disk when this returns."""
        self.flush()
        for file in self._files:
            os.fsync(file.fileno())

    def append(self, other: PairWriter) -> None:
        """The other's documents after these."""
        other.flush()
        for file, path in zip(self._files[:2], other._paths):
            with open(path, "rb") as source:
                shutil.copyfileobj(source, file, 1 << 22)
        with open(other._paths[2], "rb") as source:
            source.seek(8)  # its first mark is the 0 of its beginning
            while part := source.read(1 << 22):
                self._files[2].write((np.frombuffer(part, "<i8") + self.num_sequences).astype("<i8").data)
        self.num_sequences += other.num_sequences

    def write_index(self) -> None:
        """The index, under a name of its own; the last thing that can fail for want of space."""
        self.flush()
        os.fsync(self._files[0].fileno())  # the others do not outlive this run
        lengths = np.memmap(self._paths[1], "<i4", "r") if self.num_sequences else np.empty(0, "<i4")
        write_index(f"{self._paths[0]}.idx", self.dtype, lengths, np.memmap(self._paths[2], "<i8", "r"))

    def finish(self, prefix: str) -> None:
        """The pair to its place. `write_index` comes before."""
        self.close()
        move_pair(self._paths[0], get_bin_path(prefix), f"{self._paths[0]}.idx", get_idx_path(prefix))
        for path in self._paths[1:]:
            Path(path).unlink()

    def close(self) -> None:
        for file in self._files:
            file.close()
