"""`megatron-lite preprocess`: JSONL -> tokenised .bin/.idx pairs for `--data-path`.

    input files --blocks of lines--> workers: parse, tokenise --token arrays, in order--> one writer --> a pair per key
                                     at most a few blocks a worker are on the way: memory stays constant

The bytes do not depend on the number of workers. A pair appears under its name when all of it is written: a run that
fails or is killed leaves nothing that loads. A line that is no record ends the run with file, line and reason, unless
`--skip-bad-lines` counts it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import get_all_start_methods, get_context
from typing import NoReturn

import numpy as np

from megatron_lite.cli.jsonl import BadLine, Block, find_inputs, parse, read_blocks, size_of
from megatron_lite.config import did_you_mean, flags_of, from_namespace
from megatron_lite.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from megatron_lite.errors import ConfigError, DataError
from megatron_lite.tokenizers.build_tokenizer import build_tokenizer
from megatron_lite.tokenizers.tokenizer_config import TokenizerConfig

_BLOCKS_PER_WORKER = 4
_BAD_LINES_SHOWN = 10

# Megatron's flags that stop the run until they do what they say, and those that have nothing left to do.
_NOT_YET = (
    "--split-sentences",
    "--keep-newlines",
    "--lang",
    "--keep-sequential-samples",
    "--find-optimal-num-workers",
    "--workers-to-check",
    "--max-documents",
    "--vocab-file",
    "--merge-file",
)
_NO_EFFECT = {
    "--dataset-impl": "there is one format of data",
    "--chunk-size": "lines travel in blocks of a fixed size",
}


@dataclass
class Tokenised:
    """What a worker made of a block: for each key the tokens, and their cut into sequences and documents."""

    tokens: list[bytes]
    lengths: list[list[int]]  # of the sequences
    documents: list[list[int]]  # sequences of each document
    bad: list[tuple[int, str]]  # line number, reason


@dataclass
class Totals:
    """Counts for progress and summary."""

    documents: int = 0
    empty: int = 0
    skipped: int = 0
    text_bytes: int = 0
    read: int = 0
    sequences: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


class Encoder:
    """Block -> Tokenised; lives in every worker."""

    def __init__(self, config: TokenizerConfig, keys: list[str], append_eod: bool):
        self.tokenizer = build_tokenizer(config)
        self.keys = keys
        self.dtype = DType.optimal_dtype(self.tokenizer.vocab_size)
        self.eod = self.tokenizer.eod if append_eod and not self.tokenizer.appends_eod else None

    def __call__(self, block: Block) -> Tokenised:
        records: list[list[list[str]]] = []
        bad: list[tuple[int, str]] = []
        numbers = []
        for number, line in enumerate(block.lines, block.first):
            try:
                record = parse(line, self.keys)
            except BadLine as error:
                bad.append((number, str(error)))
                continue
            if record is not None:
                records.append(record)
                numbers.append(number)
        encoded: list[list[list[list[int]]]] = []  # record -> key -> text -> ids
        try:
            encoded += self._encode(records)
        except DataError:  # one text is at fault: find it
            for number, record in zip(numbers, records):
                try:
                    encoded += self._encode([record])
                except DataError as error:
                    bad.append((number, str(error)))
        result = Tokenised([], [], [], sorted(bad))
        for k in range(len(self.keys)):
            tokens, lengths, documents = self._join([record[k] for record in encoded])
            result.tokens.append(tokens)
            result.lengths.append(lengths)
            result.documents.append(documents)
        return result

    def _encode(self, records: list[list[list[str]]]) -> list[list[list[list[int]]]]:
        """The ids of every text, all of the block in one call of the tokenizer."""
        texts = [text for record in records for value in record for text in value]
        ids = iter(self.tokenizer.tokenize_batch(texts))
        return [[[next(ids) for _ in value] for value in record] for record in records]

    def _join(self, documents: list[list[list[int]]]) -> tuple[bytes, list[int], list[int]]:
        """One key's documents: tokens one after another, length of each sequence, sequences of each document.

        Texts without a token are left out; the end of the document goes to its last sequence.
        """
        lengths, counts, parts = [], [], []
        for texts in documents:
            sequences = [ids for ids in texts if ids]
            if sequences and self.eod is not None:
                sequences[-1] = [*sequences[-1], self.eod]
            lengths += [len(ids) for ids in sequences]
            counts.append(len(sequences))
            parts += sequences
        ids = np.fromiter(itertools.chain.from_iterable(parts), np.int64, sum(lengths))
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.tokenizer.vocab_size:
            raise DataError(
                f"the tokenizer gave ids from {ids.min()} to {ids.max()}, its vocabulary has "
                f"{self.tokenizer.vocab_size}",
                fix="check the tokenizer's files",
            )
        return ids.astype(self.dtype).tobytes(), lengths, counts


_encoder: Encoder | None = None


def _start_worker(config: TokenizerConfig, keys: list[str], append_eod: bool) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the writer's to handle
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    _encoder = Encoder(config, keys, append_eod)


def _work(block: Block) -> Tokenised:
    assert _encoder is not None
    return _encoder(block)


def _tokenise(
    blocks: Iterator[Block], encoder: Encoder, workers: int, initargs: tuple[TokenizerConfig, list[str], bool]
) -> Iterator[tuple[Block, Tokenised]]:
    """Every block with its tokens, in order. Raises: DataError when a worker dies."""
    if workers == 1:
        for block in blocks:
            yield block, encoder(block)
        return
    method = "fork" if "fork" in get_all_start_methods() else "spawn"
    with ProcessPoolExecutor(workers, get_context(method), _start_worker, initargs) as pool:
        waiting: deque[tuple[Block, Future[Tokenised]]] = deque()
        try:
            for block in blocks:
                waiting.append((block, pool.submit(_work, block)))
                if len(waiting) >= workers * _BLOCKS_PER_WORKER:
                    done, future = waiting.popleft()
                    yield done, future.result()
            while waiting:
                done, future = waiting.popleft()
                yield done, future.result()
        except BrokenProcessPool as error:
            raise DataError(
                "a worker process died",
                why="it was killed, or ran out of memory",
                fix="fewer --workers, or look for the longest line of the input",
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


class _Progress:
    """`Processed N documents (x docs/s, y MB/s).` on standard error; on a terminal one line that also says when."""

    def __init__(self, interval: int, total_read: int):
        self.interval, self.total_read = interval, total_read
        self.start = self.drawn = time.monotonic()
        self.said = 0
        self.terminal = sys.stderr.isatty()

    def __call__(self, totals: Totals) -> None:
        now = time.monotonic()
        elapsed = max(now - self.start, 1e-9)
        line = (
            f"Processed {totals.documents} documents ({totals.documents / elapsed:.1f} docs/s, "
            f"{totals.text_bytes / elapsed / 1024 / 1024:.2f} MB/s)."
        )
        if self.terminal and now - self.drawn > 0.2:
            self.drawn = now
            left = elapsed * (self.total_read / max(totals.read, 1) - 1)
            print(
                f"\r{line} {totals.read / max(self.total_read, 1):4.0%}, {left:.0f} s left \x1b[K",
                end="",
                file=sys.stderr,
            )
            sys.stderr.flush()
        elif not self.terminal and totals.documents // self.interval > self.said:
            self.said = totals.documents // self.interval
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def preprocess(
    inputs: Sequence[str],
    output_prefix: str,
    tokenizer_config: TokenizerConfig,
    *,
    json_keys: Sequence[str] = ("text",),
    append_eod: bool = False,
    workers: int = 1,
    log_interval: int = 1000,
    skip_bad_lines: bool = False,
) -> Totals:
    """Write `{output_prefix}_{key}_document.bin/.idx` for each key.

    Raises: DataError for a bad line, a dead worker, a full disk, or when nothing was written.
    """
    files = find_inputs(inputs)
    keys = list(json_keys)
    encoder = Encoder(tokenizer_config, keys, append_eod)  # a tokenizer that cannot be used fails here, at once
    totals = Totals(sequences=[0] * len(keys), tokens=[0] * len(keys))
    progress = _Progress(log_interval, size_of(files))
    with ExitStack() as stack:
        prefixes = [f"{output_prefix}_{key}_document" for key in keys]
        builders = [stack.enter_context(IndexedDatasetBuilder(f"{prefix}.bin", encoder.dtype)) for prefix in prefixes]
        stack.callback(progress.close)
        for block, result in _tokenise(read_blocks(files), encoder, workers, (tokenizer_config, keys, append_eod)):
            _report_bad(block.file, result.bad, totals, skip_bad_lines)
            for k, builder in enumerate(builders):
                _write(builder, result, k, totals)
            totals.documents += len(result.documents[0])
            totals.empty += sum(not any(counts) for counts in zip(*result.documents))
            totals.text_bytes += sum(map(len, block.lines))
            totals.read = block.read
            progress(totals)
        for key, tokens in zip(keys, totals.tokens):
            if not tokens:
                raise DataError(
                    f"nothing was written: no text under the key {key!r} in {', '.join(files)}",
                    why=f"{totals.documents} records, {totals.empty} of them empty, {totals.skipped} lines skipped",
                    fix="check --input and --json-keys",
                )
        for prefix, builder in zip(prefixes, builders):
            builder.finalize(f"{prefix}.idx")
    return totals


def _write(builder: IndexedDatasetBuilder, result: Tokenised, k: int, totals: Totals) -> None:
    """One key's documents of a block to its pair."""
    tokens = np.frombuffer(result.tokens[k], builder.dtype)
    totals.tokens[k] += len(tokens)
    totals.sequences[k] += len(result.lengths[k])
    builder.add_documents(tokens, result.lengths[k], result.documents[k])


