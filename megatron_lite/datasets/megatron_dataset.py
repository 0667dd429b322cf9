"""What the datasets over one corpus have in common: a split of a low-level dataset, described by a text.

    low    one .bin/.idx pair             IndexedDataset
    mid    one split of it, cut in samples   MegatronDataset: GPTDataset, ...
    top    a mixture of mids              BlendedDataset

The description names everything that the order of the samples depends on; its MD5 names the cache files, so its text
is Megatron-LM's to the letter.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import numpy as np

from megatron_lite.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron_lite.datasets.indexed_dataset import IndexedDataset
from megatron_lite.datasets.utils import Split

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

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, idx: int | None) -> dict[str, Any]: ...


def describe(identifiers: OrderedDict[str, Any]) -> str:
    """The description's text: JSON, objects as their own `unique_identifiers`."""
    return json.dumps(identifiers, indent=4, default=lambda thing: thing.unique_identifiers)


def description_hash(description: str) -> str:
    return hashlib.md5(description.encode("utf-8"), usedforsecurity=False).hexdigest()
