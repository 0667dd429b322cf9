"""A mixture of datasets of one split, by weight or exhaustively.

There is no random draw: item i comes from the dataset that lags most behind its share, and each dataset's samples are
used in its own (shuffled) order.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_lite.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron_lite.datasets.index_building import build_blending_indices, build_exhaustive_blending_indices
from megatron_lite.datasets.index_cache import IndexCache
from megatron_lite.datasets.megatron_dataset import MegatronDataset, describe, description_hash
from megatron_lite.datasets.utils import normalize
from megatron_lite.errors import DataError


class BlendedDataset:
    """Items of several datasets in one order. `blend[i]` is the item with its `dataset_id` added.

    Args:
        datasets: of one class and one split.
        weights: one per dataset, above 0: shares when `size` is given, else the number of samples of each.
        size: items of the blend; None: every sample of every dataset once.
        config: options of the whole build.

    Raises: DataError for weights or datasets that cannot be blended; IndexError if a dataset is asked for more
        samples than it has.
    """

    def __init__(
        self,
        datasets: Sequence[MegatronDataset],
        weights: Sequence[int | float],
        size: int | None,
        config: BlendedMegatronDatasetConfig,
    ):
        if not 0 < len(datasets) < np.iinfo(np.int16).max:
            raise DataError(f"a blend of {len(datasets)} datasets", why="1 to 32766 datasets can be blended")
        if len(datasets) != len(weights) or min(weights) <= 0:
            raise DataError(f"weights {list(weights)} for {len(datasets)} datasets", why="each needs one above 0")
        if len({(type(d), d.index_split) for d in datasets}) != 1:
            raise DataError("datasets of several classes or splits cannot be blended")
        self.datasets, self.size, self.config = list(datasets), size, config
        self.split = datasets[0].index_split
        self.weights = list(weights) if size is None else normalize(weights)

        self.unique_identifiers: OrderedDict[str, Any] = OrderedDict()
        self.unique_identifiers["class"] = type(self).__name__
        self.unique_identifiers["datasets"] = [dataset.unique_identifiers for dataset in datasets]
        self.unique_identifiers["split"] = self.split.name
        self.unique_identifiers["weights"] = self.weights
        self.unique_identifiers["size"] = size
        self.unique_description = describe(self.unique_identifiers)
        self.unique_description_hash = description_hash(self.unique_description)

        cache = IndexCache(
            config.path_to_cache,
            f"{self.unique_description_hash}-{type(self).__name__}-{self.split.name}",
            self.unique_description,
            {},
            trust=config.fast_cache_load,
            defer=config.defer_npy_index_mmap,
        )
        self._length = sum(int(weight) for weight in self.weights) if size is None else size
        self._arrays, self.built_anew_on_cache_miss = cache.load_or_build(
            ("dataset_index", "dataset_sample_index"), self._build_indices, (self._length, self._length)
        )
        if cache.trust or config.defer_npy_index_mmap:  # no pass over files that shall not be opened, or are right
            return
        for j, (used, dataset) in enumerate(zip(self.samples_per_dataset(), datasets)):
            if used > len(dataset):
                raise IndexError(
                    f"the blend asks for {used} samples of {dataset.dataset_path} (dataset {j}, weight "
                    f"{self.weights[j]:g}), which has {len(dataset)}: raise --mid-level-dataset-surplus from "
                    f"{config.mid_level_dataset_surplus:g}"
                )

    @property
    def dataset_index(self) -> np.ndarray:
        """int16 `[size]`: the dataset of each item."""
        return self._arrays[0]

    @property
    def dataset_sample_index(self) -> np.ndarray:
        """int64 `[size]`: which of that dataset's samples it is."""
        return self._arrays[1]

    def samples_per_dataset(self) -> list[int]:
        """How many of the blend's items come from each dataset."""
        return np.bincount(self.dataset_index, minlength=len(self.datasets)).tolist()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        at = 0 if idx is None else int(idx)
        dataset_id = int(self.dataset_index[at])
        item = self.datasets[dataset_id][None if idx is None else int(self.dataset_sample_index[at])]
        return {"dataset_id": dataset_id, **item}

    def origin(self, idx: int) -> str:
        """For people: where item `idx` comes from."""
        dataset_id, sample = int(self.dataset_index[idx]), int(self.dataset_sample_index[idx])
        tell = getattr(self.datasets[dataset_id], "origin", None)
        return f"sample {sample} of dataset {dataset_id}" + (f": {tell(sample)}" if tell else "")

    def _build_indices(self) -> tuple[np.ndarray, ...]:
        if self.size is None:
            return build_exhaustive_blending_indices([int(weight) for weight in self.weights])
        return build_blending_indices(self.weights, self.size)