def _report_bad(file: str, bad: list[tuple[int, str]], totals: Totals, skip: bool) -> None:
    for number, reason in bad:
        if not skip:
            raise DataError(
                f"{file}, line {number}: {reason}",
                why="every line is one JSON object with the texts of --json-keys",
                fix="mend the line, or --skip-bad-lines to leave such lines out",
            )
        totals.skipped += 1
        if totals.skipped <= _BAD_LINES_SHOWN:
            print(f"skipped {file}, line {number}: {reason}", file=sys.stderr)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"megatron-lite preprocess: {message}", fix="megatron-lite preprocess --help")


def _parser() -> _Parser:
    parser = _Parser("megatron-lite preprocess", description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help="JSONL files or globs, plain or .gz, in this order")
    add("--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX_KEY_document.bin and .idx for each key")
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="which texts of a record (default: text)")
    add("--append-eod", action="store_true", help="end every document with the tokenizer's end-of-document token")
    add("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (default: one a core)")
    add("--partitions", type=int, default=1, metavar="N", help="1: the workers share the input by themselves")
    add("--log-interval", type=int, default=1000, metavar="N", help="documents between progress lines (default: 1000)")
    add("--skip-bad-lines", action="store_true", help="count lines that are no record instead of stopping")
    for flag in _NOT_YET:
        add(flag, nargs="*", help=argparse.SUPPRESS)
    for flag in _NO_EFFECT:
        add(flag, help=argparse.SUPPRESS)
    group = parser.add_argument_group("tokenizer")
    for flag_of_config in flags_of(TokenizerConfig):
        flag_of_config.add_to(group)
    return parser


