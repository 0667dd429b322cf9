"""GPT2BPETokenizer: byte-level BPE from the two files that GPT-2 came with.

vocab.json    {"!": 0, ..., "<|endoftext|>": 50256}
merges.txt    #version: 0.2, then one merge a line, the first learnt first
"""

import json
from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megatron_lite.errors import ConfigError, DataError
from megatron_lite.tokenizers.library import LibraryTokenizer, read_text

_EOD = "<|endoftext|>"


class GPT2BPETokenizer(LibraryTokenizer):
    """GPT-2's tokens; documents end with `<|endoftext|>`, which no text yields.

    Args:
        vocab_file, merge_file: the files above.
        special_tokens: further tokens, after the file's.
        vocab_extra_ids: sentinels after all of them.

    Raises: DataError if a file is missing or does not fit the other.
    """

    def __init__(self, vocab_file: str, merge_file: str, special_tokens: Sequence[str] = (), vocab_extra_ids: int = 0):
        options = {"special_tokens": list(special_tokens)} if special_tokens else {}
        super().__init__(vocab_file, merge_file, vocab_extra_ids=vocab_extra_ids, **options)
        self.vocab_file = vocab_file
        vocab = _vocabulary(vocab_file)
        merges = _merges(merge_file)
        for pair in merges:
            missing = next((token for token in (*pair, "".join(pair)) if token not in vocab), None)
            if missing is not None:
                raise DataError(
                    f"--merge-file {merge_file} merges {' and '.join(pair)}, but {missing} is not in {vocab_file}",
                    why="every merge makes a token of the vocabulary from two others",
                    fix="give the two files of one tokenizer",
                )
        self.tokenizer = Tokenizer(models.BPE(vocab, merges))
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        self.add_special_tokens(special_tokens)

    @property
    def eod(self) -> int:
        """Raises: ConfigError if the vocabulary lacks `<|endoftext|>`."""
        id = self.tokenizer.token_to_id(_EOD)
        if id is None:
            raise ConfigError(
                f"--vocab-file {self.vocab_file} has no {_EOD}",
                why="it is what ends a document (--append-eod, --eod-mask-loss, --reset-position-ids)",
                fix="add it to the file, with the next free id",
            )
        return id


def _vocabulary(path: str) -> dict[str, int]:
    what = "the vocab.json of a GPT-2 tokenizer"
    try:
        vocab = json.loads(read_text("--vocab-file", path, what))
    except ValueError as error:
        raise DataError(f"--vocab-file {path} is not JSON: {error}", fix=f"give {what}") from error
    ids = list(vocab.values()) if isinstance(vocab, dict) else []
    if not ids or not all(type(id) is int for id in ids) or sorted(ids) != list(range(len(ids))):
        raise DataError(
            f"--vocab-file {path} is no vocabulary",
            why="it maps every token to an id, from 0 on without a gap",
            fix=f"give {what}",
        )
    return vocab


def _merges(path: str) -> list[tuple[str, str]]:
    what = "the merges.txt of a GPT-2 tokenizer"
    merges = []
    for number, line in enumerate(read_text("--merge-file", path, what).split("\n"), 1):
        if not line.strip() or number == 1 and line.startswith("#version"):
            continue
        pair = line.rstrip("\r").split(" ")
        if len(pair) != 2 or not all(pair):
            raise DataError(
                f"--merge-file {path}, line {number}: {line[:60]!r} is no merge",
                why="a line holds two tokens and a blank between them",
                fix=f"give {what}",
            )
        merges.append((pair[0], pair[1]))
    return merges
