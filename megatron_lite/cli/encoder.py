"""A block of records -> token arrays: what the workers of `preprocess` do.

Block --parse--> texts --(sentences)--> one call of the tokenizer --> ids --cut into documents--> Tokenised
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_all_start_methods, get_context, parent_process
from multiprocessing.connection import wait

import numpy as np

from megatron_lite.cli.jsonl import BadLine, Block, parse
from megatron_lite.cli.sentences import SentenceSplitter
from megatron_lite.datasets.indexed_dataset import DType
from megatron_lite.errors import DataError
from megatron_lite.tokenizers.build_tokenizer import build_tokenizer
from megatron_lite.tokenizers.tokenizer_config import TokenizerConfig

_BLOCKS_PER_WORKER = 4


@dataclass(frozen=True)
class Recipe:
    """What is made of a record."""

    tokenizer: TokenizerConfig
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    split_sentences: bool = False
    sentence_splitter: str = "auto"
    lang: str = "english"
    keep_newlines: bool = False


@dataclass
class Documents:
    """One key's documents of a block."""

    tokens: np.ndarray  # one document after another
    lengths: np.ndarray  # int32, tokens of each sequence
    sequences: np.ndarray  # int64, sequences of each document

    def token_counts(self) -> np.ndarray:
        """int64, tokens of each document."""
        ends = np.concatenate(([0], np.cumsum(self.lengths, dtype=np.int64)))[np.cumsum(self.sequences)]
        return np.diff(ends, prepend=0)

    def take(self, keep: np.ndarray) -> Documents:
        """The documents for which `keep` (bool, one a document) is true."""
        return Documents(
            self.tokens[np.repeat(keep, self.token_counts())],
            self.lengths[np.repeat(keep, self.sequences)],
            self.sequences[keep],
        )


@dataclass
class Tokenised:
    """What a worker made of a block."""

    keys: list[Documents]
    numbers: np.ndarray  # int64, line number of each document
    bad: list[tuple[int, str]]  # line number, reason


class Encoder:
    """Block -> Tokenised; lives in every worker."""

    def __init__(self, recipe: Recipe):
        self.tokenizer = build_tokenizer(recipe.tokenizer)
        self.keys = recipe.keys
        self.dtype = DType.optimal_dtype(self.tokenizer.vocab_size)
        self.eod = self.tokenizer.eod if recipe.append_eod and not self.tokenizer.appends_eod else None
        self.splitter = None
        if recipe.split_sentences:
            self.splitter = SentenceSplitter(recipe.sentence_splitter, recipe.lang, recipe.keep_newlines)

    def __call__(self, block: Block) -> Tokenised:
        records: list[list[list[str]]] = []
        bad: list[tuple[int, str]] = []
        numbers: list[int] = []
        for number, line in enumerate(block.lines, block.first):
            try:
                record = parse(line, self.keys, self.splitter)
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
            good = []
            for number, record in zip(numbers, records):
                try:
                    encoded += self._encode([record])
                    good.append(number)
                except DataError as error:
                    bad.append((number, f"{error.what} ({error.why})" if error.why else error.what))
            numbers = good
        documents = [self._join([record[k] for record in encoded]) for k in range(len(self.keys))]
        return Tokenised(documents, np.array(numbers, np.int64), sorted(bad))

    def _encode(self, records: list[list[list[str]]]) -> list[list[list[list[int]]]]:
        """The ids of every text, all of the block in one call of the tokenizer."""
        texts = [text for record in records for value in record for text in value]
        ids = iter(self.tokenizer.tokenize_batch(texts))
        return [[[next(ids) for _ in value] for value in record] for record in records]

    def _join(self, documents: list[list[list[int]]]) -> Documents:
        """One key's documents, one after another.

        Texts without a token are left out; the end of the document goes to its last sequence. A tokenizer that ends
        every text by itself has ended the other sequences too: that goes.
        """
        counts, parts = [], []
        for texts in documents:
            sequences = [ids for ids in texts if ids]
            if self.tokenizer.appends_eod:
                sequences = [*(ids[:-1] for ids in sequences[:-1] if len(ids) > 1), *sequences[-1:]]
            if sequences and self.eod is not None:
                sequences[-1] = [*sequences[-1], self.eod]
            counts.append(len(sequences))
            parts += sequences
        lengths = np.fromiter(map(len, parts), np.int32, len(parts))
        ids = np.fromiter(itertools.chain.from_iterable(parts), np.int64, int(lengths.sum(dtype=np.int64)))
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.tokenizer.vocab_size:
            raise DataError(
                f"the tokenizer gave ids from {ids.min()} to {ids.max()}, its vocabulary has "
                f"{self.tokenizer.vocab_size}",
                fix="check the tokenizer's files",
            )
        return Documents(ids.astype(self.dtype), lengths, np.array(counts, np.int64))


_encoder: Encoder | None = None


def _start_worker(recipe: Recipe) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the writer's to handle
    threading.Thread(target=_end_with_the_writer, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    _encoder = _encoder or Encoder(recipe)


def _end_with_the_writer() -> None:
    """A writer that is killed cannot tell its workers, who would wait for the next block for ever."""
    writer = parent_process()
    assert writer is not None
    wait([writer.sentinel])
    os._exit(1)


def _work(block: Block) -> Tokenised:
    assert _encoder is not None
    return _encoder(block)


def tokenise(
    blocks: Iterator[Block], recipe: Recipe, workers: int, encoder: Encoder | None = None
) -> Generator[tuple[Block, Tokenised], None, None]:
    """Every block with its tokens, in order; a few blocks a worker are on the way at any time.

    Args:
        workers: processes; 1: this one.
        encoder: of the recipe, when it exists already: forked workers share it instead of reading the tokenizer again.
    Raises: DataError when a worker dies.
    """
    global _encoder
    if workers == 1:
        encoder = encoder or Encoder(recipe)
        for block in blocks:
            yield block, encoder(block)
        return
    method = "fork" if "fork" in get_all_start_methods() else "spawn"
    _encoder = encoder
    with ProcessPoolExecutor(workers, get_context(method), _start_worker, (recipe,)) as pool:
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
            _encoder = None
            pool.shutdown(cancel_futures=True)  # waits: Python's own end would, and complain of closed pipes
