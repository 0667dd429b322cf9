"""Nearest neighbours of vectors: an exact blocked search, and faiss where it is installed.

    queries [q, D] x tile of the vectors [t, D] --> squared distances [q, t] --> those below the K-th so far --> best K

Every product has one shape (the last tile is filled up), so equal vectors have equal distances wherever they lie, and
ties go to the lower number: neither the size of the blocks nor the number of workers changes a result. Memory: one
tile, one table of distances, K candidates a query.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_lite.datasets.retro_blocks import BlockTable
from megatron_lite.errors import ConfigError, DataError

_TILE, _QUERIES = 4096, 256
_NOTHING = torch.iinfo(torch.int64).max
_LARGEST = torch.finfo(torch.float32).max


class Index(Protocol):
    """Rows that can be searched."""

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Queries fp32 `[q, D]` -> squared distances fp32 and rows int64 `[q, k]`, the nearest first; -1: none."""


class ExactIndex:
    """Every vector is looked at.

    Args:
        vectors: fp32 rows, mapped from files.
        device: where products are made. None: CUDA if there is one, else the CPU.
    """

    def __init__(self, vectors: BlockTable, device: torch.device | None = None):
        assert len(vectors) < 2**31, "a number of 31 bits beside a distance of 32"
        self.vectors = vectors
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @torch.inference_mode()
    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """As `Index` has it."""
        count, dim = queries.shape
        padded = -(-count // _QUERIES) * _QUERIES
        q = torch.zeros(padded, dim, device=self.device)
        q[:count] = torch.from_numpy(np.ascontiguousarray(queries, np.float32)).to(self.device)
        q_norms = (q * q).sum(1, keepdim=True)
        best = torch.full((padded, k), _NOTHING, device=self.device)
        for start, rows in self.vectors.slices(_TILE):
            x = torch.zeros(_TILE, dim, device=self.device)
            x[: len(rows)] = torch.from_numpy(np.array(rows)).to(self.device)  # torch wants no read-only map
            norms = (x * x).sum(1)
            norms[len(rows) :] = torch.inf
            for at in range(0, padded, _QUERIES):
                here = slice(at, at + _QUERIES)
                distances = torch.addmm(norms + q_norms[here], q[here], x.T, alpha=-2).clamp_(min=0)
                best[here] = _merged(best[here], distances, start)
        best = best[:count].cpu()
        rows_found = torch.where(best == _NOTHING, -1, best & 0xFFFFFFFF)
        distances_found = (best >> 32).to(torch.int32).view(torch.float32)
        return torch.where(rows_found < 0, torch.inf, distances_found).numpy(), rows_found.numpy()


def _merged(best: Tensor, distances: Tensor, first: int) -> Tensor:
    """The K best of those so far and a tile.

    Args:
        best: `[q, K]` sorted; the bits of the distance, which sort as it does since none is negative, above the row's.
        distances: `[q, t]` of rows `first` and following; infinity: no row.
    """
    k, device = best.shape[1], best.device
    bound = (best[:, -1:] >> 32).to(torch.int32).view(torch.float32)  # of the K-th
    bound = torch.where(best[:, -1:] == _NOTHING, _LARGEST, bound)  # while there are fewer; less than infinity
    query, column = (distances <= bound).nonzero(as_tuple=True)  # an equal distance loses to a lower row: the sort's
    if len(query) > 4 * k * len(best) and distances.shape[1] > k:
        own = torch.topk(distances, k, largest=False, sorted=False).values.amax(1, keepdim=True)
        query, column = (distances <= torch.minimum(own, bound)).nonzero(as_tuple=True)
    if not len(query):
        return best
    counts = torch.bincount(query, minlength=len(best))
    place = torch.arange(len(query), device=device) - (torch.cumsum(counts, 0) - counts)[query]
    found = torch.full((len(best), int(counts.max())), _NOTHING, device=device)
    bits = distances[query, column].view(torch.int32)
    found[query, place] = (bits.long() << 32) | (first + column)
    return torch.sort(torch.cat([best, found], 1), 1).values[:, :k]


# -- faiss -------------------------------------------------------------------------------------------------------------


def is_exact(factory: str | None) -> bool:
    """Whether a factory string asks for what the exact search does."""
    return factory is None or factory.replace(" ", "") in ("Flat", "IDMap,Flat", "IDMap2,Flat")


def faiss_module() -> Any:
    """The package. Raises: ConfigError where it is not installed."""
    try:
        return importlib.import_module("faiss")
    except ImportError:
        raise ConfigError(
            "this index needs the package faiss, which is not installed",
            why="the built-in search looks at every vector, as the factory string Flat does; other kinds are faiss's",
            fix="pip install 'megatron_lite[retro]' (faiss-cpu), or --retro-index-type exact",
        ) from None


def train_faiss(vectors: np.ndarray, factory: str) -> Any:
    """An empty index, trained. Raises: ConfigError for a factory string or a number of vectors that faiss refuses."""
    faiss = faiss_module()
    try:
        index = faiss.index_factory(vectors.shape[1], factory)
        if not index.is_trained:
            index.train(np.ascontiguousarray(vectors, np.float32))
        return index
    except RuntimeError as error:
        raise ConfigError(
            f"--retro-index-str {factory} with {len(vectors)} vectors of {vectors.shape[1]} for training",
            why=str(error).splitlines()[-1],
            fix="fewer cells (IVF), or more chunks with --retro-index-ntrain",
        ) from None


def add_faiss(index: Any, parts: Iterable[np.ndarray]) -> Iterator[int]:
    """Add vectors part by part; their numbers count on. Yields how many are in."""
    for part in parts:
        index.add(np.ascontiguousarray(part, np.float32))
        yield int(index.ntotal)


class FaissIndex:
    """An index of a file of `add_faiss`'s.

    Args:
        ef_search, nprobe: breadth of an HNSW and of an IVF index; others do not look at them.
    """

    def __init__(self, path: Path, ef_search: int, nprobe: int):
        faiss = faiss_module()
        try:
            self.index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
        except RuntimeError as error:
            raise DataError(
                f"{path} cannot be read: {str(error).splitlines()[-1]}",
                fix="megatron-lite retro preprocess --retro-tasks index",
            ) from None
        inner = self.index
        if isinstance(inner, faiss.IndexPreTransform):
            inner = faiss.downcast_index(inner.index)
        if isinstance(inner, faiss.IndexIVF):
            inner.nprobe = min(nprobe, inner.nlist)
            quantizer = faiss.downcast_index(inner.quantizer)
            if hasattr(quantizer, "hnsw"):
                quantizer.hnsw.efSearch = ef_search
        if hasattr(inner, "hnsw"):
            inner.hnsw.efSearch = ef_search
        self._inner = inner

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """As `Index` has it."""
        distances, rows = self.index.search(np.ascontiguousarray(queries, np.float32), k)
        # faiss leaves the order of equal distances open.
        order = np.lexsort((rows, distances), axis=1)
        return np.take_along_axis(distances, order, 1), np.take_along_axis(rows, order, 1)


def write_faiss(index: Any, path: Path) -> None:
    """Complete before it has its name."""
    temporary = path.with_name(f".{path.name}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        faiss_module().write_index(index, str(temporary))
        temporary.replace(path)
    except RuntimeError as error:
        raise DataError(f"cannot write {path}: {str(error).splitlines()[-1]}", fix="free some space") from None


def keep_strangers(rows: np.ndarray, documents: np.ndarray, own: list[np.ndarray], keep: int) -> np.ndarray:
    """Neighbours that are of no own document, the first `keep`, filled up with -1 on the right; int64 `[q, keep]`.

    Args:
        rows: `[q, K]` in the order of distance, -1: none.
        documents: `[q, K]`, the document of each (whatever stands at -1).
        own: for each query the documents that its sample touches.
    """
    kept = np.full((len(rows), keep), -1, np.int64)
    for i, (row, document) in enumerate(zip(rows, documents)):
        strangers = row[(row >= 0) & ~np.isin(document, own[i])][:keep]
        kept[i, : len(strangers)] = strangers
    return kept
