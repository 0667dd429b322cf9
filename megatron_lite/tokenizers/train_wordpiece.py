"""Train a BERT vocabulary, a text file with one token a line, for BertWordPieceLowerCase or BertWordPieceCase.

The same texts give the same file. The library numbers single characters as its hash tables hand them out, differently
in every run, and their numbers decide between pairs that are equally common; so they are numbered here.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from tokenizers import Tokenizer, trainers

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
    common, rare = _characters(tokenizer, lines)
    first = [*SPECIAL_TOKENS, *common, *(f"##{character}" for character in common)]
    if len(first) >= vocab_size:
        raise DataError(
            f"--vocab-size {vocab_size} leaves nothing to learn",
            why=f"special tokens, and the text's characters at the beginning and inside of words, are {len(first)}",
            fix=f"--vocab-size {2 * len(first)} or more",
        )
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=first, show_progress=False)
    blanks = dict.fromkeys(map(ord, rare), " ")
    tokenizer.train_from_iterator((line.translate(blanks) for line in lines) if rare else lines, trainer)
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    write(vocab_file, "".join(f"{token}\n" for token in tokens).encode())
    say(f"wrote {vocab_file}, {len(tokens)} tokens")
    return len(tokens)


def _characters(tokenizer: Tokenizer, lines: list[str]) -> tuple[list[str], list[str]]:
    """Characters of words that get a piece, in order; and those of the texts that are rarer, capitals included."""
    raw: Counter[str] = Counter()
    for line in lines:
        raw.update(line)
    words_of = {character: tokenizer.normalizer.normalize_str(character).split() for character in raw}
    counts: Counter[str] = Counter()
    for character, count in raw.items():
        for word in words_of[character]:
            counts.update(dict.fromkeys(word, count))
    by_count = sorted(counts, key=lambda character: (-counts[character], character))
    rare = set(by_count[_CHARACTERS:])
    return sorted(by_count[:_CHARACTERS]), [c for c in raw if rare.intersection("".join(words_of[c]))]
