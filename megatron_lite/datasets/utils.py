"""The few names that users import from Megatron's `datasets.utils`: a closed list, nothing else belongs here."""

from collections.abc import Sequence
from enum import Enum

import numpy as np

from megatron_lite.errors import ConfigError


class Split(Enum):
    """The three parts of a corpus, in the order of `--split`."""

    train = 0
    valid = 1
    test = 2


def compile_helpers() -> None:
    """Megatron's scripts call it before they build indices. Here indices are numpy's work: nothing is compiled."""


def normalize(weights: Sequence[float]) -> list[float]:
    """The weights divided by their float64 sum, as Python floats."""
    values = np.array(weights, dtype=np.float64)
    return (values / np.sum(values)).tolist()


def get_blend_from_list(blend: list[str] | None) -> tuple[list[str], list[float] | None] | None:
    """The words of `--data-path` as (prefixes, weights), weights None where only prefixes were given.

    An odd number of words are prefixes. An even number are weight, prefix pairs if every first word of a pair is a
    number, and prefixes if none is.

    Raises: ConfigError for a mixture, and for a weight that is not above 0.
    """
    if not blend:
        return None
    words = [str(word) for word in blend]
    firsts = [_number(word) for word in words[0::2]]
    if len(words) % 2 == 1 or all(value is None for value in firsts):
        stray = [word for word in words if _number(word) is not None]
        if stray:
            raise ConfigError(
                f"--data-path {' '.join(words)}: {', '.join(stray)} looks like a weight without its prefix",
                why="either every prefix has a weight before it, or none has",
                fix="write weight prefix weight prefix ..., or prefixes alone",
            )
        return words, None
    if any(value is None for value in firsts):
        raise ConfigError(
            f"--data-path {' '.join(words)} mixes weights and prefixes",
            why="either every prefix has a weight before it, or none has",
            fix="write weight prefix weight prefix ..., or prefixes alone",
        )
    weights = [value for value in firsts if value is not None]
    for weight, prefix in zip(weights, words[1::2], strict=True):
        if not (0 < weight < float("inf")):
            raise ConfigError(
                f"--data-path gives {prefix} the weight {weight:g}",
                why="a weight is the share of the samples that come from a prefix",
                fix="leave the prefix out, or give it a weight above 0",
            )
    return words[1::2], weights


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
