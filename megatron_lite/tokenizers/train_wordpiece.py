"""Train a BERT vocabulary, a text file with one token a line, for BertWordPieceLowerCase or BertWordPieceCase."""

from collections.abc import Callable, Iterable

from tokenizers import trainers

from megatron_lite.errors import DataError
from megatron_lite.tokenizers.bert_wordpiece import SPECIAL_TOKENS, wordpiece
from megatron_lite.tokenizers.training_texts import sampled_lines, write

_CHARACTERS = 1000  # with a piece of their own, at most; rarer ones are unknown. Google's vocabularies have 997.


def train_wordpiece(
    texts: Iterable[str],
    vocab_file: str,
    *,
    vocab_size: int = 30522,
    lower_case: bool = True,
    total_bytes: int | None = None,
    sample_bytes: int = 20_000_000,
    say: Callable[[str], None] = lambda message: None,
) -> int:
    """Write `vocab_file`, trained on about `sample_bytes` of the texts. `[PAD]` is 0, `[UNK]` 1, `[CLS]` 2 ...

    Args:
        texts, total_bytes, sample_bytes: see `sampled_lines`.
        lower_case: for BertWordPieceLowerCase; False: for BertWordPieceCase.
        say: told how far it is.

    Returns: tokens in the file, fewer than `vocab_size` where the texts do not have as many.
    Raises: DataError if there is no text, too small a vocabulary, or the file cannot be written.
    """
    lines = sampled_lines(texts, total_bytes, sample_bytes)
    size = sum(map(len, lines))
    say(f"training a WordPiece tokenizer of {vocab_size} tokens on {size / 1e6:.1f} million characters ...")
    tokenizer = wordpiece({token: id for id, token in enumerate(SPECIAL_TOKENS)}, lower_case)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        limit_alphabet=min(_CHARACTERS, max(1, vocab_size // 4)),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    if len(tokens) > vocab_size or len(tokens) <= len(SPECIAL_TOKENS):
        raise DataError(
            f"--vocab-size {vocab_size} leaves nothing to learn",
            why=f"special tokens, and the text's characters at the beginning and inside of words, are {len(tokens)}",
            fix=f"--vocab-size {2 * len(tokens)} or more",
        )
    write(vocab_file, "".join(f"{token}\n" for token in tokens).encode())
    say(f"wrote {vocab_file}, {len(tokens)} tokens")
    return len(tokens)
