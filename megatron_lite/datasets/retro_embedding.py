"""Text -> vectors whose distance says how alike texts are: the contract, and the embedder that needs no model.

    text --words--> features: words, pairs of neighbouring words, 3 to 5 neighbouring characters of a word
    feature --64-bit hash h--> place h mod D, sign +-1, weight tf * idf                    then length 1

Signed feature hashing (Weinberger et al. 2009, "Feature Hashing for Large Scale Multitask Learning") keeps inner
products right on average, so that a few hundred dimensions stand for millions of features. idf = ln((1 + n) / (1 + df))
+ 1, where df, the number of chunks with a feature, is counted in 2**20 slots of the same hash. The hash is arithmetic
on code points: no platform and no run of Python has another one.

All that a word adds to a vector depends on the word alone, so it is made once a word, and a text is a sum of rows.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from megatron_lite.datasets.retro_blocks import write_block
from megatron_lite.errors import DataError

_WORD = re.compile(r"\w{1,32}")
_LONGEST = 32
_SLOTS = 2**20
_TEXTS_AT_ONCE = 1024
_WORDS_KEPT = 50_000  # rows of D floats
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SALTS = {name: np.uint64(0xD1B54A32D192ED03 * (i + 1) % 2**64) for i, name in enumerate(("word", "pair", 3, 4, 5))}


class Embedder(ABC):
    """What index and query are made with. Vectors of a text do not depend on the texts beside it."""

    dim: int

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What its vectors depend on, for the records of a project."""

    @abstractmethod
    def length(self, text: str) -> int:
        """How much of a text it reads, in tokens of its own; 0: nothing."""

    @abstractmethod
    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """fp32 `[n, D]`."""

    def embed_text(self, text: str) -> np.ndarray:
        """fp32 `[D]`."""
        return self.embed([text])[0]

    def embed_text_dataset(self, dataset: Iterable[dict[str, Any]]) -> np.ndarray:
        """fp32 `[n, D]` of the entries `text`."""
        return self.embed([item["text"] for item in dataset])


