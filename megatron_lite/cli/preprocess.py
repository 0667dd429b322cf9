"""`megatron-lite preprocess`: JSONL (or parquet) -> tokenised .bin/.idx pairs for `--data-path`.

    input files --blocks of records--> workers: parse, tokenise --arrays, in order--> one writer --> a pair for each key
                                       at most a few blocks a worker are on the way: memory stays constant

The bytes do not depend on the number of workers. A pair appears under its name when all of it is written; until then
the run works in `PREFIX.preprocess/`, where a later run with the same flags goes on if this one is stopped or killed. A
line that is no record ends the run with file, line and reason, unless `--skip-bad-lines` counts it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NoReturn

import numpy as np

from megatron_lite.cli.encoder import Encoder, Recipe, Tokenised, tokenise
from megatron_lite.cli.jsonl import Block, Position, find_inputs, read_blocks, size_of
from megatron_lite.cli.pair_writer import PairWriter
from megatron_lite.cli.sentences import SPLITTERS
from megatron_lite.cli.totals import Totals, histogram, length_bins
from megatron_lite.cli.work_folder import Snapshot, WorkFolder, identity_of
from megatron_lite.config import did_you_mean, flags_of, from_namespace
from megatron_lite.errors import ConfigError, DataError
from megatron_lite.tokenizers.build_tokenizer import unread_flags
from megatron_lite.tokenizers.tokenizer_config import TokenizerConfig

_BAD_LINES_SHOWN = 10
_SECONDS_BETWEEN_SNAPSHOTS = 30.0

# Megatron's flags that have nothing left to do.
_NO_EFFECT = {
    "--dataset-impl": "there is one format of data",
    "--chunk-size": "lines travel in blocks of a fixed size",
}


class _Progress:
    """`Processed N documents (x docs/s, y MB/s).` on standard error; on a terminal one line that also says when."""

    def __init__(self, interval: int, total_read: int):
        self.interval, self.total_read = interval, total_read
        self.start = self.drawn = time.monotonic()
        self.said = 0
        self.terminal = sys.stderr.isatty()

    def __call__(self, totals: Totals, read: int) -> None:
        now = time.monotonic()
        elapsed = max(now - self.start, 1e-9)
        line = (
            f"Processed {totals.documents} documents "
            f"({(totals.documents - totals.earlier_documents) / elapsed:.1f} docs/s, "
            f"{(totals.text_bytes - totals.earlier_bytes) / elapsed / 1024 / 1024:.2f} MB/s)."
        )
        if self.terminal and now - self.drawn > 0.2:
            self.drawn = now
            left = elapsed * (self.total_read / max(read, 1) - 1)
            print(
                f"\r{line} {read / max(self.total_read, 1):4.0%}, {left:.0f} s left \x1b[K",
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
    recipe: Recipe,
    *,
    workers: int = 1,
    partitions: int = 1,
    log_interval: int = 1000,
    skip_bad_lines: bool = False,
    resume: bool = True,
) -> Totals:
    """Write `{output_prefix}_{key}_document.bin/.idx` (`_sentence` with sentence splitting) for each key.

    Args:
        partitions: deal the lines round so many parts, and write part after part: Megatron's order for the same flag.
        resume: go on where a run with the same recipe and input was stopped.
    Raises: DataError for a bad line, a dead worker, a full disk, or when nothing was written.
    """
    files = find_inputs(inputs)
    for file in sorted({file for file in files if files.count(file) > 1}):
        print(f"{file} is given more than once: its documents will be in the output as often", file=sys.stderr)
    encoder = Encoder(recipe)  # a tokenizer that cannot be used fails here, at once
    if encoder.splitter is not None:
        print(f"Sentences by {encoder.splitter.name}", flush=True)
    folder = f"{output_prefix}.preprocess"
    work = WorkFolder(folder, identity_of(recipe, encoder, partitions), files)
    job = None
    try:
        job = _Job(work, files, recipe, encoder, partitions, skip_bad_lines, resume)
        job.read(workers, log_interval)
        job.finish(output_names(output_prefix, recipe))
        work.remove()
        return job.totals
    except OSError as error:
        raise DataError(
            f"cannot write {folder}: {error.strerror or error}", fix="free some space, or write elsewhere"
        ) from error
    finally:
        if job is not None:
            job.close()
        if not work.has_snapshots():
            work.remove()
        elif sys.exc_info()[0] is not None:
            print(f"What is done is kept in {folder}: the same command goes on from there", file=sys.stderr)
        work.close()


def output_names(output_prefix: str, recipe: Recipe) -> list[str]:
    """The prefix of each key's pair, as `--data-path` takes it."""
    level = "sentence" if recipe.split_sentences else "document"
    return [f"{output_prefix}_{key}_{level}" for key in recipe.keys]


