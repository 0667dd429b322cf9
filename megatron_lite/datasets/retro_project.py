"""The project directory of Retro: where preprocessing leaves what training reads, and the settings both share.

    config.json                     settings of the data and of the retrieval
    data/ tokenizer/                corpora and tokenizer files may lie here; then the project can be moved
    db/    individual/ merged/      the chunk database                                       retro_chunks
    index/ TYPE/                    vectors of its chunks, or a faiss index                   retro_search
    query/ SPLIT_HASH/              the neighbours of every chunk of every sample, int64      retro_dataset
           SPLIT_HASH/samples.json  what the order of these samples depends on

Samples are known by their numbers, so neighbours are only right for one order of samples. `samples_of` says what that
order depends on, in words that do not change when a project is moved; training compares its own with samples.json.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_lite.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron_lite.datasets.indexed_dataset import IndexedDataset
from megatron_lite.datasets.utils import Split, get_blend_from_list
from megatron_lite.errors import DataError

_PATHS = ("retro_gpt_tokenizer_model", "retro_gpt_vocab_file", "retro_gpt_merge_file", "retro_bert_vocab_file",
          "retro_gpt_data_cache_path", "retro_embedder_path")  # fmt: skip
SPLITS = tuple(split.name for split in Split)


class RetroProject:
    """A project directory and the settings of its config.json.

    Args:
        folder: the directory.
        settings: names as in config.json; paths as they are there, see `path`.
    """

    def __init__(self, folder: str | Path, settings: dict[str, Any]):
        self.folder, self.settings = Path(folder), settings

    @classmethod
    def read(cls, folder: str | Path) -> RetroProject:
        """Raises: DataError where there is no readable config.json."""
        path = Path(folder) / "config.json"
        fix = "megatron-lite retro preprocess --retro-project-dir ... makes it; give the same directory here"
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}", fix=fix) from None
        except ValueError as error:
            raise DataError(f"{path} is no JSON: {error}", fix=fix) from None
        needed = ("retro_gpt_data_path", "retro_gpt_seq_length", "retro_gpt_chunk_length", "retro_neighbor_dirs")
        missing = [name for name in needed if name not in settings]
        if missing:
            raise DataError(f"{path} has no {', '.join(missing)}", why="it is no Retro project's", fix=fix)
        return cls(folder, settings)

    def write(self) -> None:
        """config.json, complete before it has its name."""
        write_json(self.folder / "config.json", self.settings)

    def __getitem__(self, name: str) -> Any:
        """A setting, e.g. `retro_gpt_seed`. Paths are joined with the directory."""
        value = self.settings.get(name)
        if name in _PATHS and value is not None:
            return str(self.folder / value)
        return value

    def put_path(self, name: str, path: str | None) -> None:
        """A setting that is a path: kept relative to the directory where it lies inside."""
        self.settings[name] = None if path is None else _inside(path, self.folder)

    def put_data_path(self, words: Sequence[str]) -> None:
        """`--data-path`'s words, prefixes relative to `data/` where they lie there or are given so.

        Raises: DataError for a prefix without its pair; ConfigError for words that are no blend.
        """
        blend = get_blend_from_list(list(words))
        assert blend is not None
        prefixes, weights = blend
        kept = []
        for prefix in prefixes:
            at = self.folder / "data" / prefix
            if not IndexedDataset.exists(str(at)):
                at = Path(prefix)
            if not IndexedDataset.exists(str(at)):
                raise DataError(
                    f"--retro-gpt-data-path: there is no {prefix}.bin and .idx",
                    why=f"it was looked for here and in {self.folder / 'data'}",
                    fix="the prefix of a pair that `megatron-lite preprocess` wrote",
                )
            kept.append(_inside(str(at), self.folder / "data"))
        pairs = zip(weights, kept) if weights is not None else ((None, prefix) for prefix in kept)
        self.settings["retro_gpt_data_path"] = [
            str(word) for weight, prefix in pairs for word in (weight, prefix) if word is not None
        ]

    @property
    def data_path(self) -> list[str]:
        """`--data-path`'s words, prefixes as they can be opened from here."""
        prefixes, weights = self.blend
        if weights is None:
            return prefixes
        return [word for weight, prefix in zip(weights, prefixes) for word in (str(weight), prefix)]

    @property
    def blend(self) -> tuple[list[str], list[float] | None]:
        """(prefixes as they can be opened from here, weights)."""
        blend = get_blend_from_list(self.settings["retro_gpt_data_path"])
        assert blend is not None
        return [str(self.folder / "data" / prefix) for prefix in blend[0]], blend[1]

    def corpora(self) -> list[IndexedDataset]:
        """The data sets, in the order of the blend."""
        return [IndexedDataset(prefix) for prefix in self.blend[0]]

    @property
    def sizes(self) -> list[int | None]:
        """Samples of train, valid and test that training draws: an evaluation at each interval, one at the end, and one
        before the first step (`--eval-before-training`)."""
        train, batch = self["retro_gpt_train_samples"], self["retro_gpt_global_batch_size"]
        evaluation = self["retro_gpt_eval_iters"] * batch
        interval = self["retro_gpt_eval_interval"]
        evaluations = (train // batch // interval if interval else 0) + 2
        return [train, evaluations * evaluation, evaluation]

    def merged(self, name: str) -> Path:
        """A file of the merged database: train, valid, sampled or train_doc_offsets."""
        return self.folder / "db" / "merged" / f"{name}.npy"

    def neighbor_dir(self, split: str) -> Path | None:
        """Where the neighbours of a split are; None: it has no samples.

        Raises: DataError where they were not searched yet.
        """
        directories = self["retro_neighbor_dirs"] or {}
        if split not in directories:
            raise DataError(
                f"{self.folder} has no neighbours of the {split} samples",
                why="preprocessing has not come to its end",
                fix=f"megatron-lite retro preprocess --retro-project-dir {self.folder} --retro-tasks query",
            )
        return None if directories[split] is None else self.folder / "query" / directories[split]


def samples_of(config: BlendedMegatronDatasetConfig, split: str, size: int | None, chunk_length: int) -> dict[str, Any]:
    """What the samples of a split and their order depend on, in words that stay true when a project moves.

    Args:
        config: the data sets' options, with one blend.
        size: samples asked for.
    """
    assert config.blend is not None and config.split_matrix is not None
    prefixes, weights = config.blend
    corpora = []
    for prefix in prefixes:
        lengths = IndexedDataset(prefix).sequence_lengths
        corpora.append([os.path.basename(prefix), len(lengths), int(lengths.sum(dtype="int64"))])
    bounds = config.split_matrix[Split[split].value]
    return {
        "split": split,
        "part of the corpora": list(bounds) if bounds is not None else None,
        "number of samples": size,
        "seed": config.random_seed,
        "sequence length": config.sequence_length,
        "chunk length": chunk_length,
        "corpora (name, sequences, tokens)": corpora,
        "weights": weights,
        "surplus": config.mid_level_dataset_surplus,
    }


def hash_of(description: dict[str, Any]) -> str:
    """MD5 of a description, as part of a name."""
    text = json.dumps(description, sort_keys=True)
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def check_samples(folder: Path, here: dict[str, Any]) -> None:
    """Raises: DataError that names every difference between these samples and those of a folder of neighbours."""
    path = folder / "samples.json"
    there = read_json(path)
    if there is None:
        raise DataError(
            f"{path} cannot be read",
            why="it says for which samples the neighbours were searched",
            fix="megatron-lite retro preprocess --retro-tasks query",
        )
    different = [f"{name}: {there.get(name)} there, {value} here" for name, value in here.items()
                 if json.loads(json.dumps(value)) != there.get(name)]  # fmt: skip
    if different:
        raise DataError(
            f"the neighbours in {folder} were searched for other samples\n    " + "\n    ".join(different),
            why="samples are known by their number, and another order would give each the neighbours of another",
            fix="train with the settings of the project, or preprocess anew with these",
        )


def read_json(path: Path) -> dict[str, Any] | None:
    """The object of a file; None where there is none that can be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_json(path: Path, value: Any) -> None:
    """Complete before it has its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value, indent=4, sort_keys=True) + "\n", encoding="utf-8")
    temporary.replace(path)


def _inside(path: str, folder: Path) -> str:
    """Relative to the folder where it lies in it, else absolute."""
    absolute, root = os.path.abspath(path), os.path.abspath(folder)
    return os.path.relpath(absolute, root) if os.path.commonpath([absolute, root]) == root else absolute
