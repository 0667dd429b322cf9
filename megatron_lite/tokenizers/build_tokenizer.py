"""From flags to a tokenizer, and to the size of the model's vocabulary."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron_lite import tokenizers  # the room: a tokenizer's library is imported when the tokenizer is asked for
from megatron_lite.config import default_of, flags_of
from megatron_lite.errors import ConfigError, DataError
from megatron_lite.tokenizers.base import MegatronTokenizer
from megatron_lite.tokenizers.tokenizer_config import FIELDS_OF_TYPE, NOT_FOR_TEXT, TokenizerConfig

_FOR_EVERY_TYPE = ("tokenizer_type", "padded_vocab_size", "make_vocab_size_divisible_by", "pad_vocab_size",
                   "vocab_extra_ids", "vocab_size")  # fmt: skip


def build_tokenizer(config: TokenizerConfig) -> MegatronTokenizer:
    """The tokenizer that `--tokenizer-type` and its files name.

    Raises: ConfigError for a type that is not there, or lacks a flag or its library; DataError for files that cannot be
        read.
    """
    kind = config.tokenizer_type
    if kind not in FIELDS_OF_TYPE:
        raise _unknown(kind)
    missing = missing_fields(config)
    if missing:
        raise ConfigError(
            f"--tokenizer-type {kind} without {' and '.join(map(_spelling, missing))}",
            why="the tokenizer is made from it",
            fix=" ".join(f"{_spelling(name)} {'N' if name == 'vocab_size' else 'PATH'}" for name in missing),
        )
    try:
        family = getattr(tokenizers, kind)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--tokenizer-type {kind} needs the package {error.name}, which is not installed",
            fix=f"pip install {error.name}",
        ) from None
    tokenizer: MegatronTokenizer = family(**_arguments(kind, config), vocab_extra_ids=config.vocab_extra_ids)
    return tokenizer


def missing_fields(config: Any) -> list[str]:
    """Fields of TokenizerConfig that the type cannot do without and that are not there.

    Args:
        config: a TokenizerConfig, or a namespace with its names.
    """
    needed, _ = FIELDS_OF_TYPE.get(config.tokenizer_type, ((), ()))
    return [name for name in needed if not getattr(config, name)]


def unread_flags(config: TokenizerConfig) -> list[str]:
    """Flags with a value that this type of tokenizer does not read, as `--merge-file`."""
    if config.tokenizer_type not in FIELDS_OF_TYPE:
        return []
    needed, read = FIELDS_OF_TYPE[config.tokenizer_type]
    others = [item for item in fields(config) if item.name not in {*needed, *read, *_FOR_EVERY_TYPE}]
    spelled = {one.field: one.spellings[0] for one in flags_of(TokenizerConfig)}
    return [spelled[item.name] for item in others if getattr(config, item.name) != default_of(item)]


def _unknown(kind: str | None) -> ConfigError:
    known = ", ".join(FIELDS_OF_TYPE)
    if kind is None:
        return ConfigError("--tokenizer-type was not given", fix=f"--tokenizer-type, one of {known}")
    if kind in NOT_FOR_TEXT:
        why, instead = NOT_FOR_TEXT[kind]
        return ConfigError(f"--tokenizer-type {kind} is not supported: {why}", fix=f"--tokenizer-type {instead}")
    return ConfigError(
        f"--tokenizer-type {kind} is not there",
        why=f"there are {known}",
        fix="HuggingFaceTokenizer with the model's tokenizer.json",
    )


def _arguments(kind: str, config: TokenizerConfig) -> dict[str, Any]:
    """The constructor's arguments, of those that the type reads."""
    special = {"special_tokens": config.tokenizer_special_tokens or ()}
    if kind == "NullTokenizer":
        return {
            "vocab_size": config.vocab_size,
            "eod_id": config.null_tokenizer_eod_id,
            "pad_id": config.null_tokenizer_pad_id,
        }
    if kind == "ByteTokenizer":
        return {}
    if kind == "GPT2BPETokenizer":
        return {"vocab_file": config.vocab_file, "merge_file": config.merge_file, **special}
    if kind.startswith("BertWordPiece"):
        return {"vocab_file": config.vocab_file, **special}
    if kind == "TikTokenizer":
        return {
            "path": config.tokenizer_model,
            "pattern": config.tiktoken_pattern or "v2",
            "vocab_size": config.vocab_size,
            "num_special_tokens": config.tiktoken_num_special_tokens,
            **special,
        }
    if kind == "HuggingFaceTokenizer":
        return {
            "path": config.tokenizer_model,
            "include_special_tokens": not config.tokenizer_hf_no_include_special_tokens,
            "use_fast": not config.tokenizer_hf_no_use_fast,
            "chat_template": _template(config.chat_template),
            **special,
        }
    if kind == "SFTTokenizer":
        return {
            "path": config.tokenizer_model,
            "prompt_format": config.sft_tokenizer_prompt_format,
            "chat_template": _template(config.chat_template),
            **special,
        }
    return {
        "model_file": config.tokenizer_model,
        "legacy": config.tokenizer_sentencepiece_legacy,
        "ignore_extra_whitespaces": config.tokenizer_sentencepiece_ignore_extra_whitespaces,
        **special,
    }


def _template(text_or_file: str | None) -> str | None:
    """The text of a chat template, given itself (it has braces) or as a file."""
    if text_or_file is None or "{" in text_or_file:
        return text_or_file
    try:
        return Path(text_or_file).read_text("utf-8")
    except OSError as error:
        raise DataError(
            f"cannot read --chat-template {text_or_file}: {error.strerror or error}",
            why="it is neither a Jinja template, which has braces, nor a file",
            fix="--chat-template FILE.jinja",
        ) from error


def _spelling(name: str) -> str:
    return "--" + name.replace("_", "-")


def vocab_size_with_padding(
    tokenizer: MegatronTokenizer, config: TokenizerConfig, tensor_model_parallel_size: int = 1
) -> int:
    """Rows of the model's embedding: the tokenizer's size up to a multiple of `make_vocab_size_divisible_by` times tp.

    `--padded-vocab-size` wins, `--no-pad-vocab-size` leaves the size as it is, and a larger `--vocab-size` counts
    instead of the tokenizer's, unless the tokenizer is made from it.

    Raises: ConfigError if the tokenizer has more tokens than the result, or tp does not divide it.
    """
    size = tokenizer.vocab_size
    if config.vocab_size is not None and config.tokenizer_type not in ("NullTokenizer", "TikTokenizer"):
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
