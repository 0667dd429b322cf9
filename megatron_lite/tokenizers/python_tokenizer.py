"""A tokenizer that transformers writes in Python, behind the calls that are made of the `tokenizers` library."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import AddedToken

try:
    import transformers
except ModuleNotFoundError:
    transformers = None  # type: ignore[assignment]

from megatron_lite.errors import ConfigError, DataError


@dataclass(frozen=True)
class _Encoding:
    ids: list[int]


class PythonTokenizer:
    """AutoTokenizer over local files, without the fast implementation and without code from the folder.

    Raises: ConfigError if transformers is not there, or has no such tokenizer (its version 5 has few); DataError if the
        files are missing or torn.
    """

    def __init__(self, path: str):
        if transformers is None:
            raise ConfigError(
                "--tokenizer-hf-no-use-fast needs the package transformers, which is not installed",
                why="its Python tokenizers are what the flag asks for",
                fix="pip install transformers, or leave it out",
            )
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(
                path, use_fast=False, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
            reason = str(error).strip().splitlines()
            raise DataError(
                f"--tokenizer-model {path} cannot be read by transformers: {reason[0] if reason else error}",
                fix="give the folder of a tokenizer, with its tokenizer_config.json",
            ) from error
        if self._tokenizer.is_fast:
            raise ConfigError(
                f"--tokenizer-hf-no-use-fast: transformers {transformers.__version__} has no other than the fast "
                f"tokenizer for {path}",
                why="its Python tokenizers are gone for this model",
                fix="leave the flag out",
            )
        self.special_tokens: dict[str, str] = {
            name: str(token) for name, token in self._tokenizer.special_tokens_map.items() if isinstance(token, str)
        }

    def encode(self, text: str, add_special_tokens: bool = True) -> _Encoding:
        return _Encoding(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def encode_batch_fast(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[_Encoding]:
        return [self.encode(text, add_special_tokens) for text in texts]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        return str(text)

    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]:
        return self._tokenizer.get_vocab()

    def token_to_id(self, token: str) -> int | None:
        return self.get_vocab().get(token)

    def add_tokens(self, tokens: Sequence[AddedToken]) -> int:
        return self._tokenizer.add_tokens([token.content for token in tokens], special_tokens=True)
