"""The chunk database of Retro: which pieces of which documents can be retrieved.

    document     130 tokens without its end-of-document token, m = 64
    chunks       [0, 64)  [64, 128)  [128, 130)                          never across documents, the last one shorter
    row          (data set, document, start, end, length of its text)    uint32, one a chunk

A chunk without any text that the embedder can read is invalid and not in the database. Blocks of documents are cut by
workers (`individual/`), then laid together (`merged/`):

    train.npy      chunks of the first documents of each data set, as many as preprocessing's train split has
    valid.npy      the rest
    sampled.npy    the first chunks of each data set, to train an index on

The row of a chunk in train.npy is its id everywhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lite.datasets.indexed_dataset import IndexedDataset
from megatron_lite.datasets.retro_blocks import Arrays, Block
from megatron_lite.errors import DataError

COLUMNS = ("dataset", "document", "start", "end", "length")


@dataclass
class DatasetInfo:
    """A record of `indexed_dataset_infos.json`: what the database took from one data set.

    ratio: its weight in the blend; prefix: as config.json has it.
    n_docs_train: documents of the train split, the first of all. Chunks are counted without invalid ones, but for
    `n_chunks_invalid`.
    """

    ratio: float
    prefix: str
    n_docs: int
    n_docs_train: int
    n_chunks: int = 0
    n_chunks_train: int = 0
    n_chunks_valid: int = 0
    n_chunks_invalid: int = 0
    n_chunks_sampled: int = 0


def cut(length: int, chunk_length: int) -> list[tuple[int, int]]:
    """Consecutive pieces of `chunk_length` tokens, the last one shorter, none empty."""
    return [(start, min(start + chunk_length, length)) for start in range(0, length, chunk_length)]


def without_eod(tokens: np.ndarray, eod: int) -> np.ndarray:
    """A document's tokens without the token that ends it."""
    return tokens[:-1] if len(tokens) and tokens[-1] == eod else tokens


def chunks_of_documents(
    corpus: IndexedDataset,
    start: int,
    end: int,
    chunk_length: int,
    eod: int,
    text_of: Callable[[Sequence[int]], str],
    length_of: Callable[[str], int],
    advance: Callable[[int], None] = lambda count: None,
) -> Arrays:
    """Documents [start, end) of a corpus, cut.

    Args:
        text_of: tokens -> text. length_of: what the embedder reads of it; 0: nothing, the chunk is invalid.
        advance: told now and then how many documents are done.
    Returns: `chunks_valid`, `chunks_invalid` uint32 `[n, 4]` = (document, start, end, length); `doc_offsets` uint64
        `[documents, 2]` = (document, valid chunks up to its end).
    """
    valid: list[tuple[int, int, int, int]] = []
    invalid: list[tuple[int, int, int, int]] = []
    offsets = np.empty((end - start, 2), np.uint64)
    told = start
    for document in range(start, end):
        tokens = without_eod(corpus.get(document), eod)
        for begin, stop in cut(len(tokens), chunk_length):
            length = length_of(text_of(tokens[begin:stop].tolist()))
            (valid if length else invalid).append((document, begin, stop, length))
        offsets[document - start] = document, len(valid)
        if document - told >= 100:
            advance(document - told)
            told = document
    advance(end - told)
    return {
        "chunks_valid": np.array(valid, np.uint32).reshape(-1, 4),
        "chunks_invalid": np.array(invalid, np.uint32).reshape(-1, 4),
        "doc_offsets": offsets,
    }


def is_chunk_block(block: Block, arrays: Arrays) -> bool:
    """Whether a file is a block of documents' chunks."""
    if set(arrays) != {"chunks_valid", "chunks_invalid", "doc_offsets"}:
        return False
    offsets, valid = arrays["doc_offsets"], arrays["chunks_valid"]
    last = int(offsets[-1, 1]) if len(offsets) else 0
    return len(offsets) == block.rows and last == len(valid) and int(offsets[0, 0]) == block.start


def count_chunks(info: DatasetInfo, blocks: Sequence[Block], read: Callable[[Block], Arrays]) -> None:
    """Fills in the numbers of chunks from the data set's blocks."""
    info.n_chunks = info.n_chunks_train = info.n_chunks_invalid = 0
    for block in blocks:
        arrays = read(block)
        valid = arrays["chunks_valid"]
        info.n_chunks += len(valid)
        info.n_chunks_train += int((valid[:, 0] < info.n_docs_train).sum())
        info.n_chunks_invalid += len(arrays["chunks_invalid"])
    info.n_chunks_valid = info.n_chunks - info.n_chunks_train


def share_of_samples(infos: Sequence[DatasetInfo], ntrain: int) -> None:
    """How many chunks of each data set an index is trained on: its weight's part of `ntrain`, at most its train
    chunks."""
    total = sum(info.ratio for info in infos)
    for info in infos:
        info.n_chunks_sampled = min(int(ntrain * info.ratio / total), info.n_chunks_train)


