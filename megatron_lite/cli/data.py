"""`megatron-lite data <verb>`: work on corpora that are tokenised already."""

from __future__ import annotations

import argparse
import difflib
import glob
import importlib
import os
from collections.abc import Sequence
from typing import NoReturn

from megatron_lite.datasets.indexed_dataset import IndexedDataset, get_bin_path, get_idx_path
from megatron_lite.errors import ConfigError, DataError

# verb -> (module with `main(argv) -> int`, what `--help` says)
VERBS = {
    "merge": ("megatron_lite.cli.data_merge", "several pairs -> one, in order"),
    "inspect": ("megatron_lite.cli.data_inspect", "what is in a pair: header, counts, samples, checks"),
    "index": ("megatron_lite.cli.data_index", "build the index caches of a run before it starts, without a GPU"),
}


class Parser(argparse.ArgumentParser):
    """argparse with our errors."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}", fix=f"{self.prog} --help")


def usage() -> str:
    verbs = "\n".join(f"  {verb:<10} {text}" for verb, (_, text) in VERBS.items())
    return f"usage: megatron-lite data <verb> [options]\n\n{verbs}"


def main(argv: Sequence[str]) -> int:
    """The verb's verb."""
    words = list(argv)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 2
    if words[0] not in VERBS:
        close = difflib.get_close_matches(words[0], VERBS, n=1, cutoff=0.5)
        raise ConfigError(
            f"megatron-lite data has no verb {words[0]!r}" + (f"; did you mean {close[0]!r}?" if close else ""),
            why=f"the verbs are {', '.join(VERBS)}",
            fix="megatron-lite data --help",
        )
    return importlib.import_module(VERBS[words[0]][0]).main(words[1:])


def find_pairs(words: Sequence[str], leave_out: str | None = None) -> list[str]:
    """The prefixes that words name, in their order: a prefix, a folder (all its pairs by name) or a glob of prefixes.

    Args:
        leave_out: a prefix that folders and globs do not give, such as the output's.
    Raises: DataError where there is no pair, or half of one.
    """
    prefixes: list[str] = []
    for word in words:
        if os.path.isdir(word):
            found = _complete(sorted(os.path.join(word, name) for name in os.listdir(word)), leave_out)
        elif IndexedDataset.exists(word):
            found = [word]
        else:
            found = _complete(sorted(glob.glob(f"{word}.bin") + glob.glob(f"{word}.idx") + glob.glob(word)), leave_out)
        if not found:
            raise DataError(
                f"{word}: there is no pair of .bin and .idx",
                fix="give a folder, or prefixes without .bin and .idx, as --data-path takes them",
            )
        prefixes += found
    return prefixes


def _complete(paths: Sequence[str], leave_out: str | None) -> list[str]:
    """The prefixes of the pairs among some paths; other files are passed over."""
    files = {path for path in paths if path.endswith((".bin", ".idx"))}
    prefixes = sorted({path[:-4] for path in files})
    if leave_out is not None:
        prefixes = [prefix for prefix in prefixes if os.path.abspath(prefix) != os.path.abspath(leave_out)]
    for prefix in prefixes:
        for path in (get_bin_path(prefix), get_idx_path(prefix)):
            if not os.path.exists(path):
                raise DataError(
                    f"{path} is missing",
                    why="a corpus is a pair of .bin and .idx; the other half is there",
                    fix="copy the missing file, or move the other one away",
                )
    return prefixes
