"""The embedders of a Retro project: `hash`, `bert`, `sentence`, or a class of the user's.

A model's vector of a text is the mean of its last hidden states over the text's own tokens: what was added around them
does not count.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_lite.datasets.retro_embedding import Embedder, HashEmbedder
from megatron_lite.datasets.retro_project import RetroProject
from megatron_lite.errors import ConfigError, DataError
from megatron_lite.training.families import FAMILIES, family_of


def hash_counts_path(project: RetroProject) -> Path:
    """Where `hash` keeps how often features occur."""
    return project.folder / "index" / "hash_counts.npz"


def make_embedder(project: RetroProject) -> Embedder:
    """The embedder of a project's settings. `hash` has no weights before they are counted.

    Raises: ConfigError, DataError for a model that is not there.
    """
    kind = project["retro_embedder"]
    if kind == "hash":
        path = hash_counts_path(project)
        dim = project["retro_embedder_dim"]
        return HashEmbedder.load(path, dim) if path.exists() else HashEmbedder(dim)
    batch, longest = project["retro_bert_batch_size"], project["retro_bert_max_chunk_length"]
    path = project["retro_embedder_path"]
    if kind in ("bert", "sentence") and path is None:
        raise ConfigError(
            f"--retro-embedder {kind} without --retro-embedder-path",
            why="it is made from a model",
            fix="--retro-embedder-path FOLDER",
        )
    if kind == "sentence":
        return SentenceEmbedder(path, batch, longest)
    if kind == "bert":
        tokenizer_type, vocab = project["retro_bert_tokenizer_type"], project["retro_bert_vocab_file"]
        return BertEmbedder(path, batch, longest, tokenizer_type, vocab)
    return _of_the_user(kind)


def _of_the_user(name: str) -> Embedder:
    module, _, attribute = name.partition(":")
    try:
        made = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"--retro-embedder {name}: {error}",
            why="it is hash, bert, sentence, or MODULE:NAME of a class that Python finds",
            fix="the module's folder in PYTHONPATH",
        ) from None
    if not isinstance(made, Embedder):
        raise ConfigError(
            f"--retro-embedder {name} makes a {type(made).__name__}",
            why="its length and embed are called",
            fix="let it inherit from megatron_lite.datasets.retro_embedding.Embedder",
        )
    return made


class _Batched(Embedder):
    """Texts in batches of like lengths, so that padding is rare; a text's vector does not depend on its batch but for
    rounding."""

    batch_size: int

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        vectors = np.empty((len(texts), self.dim), np.float32)
        for start in range(0, len(order), self.batch_size):
            those = order[start : start + self.batch_size]
            vectors[those] = self._vectors([texts[i] for i in those])
        return vectors

    def _vectors(self, texts: list[str]) -> np.ndarray:
        raise NotImplementedError


def _mean(hidden: torch.Tensor, counted: torch.Tensor) -> np.ndarray:
    """hidden `[n, s, h]`, counted `[n, s]` -> fp32 `[n, h]`."""
    weight = counted.unsqueeze(-1).float()
    return ((hidden.float() * weight).sum(1) / weight.sum(1).clamp(min=1)).cpu().numpy()


class SentenceEmbedder(_Batched):
    """An encoder of the package transformers, from a local folder.

    Args:
        path: of the model and its tokenizer; nothing is downloaded.
    """

    def __init__(self, path: str, batch_size: int, longest: int):
        try:
            from transformers import AutoModel, AutoTokenizer
        except ImportError:
            raise ConfigError(
                "--retro-embedder sentence needs the package transformers, which is not installed",
                fix="pip install 'megatron_lite[hf]', or --retro-embedder hash",
            ) from None
        if not Path(path, "config.json").is_file():
            raise DataError(
                f"--retro-embedder-path {path} is no folder of a model",
                why="there is no config.json in it",
                fix="a folder that save_pretrained wrote",
            )
        self._tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = AutoModel.from_pretrained(path, local_files_only=True).eval().to(device)
        self.dim = int(self._model.config.hidden_size)
        self.path, self.batch_size, self.longest = path, batch_size, longest

    def identity(self) -> dict[str, Any]:
        return {"embedder": "sentence", "model": os.path.basename(os.path.normpath(self.path)), "longest": self.longest}

    def length(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False, truncation=True, max_length=self.longest))

    @torch.inference_mode()
    def _vectors(self, texts: list[str]) -> np.ndarray:
        batch = self._tokenizer(
            texts,
            padding=True,
            truncation=True,
            max_length=self.longest,
            return_tensors="pt",
            return_special_tokens_mask=True,
        )
        special = batch.pop("special_tokens_mask")
        batch = batch.to(self._model.device)
        hidden = self._model(**batch).last_hidden_state
        return _mean(hidden, batch["attention_mask"].bool() & ~special.bool().to(hidden.device))


class BertEmbedder(_Batched):
    """A BERT of pretrain_bert.py.

    Args:
        path: what `--save` was; the model is built as its arguments say.
        tokenizer_type, vocab_file: None: as it was trained with.
    """

    def __init__(
        self, path: str, batch_size: int, longest: int, tokenizer_type: str | None = None, vocab_file: str | None = None
    ):
        from megatron_lite.cli.loaded_model import load_model

        flags = ["--tokenizer-type", tokenizer_type] if tokenizer_type else []
        flags += ["--vocab-file", vocab_file] if vocab_file else []
        # Every rank of preprocessing has a model of its own: the launcher's variables are not meant for it.
        with _without(os.environ, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            loaded = load_model(path, flags)
        if family_of(loaded.args) != "bert":
            raise ConfigError(
                f"--retro-embedder-path {path} holds a model of {FAMILIES[family_of(loaded.args)].title}",
                why="texts are embedded by a BERT",
                fix="what --save was of a run of pretrain_bert.py",
            )
        model: Any = loaded.model
        model.return_embeddings = True
        self._model = model
        self._tokenizer, self._device = loaded.tokenizer, loaded.args.device
        self._has_segments = loaded.args.bert_binary_head
        self.dim = loaded.args.hidden_size
        self.path, self.batch_size = path, batch_size
        self.longest = min(longest, loaded.args.max_position_embeddings)

    def identity(self) -> dict[str, Any]:
        return {"embedder": "bert", "model": os.path.basename(os.path.normpath(self.path)), "longest": self.longest}

    def length(self, text: str) -> int:
        return min(len(self._tokenizer.tokenize(text)), self.longest - 2)

    @torch.inference_mode()
    def _vectors(self, texts: list[str]) -> np.ndarray:
        tokenizer = self._tokenizer
        rows = [[tokenizer.cls, *tokenizer.tokenize(text)[: self.longest - 2], tokenizer.sep] for text in texts]
        s = max(map(len, rows))
        ids = torch.full((len(rows), s), tokenizer.pad)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row)
        lengths = torch.tensor(list(map(len, rows))).unsqueeze(1)
        mask = (torch.arange(s) < lengths).long()
        ids, mask = ids.to(self._device), mask.to(self._device)
        segments = torch.zeros_like(ids) if self._has_segments else None
        return self._model(ids, mask, segments).float().cpu().numpy()


@contextmanager
def _without(variables: MutableMapping[str, str], *names: str) -> Iterator[None]:
    """Some variables are not there inside."""
    before = {name: variables.pop(name) for name in names if name in variables}
    try:
        yield
    finally:
        variables.update(before)
