"""A Hugging Face tokenizer from local files, through the `tokenizers` library (transformers is not needed).

folder/tokenizer.json            the tokenizer
folder/tokenizer_config.json     which tokens are eos, bos, pad, ...   }  either, or both
folder/special_tokens_map.json   the same, in older folders            }
"""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from megatron_lite.errors import ConfigError, DataError
from megatron_lite.tokenizers.base import MegatronTokenizer


class HuggingFaceTokenizer(MegatronTokenizer):
    """The tokens of a `tokenizer.json`; documents end with the eos token that the files beside it name.

    Args:
        path: folder with the files above, or the `tokenizer.json` itself.
        include_special_tokens: add what the tokenizer adds by itself, as a bos token in front.

    Raises: DataError if the files are missing or torn. Nothing is downloaded.
    """

    def __init__(self, path: str, include_special_tokens: bool = True):
        super().__init__(path, include_special_tokens=include_special_tokens)
        self.path = path
        file = Path(path) if path.endswith(".json") else Path(path) / "tokenizer.json"
        if not file.is_file():
            raise DataError(
                f"--tokenizer-model {path}: there is no {file}",
                why="HuggingFaceTokenizer reads local files and downloads nothing",
                fix="give the folder of a tokenizer. With transformers: AutoTokenizer.from_pretrained(NAME)"
                ".save_pretrained(FOLDER) writes it",
            )
        try:
            self.tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises Exception itself
            raise DataError(f"{file} cannot be read: {error}", fix="write or copy it again") from error
        self.include_special_tokens = include_special_tokens
        self._special = _special_tokens(file.parent)
        ids = self.tokenizer.get_vocab(with_added_tokens=True).values()
        self._size = max(ids, default=-1) + 1
        eos = self._special.get("eos_token")
        probe = self.tokenizer.encode("a", add_special_tokens=include_special_tokens).ids
        self._appends_eod = eos is not None and bool(probe) and probe[-1] == self.tokenizer.token_to_id(eos)

    @property
    def special_tokens_dict(self) -> dict[str, int]:
        """Named special tokens that the vocabulary has: `eos_token` -> id."""
        ids = {name: self.tokenizer.token_to_id(token) for name, token in self._special.items()}
        return {name: id for name, id in ids.items() if id is not None}

    def tokenize(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=self.include_special_tokens).ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=self.include_special_tokens)
        return [encoding.ids for encoding in encodings]

    def detokenize(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode([int(id) for id in ids], skip_special_tokens=False)

    @property
    def vocab_size(self) -> int:
        return self._size

    @property
    def vocab(self) -> dict[str, int]:
        return self.tokenizer.get_vocab(with_added_tokens=True)

    @property
    def appends_eod(self) -> bool:
        return self._appends_eod

    @property
    def eod(self) -> int:
        """Raises: ConfigError if no file names an eos token."""
        id = self.special_tokens_dict.get("eos_token")
        if id is None:
            raise ConfigError(
                f"the tokenizer {self.path} has no eos token",
                why="it is what ends a document (--append-eod, --eod-mask-loss, --reset-position-ids)",
                fix='name one in tokenizer_config.json beside tokenizer.json: "eos_token": "</s>"',
            )
        return id

    @property
    def bos(self) -> int:
        return self._named("bos")

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
        id = self.special_tokens_dict.get(f"{name}_token")
        return self._missing(name) if id is None else id


def _special_tokens(folder: Path) -> dict[str, str]:
    """`eos_token` and its like -> token text, from the files that name them; tokenizer_config.json wins."""
    named: dict[str, str] = {}
    for file in (folder / "special_tokens_map.json", folder / "tokenizer_config.json"):
        if not file.is_file():
            continue
        try:
            content = json.loads(file.read_text("utf-8"))
        except ValueError as error:
            raise DataError(f"{file} is not JSON: {error}", fix="write or copy it again") from error
        for name, value in content.items():
            token = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(token, str):
                named[name] = token
    return named
