"""Train a SentencePiece model from which texts come back as they were: blanks, tabs, line ends and all.

Nothing is normalised, no blank is added or merged, line ends and tabs are pieces of their own, and what no piece
covers is spelled in bytes. Only U+2581, SentencePiece's own sign for a blank, comes back as a blank.
"""

import io
import os
from collections.abc import Callable, Iterable
from typing import Literal

from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from megatron_lite.errors import DataError
from megatron_lite.tokenizers.training_texts import sampled_lines, write

_PIECES_NOT_LEARNED = 2 + 2 + 256  # <unk> and the end of a document; line end and tab; bytes


def train_sentencepiece(
    texts: Iterable[str],
    model_path: str,
    *,
    vocab_size: int = 8192,
    model_type: Literal["bpe", "unigram"] = "bpe",
    total_bytes: int | None = None,
    sample_bytes: int = 20_000_000,
    character_coverage: float = 0.9999,
    num_threads: int | None = None,
    say: Callable[[str], None] = lambda message: None,
) -> int:
    """Write `model_path`, trained on about `sample_bytes` of the texts. Piece 0 is unknown, piece 1 ends documents.

    Args:
        texts, total_bytes, sample_bytes: see `sampled_lines`.
        say: told how far it is.

    Returns: pieces in the model, fewer than `vocab_size` where the texts do not have as many.
    Raises: DataError if there is no text, too small a vocabulary, or the file cannot be written.
    """
    if vocab_size <= _PIECES_NOT_LEARNED:
        raise DataError(
            f"--vocab-size {vocab_size} leaves nothing to learn",
            why=f"{_PIECES_NOT_LEARNED} pieces are bytes, special tokens, line end and tab",
            fix=f"--vocab-size {2 * _PIECES_NOT_LEARNED} or more",
        )
    lines = sampled_lines(texts, total_bytes, sample_bytes)
    size = sum(map(len, lines))
    say(f"training a {model_type} tokenizer of {vocab_size} pieces on {size / 1e6:.1f} million characters ...")
    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            character_coverage=character_coverage,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            user_defined_symbols=["\n", "\t"],
            max_sentence_length=1 << 20,
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            eos_piece="<eod>",
            num_threads=num_threads or os.cpu_count() or 1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise DataError(
            f"a tokenizer of {vocab_size} pieces cannot be trained on this text of {size} characters",
            why=str(error).strip().splitlines()[-1],
            fix="more text, or a smaller --vocab-size",
        ) from error
    write(model_path, model.getvalue())
    pieces = SentencePieceProcessor(model_proto=model.getvalue()).get_piece_size()
    say(f"wrote {model_path}, {pieces} pieces")
    return pieces
