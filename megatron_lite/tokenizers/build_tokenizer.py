"""From flags to a tokenizer, and to the size of the model's vocabulary."""

from megatron_lite import tokenizers  # the room: a tokenizer's library is imported when the tokenizer is asked for
from megatron_lite.errors import ConfigError
from megatron_lite.tokenizers.base import MegatronTokenizer
from megatron_lite.tokenizers.byte_level import ByteTokenizer
from megatron_lite.tokenizers.null import NullTokenizer
from megatron_lite.tokenizers.tokenizer_config import TokenizerConfig

_FROM_MODEL = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer", "HuggingFaceTokenizer")
_INSTEAD = {
    "GPT2BPETokenizer": "HuggingFaceTokenizer with a folder that holds GPT-2's tokenizer.json",
    "TikTokenizer": "HuggingFaceTokenizer with the model's tokenizer.json",
    "BertWordPieceLowerCase": "HuggingFaceTokenizer with the model's tokenizer.json",
    "BertWordPieceCase": "HuggingFaceTokenizer with the model's tokenizer.json",
    "SFTTokenizer": "HuggingFaceTokenizer with the model's tokenizer.json",
}


def build_tokenizer(config: TokenizerConfig) -> MegatronTokenizer:
    """The tokenizer that `--tokenizer-type` and its files name.

    Raises: ConfigError for a type that is not there (yet), or lacks a flag or its library; DataError for files that
        cannot be read.
    """
    kind = config.tokenizer_type
    if config.vocab_extra_ids:
        raise ConfigError(
            f"--vocab-extra-ids {config.vocab_extra_ids}",
            why="sentinel tokens for T5 have not landed yet",
            fix="leave it out",
        )
    if kind == "NullTokenizer":
        if config.vocab_size is None:
            raise ConfigError("--tokenizer-type NullTokenizer without --vocab-size", fix="--vocab-size N")
        return NullTokenizer(config.vocab_size, config.null_tokenizer_eod_id, config.null_tokenizer_pad_id)
    if kind == "ByteTokenizer":
        return ByteTokenizer()
    if kind in _FROM_MODEL:
        if not config.tokenizer_model:
            what = "FOLDER" if kind == "HuggingFaceTokenizer" else "FILE.model"
            raise ConfigError(f"--tokenizer-type {kind} without --tokenizer-model", fix=f"--tokenizer-model {what}")
        try:
            family = getattr(tokenizers, kind)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"--tokenizer-type {kind} needs the package {error.name}, which is not installed",
                fix=f"pip install {error.name}",
            ) from None
        tokenizer: MegatronTokenizer = family(config.tokenizer_model)
        return tokenizer
    known = ", ".join([*_FROM_MODEL, "NullTokenizer", "ByteTokenizer"])
    if kind is None:
        raise ConfigError("--tokenizer-type was not given", fix=f"--tokenizer-type, one of {known}")
    raise ConfigError(
        f"--tokenizer-type {kind} has not landed yet",
        why=f"there are {known}",
        fix=f"use {_INSTEAD.get(kind, 'one of these')}",
    )


def vocab_size_with_padding(
    tokenizer: MegatronTokenizer, config: TokenizerConfig, tensor_model_parallel_size: int = 1
) -> int:
    """Rows of the model's embedding: the tokenizer's size up to a multiple of `make_vocab_size_divisible_by` times tp.

    `--padded-vocab-size` wins, `--no-pad-vocab-size` leaves the size as it is, and a larger `--vocab-size` counts
    instead of the tokenizer's.

    Raises: ConfigError if the tokenizer has more tokens than the result, or tp does not divide it.
    """
    size = tokenizer.vocab_size
    if config.vocab_size is not None and not isinstance(tokenizer, NullTokenizer):
        if config.vocab_size < size:
            raise ConfigError(
                f"--vocab-size {config.vocab_size} is less than the tokenizer's {size}",
                why="every token needs its row in the embedding",
                fix="leave --vocab-size out",
            )
        size = config.vocab_size
    if config.padded_vocab_size is not None:
        if config.padded_vocab_size < size:
            raise ConfigError(
                f"--padded-vocab-size {config.padded_vocab_size} is less than the tokenizer's {size}",
                why="every token needs its row in the embedding",
                fix=f"--padded-vocab-size {size} or more",
            )
        padded = config.padded_vocab_size
    elif not config.pad_vocab_size:
        padded = size
    else:
        multiple = config.make_vocab_size_divisible_by * tensor_model_parallel_size
        padded = -(-size // multiple) * multiple
    if padded % tensor_model_parallel_size:
        raise ConfigError(
            f"a vocabulary of {padded} cannot be shared by --tensor-model-parallel-size {tensor_model_parallel_size}",
            why="every rank holds the same number of rows of the embedding",
            fix="a multiple of it, or without --no-pad-vocab-size",
        )
    return padded
