"""What the datasets over one corpus have in common: a split of a low-level dataset, described by a text.

    low    one .bin/.idx pair             IndexedDataset
    mid    one split of it, cut in samples   MegatronDataset: GPTDataset, ...
    top    a mixture of mids              BlendedDataset

The description names everything that the order of the samples depends on; its MD5 names the cache files, so its text
is Megatron-LM's to the letter.
"""

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import numpy as np

from megatron_lite.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron_lite.datasets.indexed_dataset import IndexedDataset
from megatron_lite.datasets.object_storage import is_object_storage_path
from megatron_lite.datasets.utils import Split
from megatron_lite.errors import DataError

LowLevelDataset = IndexedDataset | Iterable


class MegatronDataset(ABC):
    """One split of one corpus.

    Args:
        dataset: the low-level dataset.
        dataset_path: its prefix; None for generated data.
        indices: the ids of the low-level dataset that belong to this split.
        num_samples: samples that will be drawn, at least; None: one epoch.
        index_split: which split this is.
        config: options of the whole build.
    """

    def __init__(
        self,
        dataset: Any,
        dataset_path: str | None,
        indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: BlendedMegatronDatasetConfig,
    ):
        self.dataset, self.dataset_path, self.indices = dataset, dataset_path, indices
        self.num_samples, self.index_split, self.config = num_samples, index_split, config
        self.unique_identifiers: OrderedDict[str, Any] = OrderedDict()
        self.unique_identifiers["class"] = type(self).__name__
        self.unique_identifiers["dataset_path"] = dataset_path
        self.unique_identifiers["num_samples"] = num_samples
        self.unique_identifiers["index_split"] = index_split.name
        for attribute in self._key_config_attributes():
            self.unique_identifiers[attribute] = getattr(config, attribute)
        self.unique_description = describe(self.unique_identifiers)
        self.unique_description_hash = description_hash(self.unique_description)
        self.built_anew_on_cache_miss = False

    @staticmethod
    @abstractmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """What `--split` divides: sequences, or documents."""

    @staticmethod
    @abstractmethod
    def build_low_level_dataset(dataset_path: str | None, config: Any) -> Any:
        """Open the corpus."""

    @staticmethod
    @abstractmethod
    def num_tokens(low_level_dataset: Any, indices: np.ndarray) -> int:
        """Tokens of one epoch over `indices`. Without any there is nothing to draw from."""

    @staticmethod
    def _key_config_attributes() -> list[str]:
        """Fields of the config that belong to the description, in its order."""
        return ["random_seed", "sequence_length", "split", "split_matrix", "tokenizer"]

    def cache_folder(self) -> str | None:
        """Where the index of this dataset is kept; None: nowhere, as the data are made up.

        Raises: DataError for a corpus in object storage, beside which nothing can be kept.
        """
        if self.config.path_to_cache is not None or self.dataset_path is None:
            return self.config.path_to_cache
        if is_object_storage_path(self.dataset_path):
            raise DataError(
                f"the index cache of {self.dataset_path} needs a folder on disk",
                why="the order of the samples is kept beside a corpus, and this one lies in object storage",
                fix="--data-cache-path FOLDER",
            )
        return os.path.join(self.dataset_path, "cache", f"{type(self).__name__}_indices")

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, idx: int | None) -> dict[str, Any]: ...


def object_storage_folder(config: BlendedMegatronDatasetConfig) -> str | None:
    """Where the `.idx` of corpora in object storage are kept; None: in memory."""
    return None if config.path_to_cache is None else os.path.join(config.path_to_cache, "object_storage")


def describe(identifiers: OrderedDict[str, Any]) -> str:
    """The description's text: JSON, objects as their own `unique_identifiers`."""
    return json.dumps(identifiers, indent=4, default=lambda thing: thing.unique_identifiers)


def description_hash(description: str) -> str:
    return hashlib.md5(description.encode("utf-8"), usedforsecurity=False).hexdigest()