def merge(
    infos: Sequence[DatasetInfo],
    blocks: Sequence[Sequence[Block]],
    read: Callable[[Block], Arrays],
    folder: Path,
) -> None:
    """Write `train.npy`, `valid.npy`, `sampled.npy` (uint32 `[n, 5]`, see COLUMNS) and `train_doc_offsets.npy` (uint64
    `[documents, 3]` = (data set, document, chunks of the file up to its end)), each complete before it has its name.

    Memory: one block.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {
        "train": (sum(info.n_chunks_train for info in infos), 5),
        "valid": (sum(info.n_chunks_valid for info in infos), 5),
        "sampled": (sum(info.n_chunks_sampled for info in infos), 5),
    }
    temporary = {name: folder / f".{name}.npy.tmp" for name in (*sizes, "train_doc_offsets")}
    arrays: dict[str, Any] = {name: _created(temporary[name], size, np.uint32) for name, size in sizes.items()}
    documents = (sum(info.n_docs_train for info in infos), 3)
    arrays["train_doc_offsets"] = _created(temporary["train_doc_offsets"], documents, np.uint64)
    filled = dict.fromkeys(arrays, 0)

    def add(name: str, rows: np.ndarray) -> None:
        arrays[name][filled[name] : filled[name] + len(rows)] = rows
        filled[name] += len(rows)

    for number, (info, own) in enumerate(zip(infos, blocks)):
        before, sampled = filled["train"], 0
        for block in own:
            of_block = read(block)
            valid, offsets = of_block["chunks_valid"], of_block["doc_offsets"]
            rows = np.concatenate([np.full((len(valid), 1), number, np.uint32), valid], axis=1)
            in_train = valid[:, 0] < info.n_docs_train
            kept = int((offsets[:, 0] < info.n_docs_train).sum())
            ends = offsets[:kept].astype(np.uint64)
            dataset = np.full((kept, 1), number, np.uint64)
            add("train_doc_offsets", np.concatenate([dataset, ends[:, :1], ends[:, 1:] + np.uint64(before)], axis=1))
            wanted = min(info.n_chunks_sampled - sampled, int(in_train.sum()))
            add("sampled", rows[in_train][:wanted])
            sampled += wanted
            add("train", rows[in_train])
            add("valid", rows[~in_train])
            before = filled["train"]
    for name, array in arrays.items():
        assert filled[name] == len(array), (name, filled[name], len(array))
        if isinstance(array, np.memmap):
            array.flush()
        else:
            with temporary[name].open("wb") as file:
                np.save(file, array)
    arrays.clear()
    for name, path in temporary.items():
        path.replace(folder / f"{name}.npy")


def _created(path: Path, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array in a new file; an empty one, which cannot be mapped, in memory."""
    if not shape[0]:
        return np.empty(shape, dtype)
    return np.lib.format.open_memmap(path, "w+", dtype, shape)


class DBDataset:
    """The chunks of one merged file. Item i: `doc_id`, and `text` int64 `[m]`, padded on the right with `eod`.

    Args:
        path: a merged file.
        corpora: the data sets, in the order of the blend.
        chunk_length: m.
    """

    def __init__(self, path: Path, corpora: Sequence[IndexedDataset], chunk_length: int, eod: int):
        self.path, self.corpora, self.chunk_length, self.eod = path, list(corpora), chunk_length, eod
        self._open()

    def _open(self) -> None:
        fix = "megatron-lite retro preprocess --retro-tasks db"
        try:
            self.chunks = np.load(self.path, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path} cannot be read: {error}", fix=fix) from None
        if self.chunks.ndim != 2 or self.chunks.shape[1] != len(COLUMNS):
            raise DataError(f"{self.path} is no chunk database", fix=fix)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "chunks"}  # a map travels as a copy

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        return {"doc_id": int(self.chunks[idx, 1]), "text": self.padded(idx)}

    def tokens(self, idx: int) -> np.ndarray:
        """The chunk's tokens, as the corpus has them."""
        dataset, document, start, end, _ = self.chunks[idx].tolist()
        return self.corpora[dataset].get(document, start, end - start)

    def padded(self, idx: int) -> np.ndarray:
        """The chunk's tokens, int64 `[m]`."""
        text = np.full(self.chunk_length, self.eod, np.int64)
        tokens = self.tokens(idx)
        text[: len(tokens)] = tokens
        return text

    def document_of(self, ids: np.ndarray) -> np.ndarray:
        """(data set, document) of chunks `[...]` in one number, int64."""
        return self.chunks[ids, 0].astype(np.int64) << 32 | self.chunks[ids, 1].astype(np.int64)
