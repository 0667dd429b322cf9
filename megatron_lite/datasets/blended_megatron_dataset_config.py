"""What a build of train, valid and test datasets is told, and how `--split` becomes bounds."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from megatron_lite.datasets.utils import Split, normalize
from megatron_lite.errors import ConfigError
from megatron_lite.log import warn_rank_0

Blend = tuple[list[str], list[float] | None]
SplitMatrix = list[tuple[float, float] | None]


@dataclass(kw_only=True)
class BlendedMegatronDatasetConfig:
    """Options of the datasets of one run.

    `blend` (cut by `split`) and `blend_per_split` (one blend a split, each used whole) exclude each other; with
    neither, the data is generated (`mock`). A blend is (prefixes, weights), weights None where the sizes decide.
    """

    random_seed: int
    """Seed of every shuffle, the same for all corpora and splits."""

    sequence_length: int

    blend: Blend | None = None

    blend_per_split: list[Blend | None] | None = None

    multiple_validation_sets: bool = False
    """Keep the members of the valid blend apart: `build()` returns a list of datasets for this split."""

    full_validation: bool = False
    """The valid datasets are one epoch, whatever size was asked."""

    split: str | None = None
    """Shares of train, valid and test, as "969, 30, 1"."""

    split_matrix: SplitMatrix | None = field(init=False, default=None)
    """Begin and end of each split as parts of 1, None for a split of share 0; made from `split`."""

    num_dataset_builder_threads: int = 1
    """Threads that build the members of a blend."""

    path_to_cache: str | None = None
    """Folder of the index caches; None: beside each corpus, and none for blends."""

    mmap_bin_files: bool = True

    mock: bool = field(init=False, default=False)

    tokenizer: Any = None
    """Offers `unique_identifiers`, `eod` and perhaps `pad`."""

    mid_level_dataset_surplus: float = 0.005
    """Part of its share by which each member of a weighted blend is built larger."""

    allow_ambiguous_pad_tokens: bool = False
    """Take the tokenizer's pad token as padding even where it is another special token as well."""

    fast_cache_load: bool = False
    """The index caches are there and right: no rank waits for another, and nothing is compared."""

    defer_npy_index_mmap: bool = False
    """Open the index files at the first sample."""

    def __post_init__(self) -> None:
        if self.blend is not None and self.blend_per_split is not None:
            raise ConfigError(
                "--data-path and --train-data-path, --valid-data-path or --test-data-path were both given",
                why="the first is cut by --split, the others are used whole",
                fix="give one kind only",
            )
        if self.num_dataset_builder_threads < 1:
            raise ConfigError(f"--num-dataset-builder-threads {self.num_dataset_builder_threads}", fix="give 1 or more")
        if self.blend_per_split is not None:
            if len(self.blend_per_split) != len(Split) or not any(self.blend_per_split):
                raise ConfigError(
                    "no corpus in --train-data-path, --valid-data-path and --test-data-path",
                    fix="give at least one of them",
                )
            if self.split is not None:
                raise ConfigError(
                    f"--split {self.split} with --train-data-path, --valid-data-path or --test-data-path",
                    why="these corpora are used whole",
                    fix="leave --split out, or give one --data-path",
                )
            for blend in self.blend_per_split:
                _check_blend(blend)
            return
        if self.blend is None:
            self.mock, self.split = True, "1,1,1"
        elif self.split is None:
            warn_rank_0('--split was not given: train, valid and test are shares "969, 30, 1" of --data-path')
            self.split = "969, 30, 1"
        _check_blend(self.blend)
        assert self.split is not None
        self.split_matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(self.split))


def _check_blend(blend: Blend | None) -> None:
    if blend is None:
        return
    prefixes, weights = blend
    if not prefixes:
        raise ConfigError("a blend without a corpus", fix="give at least one prefix in --data-path")
    if weights is not None and len(weights) != len(prefixes):
        raise ConfigError(f"{len(prefixes)} corpora have {len(weights)} weights", fix="give every corpus one weight")
    for prefix, weight in zip(prefixes, weights or []):
        if not weight > 0:
            raise ConfigError(
                f"--data-path gives {prefix} the weight {weight:g}",
                why="a weight is the share of the samples that come from a prefix",
                fix="leave the prefix out, or give it a weight above 0",
            )


def parse_and_normalize_split(split: str) -> list[float]:
    """ "969, 30, 1" -> [0.969, 0.03, 0.001]. Separators are commas, blanks and slashes; quotes are ignored; missing
    shares are 0.

    Raises: ConfigError for anything that is not one to three shares with a sum above 0.
    """
    words = re.sub(r"[,/\\'\"\s\[\]()]+", " ", split).split()
    if not words or not all(re.fullmatch(r"\d+\.?\d*|\.\d+", word) for word in words) or len(words) > len(Split):
        raise ConfigError(
            f"--split {split!r} cannot be read",
            why="it gives the shares of train, valid and test: one to three plain numbers",
            fix='--split "969, 30, 1"',
        )
    shares = [float(word) for word in words] + [0.0] * (len(Split) - len(words))
    if sum(shares) == 0:
        raise ConfigError(
            f"--split {split!r} leaves every part empty", why="the shares add up to 0", fix='--split "969, 30, 1"'
        )
    return normalize(shares)


def convert_split_vector_to_split_matrix(vector_a: list[float], vector_b: list[float] | None = None) -> SplitMatrix:
    """Shares -> (begin, end) of each split, None where it is empty; with two vectors, where both overlap.

    The first bound is the integer 0 and all others are floats: the bounds are part of the text that names the caches.
    """
    bounds = _bounds(vector_a)
    if vector_b is None:
        return bounds
    matrix: SplitMatrix = []
    for a, b in zip(bounds, _bounds(vector_b)):
        overlap = (max(a[0], b[0]), min(a[1], b[1])) if a is not None and b is not None else None
        matrix.append(overlap if overlap is not None and overlap[0] < overlap[1] else None)
    return matrix


def _bounds(vector: list[float]) -> SplitMatrix:
    edges: list[float] = [0]
    for share in vector:
        edges.append(edges[-1] + share)
    return [(begin, end) if end > begin else None for begin, end in zip(edges, edges[1:])]
