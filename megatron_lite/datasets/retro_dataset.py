"""Samples of Retro: a GPT sample, and the tokens of the neighbours of its chunks.

    sample i      tokens [s], cut in l = s/m chunks
    chunk c       row i * l + c of the neighbours' table: chunk ids, the nearest first, -1: none          [l, k]
    neighbour n   chunks n, n + 1, ... of the database: what was found and how it goes on                 [l, k, r]

The GPT part is drawn by `MultiSplitGPTDataset` in the order in which preprocessing saw it. A neighbour that is not
there, and a continuation beyond its document, are end-of-document tokens (`missing="wrap"`: what follows in the
database, as in Megatron).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from megatron_lite.datasets.blended_dataset import BlendedDataset
from megatron_lite.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron_lite.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron_lite.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron_lite.datasets.megatron_dataset import MegatronDataset
from megatron_lite.datasets.retro_blocks import BlockTable, blocks_on_disk
from megatron_lite.datasets.retro_chunks import DBDataset
from megatron_lite.datasets.retro_project import SPLITS, RetroProject, check_samples, samples_of
from megatron_lite.errors import ConfigError, DataError


@dataclass(kw_only=True)
class MultiSplitGPTDatasetConfig(GPTDatasetConfig):
    """GPTDatasetConfig of data that were split once before: only what both splits have in common is used."""

    return_document_ids: bool = False
    """Items say which documents they touch (`document_ids`)."""

    split_preprocessing: str | None = None
    """Shares of train, valid and test when neighbours were searched."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split is None or self.split_preprocessing is None:
            raise ConfigError(
                "Retro with a corpus for each split",
                why="the split of preprocessing and that of training are parts of the same corpora",
                fix="one --data-path and --split",
            )
        split, before = parse_and_normalize_split(self.split), parse_and_normalize_split(self.split_preprocessing)
        if split != before:
            self.split_matrix = convert_split_vector_to_split_matrix(split, before)

    @classmethod
    def of(cls, config: GPTDatasetConfig, **more: Any) -> MultiSplitGPTDatasetConfig:
        """From GPT's options."""
        return cls(**{item.name: getattr(config, item.name) for item in fields(config) if item.init}, **more)


class MultiSplitGPTDataset(GPTDataset):
    """GPTDataset whose items may say which documents they touch: `document_ids`, int64, each once."""

    config: MultiSplitGPTDatasetConfig

    def __getitem__(self, idx: int | None) -> dict[str, np.ndarray]:
        item = super().__getitem__(idx)
        if self.config.return_document_ids:
            item["document_ids"] = self.document_ids(0 if idx is None else int(idx))
        return item

    def document_ids(self, idx: int) -> np.ndarray:
        """The documents of item `idx`."""
        k = int(self.shuffle_index[idx])
        first, last = int(self.sample_index[k, 0]), int(self.sample_index[k + 1, 0])
        return np.unique(self.document_index[first : last + 1]).astype(np.int64)

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*GPTDataset._key_config_attributes(), "split_preprocessing"]


class RetroDataset:
    """Args:
    num_queried_samples: whose neighbours are known; item i is sample i modulo this.
    dataset: the GPT samples.
    neighbors: chunk ids, `[samples * l, at least k]`.
    db: the chunks.
    chunk_length, num_neighbors, num_retrieved_chunks: m, k, and chunks of a neighbour.
    length: how many items there are; None: as many as samples.
    missing: "eod" or "wrap", see the head of this file.

    Item: as the GPT dataset's, with `neighbor_chunks` int64 `[l, k, nretr]` (-1: missing) and `neighbor_tokens` int64
    `[l, k, r]`. Item None: sample 0 without loss.
    """

    def __init__(
        self,
        num_queried_samples: int,
        dataset: Any,
        neighbors: BlockTable,
        db: DBDataset,
        *,
        chunk_length: int,
        num_neighbors: int,
        num_retrieved_chunks: int,
        length: int | None = None,
        missing: str = "eod",
    ):
        self.num_queried_samples, self.dataset, self.neighbors, self.db = num_queried_samples, dataset, neighbors, db
        self.chunk_length, self.num_neighbors = chunk_length, num_neighbors
        self.num_retrieved_chunks, self.missing = num_retrieved_chunks, missing
        self._length = num_queried_samples if length is None else length
        self.dataset_path = getattr(dataset, "dataset_path", None)

    def __len__(self) -> int:
        return self._length

    def origin(self, idx: int) -> str:
        """For people: where the sample of item `idx` comes from."""
        sample = idx % self.num_queried_samples
        tell = getattr(self.dataset, "origin", None)
        return f"sample {sample} of the GPT data" + (f": {tell(sample)}" if tell else "")

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        sample = 0 if idx is None else int(idx) % self.num_queried_samples
        item = dict(self.dataset[None if idx is None else sample])
        chunks = len(item["tokens"]) // self.chunk_length
        rows = self.neighbors.rows_between(sample * chunks, (sample + 1) * chunks)
        found = retrieved(np.asarray(rows[:, : self.num_neighbors]), self.db, self.num_retrieved_chunks, self.missing)
        item["neighbor_chunks"] = found
        item["neighbor_tokens"] = tokens_of(found, self.db)
        return item


