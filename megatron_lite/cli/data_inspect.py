"""`megatron-lite data inspect`: what is in a pair, and whether it is sound.

header and counts     from the .idx
checks                .bin and .idx belong together; pointers are the running sum; marks run from 0 to the end; with
                      a tokenizer also: every id is in its vocabulary, and which documents end with its EOD
samples               the first documents, as ids and, with a tokenizer, as text
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import numpy as np

from megatron_lite.cli.data import Parser, find_pairs
from megatron_lite.cli.totals import histogram, length_bins
from megatron_lite.config import flags_of, from_namespace
from megatron_lite.datasets.indexed_dataset import IndexedDataset
from megatron_lite.errors import ConfigError, DataError
from megatron_lite.tokenizers.base import MegatronTokenizer
from megatron_lite.tokenizers.build_tokenizer import build_tokenizer
from megatron_lite.tokenizers.tokenizer_config import TokenizerConfig

_TOKENS_AT_ONCE = 1 << 22


def faults(pair: IndexedDataset, tokenizer: MegatronTokenizer | None, read_tokens: bool) -> Iterator[str]:
    """What is wrong with a pair that opened; opening has compared header, sizes and the ends of the marks.

    Args:
        read_tokens: look at every token, which takes as long as reading the file.
    """
    lengths, item = pair.sequence_lengths, pair.index.dtype.itemsize
    begin = 0
    for at in range(0, len(lengths), 1 << 18):
        part = lengths[at : at + (1 << 18)]
        ends = begin + np.cumsum(part, dtype=np.int64) * item
        pointers = pair.index.sequence_pointers[at : at + len(part)]
        wrong = np.flatnonzero(pointers != np.concatenate(([begin], ends[:-1])))
        if len(wrong):
            expected = begin if wrong[0] == 0 else ends[wrong[0] - 1]
            yield f"sequence {at + wrong[0]} is said to begin at byte {pointers[wrong[0]]}, not at {expected}"
            break
        begin = int(ends[-1])
    falling = np.flatnonzero(np.diff(pair.document_indices) < 0)
    if len(falling):
        yield f"document {falling[0]} ends before it begins"
    if tokenizer is None or not read_tokens:
        return
    tokens, size = _tokens(pair), tokenizer.vocab_size
    for at in range(0, len(tokens), _TOKENS_AT_ONCE):
        part = tokens[at : at + _TOKENS_AT_ONCE]
        if len(outside := np.flatnonzero((part < 0) | (part >= size))):
            yield f"token {at + outside[0]} is {part[outside[0]]}, the tokenizer has ids from 0 to {size - 1}"
            return


def documents_ending_with(pair: IndexedDataset, token: int) -> int:
    """How many documents' last token it is."""
    begins, ends = pair.document_indices[:-1], pair.document_indices[1:]
    last = ends[ends > begins] - 1  # the last sequence of each document that has one
    last = last[pair.sequence_lengths[last] > 0]
    at = pair.index.sequence_pointers[last] // pair.index.dtype.itemsize + pair.sequence_lengths[last] - 1
    return int(np.count_nonzero(_tokens(pair)[at] == token))


def _tokens(pair: IndexedDataset) -> np.ndarray:
    """All tokens, a view of the mapped file."""
    if not len(pair):
        return np.empty(0, pair.index.dtype)
    part = pair.get(0, 0, pair.index.bin_bytes // pair.index.dtype.itemsize)  # a part may run on past its sequence
    return part[0] if pair.multimodal else part


def describe(pair: IndexedDataset) -> list[str]:
    """Header and counts."""
    marks, lengths = pair.document_indices, pair.sequence_lengths
    ends = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    counts = np.diff(ends[marks])
    tokens = int(ends[-1])
    lines = [
        f"{pair.path_prefix}: version 1, tokens of {pair.index.dtype.name}, {pair.index.bin_bytes} bytes in .bin",
        f"{len(counts)} documents ({int((counts == 0).sum())} empty), {len(lengths)} sequences, {tokens} tokens",
    ]
    if len(counts):
        lines.append(
            f"tokens of a document: {counts.min()} to {counts.max()}, mean {tokens / len(counts):.1f}, "
            f"median {np.median(counts):g}"
        )
    return [*lines, *histogram(length_bins(counts))]


def samples(pair: IndexedDataset, tokenizer: MegatronTokenizer | None, count: int, tokens: int) -> Iterator[str]:
    """The first documents: ids, and text where there is a tokenizer."""
    marks = pair.document_indices
    for number in range(min(count, len(marks) - 1)):
        begin, end = int(marks[number]), int(marks[number + 1])
        parts = pair[begin:end]
        parts = parts[0] if pair.multimodal else parts
        ids = np.concatenate(parts)[:tokens].tolist() if parts else []
        total = sum(map(len, parts))
        yield f"document {number}: {end - begin} sequences, {total} tokens"
        yield "  " + " ".join(map(str, ids)) + (" ..." if total > tokens else "")
        if tokenizer is not None and ids:
            yield "  " + repr(tokenizer.detokenize(ids))


def main(argv: Sequence[str]) -> int:
    """The verb: status 1 if a check fails."""
    parser = Parser(
        "megatron-lite data inspect",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help="prefixes, globs of them, or folders of pairs")
    parser.add_argument("--documents", type=int, default=3, metavar="N", help="show the first N (default: 3)")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="show N tokens of each (default: 64)")
    parser.add_argument("--multimodal", action="store_true", help="the pairs have a mode for each sequence")
    parser.add_argument("--quick", action="store_true", help="leave the .bin alone but for the documents shown")
    group = parser.add_argument_group("tokenizer, for text and the checks of ids")
    for flag in flags_of(TokenizerConfig):
        flag.add_to(group)
    args = parser.parse_args(list(argv))
    if min(args.documents, args.tokens) < 0:
        raise ConfigError(f"--documents {args.documents} --tokens {args.tokens}", fix="give 0 or more")
    config = from_namespace(TokenizerConfig, args)
    tokenizer = None if config.tokenizer_type is None else build_tokenizer(config)
    found = 0
    for prefix in find_pairs(args.prefixes):
        pair = IndexedDataset(prefix, multimodal=args.multimodal)
        for line in describe(pair):
            print(line)
        if tokenizer is not None and not args.quick:
            try:
                ending = documents_ending_with(pair, tokenizer.eod)
                print(f"{ending} of {len(pair.document_indices) - 1} documents end with the end-of-document token")
            except (NotImplementedError, ConfigError):
                print("the tokenizer has no end-of-document token")
        wrong = list(faults(pair, tokenizer, not args.quick))
        for fault in wrong:
            print(f"FAULT: {fault}")
        found += len(wrong)
        if not wrong:
            print("checks: fine" + ("" if tokenizer else " (ids are checked with a tokenizer: --tokenizer-type ...)"))
        if not any("token" in fault for fault in wrong):
            for line in samples(pair, tokenizer, args.documents, args.tokens):
                print(line)
    if found:
        raise DataError(
            f"{found} {'fault was' if found == 1 else 'faults were'} found",
            fix="preprocess the corpus again, or use its tokenizer",
        )
    return 0