class _Job:
    """The run between the opening of its folder and the pairs at their places."""

    def __init__(
        self,
        work: WorkFolder,
        files: list[str],
        recipe: Recipe,
        encoder: Encoder,
        partitions: int,
        skip_bad_lines: bool,
        resume: bool,
    ):
        self.work, self.files, self.recipe, self.encoder = work, files, recipe, encoder
        self.partitions, self.skip_bad_lines = partitions, skip_bad_lines
        snapshot = work.begin(skip_bad_lines, "" if resume else "--no-resume")
        self.writers: list[list[PairWriter]] = []  # of each part, of each key
        if snapshot is not None:
            try:
                self._open(snapshot.sizes)
            except OSError:  # a file is gone or was cut
                self.close()
                snapshot = work.begin(skip_bad_lines, "a file of it is gone, or was cut")
        if snapshot is None:
            self._open(None)
            snapshot = Snapshot(Position(), Totals.of_keys(len(recipe.keys)), self._sizes())
        else:
            at = snapshot.position
            where = f"{files[at.file]}, line {at.line}" if at.file < len(files) else "the end of the input"
            print(f"Going on from {where}: {snapshot.totals.documents} documents are done", flush=True)
        self.last, self.committed = snapshot, snapshot
        self.end_of_file: Snapshot | None = None  # not on the disk yet
        self.totals = snapshot.totals.copy()
        self.totals.earlier_documents, self.totals.earlier_bytes = self.totals.documents, self.totals.text_bytes

    def _open(self, sizes: list[list[int]] | None) -> None:
        self.writers = []
        number = 0
        for part in range(self.partitions):
            self.writers.append([])
            for k in range(len(self.recipe.keys)):
                stem = self.work.stem(f"{part}_{k}")
                self.writers[-1].append(PairWriter(stem, self.encoder.dtype, sizes[number] if sizes else None))
                number += 1

    def _all(self) -> Iterator[PairWriter]:
        return (writer for part in self.writers for writer in part)

    def _sizes(self) -> list[list[int]]:
        return [writer.sizes() for writer in self._all()]

    def read(self, workers: int, log_interval: int) -> None:
        """All of the input into the growing pairs. Whatever ends it, what was done before can be gone on from."""
        blocks = read_blocks(self.files, start=self.last.position, columns=self.recipe.keys)
        progress = _Progress(log_interval, size_of(self.files))
        opened, saved = -1, time.monotonic()
        try:
            with contextlib.closing(tokenise(blocks, self.recipe, workers, self.encoder)) as results:
                for block, result in results:
                    number = block.next.file
                    if number != opened:
                        print(f"Opening {block.file}", flush=True)
                        if opened < 0:
                            print(f"Time to startup: {time.monotonic() - progress.start:.2f}", flush=True)
                        if self.last.position.file < number:
                            self.end_of_file = replace(self.last, position=Position(number))
                        opened = number
                    self._add(block, result)
                    self.last = Snapshot(block.next, self.totals.copy(), self._sizes())
                    if time.monotonic() - saved > _SECONDS_BETWEEN_SNAPSHOTS:
                        self._commit()
                        saved = time.monotonic()
                    progress(self.totals, block.read)
        except BaseException:
            with contextlib.suppress(OSError):  # a full disk is told by what met it
                if self.last.totals.documents:
                    self._commit()
            raise
        finally:
            progress.close()

    def _commit(self) -> None:
        """The state now, and that at the end of the file before: it holds even if this file is changed."""
        if self.last == self.committed:
            return
        for writer in self._all():
            writer.sync()
        if self.end_of_file is not None:
            self.work.commit(self.end_of_file)
        self.work.commit(self.last)
        self.committed, self.end_of_file = self.last, None

    def _add(self, block: Block, result: Tokenised) -> None:
        totals = self.totals
        self._report_bad(block.file, result.bad)
        part = (totals.lines + result.numbers - block.first) % self.partitions
        for k, documents in enumerate(result.keys):
            for p in range(self.partitions):
                dealt = documents if self.partitions == 1 else documents.take(part == p)
                self.writers[p][k].add(dealt)
            counts = documents.token_counts()
            totals.tokens[k] += len(documents.tokens)
            totals.sequences[k] += len(documents.lengths)
            totals.lengths[k] = (np.array(totals.lengths[k]) + length_bins(counts)).tolist()
        totals.lines += len(block.lines)
        totals.documents += len(result.numbers)
        totals.empty += int(np.count_nonzero(np.sum([documents.sequences for documents in result.keys], axis=0) == 0))
        totals.text_bytes += block.size

    def _report_bad(self, file: str, bad: list[tuple[int, str]]) -> None:
        for number, reason in bad:
            if not self.skip_bad_lines:
                raise DataError(
                    f"{file}, line {number}: {reason}",
                    why="every line is one JSON object with the texts of --json-keys",
                    fix="mend the line, or --skip-bad-lines to leave such lines out",
                )
            self.totals.skipped += 1
            if self.totals.skipped <= _BAD_LINES_SHOWN:
                print(f"skipped {file}, line {number}: {reason}", file=sys.stderr)

    def finish(self, prefixes: list[str]) -> None:
        """Parts joined, indices made, pairs at their places. Raises: DataError for a key without a token."""
        totals = self.totals
        for key, tokens in zip(self.recipe.keys, totals.tokens):
            if not tokens:
                self.work.remove()  # there is nothing to go on from
                raise DataError(
                    f"nothing was written: no text under the key {key!r} in {', '.join(self.files)}",
                    why=f"{totals.documents} records, {totals.empty} of them empty, {totals.skipped} lines skipped",
                    fix="check --input and --json-keys",
                )
        first, *others = self.writers
        for part in others:
            for writer, other in zip(first, part):
                writer.append(other)
        for writer in first:
            writer.write_index()
        for writer, prefix in zip(first, prefixes):
            writer.finish(prefix)

    def close(self) -> None:
        for writer in self._all():
            with contextlib.suppress(OSError):
                writer.close()


