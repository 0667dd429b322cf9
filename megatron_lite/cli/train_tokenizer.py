"""`megatron-lite train-tokenizer`: a SentencePiece tokenizer from the texts of JSONL files."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from megatron_lite.cli.jsonl import BadLine, find_inputs, parse, read_blocks, size_of
from megatron_lite.cli.progress import progress
from megatron_lite.errors import ConfigError, DataError
from megatron_lite.tokenizers.train_sentencepiece import train_sentencepiece


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


def main(argv: Sequence[str]) -> int:
    """The verb: trains and writes the model, then says how large it is."""
    parser = _Parser("megatron-lite train-tokenizer", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help="JSONL files or globs, plain or .gz")
    add("--output", required=True, metavar="FILE.model", help="the model file, for --tokenizer-model")
    add("--vocab-size", type=int, default=8192, metavar="N", help="pieces (default: %(default)s)")
    add("--model-type", choices=("bpe", "unigram"), default="bpe", help="(default: %(default)s)")
    add("--json-key", default="text", metavar="KEY", help="which text of a record (default: %(default)s)")
    add(
        "--sample-bytes",
        type=int,
        default=20_000_000,
        metavar="N",
        help="train on about so much (default: %(default)s)",
    )
    add(
        "--character-coverage", type=float, default=0.9999, metavar="X", help="share of characters with their own piece"
    )
    add("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="threads (default: one a core)")
    args = parser.parse_args(list(argv))
    files = find_inputs(args.input)
    pieces = train_sentencepiece(
        texts(files, args.json_key),
        args.output,
        vocab_size=args.vocab_size,
        model_type=args.model_type,
        total_bytes=size_of(files),
        sample_bytes=args.sample_bytes,
        character_coverage=args.character_coverage,
        num_threads=args.workers,
        say=lambda message: print(message, file=sys.stderr, flush=True),
    )
    print(f"{args.output}: {pieces} pieces")
    return 0
