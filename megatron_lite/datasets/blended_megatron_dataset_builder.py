"""Train, valid and test datasets of a run, from one description of the data.

                          --data-path A                       --data-path 0.3 A 0.7 B
    low                   A.bin/.idx                          A.bin/.idx         B.bin/.idx
    split by --split      | train |valid|test|                | train |..        | train |..
    mid                   GPTDataset x 3                      GPTDataset x 3     GPTDataset x 3
    top                   the mids themselves                 BlendedDataset x 3

On several ranks one of them makes the index files, and the others load them; see `build_turns`.
"""

import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from megatron_lite import collectives
from megatron_lite.datasets.blended_dataset import BlendedDataset
from megatron_lite.datasets.blended_megatron_dataset_config import Blend, BlendedMegatronDatasetConfig, SplitMatrix
from megatron_lite.datasets.build_turns import build_in_turns
from megatron_lite.datasets.dataset_table import TopLevelDataset, dataset_table, mids_of
from megatron_lite.datasets.megatron_dataset import MegatronDataset
from megatron_lite.datasets.utils import Split, normalize
from megatron_lite.errors import ConfigError, DataError
from megatron_lite.log import print_rank_0, rank_and_world_size, warn_rank_0


class BlendedMegatronDatasetBuilder:
    """Builds the datasets of the three splits.

    Args:
        cls: class of the mid-level datasets.
        sizes: samples asked for train, valid and test; None: one epoch.
        is_built_on_rank: does this rank need datasets? Others take part in `build` and get None.
        config: the blends and options.
        group: the ranks that call `build` together; None: all of the run, as in Megatron.
        is_index_builder: makes this rank the index files, while the others wait? Default: the first rank of `group`.
            Where nodes share no folder, let one rank of each node do it.
    """

    def __init__(
        self,
        cls: type[MegatronDataset],
        sizes: list[int | None],
        is_built_on_rank: Callable[[], bool],
        config: BlendedMegatronDatasetConfig,
        *,
        group: Any = None,
        is_index_builder: bool | None = None,
    ):
        if len(sizes) != len(Split) or any(size is not None and size < 0 for size in sizes):
            raise ConfigError(f"sizes {sizes} of train, valid and test", why="three numbers of 0 or more, or None")
        self.cls, self.config = cls, config
        self.group = collectives.world() if group is None else group
        self.sizes = list(sizes)
        if config.full_validation:
            self.sizes[Split.valid.value] = None
        self.is_built_on_rank = is_built_on_rank
        self.is_index_builder = (
            collectives.group_rank(self.group) == 0 if is_index_builder is None else is_index_builder
        )

    def build(self) -> list[TopLevelDataset]:
        """[train, valid, test]: a mid-level dataset, a blend, a list (valid with `multiple_validation_sets`) or None.

        None where the split has no share or no data, or this rank needs no datasets.

        Raises: DataError (on every rank) if a corpus cannot be read or holds nothing for a split.
        """
        reads = self.is_built_on_rank()
        if self.config.fast_cache_load:  # the files are there: no rank waits for another
            datasets = self._build_all() if reads else None
        else:
            datasets = build_in_turns(
                self._build_all,
                self.group,
                builds_index=self.is_index_builder,
                reads_data=reads,
                has_files=self._caches(),
                made_files=lambda tops: any(mid.built_anew_on_cache_miss for top in tops for mid in mids_of(top)),
            )
        if datasets is None or not reads:
            return [None] * len(Split)
        self._report(datasets)
        return datasets

    # -- one split after another --------------------------------------------------------------------------------

    def _build_all(self) -> list[TopLevelDataset]:
        config = self.config
        if config.mock:
            low = self.cls.build_low_level_dataset(None, config)
            assert config.split_matrix is not None
            return [self._mid(low, None, split, config.split_matrix, self.sizes[split.value]) for split in Split]
        if config.blend_per_split is None:
            assert config.blend is not None and config.split_matrix is not None
            opened = self._open(config.blend[0])
            return [self._top(config.blend, opened, split, config.split_matrix) for split in Split]
        tops: list[TopLevelDataset] = []
        for split, blend in zip(Split, config.blend_per_split):
            whole: SplitMatrix = [(0.0, 1.0) if other is split else None for other in Split]
            # One prefix: its weight has nothing to weigh, as the corpus is used whole.
            alone = (blend[0], None) if blend is not None and len(blend[0]) == 1 else blend
            tops.append(self._top(alone, self._open(alone[0]), split, whole) if alone is not None else None)
        return tops

    def _open(self, prefixes: list[str]) -> list[Any]:
        return [self.cls.build_low_level_dataset(prefix, self.config) for prefix in prefixes]

    def _top(self, blend: Blend, lows: list[Any], split: Split, matrix: SplitMatrix) -> TopLevelDataset:
        if matrix[split.value] is None:
            return None
        prefixes, weights = blend
        size = self.sizes[split.value]
        if self.config.multiple_validation_sets and split is Split.valid:
            return self._apart(blend, lows, matrix)
        if len(prefixes) == 1 and weights is None:
            return self._mid(lows[0], prefixes[0], split, matrix, size)
        if weights is not None and size is None:
            raise ConfigError(
                f"the {split.name} corpora have weights but no number of samples is asked for",
                why="weights share out a number of samples; one epoch of all corpora has none",
                fix="give the prefixes without weights, or a number of samples",
            )
        members = self._members_with_tokens(prefixes, lows, weights, split, matrix)
        if not members:
            self._check_nothing_asked(prefixes, split, size)
            return None
        prefixes, lows, shares = [m[0] for m in members], [m[1] for m in members], [m[2] for m in members]
        if weights is not None:
            assert size is not None
            shares = normalize(shares)
            asked = [math.ceil(size * share) for share in shares]
            surplus = 1 + self.config.mid_level_dataset_surplus
            mids = self._mids(prefixes, lows, [math.ceil(n * surplus) for n in asked], split, matrix)
            return BlendedDataset(mids, shares, sum(asked), self.config)
        mids = []
        for mid in self._mids(prefixes, lows, [None] * len(prefixes), split, matrix):
            if len(mid):
                mids.append(mid)
            else:
                self._left_out(mid.dataset_path, split, "its tokens are fewer than one sample")
        if not mids:
            self._check_nothing_asked(prefixes, split, size)
            return None
        lengths = [len(mid) for mid in mids]
        return BlendedDataset(mids, lengths, None if size is None else min(size, sum(lengths)), self.config)

    def _apart(self, blend: Blend, lows: list[Any], matrix: SplitMatrix) -> list[MegatronDataset]:
        """The validation sets, none of them mixed with another."""
        prefixes, weights = blend
        if weights is not None:
            warn_rank_0("the weights of the validation sets are not used: each set is evaluated by itself")
        sizes = [self.sizes[Split.valid.value]] * len(prefixes)
        sets = self._mids(prefixes, lows, sizes, Split.valid, matrix)
        empty = [prefix for prefix, dataset in zip(prefixes, sets) if not len(dataset)]
        if empty:
            raise DataError(
                f"no sample of {self.config.sequence_length} tokens in the validation set {', '.join(empty)}",
                why="with --multiple-validation-sets every set has a loss of its own",
                fix="leave it out, or join it with another set",
            )
        return sets

    def _members_with_tokens(
        self, prefixes: list[str], lows: list[Any], weights: list[float] | None, split: Split, matrix: SplitMatrix
    ) -> list[tuple[str, Any, float]]:
        """The members of a blend that hold a token in this split: (prefix, low-level dataset, weight)."""
        members = []
        for prefix, low, weight in zip(prefixes, lows, weights or [1.0] * len(prefixes)):
            if self.cls.num_tokens(low, self._ids(low, split, matrix)):
                members.append((prefix, low, weight))
            else:
                self._left_out(prefix, split, "it has no token there")
        return members

    def _left_out(self, prefix: str | None, split: Split, why: str) -> None:
        warn_rank_0(f"{prefix} is left out of the {split.name} blend: {why}")

    def _check_nothing_asked(self, prefixes: list[str], split: Split, size: int | None) -> None:
        """An empty blend is an error when samples of it were asked for."""
        if size:
            raise DataError(
                f"no corpus has a sample for the {split.name} split, {size} samples were asked for",
                why=f"{', '.join(prefixes)} with --split {self.config.split}",
                fix=f"give the {split.name} split a larger share, or ask for no samples of it",
            )

    def _mids(
        self, prefixes: list[str], lows: list[Any], sizes: Iterable[int | None], split: Split, matrix: SplitMatrix
    ) -> list[MegatronDataset]:
        def build(member: tuple[str, Any, int | None]) -> MegatronDataset:
            prefix, low, size = member
            return self._mid(low, prefix, split, matrix, size)

        with ThreadPoolExecutor(self.config.num_dataset_builder_threads) as pool:
            return list(pool.map(build, zip(prefixes, lows, sizes, strict=True)))

    def _mid(
        self, low: Any, prefix: str | None, split: Split, matrix: SplitMatrix, size: int | None
    ) -> MegatronDataset:
        return self.cls(low, prefix, self._ids(low, split, matrix), size, split, self.config)

    def _ids(self, low: Any, split: Split, matrix: SplitMatrix) -> np.ndarray:
        """The ids of the low-level dataset that belong to a split; int32, or int64 where they do not fit."""
        numel = self.cls.numel_low_level_dataset(low)
        bounds = matrix[split.value]
        assert bounds is not None
        begin, end = (int(round(bound * float(numel))) for bound in bounds)
        return np.arange(begin, end, dtype=np.int32 if numel <= np.iinfo(np.int32).max else np.int64)

    # -- report -------------------------------------------------------------------------------------------------

    def _caches(self) -> bool:
        return self.config.path_to_cache is not None or not self.config.mock

    def _report(self, tops: list[TopLevelDataset]) -> None:
        """Say what is drawn from each corpus."""
        if rank_and_world_size()[0] != 0 or not any(mids_of(top) for top in tops):
            return  # counting a blend reads its whole index
        for line in dataset_table(tops, self.config.sequence_length):
            print_rank_0(f"   {line}")
        for split, top in zip(Split, tops):
            for mid in mids_of(top):
                tokens = getattr(mid, "tokens_per_epoch", None)
                if tokens is not None and 0 < tokens <= self.config.sequence_length:
                    warn_rank_0(
                        f"an epoch of {mid.dataset_path} ({split.name}) has {tokens} tokens, fewer than one sample of "
                        f"{self.config.sequence_length}: every sample repeats the documents"
                    )
