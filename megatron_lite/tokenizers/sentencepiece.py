"""Tokenizers over a SentencePiece model file."""

from collections.abc import Sequence

from sentencepiece import SentencePieceProcessor

from megatron_lite.errors import ConfigError, DataError
from megatron_lite.tokenizers.base import MegatronTokenizer


class SentencePieceTokenizer(MegatronTokenizer):
    """The model's pieces, no others; documents end with the model's end-of-sentence piece. No token is added to a text.

    Raises: DataError if the file is missing or not a SentencePiece model.
    """

    def __init__(self, model_file: str):
        super().__init__(model_file)
        self.model_file = model_file
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

    def tokenize(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self.tokenizer.encode(list(texts), num_threads=1)

    def detokenize(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode([int(id) for id in ids])

    @property
    def vocab_size(self) -> int:
        return self._size

    @property
    def vocab(self) -> dict[str, int]:
        return {self.tokenizer.id_to_piece(id): id for id in range(self._size)}

    @property
    def eod(self) -> int:
        """Raises: ConfigError if the model was trained without an end-of-sentence piece."""
        if self.tokenizer.eos_id() < 0:
            raise ConfigError(
                f"{self.model_file} has no end-of-sentence piece",
                why="it is what ends a document (--append-eod, --eod-mask-loss, --reset-position-ids)",
                fix="train the model with an eos_id, as `megatron-lite train-tokenizer` does",
            )
        return self.tokenizer.eos_id()

    @property
    def bos(self) -> int:
        return self._id_or_missing(self.tokenizer.bos_id(), "bos")

    @property
    def pad(self) -> int:
        return self._id_or_missing(self.tokenizer.pad_id(), "pad")

    def _id_or_missing(self, id: int, name: str) -> int:
        return id if id >= 0 else self._missing(name)


class GPTSentencePieceTokenizer(SentencePieceTokenizer):
    """SentencePieceTokenizer by its other name."""


class Llama2Tokenizer(SentencePieceTokenizer):
    """SentencePieceTokenizer over a Llama-2 model, whose pad piece is not used."""

    @property
    def pad(self) -> int:
        return self._missing("pad")