def find_optimal_num_workers(
    inputs: Sequence[str], recipe: Recipe, candidates: Sequence[int], max_documents: int
) -> tuple[int, list[float]]:
    """The number of workers that tokenises quickest, and the documents a second of each. Nothing is written."""
    rates = []
    files, encoder = find_inputs(inputs), Encoder(recipe)
    for workers in candidates:
        start, documents = time.monotonic(), 0
        blocks = read_blocks(files, columns=recipe.keys)
        with contextlib.closing(tokenise(blocks, recipe, workers, encoder)) as results:
            for block, result in results:
                if result.bad:
                    number, reason = result.bad[0]
                    print(f"passed over {block.file}, line {number}: {reason}", file=sys.stderr)
                documents += len(result.numbers)
                if documents >= max_documents:
                    break
            rates.append(documents / max(time.monotonic() - start, 1e-9))
        print(f"{workers} workers: {documents} documents, {rates[-1]:.1f} docs/s", flush=True)
    return candidates[rates.index(max(rates))], rates


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"megatron-lite preprocess: {message}", fix="megatron-lite preprocess --help")


def _parser() -> _Parser:
    parser = _Parser("megatron-lite preprocess", description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="files or globs in this order: JSONL, plain or .gz .bz2 .xz .zst, or .parquet",
    )
    add(
        "--output-prefix",
        metavar="PREFIX",
        help="writes PREFIX_KEY_document.bin and .idx for each key (PREFIX_KEY_sentence with --split-sentences)",
    )
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="which texts of a record (default: text)")
    add("--append-eod", action="store_true", help="end every document with the tokenizer's end-of-document token")
    add("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (default: one a core)")
    add("--log-interval", type=int, default=1000, metavar="N", help="documents between progress lines (default: 1000)")
    add("--skip-bad-lines", action="store_true", help="count lines that are no record instead of stopping")
    add(
        "--no-resume",
        action="store_true",
        help="begin anew where a run with the same flags and input was stopped (default: go on from there)",
    )
    group = parser.add_argument_group("sentences")
    add = group.add_argument
    add("--split-sentences", action="store_true", help="one sequence a sentence (BERT, T5)")
    add("--lang", default="english", help="language of the sentences: a name or a code (default: english)")
    add("--keep-newlines", action="store_true", help="keep the white space after a sentence with it")
    add(
        "--sentence-splitter",
        choices=SPLITTERS,
        default="auto",
        help="auto: nltk's punkt if its data are on this machine, else sentencex",
    )
    group = parser.add_argument_group("order")
    add = group.add_argument
    add(
        "--partitions",
        type=int,
        default=1,
        metavar="N",
        help="Megatron's order for N parts: lines 1, N+1, 2N+1, ... of all files first (default: 1, the input's order)",
    )
    add("--keep-sequential-samples", action="store_true", help="the input's order, whatever --partitions is")
    group = parser.add_argument_group("how many workers")
    add = group.add_argument
    add("--find-optimal-num-workers", action="store_true", help="write nothing, time --workers-to-check")
    add("--workers-to-check", type=int, nargs="+", default=[16, 32, 64], metavar="N", help="(default: 16 32 64)")
    add("--max-documents", type=int, default=100_000, metavar="N", help="documents for each (default: 100000)")
    for flag in _NO_EFFECT:
        parser.add_argument(flag, help=argparse.SUPPRESS)
    group = parser.add_argument_group("tokenizer")
    for flag_of_config in flags_of(TokenizerConfig):
        flag_of_config.add_to(group)
    # Older scripts have it under this name.
    parser.add_argument("--vocab", dest="vocab_file", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def _check(args: argparse.Namespace, unknown: list[str], parser: argparse.ArgumentParser) -> None:
    """Raises: ConfigError for flags that are unknown, missing, or have no sensible value."""
    if unknown:
        known = [spelling for action in parser._actions for spelling in action.option_strings]
        close = did_you_mean(unknown[0], known, 1)
        raise ConfigError(
            f"megatron-lite preprocess has no flag {unknown[0]}" + (f"; did you mean {close[0]}?" if close else ""),
            fix="megatron-lite preprocess --help",
        )
    for name in ("workers", "log_interval", "partitions", "max_documents", "workers_to_check"):
        value = getattr(args, name)
        if min(value if isinstance(value, list) else [value]) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}", fix="give 1 or more")
    if args.output_prefix is None and not args.find_optimal_num_workers:
        raise ConfigError("megatron-lite preprocess without --output-prefix", fix="--output-prefix PREFIX")
    if len(set(args.json_keys)) != len(args.json_keys):
        raise ConfigError(f"--json-keys {' '.join(args.json_keys)} names a key twice", fix="name each key once")
    if args.keep_newlines and not args.split_sentences:
        raise ConfigError(
            "--keep-newlines without --split-sentences",
            why="it is about the white space between sentences; without splitting all of it is kept anyway",
            fix="leave it out, or add --split-sentences",
        )
    for flag, why in _NO_EFFECT.items():
        if getattr(args, flag.strip("-").replace("-", "_")) is not None:
            print(f"{flag} has no effect: {why}", file=sys.stderr)