def _check(args: argparse.Namespace, unknown: list[str], parser: argparse.ArgumentParser) -> None:
    """Raises: ConfigError for flags that are unknown, come later, or have no sensible value."""
    if unknown:
        known = [spelling for action in parser._actions for spelling in action.option_strings]
        close = did_you_mean(unknown[0], known, 1)
        raise ConfigError(
            f"megatron-lite preprocess has no flag {unknown[0]}" + (f"; did you mean {close[0]}?" if close else ""),
            fix="megatron-lite preprocess --help",
        )
    later = [flag for flag in _NOT_YET if getattr(args, flag.strip("-").replace("-", "_")) is not None]
    if args.partitions != 1:
        later.append(f"--partitions {args.partitions}")
    if later:
        raise ConfigError(
            f"megatron-lite preprocess: {', '.join(later)} has not landed yet",
            why="a flag that does nothing would be worse",
            fix="leave it out; --workers alone uses all cores",
        )
    for name in ("workers", "log_interval"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}", fix="give 1 or more")
    if len(set(args.json_keys)) != len(args.json_keys):
        raise ConfigError(f"--json-keys {' '.join(args.json_keys)} names a key twice", fix="name each key once")
    for flag, why in _NO_EFFECT.items():
        if getattr(args, flag.strip("-").replace("-", "_")) is not None:
            print(f"{flag} has no effect: {why}", file=sys.stderr)


def main(argv: Sequence[str]) -> int:
    """The verb: writes the pairs, then says what is in them."""
    parser = _parser()
    args, unknown = parser.parse_known_args(list(argv))
    _check(args, unknown, parser)
    config = from_namespace(TokenizerConfig, args)
    start = time.monotonic()
    totals = preprocess(
        args.input,
        args.output_prefix,
        config,
        json_keys=args.json_keys,
        append_eod=args.append_eod,
        workers=args.workers,
        log_interval=args.log_interval,
        skip_bad_lines=args.skip_bad_lines,
    )
    elapsed = max(time.monotonic() - start, 1e-9)
    megabytes = totals.text_bytes / 1024 / 1024
    for key, tokens, sequences in zip(args.json_keys, totals.tokens, totals.sequences):
        print(
            f"{args.output_prefix}_{key}_document: {totals.documents} documents, {sequences} sequences, {tokens} tokens"
        )
    records = f"{totals.empty} empty record{'' if totals.empty == 1 else 's'}, {totals.skipped} skipped"
    print(f"{megabytes:.1f} MB of JSONL in {elapsed:.1f} s, {megabytes / elapsed:.2f} MB/s; {records}")
    return 0
