"""TikTokenizer: byte-level BPE through the tiktoken library, from a JSON vocabulary.

file: [{"rank": 0, "token_bytes": "AA==", "token_str": ...}, ...]      rank r: the r-th token, base64

ids   0 ....................... 999 | 1000 ........................ vocab_size - 1
      <unk> <s> </s> ... <SPECIAL_k> | rank 0, 1, ... (the first 256: single bytes)
"""

import base64
import json
from collections.abc import Sequence
from functools import cached_property

import tiktoken

from megatron_lite.errors import ConfigError, DataError
from megatron_lite.tokenizers.base import MegatronTokenizer
from megatron_lite.tokenizers.library import read_text

# How a text is cut before pairs are merged: words, single digits, punctuation, line ends, blanks. v2 keeps a capital
# and the small letters after it together and lets a slash end punctuation. Part of what a vocabulary was trained with.
PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
_SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
_NEEDED = _SPECIAL[:3]
_DEFAULT_SIZE = 131_072


class TikTokenizer(MegatronTokenizer):
    """Documents end with `</s>`; no text yields a special token.

    Args:
        path: the JSON vocabulary.
        pattern: "v1" or "v2".
        vocab_size: ids in all; of the file as many tokens count as have room beside the special ones.
        num_special_tokens: ids kept for special tokens, at the beginning.
        special_tokens: the first of these, `<unk>`, `<s>` and `</s>` among them.
        vocab_extra_ids: sentinels after all of them.

    Raises: DataError if the file is missing or no such vocabulary; ConfigError if the numbers do not fit.
    """

    def __init__(
        self,
        path: str,
        pattern: str = "v2",
        vocab_size: int | None = None,
        num_special_tokens: int = 1000,
        special_tokens: Sequence[str] = (),
        vocab_extra_ids: int = 0,
    ):
        self._size = vocab_size or _DEFAULT_SIZE
        named = list(special_tokens or _SPECIAL)
        super().__init__(
            path,
            vocab_extra_ids=vocab_extra_ids,
            pattern=PATTERNS[pattern],
            vocab_size=self._size,
            num_special_tokens=num_special_tokens,
            special_tokens=named,
        )
        missing = [token for token in _NEEDED if token not in named]
        if missing or len(set(named)) != len(named):
            raise ConfigError(
                f"--tokenizer-special-tokens {' '.join(named)}",
                why=f"{' '.join(missing)} is missing" if missing else "a token is there twice",
                fix=f"--tokenizer-special-tokens {' '.join(_NEEDED)} ...",
            )
        if len(named) > num_special_tokens or self._size < num_special_tokens + 256:
            raise ConfigError(
                f"--tiktoken-num-special-tokens {num_special_tokens} with {len(named)} special tokens and "
                f"--vocab-size {self._size}",
                why="they hold the special tokens, and the vocabulary holds 256 bytes beside them",
                fix=f"--tiktoken-num-special-tokens N, N from {len(named)} to {self._size - 256}",
            )
        named += [f"<SPECIAL_{k}>" for k in range(len(named), num_special_tokens)]
        self._special = {token: id for id, token in enumerate(named)}
        tokens = _ranked_tokens(path, self._size - num_special_tokens)
        # BPE asks only which rank is lower, so the ranks may be the ids.
        ids = {token: num_special_tokens + rank for rank, token in enumerate(tokens)}
        self.tokenizer = tiktoken.Encoding(
            path, pat_str=PATTERNS[pattern], mergeable_ranks=ids, special_tokens=self._special
        )
        self._tokens = tokens

    # ----------------------------------------------------------------------------------------------- text and ids
    def tokenize(self, text: str) -> list[int]:
        return self.tokenizer.encode_ordinary(text)

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.tokenizer.encode_ordinary(text) for text in texts]

    def _decode(self, ids: list[int]) -> str:
        """Ids without a token (a vocabulary may be larger than its file) are left out."""
        last = len(self._special) + len(self._tokens)
        return self.tokenizer.decode([id for id in ids if id < last], errors="replace")

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        return self.tokenizer.decode_with_offsets(self.tokenize(text))[1]

    # ------------------------------------------------------------------------------------------------- vocabulary
    @property
    def _library_size(self) -> int:
        return self._size

    @cached_property
    def _library_vocab(self) -> dict[str, int]:
        """Bytes that are no text by themselves are written `\\xNN`."""
        first = len(self._special)
        return {**{token.decode("utf-8", "backslashreplace"): first + i for i, token in enumerate(self._tokens)},
                **self._special}  # fmt: skip

    @property
    def eod(self) -> int:
        return self._special["</s>"]

    @property
    def unk(self) -> int:
        return self._special["<unk>"]

    @property
    def bos(self) -> int:
        return self._special["<s>"]

    def _named(self, name: str) -> int:
        id = self._special.get(f"<{name}>")
        return self._missing(name) if id is None else id


def _ranked_tokens(path: str, count: int) -> list[bytes]:
    """The first `count` tokens of the file, by rank.

    Raises: DataError if it is no list of ranks, or does not begin with the 256 bytes.
    """
    what = "a tiktoken vocabulary in JSON, a list of rank, token_bytes and token_str"
    text = read_text("--tokenizer-model", path, what)
    try:
        entries = json.loads(text)
        tokens = [base64.b64decode(entry["token_bytes"], validate=True) for entry in entries[:count]]
        ranks = [entry["rank"] for entry in entries[:count]]
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"--tokenizer-model {path} is no tiktoken vocabulary: {error}", fix=f"give {what}") from error
    if ranks != list(range(len(tokens))) or len(set(tokens)) != len(tokens):
        raise DataError(
            f"--tokenizer-model {path}: its ranks are not 0, 1, 2, ... of tokens that differ",
            why="a token's rank is its id",
            fix="write or copy the file again",
        )
    if tokens[:256] != [bytes([byte]) for byte in range(256)]:
        raise DataError(
            f"--tokenizer-model {path} does not begin with the 256 single bytes",
            why="every text must have tokens",
            fix=f"give {what}",
        )
    return tokens
