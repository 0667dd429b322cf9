"""`megatron-lite train-tokenizer`: a SentencePiece or WordPiece tokenizer from the texts of JSONL files.

--model-type bpe, unigram    FILE.model    --tokenizer-type SentencePieceTokenizer --tokenizer-model FILE.model
--model-type wordpiece       vocab.txt     --tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from megatron_lite.cli.jsonl import BadLine, find_inputs, parse, read_blocks, size_of
from megatron_lite.cli.progress import progress
from megatron_lite.errors import ConfigError, DataError
from megatron_lite.tokenizers.train_sentencepiece import train_sentencepiece
from megatron_lite.tokenizers.train_wordpiece import train_wordpiece


def texts(files: Sequence[str], key: str) -> Iterator[str]:
    """The texts of all records. Raises: DataError for a line that is no record, with its number."""
    read = 0
    with progress("reading", size_of(files) / 1e6, "MB") as advance:
        for block in read_blocks(files):
            for number, line in enumerate(block.lines, block.first):
                try:
                    record = parse(line, [key])
                except BadLine as error:
                    raise DataError(
                        f"{block.file}, line {number}: {error}",
                        why=f"every line is one JSON object with a text under {key!r}",
                        fix="mend the line, or name the key with --json-key",
                    ) from None
                yield from record[0] if record is not None else []
            advance((block.read - read) / 1e6)
            read = block.read


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"megatron-lite train-tokenizer: {message}", fix="megatron-lite train-tokenizer --help")


def _parser() -> _Parser:
    parser = _Parser("megatron-lite train-tokenizer", description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help="JSONL files or globs, plain or .gz")
    add("--output", required=True, metavar="FILE", help="a model for --tokenizer-model; wordpiece: for --vocab-file")
    add("--vocab-size", type=int, metavar="N", help="tokens (default: 8192; wordpiece: 30522)")
    add("--model-type", choices=("bpe", "unigram", "wordpiece"), default="bpe", help="(default: %(default)s)")
    add("--cased", action="store_true", help="wordpiece: keep capitals and accents, for BertWordPieceCase")
    add("--json-key", default="text", metavar="KEY", help="which text of a record (default: %(default)s)")
    add(
        "--sample-bytes",
        type=int,
        default=20_000_000,
        metavar="N",
        help="train on about so much (default: %(default)s)",
    )
    add("--character-coverage", type=float, metavar="X", help="share of characters with a piece (default: 0.9999)")
    add("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="threads (default: one a core)")
    return parser


def _check(args: argparse.Namespace) -> None:
    """Raises: ConfigError for options that this type of model has no use for, or without sense."""
    if args.cased and args.model_type != "wordpiece":
        raise ConfigError(
            f"--cased with --model-type {args.model_type}", why="it keeps capitals anyway", fix="leave --cased out"
        )
    if args.character_coverage is not None and args.model_type == "wordpiece":
        raise ConfigError(
            f"--character-coverage {args.character_coverage} with --model-type wordpiece",
            why="the commonest 1000 characters have a piece",
            fix="leave it out",
        )
    if args.character_coverage is not None and not 0.98 <= args.character_coverage <= 1:
        raise ConfigError(f"--character-coverage {args.character_coverage}", fix="give 0.98 to 1")
    for name in ("vocab_size", "sample_bytes", "workers"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}", fix="give 1 or more")


def main(argv: Sequence[str]) -> int:
    """The verb: trains and writes the model, then says how large it is and which flags use it."""
    args = _parser().parse_args(list(argv))
    _check(args)
    files = find_inputs(args.input)
    common: dict[str, Any] = {
        "total_bytes": size_of(files),
        "sample_bytes": args.sample_bytes,
        "say": lambda message: print(message, file=sys.stderr, flush=True),
    }
    if args.model_type == "wordpiece":
        os.environ["RAYON_NUM_THREADS"] = str(args.workers)  # read by the library when it first works in parallel
        pieces = train_wordpiece(
            texts(files, args.json_key),
            args.output,
            vocab_size=args.vocab_size or 30522,
            lower_case=not args.cased,
            **common,
        )
        kind, flag = ("BertWordPieceCase" if args.cased else "BertWordPieceLowerCase"), "--vocab-file"
    else:
        pieces = train_sentencepiece(
            texts(files, args.json_key),
            args.output,
            vocab_size=args.vocab_size or 8192,
            model_type=args.model_type,
            character_coverage=0.9999 if args.character_coverage is None else args.character_coverage,
            num_threads=args.workers,
            **common,
        )
        kind, flag = "SentencePieceTokenizer", "--tokenizer-model"
    print(f"{args.output}: {pieces} pieces, for --tokenizer-type {kind} {flag} {args.output}")
    return 0
