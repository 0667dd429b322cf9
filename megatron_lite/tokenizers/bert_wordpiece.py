"""WordPiece tokenizers from a BERT vocabulary: a text file with one token a line, whose number is its id.

    ids   0 ... [PAD] ... [UNK] [CLS] [SEP] [MASK] ...   n-1   |  n   |  n+1  |   n+2 ...
          the file's n lines                                   | [BOS]| [EOS] | <extra_id_0> ...   (T5)

The brackets of a text are punctuation: `[MASK]` in a document is three words, not the mask.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from megatron_lite.errors import DataError
from megatron_lite.tokenizers.library import LibraryTokenizer, read_text

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class _BertWordPiece(LibraryTokenizer):
    """Words cut into pieces, the later ones marked with `##`; documents end with `[EOS]`. No token is added to a text.

    Args:
        vocab_file: the file above. Empty lines at its end do not count.
        special_tokens: further tokens, after the file's.
        vocab_extra_ids: sentinels after all others.

    Raises: DataError if the file is missing, lacks a special token or names a token twice.
    """

    lower_case: bool

    def __init__(self, vocab_file: str, special_tokens: Sequence[str] = (), vocab_extra_ids: int = 0):
        options = {"special_tokens": list(special_tokens)} if special_tokens else {}
        super().__init__(vocab_file, vocab_extra_ids=vocab_extra_ids, lower_case=self.lower_case, **options)
        self.tokenizer = wordpiece(_vocabulary(vocab_file), self.lower_case)
        self.add_special_tokens(special_tokens)

    def _appends(self) -> list[str]:
        return ["[BOS]", "[EOS]"]

    @property
    def eod(self) -> int:
        return self.vocab["[EOS]"]

    @property
    def unk(self) -> int:
        return self.vocab["[UNK]"]

    @property
    def bos(self) -> int:
        return self.vocab["[BOS]"]

    @property
    def pad(self) -> int:
        return self.vocab["[PAD]"]

    @property
    def cls(self) -> int:
        return self.vocab["[CLS]"]

    @property
    def sep(self) -> int:
        return self.vocab["[SEP]"]

    @property
    def mask(self) -> int:
        return self.vocab["[MASK]"]


class BertWordPieceLowerCase(_BertWordPiece):
    """WordPiece over lower-case words without accents."""

    lower_case = True


class BertWordPieceCase(_BertWordPiece):
    """WordPiece over words as they are."""

    lower_case = False


def wordpiece(vocab: dict[str, int], lower_case: bool) -> Tokenizer:
    """BERT's splitting into words and pieces, as the library has it.

    Source: Devlin et al. 2019, "BERT: Pre-training of Deep Bidirectional Transformers", and Wu et al. 2016 for the
    pieces.
    """
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _vocabulary(path: str) -> dict[str, int]:
    lines = read_text("--vocab-file", path, "a BERT vocab.txt; `megatron-lite train-tokenizer` makes one")
    tokens = [line.rstrip("\r") for line in lines.rstrip("\r\n").split("\n")]
    vocab: dict[str, int] = {}
    for id, token in enumerate(tokens):
        if token in vocab:
            raise DataError(
                f"--vocab-file {path}, line {id + 1}: {token!r} is on line {vocab[token] + 1} already",
                why="a token's line is its id",
                fix="write or copy the file again",
            )
        vocab[token] = id
    missing = [token for token in SPECIAL_TOKENS if token not in vocab]
    if missing:
        raise DataError(
            f"--vocab-file {path} has no {', '.join(missing)}",
            why="a BERT vocabulary names padding, unknown words, begin, separator and mask",
            fix="give a BERT vocab.txt; `megatron-lite train-tokenizer --model-type wordpiece` makes one",
        )
    return vocab
