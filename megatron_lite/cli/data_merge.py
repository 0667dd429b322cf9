"""`megatron-lite data merge`: several pairs -> one, equal to having written all documents in one go.

Tokens are copied piece by piece; memory holds the index alone, 12 bytes a sequence and 8 a document. The result appears
under its name when it is whole.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_lite.cli.data import Parser, find_pairs
from megatron_lite.cli.progress import progress
from megatron_lite.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder, get_bin_path, get_idx_path
from megatron_lite.errors import ConfigError, DataError


def merge(prefixes: Sequence[str], output_prefix: str, multimodal: bool = False) -> IndexedDataset:
    """Writes the pair `output_prefix`: the documents of all pairs in order. Returns it.

    Raises: DataError if a pair cannot be read, the types differ, or the disk is too small.
    """
    for prefix in prefixes:
        if os.path.realpath(get_bin_path(prefix)) == os.path.realpath(get_bin_path(output_prefix)):
            raise ConfigError(
                f"--output-prefix {output_prefix} is one of the pairs to be merged", fix="give it another name"
            )
    total = sum(os.path.getsize(path(prefix)) for prefix in prefixes for path in (get_bin_path, get_idx_path))
    folder = Path(output_prefix).absolute().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise DataError(f"cannot write {folder}: {error.strerror or error}", fix="write elsewhere") from error
    if free < total:
        raise DataError(f"{total} bytes do not fit in {folder}, which has {free} free", fix="write elsewhere")
    dtype = IndexedDataset(prefixes[0], multimodal=multimodal).index.dtype.newbyteorder("=")
    with (
        IndexedDatasetBuilder(get_bin_path(output_prefix), dtype, multimodal) as builder,
        progress("merging", total / 1e6, "MB") as advance,
    ):
        for prefix in prefixes:
            builder.add_index(prefix)
            advance(sum(os.path.getsize(path(prefix)) for path in (get_bin_path, get_idx_path)) / 1e6)
        builder.finalize(get_idx_path(output_prefix))
    return IndexedDataset(output_prefix, multimodal=multimodal)


def main(argv: Sequence[str]) -> int:
    """The verb."""
    parser = Parser("megatron-lite data merge", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PREFIX",
        help="prefixes or globs of them, in this order; or folders: all their pairs by name, but the output's",
    )
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx")
    parser.add_argument("--multimodal", action="store_true", help="the pairs have a mode for each sequence")
    args = parser.parse_args(list(argv))
    prefixes = find_pairs(args.input, leave_out=args.output_prefix)
    start = time.monotonic()
    merged = merge(prefixes, args.output_prefix, args.multimodal)
    tokens = merged.index.bin_bytes // merged.index.dtype.itemsize
    for prefix in prefixes:
        print(f"  {prefix}")
    print(
        f"{args.output_prefix}: {len(prefixes)} pairs, {len(merged.document_indices) - 1} documents, {len(merged)} "
        f"sequences, {tokens} tokens of {merged.index.dtype.name}, in {time.monotonic() - start:.1f} s"
    )
    return 0