def retrieved(neighbors: np.ndarray, db: DBDataset, num_chunks: int, missing: str = "eod") -> np.ndarray:
    """Neighbours `[..., k]` -> the chunks to read, int64 `[..., k, num_chunks]`: each and what follows; -1: nothing."""
    ids = neighbors[..., None] + np.arange(num_chunks)
    if missing == "wrap":
        return ids % len(db)
    inside = (neighbors[..., None] >= 0) & (ids < len(db))
    safe = np.where(inside, ids, 0)
    same = db.document_of(safe) == db.document_of(safe[..., :1])
    return np.where(inside & same, ids, -1)


def tokens_of(chunks: np.ndarray, db: DBDataset) -> np.ndarray:
    """Chunks `[..., k, nretr]` -> their tokens one after another, int64 `[..., k, nretr * m]`."""
    tokens = np.full((chunks.size, db.chunk_length), db.eod, np.int64)
    for place, chunk in enumerate(chunks.reshape(-1).tolist()):
        if chunk >= 0:
            text = db.tokens(chunk)
            tokens[place, : len(text)] = text
    return tokens.reshape(*chunks.shape[:-1], chunks.shape[-1] * db.chunk_length)


def gpt_datasets(
    config: MultiSplitGPTDatasetConfig, sizes: list[int | None], is_built_on_rank: Callable[[], bool] = lambda: True
) -> list[Any]:
    """The GPT samples of train, valid and test, for preprocessing, for Retro, and for the GPT beside it."""
    return list(BlendedMegatronDatasetBuilder(MultiSplitGPTDataset, sizes, is_built_on_rank, config).build())


def mid_of(dataset: Any, idx: int) -> tuple[MegatronDataset, int]:
    """(the data set over one corpus, the item's number in it) of item `idx`."""
    if isinstance(dataset, BlendedDataset):
        member = int(dataset.dataset_index[idx])
        return dataset.datasets[member], int(dataset.dataset_sample_index[idx])
    return dataset, idx


def get_retro_datasets(
    project: RetroProject,
    config: MultiSplitGPTDatasetConfig,
    is_built_on_rank: Callable[[], bool] = lambda: True,
    **options: Any,
) -> list[RetroDataset | None]:
    """Train, valid and test of a project, from its files. See `retro_datasets`."""
    return retro_datasets(project, config, gpt_datasets(config, project.sizes, is_built_on_rank), **options)


def retro_datasets(
    project: RetroProject,
    config: MultiSplitGPTDatasetConfig,
    built: Sequence[Any],
    *,
    num_neighbors: int,
    num_retrieved_chunks: int,
    verify_neighbor_count: bool = True,
    train_length: int | None = None,
    missing: str = "eod",
) -> list[RetroDataset | None]:
    """Train, valid and test of a project; None where a split has no samples, or this rank reads nothing.

    Args:
        config: as for the GPT data; its blend is the project's.
        built: GPT samples of the three, made with it for the project's sizes.
        train_length: samples of training; more than were prepared start over.
    Raises: DataError where neighbours are missing, or were searched for other samples.
    """
    sizes = project.sizes
    m = project["retro_gpt_chunk_length"]
    if config.sequence_length % m:
        raise ConfigError(
            f"--seq-length {config.sequence_length} with chunks of {m} tokens",
            why="a sample is cut into whole chunks",
            fix=f"--seq-length {-(-config.sequence_length // m) * m}",
        )
    chunks = config.sequence_length // m
    datasets: list[RetroDataset | None] = []
    db = None
    for split, size, dataset in zip(SPLITS, sizes, built):
        if dataset is None or not size:
            datasets.append(None)
            continue
        if db is None:
            db = DBDataset(project.merged("train"), project.corpora(), m, config.tokenizer.eod)
        folder = project.neighbor_dir(split)
        if folder is None:
            datasets.append(None)
            continue
        check_samples(folder, samples_of(config, split, size, m))
        blocks = blocks_on_disk(folder)
        if not blocks:
            foreign = any(folder.glob("*.hdf5"))
            raise DataError(
                f"there are no neighbours in {folder}",
                why="blocks are .npy files" + (", and these are Megatron's HDF5" if foreign else ""),
                fix="megatron-lite retro preprocess --retro-tasks query",
            )
        if verify_neighbor_count and blocks[-1].end != size * chunks:
            raise DataError(
                f"{folder} has the neighbours of {blocks[-1].end} chunks",
                why=f"{size} samples of {chunks} chunks are drawn",
                fix="megatron-lite retro preprocess --retro-tasks query, or --retro-no-verify-neighbor-count to go "
                "through those that are there again and again",
            )
        neighbors = BlockTable(blocks)
        if neighbors.rows_between(0, 1).shape[1] < num_neighbors:
            raise ConfigError(
                f"--retro-num-neighbors {num_neighbors}",
                why=f"{neighbors.rows_between(0, 1).shape[1]} were saved for each chunk",
                fix="fewer, or preprocess with a larger --retro-query-num-neighbors-save",
            )
        datasets.append(
            RetroDataset(
                min(size, len(neighbors) // chunks),
                dataset,
                neighbors,
                db,
                chunk_length=m,
                num_neighbors=num_neighbors,
                num_retrieved_chunks=num_retrieved_chunks,
                length=train_length if split == "train" and train_length is not None else size,
                missing=missing,
            )
        )
    return datasets
