"""NullTokenizer: the text is already numbers."""

import re
from collections.abc import Sequence

from megatron_lite.errors import ConfigError, DataError
from megatron_lite.tokenizers.base import MegatronTokenizer


class NullTokenizer(MegatronTokenizer):
    """Ids in decimal, separated by blanks: "17 4 99". Ids 0 ... vocab_size - 1, and one more that ends documents.

    Args:
        vocab_size: ids of the text; `vocab_size` of the tokenizer is one more.
        eod_id: end-of-document id. None: the additional one.
        pad_id: padding id, -1: none.
        vocab_extra_ids: sentinels after all of them.
    """

    def __init__(self, vocab_size: int, eod_id: int | None = None, pad_id: int = -1, vocab_extra_ids: int = 0):
        options: dict[str, int] = {} if eod_id is None else {"eod_id": eod_id}
        options |= {} if pad_id == -1 else {"pad_id": pad_id}
        super().__init__(vocab_extra_ids=vocab_extra_ids, vocab_size=vocab_size, **options)
        self._size = vocab_size + 1
        self._eod = vocab_size if eod_id is None else eod_id
        self._pad = pad_id
        for name, value, lowest in (("--null-tokenizer-eod-id", self._eod, 0), ("--null-tokenizer-pad-id", pad_id, -1)):
            if not lowest <= value < self._size:
                raise ConfigError(
                    f"{name} {value} with --vocab-size {vocab_size}", fix=f"give {lowest} to {self._size - 1}"
                )

    def tokenize(self, text: str) -> list[int]:
        """Raises: DataError for a word that is not an id of the vocabulary."""
        ids = []
        for word in text.split():
            if not (word.isascii() and word.isdigit()) or int(word) >= self._size:
                raise DataError(
                    f"{word[:40]!r} is not an id for NullTokenizer",
                    why=f"its texts are numbers from 0 to {self._size - 1}, separated by blanks",
                    fix="raise --vocab-size, or choose the tokenizer of this text",
                )
            ids.append(int(word))
        return ids

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        return [match.start() for match in re.finditer(r"\S+", text)]

    def _decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    @property
    def _library_size(self) -> int:
        return self._size

    @property
    def _library_vocab(self) -> dict[str, int]:
        return {str(id): id for id in range(self._size)}

    @property
    def eod(self) -> int:
        return self._eod

    @property
    def pad(self) -> int:
        return self._pad if self._pad >= 0 else self._missing("pad")
