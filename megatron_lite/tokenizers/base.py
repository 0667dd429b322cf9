"""What every tokenizer offers, by Megatron's names.

    ids 0 ...............|..................|...................| padding of the model's vocabulary
        of the library   |  appended here   |   <extra_id_0> ...
                         |  [BOS], <EOD>    |   --vocab-extra-ids

A tokenizer without a special token raises NotImplementedError when asked for it; -1 is never a token id.
"""

import json
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from itertools import groupby
from typing import Any, NoReturn

from megatron_lite.errors import ConfigError

_NAMED = ("unk", "bos", "eos", "pad", "cls", "sep", "mask")


class MegatronTokenizer(ABC):
    """Text to ids and back.

    Args:
        tokenizer_paths: the files that define it.
        vocab_extra_ids: number of sentinel tokens `<extra_id_0>` ... after all others.
        tokenizer_options: what else its ids depend on.

    `unique_identifiers` name the tokenizer in the caches of the datasets.
    """

    def __init__(self, *tokenizer_paths: str, vocab_extra_ids: int = 0, **tokenizer_options: Any):
        self.unique_identifiers: OrderedDict[str, Any] = OrderedDict()
        self.unique_identifiers["class"] = type(self).__name__
        self.unique_identifiers["tokenizer_path"] = list(tokenizer_paths)
        if vocab_extra_ids:
            tokenizer_options["vocab_extra_ids"] = vocab_extra_ids
        for name, value in tokenizer_options.items():
            self.unique_identifiers[name] = str(value)
        self.unique_description = json.dumps(self.unique_identifiers, indent=4)
        self.vocab_extra_ids = vocab_extra_ids

    # ------------------------------------------------------------------------------------------- of each tokenizer
    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """The ids of a text, without an end-of-document token unless `appends_eod`."""

    @property
    @abstractmethod
    def eod(self) -> int:
        """The token that ends a document."""

    @property
    @abstractmethod
    def _library_size(self) -> int:
        """One more than the largest id of the library."""

    @property
    @abstractmethod
    def _library_vocab(self) -> dict[str, int]:
        """Token text -> id, of the library."""

    @abstractmethod
    def _decode(self, ids: list[int]) -> str:
        """The text of ids of the library."""

    def _appends(self) -> list[str]:
        """Tokens that come after the library's, those that it has left out."""
        return []

    # ----------------------------------------------------------------------------------------------- text and ids
    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`tokenize` of each text; quicker where the library takes many at once."""
        return [self.tokenize(text) for text in texts]

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of some ids. Tokens that the library does not know stand between blanks."""
        numbers = [int(id) for id in ids]
        if not self._appended:
            return self._decode(numbers)
        text_of = {id: token for token, id in self._appended.items()}
        parts = []
        for own, run in groupby(numbers, key=lambda id: id < self._library_size):
            part = list(run)
            parts += [self._decode(part)] if own else [text_of[id] for id in part if id in text_of]
        return " ".join(parts)

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        """Where each token of `tokenize(text)` begins, in characters.

        Raises: NotImplementedError if the library does not tell.
        """
        raise NotImplementedError(f"{type(self).__name__} does not tell where its tokens begin")

    # ------------------------------------------------------------------------------------------------- vocabulary
    @property
    def vocab_size(self) -> int:
        """One more than the largest id, special and added tokens included."""
        return self._library_size + len(self._appended)

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Token text -> id."""
        return {**self._library_vocab, **self._appended}

    @cached_property
    def inv_vocab(self) -> dict[int, str]:
        """Id -> token text."""
        return {id: token for token, id in self.vocab.items()}

    @cached_property
    def _appended(self) -> dict[str, int]:
        sentinels = [f"<extra_id_{i}>" for i in range(self.vocab_extra_ids)]
        wanted = dict.fromkeys([*self._appends(), *sentinels])
        known = self._library_vocab if wanted else {}
        return {token: self._library_size + i for i, token in enumerate(t for t in wanted if t not in known)}

    # --------------------------------------------------------------------------------------------- special tokens
    @cached_property
    def additional_special_tokens_ids(self) -> list[int]:
        """The sentinels of T5, `<extra_id_0>` first. A vocabulary that has such tokens keeps its own ids for them."""
        return [self.vocab[f"<extra_id_{i}>"] for i in range(self.vocab_extra_ids)]

    @property
    def special_tokens_dict(self) -> dict[str, int]:
        """Special tokens that there are: `eos_token` -> id."""
        found = {}
        for name in _NAMED:
            with suppress(NotImplementedError, ConfigError):
                found[f"{name}_token"] = int(getattr(self, name))
        return found

    @property
    def appends_eod(self) -> bool:
        """Does `tokenize` end with `eod` by itself?"""
        return False

    @property
    def adds_tokens(self) -> bool:
        """Does `tokenize` put tokens in front of every text, or behind it?"""
        return False

    @property
    def eos(self) -> int:
        return self.eod

    @property
    def unk(self) -> int:
        self._missing("unk")

    @property
    def bos(self) -> int:
        self._missing("bos")

    @property
    def pad(self) -> int:
        return self._named("pad")

    @property
    def cls(self) -> int:
        return self._named("cls")

    @property
    def sep(self) -> int:
        return self._named("sep")

    @property
    def mask(self) -> int:
        return self._named("mask")

    def _named(self, name: str) -> int:
        """The id of `pad`, `cls`, `sep` or `mask`, for libraries that know them by name."""
        self._missing(name)

    def _missing(self, name: str) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__} has no {name} token")
