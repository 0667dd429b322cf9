"""LibraryTokenizer: a tokenizer of the `tokenizers` library, however it came about. It does what the library does."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from megatron_lite.errors import DataError
from megatron_lite.tokenizers.base import MegatronTokenizer


class LibraryTokenizer(MegatronTokenizer):
    """Encodes and decodes with `self.tokenizer`, a `tokenizers.Tokenizer` that the subclass makes.

    `include_special_tokens`: texts get what the tokenizer adds by itself, as a bos token in front.
    """

    tokenizer: Any
    include_special_tokens = False

    def tokenize(self, text: str) -> list[int]:
        """An empty text has no token, whatever is added to others: it is no document."""
        return self.tokenizer.encode(text, add_special_tokens=self.include_special_tokens).ids if text else []

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=self.include_special_tokens)
        return [encoding.ids if text else [] for text, encoding in zip(texts, encodings)]

    @cached_property
    def adds_tokens(self) -> bool:
        return bool(self.tokenizer.encode("", add_special_tokens=self.include_special_tokens).ids)

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        if not text:
            return []
        encoding = self.tokenizer.encode(text, add_special_tokens=self.include_special_tokens)
        return [start for start, _ in encoding.offsets]

    @cached_property
    def _library_size(self) -> int:
        return max(self._library_vocab.values(), default=-1) + 1

    @property
    def _library_vocab(self) -> dict[str, int]:
        return self.tokenizer.get_vocab(with_added_tokens=True)

    def add_special_tokens(self, tokens: Sequence[str]) -> None:
        """Tokens of the user: those that the vocabulary lacks come after it. Their text is one token wherever it is."""
        self.tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])


def read_text(flag: str, path: str, what: str) -> str:
    """The text of a file of the tokenizer.

    Raises: DataError if it cannot be read.
    """
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"cannot read {flag} {path}: {reason}", fix=f"give {what}") from error
