"""TokenizerConfig: how text becomes token ids, and how large the model's vocabulary is."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config import flag

# Megatron's names, and ByteTokenizer, which needs no file: one token a byte. Beside each the fields that it cannot do
# without, and those that it reads if they are there.
_SENTENCEPIECE = (
    ("tokenizer_model",),
    ("tokenizer_special_tokens", "tokenizer_sentencepiece_legacy", "tokenizer_sentencepiece_ignore_extra_whitespaces"),
)
_WORDPIECE = (("vocab_file",), ("tokenizer_special_tokens",))
FIELDS_OF_TYPE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "BertWordPieceLowerCase": _WORDPIECE,
    "BertWordPieceCase": _WORDPIECE,
    "GPT2BPETokenizer": (("vocab_file", "merge_file"), ("tokenizer_special_tokens",)),
    "SentencePieceTokenizer": _SENTENCEPIECE,
    "GPTSentencePieceTokenizer": _SENTENCEPIECE,
    "HuggingFaceTokenizer": (
        ("tokenizer_model",),
        (
            "tokenizer_special_tokens",
            "tokenizer_hf_no_use_fast",
            "tokenizer_hf_no_include_special_tokens",
            "chat_template",
        ),
    ),
    "SFTTokenizer": (
        ("tokenizer_model",),
        ("tokenizer_special_tokens", "chat_template", "sft_tokenizer_prompt_format"),
    ),
    "Llama2Tokenizer": _SENTENCEPIECE,
    "TikTokenizer": (
        ("tokenizer_model",),
        ("vocab_size", "tiktoken_pattern", "tiktoken_num_special_tokens", "tokenizer_special_tokens"),
    ),
    "NullTokenizer": (("vocab_size",), ("null_tokenizer_eod_id", "null_tokenizer_pad_id")),
    "ByteTokenizer": ((), ()),
}
# Known and refused: why, and what to do instead.
NOT_FOR_TEXT = {
    "MultimodalTokenizer": ("models here read text alone", "HuggingFaceTokenizer with the same folder"),
    "NullMultimodalTokenizer": ("models here read text alone", "NullTokenizer"),
}
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
    tokenizer_model: str | None = flag(
        None, "SentencePiece model, JSON vocabulary of tiktoken, or folder of a Hugging Face tokenizer."
    )
    vocab_file: str | None = flag(None, "Vocabulary of GPT2BPETokenizer (vocab.json) or WordPiece (vocab.txt).")
    merge_file: str | None = flag(None, "Merges of GPT2BPETokenizer (merges.txt).")
    vocab_size: int | None = flag(None, "Size of the vocabulary of NullTokenizer, or instead of the tokenizer's own.")
    padded_vocab_size: int | None = flag(None, "Exact size of the model's vocabulary.")
    make_vocab_size_divisible_by: int = flag(128, "The vocabulary is padded to a multiple of this times the TP size.")
    pad_vocab_size: bool = flag(
        True, "Do not pad the vocabulary.", off=("--no-pad-vocab-size", "--disable-pad-vocab-size")
    )
    vocab_extra_ids: int = flag(0, "Extra sentinel tokens at the end of the vocabulary (T5).")
    tokenizer_special_tokens: list[str] | None = flag(
        None, "Further special tokens; for TikTokenizer the first ones, instead of <unk> <s> </s> ..."
    )
    tokenizer_sentencepiece_legacy: bool = flag(
        False, "SentencePiece with special tokens after the pieces, found in texts too, as Megatron had it first."
    )
    tokenizer_sentencepiece_ignore_extra_whitespaces: bool = flag(
        True,
        "SentencePiece: keep repeated blanks, also if the model was trained to drop them.",
        off=(
            "--no-tokenizer-sentencepiece-ignore-extra-whitespaces",
            "--disable-tokenizer-sentencepiece-ignore-extra-whitespaces",
        ),
    )
    tokenizer_hf_no_use_fast: bool = flag(False, "HuggingFaceTokenizer: the Python tokenizer of transformers.")
    tokenizer_hf_no_include_special_tokens: bool = flag(
        False, "HuggingFaceTokenizer: add nothing to a text, as a begin token."
    )
    tiktoken_pattern: str | None = flag(None, "TikTokenizer: how a text is cut. Default: v2.", choices=("v1", "v2"))
    tiktoken_num_special_tokens: int = flag(1000, "TikTokenizer: ids kept for special tokens.")
    null_tokenizer_eod_id: int | None = flag(None, "NullTokenizer: end-of-document id. Default: the last id.")
    null_tokenizer_pad_id: int = flag(-1, "NullTokenizer: padding id; -1: none.")
    sft_tokenizer_prompt_format: str = flag(
        "nemotron-h-aligned",
        "SFTTokenizer: how messages become one text: nemotron-h-aligned, nemotron-nano-v2, identity (all of it is "
        "trained), or default, the tokenizer's own chat template.",
    )
    chat_template: str | None = flag(
        None, "HuggingFaceTokenizer: Jinja template of conversations, or a file with one, instead of its own."
    )
