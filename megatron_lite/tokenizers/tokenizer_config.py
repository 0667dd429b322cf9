"""TokenizerConfig: how text becomes token ids, and how large the model's vocabulary is."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config import flag

# Megatron's names, and ByteTokenizer, which needs no file: one token a byte.
TOKENIZER_TYPES = (
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "HuggingFaceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "MultimodalTokenizer",
    "NullTokenizer",
    "NullMultimodalTokenizer",
    "SFTTokenizer",
    "ByteTokenizer",
)


@dataclass(kw_only=True)
class TokenizerConfig:
    """Which tokenizer, from which files. The names are those of Megatron's arguments."""

    tokenizer_type: str | None = flag(None, "Family of the tokenizer.", choices=TOKENIZER_TYPES)
    tokenizer_model: str | None = flag(None, "SentencePiece or tiktoken file, or a folder of a Hugging Face tokenizer.")
    vocab_size: int | None = flag(None, "Size of the vocabulary of NullTokenizer, or instead of the tokenizer's own.")
    padded_vocab_size: int | None = flag(None, "Exact size of the model's vocabulary.")
    make_vocab_size_divisible_by: int = flag(128, "The vocabulary is padded to a multiple of this times the TP size.")
    pad_vocab_size: bool = flag(
        True, "Do not pad the vocabulary.", off=("--no-pad-vocab-size", "--disable-pad-vocab-size")
    )
    vocab_extra_ids: int = flag(0, "Extra sentinel tokens at the end of the vocabulary (T5).")
    null_tokenizer_eod_id: int | None = flag(None, "NullTokenizer: end-of-document id. Default: the last id.")
    null_tokenizer_pad_id: int = flag(-1, "NullTokenizer: padding id; -1: none.")
