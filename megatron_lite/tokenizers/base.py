"""What every tokenizer offers, by Megatron's names.

A tokenizer without a special token raises NotImplementedError when asked for it; -1 is never a token id.
"""

import json
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any


class MegatronTokenizer(ABC):
    """Text to ids and back.

    Args:
        tokenizer_paths: the files that define it.
        tokenizer_options: what else its ids depend on.

    `unique_identifiers` name the tokenizer in the caches of the datasets.
    """

    def __init__(self, *tokenizer_paths: str, **tokenizer_options: Any):
        self.unique_identifiers: OrderedDict[str, Any] = OrderedDict()
        self.unique_identifiers["class"] = type(self).__name__
        self.unique_identifiers["tokenizer_path"] = list(tokenizer_paths)
        for name, value in tokenizer_options.items():
            self.unique_identifiers[name] = str(value)
        self.unique_description = json.dumps(self.unique_identifiers, indent=4)

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """The ids of a text, without an end-of-document token unless `appends_eod`."""

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`tokenize` of each text; quicker where the library takes many at once."""
        return [self.tokenize(text) for text in texts]

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of some ids."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """One more than the largest id, special and added tokens included."""

    @property
    @abstractmethod
    def vocab(self) -> dict[str, int]:
        """Token text -> id."""

    @property
    def inv_vocab(self) -> dict[int, str]:
        return {id: token for token, id in self.vocab.items()}

    @property
    @abstractmethod
    def eod(self) -> int:
        """The token that ends a document."""

    @property
    def appends_eod(self) -> bool:
        """Does `tokenize` end with `eod` by itself?"""
        return False

    @property
    def eos(self) -> int:
        return self.eod

    @property
    def bos(self) -> int:
        return self._missing("bos")

    @property
    def pad(self) -> int:
        return self._missing("pad")

    @property
    def cls(self) -> int:
        return self._missing("cls")

    @property
    def sep(self) -> int:
        return self._missing("sep")

    @property
    def mask(self) -> int:
        return self._missing("mask")

    def _missing(self, name: str) -> int:
        raise NotImplementedError(f"{type(self).__name__} has no {name} token")