def main(argv: Sequence[str]) -> int:
    """The verb: writes the pairs, then says what is in them."""
    parser = _parser()
    args, unknown = parser.parse_known_args(list(argv))
    _check(args, unknown, parser)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # --workers says how many processors are used
    recipe = Recipe(
        tokenizer=from_namespace(TokenizerConfig, args),
        keys=tuple(args.json_keys),
        append_eod=args.append_eod,
        split_sentences=args.split_sentences,
        sentence_splitter=args.sentence_splitter,
        lang=args.lang,
        keep_newlines=args.keep_newlines,
    )
    for flag in unread_flags(recipe.tokenizer):
        print(f"{flag} has no effect: {recipe.tokenizer.tokenizer_type} does not read it", file=sys.stderr)
    if args.find_optimal_num_workers:
        best, _ = find_optimal_num_workers(args.input, recipe, args.workers_to_check, args.max_documents)
        print(f"best: --workers {best}")
        return 0
    start = time.monotonic()
    totals = preprocess(
        args.input,
        args.output_prefix,
        recipe,
        workers=args.workers,
        partitions=1 if args.keep_sequential_samples else args.partitions,
        log_interval=args.log_interval,
        skip_bad_lines=args.skip_bad_lines,
        resume=not args.no_resume,
    )
    _say(totals, output_names(args.output_prefix, recipe), max(time.monotonic() - start, 1e-9))
    return 0


def _say(totals: Totals, prefixes: list[str], elapsed: float) -> None:
    """The summary."""
    for k, prefix in enumerate(prefixes):
        print(
            f"{prefix}: {totals.documents} documents, {totals.sequences[k]} sequences, {totals.tokens[k]} tokens, "
            f"{os.path.getsize(f'{prefix}.bin')} bytes"
        )
        print("  tokens of a document     documents", *histogram(totals.lengths[k]), sep="\n")
    megabytes = (totals.text_bytes - totals.earlier_bytes) / 1024 / 1024
    records = f"{totals.empty} empty record{'' if totals.empty == 1 else 's'}, {totals.skipped} skipped"
    print(f"{megabytes:.1f} MB of records in {elapsed:.1f} s, {megabytes / elapsed:.2f} MB/s; {records}")