class HashEmbedder(Embedder):
    """Args:
    dim: D.
    counts: int64 `[2**20]`, texts with a feature of each slot; None: every feature weighs the same.
    num_texts: how many texts were counted.
    """

    def __init__(self, dim: int = 512, counts: np.ndarray | None = None, num_texts: int = 0):
        self.dim = dim
        self.num_texts = num_texts
        self._idf = np.ones(_SLOTS, np.float32)
        if counts is not None:
            self._idf = (np.log((1 + num_texts) / (1 + counts.astype(np.float64))) + 1).astype(np.float32)
        self._row: dict[str, int] = {}
        self._rows = np.empty((0, dim), np.float32)
        self._hash = np.empty(0, np.uint64)

    @classmethod
    def load(cls, path: Path, dim: int) -> HashEmbedder:
        """With the counts of `save_counts`. Raises: DataError."""
        try:
            with np.load(path) as file:
                return cls(dim, file["counts"], int(file["num_texts"]))
        except (OSError, KeyError, ValueError) as error:
            raise DataError(
                f"{path} cannot be read: {error}", fix="megatron-lite retro preprocess --retro-tasks index"
            ) from None

    @staticmethod
    def save_counts(path: Path, counts: np.ndarray, num_texts: int) -> None:
        """How often features occur, for `load`."""
        write_block(path, {"counts": counts, "num_texts": np.array(num_texts)})

    def identity(self) -> dict[str, Any]:
        return {"embedder": "hash", "dim": self.dim}

    def length(self, text: str) -> int:
        return len(_WORD.findall(text))

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        vectors = np.empty((len(texts), self.dim), np.float32)
        for start in range(0, len(texts), _TEXTS_AT_ONCE):
            part = texts[start : start + _TEXTS_AT_ONCE]
            vectors[start : start + len(part)] = self._embed([_WORD.findall(text.lower()) for text in part])
        return vectors

    def _embed(self, texts: list[list[str]]) -> np.ndarray:
        lengths = np.array([len(words) for words in texts])
        words = list(chain.from_iterable(texts))
        if not words:
            return np.zeros((len(texts), self.dim), np.float32)
        self._learn(dict.fromkeys(words))
        at = np.fromiter(map(self._row.__getitem__, words), np.int64, len(words))
        offsets = np.concatenate(([0], np.cumsum(lengths)[:-1]))
        sums = F.embedding_bag(
            torch.from_numpy(at), torch.from_numpy(self._rows), torch.from_numpy(offsets), mode="sum"
        ).numpy()
        first, pairs = _pairs(self._hash[at], lengths)
        place, value = self._places(pairs)
        sums += np.bincount(first * self.dim + place, value, len(texts) * self.dim).reshape(-1, self.dim)
        norms = np.sqrt((sums.astype(np.float64) ** 2).sum(1, keepdims=True))
        return (sums / np.where(norms == 0, 1, norms)).astype(np.float32)

    def _places(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Features -> (place in the vector, signed weight)."""
        place = (hashes & np.uint64(0xFFFFFFFF)).astype(np.int64) % self.dim
        sign = 1.0 - 2.0 * ((hashes >> np.uint64(32)) & np.uint64(1)).astype(np.float32)
        return place, sign * self._idf[slots(hashes)]

    def _learn(self, words: Iterable[str]) -> None:
        """Make the rows of words that have none."""
        new = [word for word in words if word not in self._row]
        if len(self._row) + len(new) > _WORDS_KEPT:
            self._forget()
            new = list(words)
        if not new:
            return
        if len(self._row) + len(new) > len(self._rows):
            room = max(len(self._row) + len(new), 2 * len(self._rows))
            self._rows = np.concatenate([self._rows, np.empty((room - len(self._rows), self.dim), np.float32)])
            self._hash = np.concatenate([self._hash, np.empty(room - len(self._hash), np.uint64)])
        begin = len(self._row)
        for start in range(0, len(new), 4096):
            part = new[start : start + 4096]
            hashes, owners, features = word_features(part)
            place, value = self._places(features)
            rows = np.bincount(owners * self.dim + place, value, len(part) * self.dim)
            self._rows[begin : begin + len(part)] = rows.reshape(-1, self.dim)
            self._hash[begin : begin + len(part)] = hashes
            self._row.update(zip(part, range(begin, begin + len(part))))
            begin += len(part)

    def _forget(self) -> None:
        self._row.clear()
        self._rows, self._hash = self._rows[:0], self._hash[:0]


def count_features(texts: Sequence[str]) -> np.ndarray:
    """How many of the texts have a feature of each slot, int64 `[2**20]`."""
    counts = np.zeros(_SLOTS, np.int64)
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        part = [_WORD.findall(text.lower()) for text in texts[start : start + _TEXTS_AT_ONCE]]
        vocabulary = {word: i for i, word in enumerate(dict.fromkeys(chain.from_iterable(part)))}
        if not vocabulary:
            continue
        hashes, owners, features = word_features(list(vocabulary))
        begins = np.searchsorted(owners, np.arange(len(vocabulary) + 1))  # owners are sorted
        lengths = np.array([len(words) for words in part])
        at = np.fromiter((vocabulary[word] for words in part for word in words), np.int64, int(lengths.sum()))
        text = np.repeat(np.arange(len(part)), lengths)
        # Each word once a text, then all its features.
        once = np.unique(text * len(vocabulary) + at)
        text_of, word_of = np.divmod(once, len(vocabulary))
        sizes = begins[word_of + 1] - begins[word_of]
        picked = np.repeat(begins[word_of] - np.concatenate(([0], np.cumsum(sizes)[:-1])), sizes) + np.arange(
            sizes.sum()
        )
        first, pairs = _pairs(hashes[at], lengths)
        keys = np.concatenate(
            [np.repeat(text_of, sizes) * _SLOTS + slots(features[picked]), first * _SLOTS + slots(pairs)]
        )
        counts += np.bincount(np.unique(keys) % _SLOTS, minlength=_SLOTS)
    return counts


def word_features(words: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hashes of words `[n]`; and of all their features, the words themselves included: (whose it is, hash), by word."""
    letters = np.array(words, f"<U{_LONGEST}").view(np.uint32).reshape(len(words), _LONGEST).astype(np.uint64)
    sizes = np.array([len(word) for word in words])
    whole = np.zeros(len(words), np.uint64)
    for i in range(int(sizes.max(initial=0))):
        whole = np.where(i < sizes, whole * _MULTIPLIER + letters[:, i], whole)
    hashes = _mixed(whole, "word")
    owners, features = [np.arange(len(words))], [hashes]
    for n in (3, 4, 5):
        for begin in range(int(sizes.max(initial=0)) - n + 1):
            those = np.flatnonzero(sizes >= begin + n)
            part = np.zeros(len(those), np.uint64)
            for i in range(begin, begin + n):
                part = part * _MULTIPLIER + letters[those, i]
            owners.append(those)
            features.append(_mixed(part, n))
    owner = np.concatenate(owners)
    order = np.argsort(owner, kind="stable")
    return hashes, owner[order], np.concatenate(features)[order]


def _pairs(hashes: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Neighbouring words of each text: (text, hash of the pair).

    Args:
        hashes: of the words of all texts, one after another. lengths: words of each text.
    """
    text = np.repeat(np.arange(len(lengths)), lengths)
    inside = np.flatnonzero(text[:-1] == text[1:]) if len(text) else np.empty(0, np.int64)
    return text[inside], _mixed(hashes[inside] * _MULTIPLIER + hashes[inside + 1], "pair")


def slots(hashes: np.ndarray) -> np.ndarray:
    """Where features are counted."""
    return (hashes >> np.uint64(44)).astype(np.int64)


def _mixed(x: np.ndarray, kind: str | int) -> np.ndarray:
    """Every bit of the result depends on every bit of x (the finalizer of SplitMix64, Steele et al. 2014)."""
    x = x + _SALTS[kind]
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
