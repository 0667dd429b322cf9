"""Tokenizers over a SentencePiece model file."""

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from sentencepiece import SentencePieceProcessor

from megatron_lite.errors import ConfigError, DataError
from megatron_lite.tokenizers.base import MegatronTokenizer


class SentencePieceTokenizer(MegatronTokenizer):
    """The model's pieces, no others; documents end with the model's end-of-sentence piece. No token is added to a text.

    Args:
        model_file: the `.model` file.
        vocab_extra_ids: sentinels after the pieces.
        legacy: as the first versions of Megatron had it. Tokens that the model lacks come after its pieces: `<CLS>`,
            `<SEP>`, `<EOD>`, `<MASK>`, padding, begin and end of a text, and `special_tokens`; documents end with
            `<EOD>`; and where their text, or a sentinel's, occurs in a document, it is that token.
        special_tokens: further tokens; only with `legacy`.
        ignore_extra_whitespaces: False: blanks at the ends and repeated ones are kept, also by a model that was trained
            to drop them.

    Raises: DataError if the file is missing or not a SentencePiece model.
    """

    _tokens_of_legacy: tuple[str, ...] = ("<CLS>", "<SEP>", "<EOD>", "<MASK>", "<PAD>", "<BOS>", "<EOS>")

    def __init__(
        self,
        model_file: str,
        vocab_extra_ids: int = 0,
        *,
        legacy: bool = False,
        special_tokens: Sequence[str] = (),
        ignore_extra_whitespaces: bool = True,
    ):
        options: dict[str, object] = {"legacy": True} if legacy else {}
        options |= {"special_tokens": list(special_tokens)} if special_tokens else {}
        options |= {} if ignore_extra_whitespaces else {"ignore_extra_whitespaces": False}
        super().__init__(model_file, vocab_extra_ids=vocab_extra_ids, **options)
        if special_tokens and not legacy:
            raise ConfigError(
                f"special tokens {' '.join(special_tokens)} for {model_file}",
                why="a SentencePiece model has its pieces and no others",
                fix="--tokenizer-sentencepiece-legacy, which adds them after the pieces",
            )
        self.model_file, self.legacy = model_file, legacy
        self.special_tokens = list(special_tokens)
        try:
            with open(model_file, "rb") as file:
                proto = file.read()
        except OSError as error:
            raise DataError(
                f"cannot read --tokenizer-model {model_file}: {error.strerror or error}",
                fix="give a SentencePiece .model file; `megatron-lite train-tokenizer` makes one",
            ) from error
        try:
            self.tokenizer = SentencePieceProcessor(model_proto=proto)
            self._size = self.tokenizer.get_piece_size()
        except RuntimeError as error:
            raise DataError(
                f"--tokenizer-model {model_file} is not a SentencePiece model",
                why=str(error).splitlines()[0],
                fix="give a SentencePiece .model file; `megatron-lite train-tokenizer` makes one",
            ) from error
        if not ignore_extra_whitespaces:
            self.tokenizer = SentencePieceProcessor(model_proto=_keeping_blanks(proto))

    # ----------------------------------------------------------------------------------------------- text and ids
    def tokenize(self, text: str) -> list[int]:
        if not self._strings:
            return self.tokenizer.encode(text)
        ids: list[int] = []
        for part in self._cut.split(text):  # text, special, text, special, ...
            ids += [self._strings[part]] if part in self._strings else self.tokenizer.encode(part)
        return ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if self._strings:
            return [self.tokenize(text) for text in texts]
        return self.tokenizer.encode(list(texts), num_threads=1)

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)

    @cached_property
    def _strings(self) -> dict[str, int]:
        """Texts that are tokens wherever they stand, and their ids: none but with `legacy`."""
        if not self.legacy:
            return {}
        named = [*self._appends(), *(f"<extra_id_{i}>" for i in range(self.vocab_extra_ids))]
        return {token: self.vocab[token] for token in named}

    @cached_property
    def _cut(self) -> re.Pattern[str]:
        longest_first = sorted(self._strings, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    # ------------------------------------------------------------------------------------------------- vocabulary
    @property
    def _library_size(self) -> int:
        return self._size

    @cached_property
    def _library_vocab(self) -> dict[str, int]:
        return {self.tokenizer.id_to_piece(id): id for id in range(self._size)}

    def _appends(self) -> list[str]:
        if not self.legacy:
            return []
        own = self.tokenizer
        models_own = {"<PAD>": own.pad_id(), "<BOS>": own.bos_id(), "<EOS>": own.eos_id()}
        tokens = [
            self.tokenizer.id_to_piece(models_own[token]) if models_own.get(token, -1) >= 0 else token
            for token in self._tokens_of_legacy
        ]
        return [*tokens, *self.special_tokens]

    @property
    def eod(self) -> int:
        """Raises: ConfigError if the model was trained without an end-of-sentence piece."""
        return self.vocab["<EOD>"] if self._has("<EOD>") else self.eos

    @property
    def eos(self) -> int:
        id = self._id(self.tokenizer.eos_id(), "<EOS>")
        if id is None:
            raise ConfigError(
                f"{self.model_file} has no end-of-sentence piece",
                why="it is what ends a document (--append-eod, --eod-mask-loss, --reset-position-ids)",
                fix="train the model with an eos_id, as `megatron-lite train-tokenizer` does",
            )
        return id

    @property
    def unk(self) -> int:
        return self.tokenizer.unk_id()  # there is no model without it

    @property
    def bos(self) -> int:
        id = self._id(self.tokenizer.bos_id(), "<BOS>")
        return self._missing("bos") if id is None else id

    @property
    def pad(self) -> int:
        id = self._id(self.tokenizer.pad_id(), "<PAD>")
        return self._missing("pad") if id is None else id

    @property
    def cls(self) -> int:
        return self.vocab["<CLS>"] if self._has("<CLS>") else self._missing("cls")

    @property
    def sep(self) -> int:
        return self.vocab["<SEP>"] if self._has("<SEP>") else self._missing("sep")

    @property
    def mask(self) -> int:
        return self.vocab["<MASK>"] if self._has("<MASK>") else self._missing("mask")

    def _has(self, token: str) -> bool:
        return self.legacy and token in self._tokens_of_legacy

    def _id(self, of_the_model: int, appended: str) -> int | None:
        """The model's own id (-1: it has none), else that of the appended token."""
        if of_the_model >= 0:
            return of_the_model
        return self.vocab[appended] if self._has(appended) else None


class GPTSentencePieceTokenizer(SentencePieceTokenizer):
    """SentencePieceTokenizer by its other name; `legacy` adds `special_tokens` and no others."""

    _tokens_of_legacy = ()


class Llama2Tokenizer(SentencePieceTokenizer):
    """SentencePieceTokenizer over a Llama-2 model, whose pad piece is not used.

    `legacy` puts the model's begin-of-sentence piece in front of every text, and adds `special_tokens`.
    """

    _tokens_of_legacy = ()

    def tokenize(self, text: str) -> list[int]:
        ids = super().tokenize(text)
        return [self.bos, *ids] if self.legacy and ids else ids

    @property
    def adds_tokens(self) -> bool:
        return self.legacy

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.tokenize(text) for text in texts] if self.legacy else super().tokenize_batch(texts)

    @property
    def pad(self) -> int:
        self._missing("pad")


def _keeping_blanks(proto: bytes) -> bytes:
    """The same model, told not to drop blanks. Pieces and scores stay, so ids do."""
    from sentencepiece import sentencepiece_model_pb2  # needs protobuf, which comes with TensorBoard

    messages: Any = sentencepiece_model_pb2  # its classes are made when it is imported
    model = messages.ModelProto.FromString(proto)
    model.normalizer_spec.remove_extra_whitespaces = False
    return model.SerializeToString()
