"""ByteTokenizer: one token a byte of UTF-8. Needs no file and knows every text."""

from collections.abc import Sequence

import numpy as np

from megatron_lite.tokenizers.base import MegatronTokenizer

_EOD, _PAD, _SIZE = 0, 1, 512
# Bytes 0 and 1 of a text are not its end or padding: they have ids of their own above the 256 bytes.
_MOVED = 256


class ByteTokenizer(MegatronTokenizer):
    """Ids are bytes (2 ... 255; bytes 0 and 1 are 256 and 257), 0 ends a document, 1 pads; vocabulary 512."""

    def __init__(self, vocab_extra_ids: int = 0):
        super().__init__(vocab_extra_ids=vocab_extra_ids)

    def tokenize(self, text: str) -> list[int]:
        ids = np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int64)
        ids[ids < 2] += _MOVED
        return ids.tolist()

    def _decode(self, ids: list[int]) -> str:
        """Ids that are no byte are left out; bytes that are no UTF-8 become U+FFFD."""
        values = np.asarray(ids, np.int64)
        values = np.where(
            (values == _MOVED) | (values == _MOVED + 1), values - _MOVED, np.where(values < 2, -1, values)
        )
        return bytes(values[(values >= 0) & (values < 256)].tolist()).decode("utf-8", errors="replace")

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        return [i for i, character in enumerate(text) for _ in character.encode("utf-8")]

    @property
    def _library_size(self) -> int:
        return _SIZE

    @property
    def _library_vocab(self) -> dict[str, int]:
        special = {"<eod>": _EOD, "<pad>": _PAD, "<0x00>": _MOVED, "<0x01>": _MOVED + 1}
        return {**special, **{f"<0x{byte:02X}>": byte for byte in range(2, 256)}}

    @property
    def eod(self) -> int:
        return _EOD

    @property
    def pad(self) -> int:
        return _PAD
