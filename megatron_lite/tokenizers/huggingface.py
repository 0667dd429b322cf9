"""A Hugging Face tokenizer from local files, through the `tokenizers` library (transformers is not needed).

folder/tokenizer.json            the tokenizer; the others may be missing
folder/tokenizer_config.json     which tokens are eos, bos, pad, ...; the chat template
folder/special_tokens_map.json   the same tokens, in older folders
folder/chat_template.jinja       the chat template, in newer folders
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from megatron_lite.errors import ConfigError, DataError
from megatron_lite.tokenizers.library import LibraryTokenizer


class HuggingFaceTokenizer(LibraryTokenizer):
    """The tokens of a `tokenizer.json`; documents end with the eos token that the files beside it name.

    As transformers' AutoTokenizer has it, tokens that the files beside it name and the vocabulary lacks come after it,
    and the `tokenizer.json` alone decides what a text gets in front and behind.

    Args:
        path: folder with the files above, or the `tokenizer.json` itself.
        include_special_tokens: add what the tokenizer adds by itself, as a bos token in front.
        special_tokens: further tokens; those that the vocabulary lacks come after it.
        vocab_extra_ids: sentinels after all of them; those that the vocabulary has (T5's) stay what they are.
        use_fast: False: the tokenizer that transformers writes in Python, where it still has one.
        chat_template: Jinja template instead of the tokenizer's own.

    Raises: DataError if the files are missing or torn. Nothing is downloaded.
    """

    def __init__(
        self,
        path: str,
        include_special_tokens: bool = True,
        *,
        special_tokens: Sequence[str] = (),
        vocab_extra_ids: int = 0,
        use_fast: bool = True,
        chat_template: str | None = None,
    ):
        options: dict[str, object] = {} if use_fast else {"use_fast": False}
        options |= {"special_tokens": list(special_tokens)} if special_tokens else {}
        super().__init__(
            path, vocab_extra_ids=vocab_extra_ids, include_special_tokens=include_special_tokens, **options
        )
        self.path, self.include_special_tokens = path, include_special_tokens
        folder = Path(path).parent if path.endswith(".json") else Path(path)
        settings = _settings(folder)
        self._special = _special_tokens(settings)
        self.chat_template = chat_template or _chat_template(folder, settings)
        if use_fast:
            self.tokenizer = _read(path)
            _complete(self.tokenizer, settings, self._special)
        else:
            from megatron_lite.tokenizers.python_tokenizer import PythonTokenizer  # needs transformers

            self.tokenizer = PythonTokenizer(path)
            self._special = self.tokenizer.special_tokens
        self.add_special_tokens(special_tokens)
        eos = self._special.get("eos_token")
        probe = self.tokenize("a")
        self._appends_eod = eos is not None and bool(probe) and probe[-1] == self.tokenizer.token_to_id(eos)

    @property
    def special_tokens_dict(self) -> dict[str, int]:
        """Named special tokens that the vocabulary has: `eos_token` -> id."""
        ids = {name: self.tokenizer.token_to_id(token) for name, token in self._special.items()}
        return {name: id for name, id in ids.items() if id is not None}

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
    def unk(self) -> int:
        return self._named("unk")

    @property
    def bos(self) -> int:
        return self._named("bos")

    def _named(self, name: str) -> int:
        id = self.special_tokens_dict.get(f"{name}_token")
        return self._missing(name) if id is None else id

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> list[int] | str:
        """A conversation as the model of this tokenizer was trained to see it, in ids or as text.

        Args:
            conversation: messages `{"role": "user", "content": "..."}`.
            chat_template: Jinja template instead of the tokenizer's.
            add_generation_prompt: end with what begins an answer.
            variables: further names for the template, as `tools`.

        Raises: ConfigError if there is no template; DataError if it refuses the conversation.
        """
        from megatron_lite.tokenizers.chat_template import render

        template = chat_template or self.chat_template
        if template is None:
            raise ConfigError(
                f"the tokenizer {self.path} has no chat template",
                why="it says how messages become one text",
                fix="--chat-template FILE.jinja, or chat_template.jinja beside tokenizer.json",
            )
        names = {**self._special, "add_generation_prompt": add_generation_prompt, **variables}
        text = render(template, conversation, names)
        return self.tokenizer.encode(text, add_special_tokens=False).ids if tokenize else text


def _read(path: str) -> Tokenizer:
    file = Path(path) if path.endswith(".json") else Path(path) / "tokenizer.json"
    if not file.is_file():
        raise DataError(
            f"--tokenizer-model {path}: there is no {file}",
            why="HuggingFaceTokenizer reads local files and downloads nothing",
            fix="give the folder of a tokenizer. With transformers: AutoTokenizer.from_pretrained(NAME)"
            ".save_pretrained(FOLDER) writes it",
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises Exception itself
        raise DataError(f"{file} cannot be read: {error}", fix="write or copy it again") from error
    tokenizer.no_truncation()  # the file may hold the settings of someone's batch: a document is whole here
    tokenizer.no_padding()
    return tokenizer


def _settings(folder: Path) -> dict[str, Any]:
    """What the files beside it say; tokenizer_config.json wins."""
    settings: dict[str, Any] = {}
    for file in (folder / "special_tokens_map.json", folder / "tokenizer_config.json"):
        if file.is_file():
            try:
                settings |= json.loads(file.read_text("utf-8"))
            except (ValueError, TypeError) as error:
                raise DataError(f"{file} is not a JSON object: {error}", fix="write or copy it again") from error
    return settings


def _token(value: Any) -> AddedToken | None:
    """A token as the files write it: a text, or an object with `content`. None: no token."""
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        switches = {name: bool(value.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "normalized")}
        return AddedToken(value["content"], special=bool(value.get("special", True)), **switches)
    return AddedToken(value, special=True, normalized=False) if isinstance(value, str) else None


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """`eos_token` and its like -> token text."""
    named = {name: _token(value) for name, value in settings.items() if name.endswith("_token")}
    return {name: token.content for name, token in named.items() if token is not None}


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """The tokenizer's template: its file, else its setting; of several the one called default."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _complete(tokenizer: Tokenizer, settings: dict[str, Any], special: dict[str, str]) -> None:
    """Adds the tokens that the files beside it name and it lacks."""
    listed = settings.get("added_tokens_decoder") or {}
    wanted = [_token(listed[id]) for id in sorted(listed, key=int)]
    wanted += [_token(settings[name]) for name in special]
    for name in ("additional_special_tokens", "extra_special_tokens"):
        wanted += [_token(value) for value in settings.get(name) or () if isinstance(settings[name], list)]
    there = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    new: dict[str, AddedToken] = {}
    for token in wanted:
        if token is not None and token.content not in there:
            new.setdefault(token.content, token)
    tokenizer.add_tokens(list(new.values()))
