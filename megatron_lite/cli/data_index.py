"""`megatron-lite data index`: the order of all samples of a run, built before the run, in one process on a CPU.

    megatron-lite data index --data-path corpus --split 99,1,0 --seq-length 1024 --seed 1234 --train-samples 1000000
                             --global-batch-size 256 --tokenizer-type ... --data-cache-path cache

The flags are those of `pretrain_gpt.py`, with `--model bert` those of `pretrain_bert.py`, and so on: the whole command
line (or `--config`) may be given, and what has no say in the data is passed over. The run then finds every file of the
cache, whatever its layout. With `--per-dataset-sequences-path FILE` the file of that flag is written, too.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_lite.datasets.indexed_dataset import IndexedDataset
from megatron_lite.errors import ConfigError, DataError
from megatron_lite.training.families import FAMILIES, defaults_of

# What the data do not depend on, so that it need not be given. What is given is checked as the run checks it.
_ANY_MODEL = {
    "num_layers": 1,
    "hidden_size": 1,
    "num_attention_heads": 1,
    "micro_batch_size": 1,
    "max_position_embeddings": 1 << 40,
    "lr": 1e-3,
}


def _more_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument(
        "--prepare-cache-world-size",
        type=int,
        metavar="N",
        help="Ranks of the run that will use the caches. Default: as many as its model-parallel layout needs.",
    )
    parser.add_argument("--model", choices=tuple(FAMILIES), default="gpt", help="What kind of model the run trains.")
    return parser


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The run's arguments, validated for the number of ranks that it will have.

    Raises: ConfigError for what the run would refuse too, and where the number of samples is not told.
    """
    from megatron_lite.training.arguments import parse_args, validate_args

    family, _ = _more_flags(argparse.ArgumentParser(add_help=False, allow_abbrev=False)).parse_known_args(list(argv))
    args = parse_args(list(argv), _more_flags, {**defaults_of(family.model), **_ANY_MODEL})
    if args.mock_data or not any(
        (
            args.data_path,
            args.data_args_path,
            args.train_data_path,
            args.valid_data_path,
            args.test_data_path,
            args.per_split_data_args_path,
        )
    ):
        raise ConfigError(
            "megatron-lite data index without a corpus", why="made-up data have no cache", fix="--data-path PREFIX"
        )
    if args.sft:
        raise ConfigError(
            "megatron-lite data index --sft", why="conversations have no index cache", fix="start the run itself"
        )
    # The run may count on these files; here they are made.
    args.dataloader_fast_cache_load = False
    args.counts_path, args.per_dataset_sequences_path = args.per_dataset_sequences_path, None
    size = args.prepare_cache_world_size
    if size is not None and size < 1:
        raise ConfigError(f"--prepare-cache-world-size {size}", fix="give 1 or more")
    if size is None and args.global_batch_size is None:
        raise ConfigError(
            "neither --global-batch-size nor --prepare-cache-world-size",
            why="how many samples a run needs is counted in global batches",
            fix="--global-batch-size N, as the run has it",
        )
    if size is None:
        size = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    return validate_args(args, size)


def _write_counts(path: str, corpora: dict[str | None, IndexedDataset]) -> None:
    """The file of --per-dataset-sequences-path, whole or not at all."""
    counts = {prefix: [len(corpus), len(corpus.document_indices)] for prefix, corpus in corpora.items()}
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        Path(temporary).write_text(json.dumps(counts, indent=1) + "\n", "utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise DataError(f"cannot write --per-dataset-sequences-path {path}: {error.strerror}") from error


def main(argv: Sequence[str]) -> int:
    """The verb: says what is drawn from which corpus, and where the files are."""
    if any(word in ("-h", "--help") for word in argv):
        print(__doc__)
        print("The flags of the data, and all others: python pretrain_gpt.py --help")
        return 0
    args = _arguments(argv)
    from megatron_lite.datasets.blended_dataset import BlendedDataset
    from megatron_lite.datasets.dataset_table import mids_of
    from megatron_lite.training.data_loading import train_valid_test_num_samples
    from megatron_lite.training.global_vars import build_tokenizer
    from megatron_lite.training.model_parts import dataset_builder

    start = time.monotonic()
    builder = dataset_builder(args, build_tokenizer(args), train_valid_test_num_samples(args), lambda: True)
    tops, config = builder.build(), builder.config
    mids = [mid for top in tops for mid in mids_of(top)]
    made = sum(mid.built_anew_on_cache_miss for mid in mids)
    folders = [config.path_to_cache] if config.path_to_cache else sorted({f"{mid.dataset_path}/cache" for mid in mids})
    print(
        f"{len(mids)} datasets in {time.monotonic() - start:.1f} s: {made} built, {len(mids) - made} were there; "
        f"caches in {', '.join(folders)}"
    )
    if args.counts_path:
        _write_counts(args.counts_path, {mid.dataset_path: mid.dataset for mid in mids})
        print(
            f"sequences and document marks of {len({mid.dataset_path for mid in mids})} corpora in {args.counts_path}"
        )
    if config.path_to_cache is None and any(isinstance(top, BlendedDataset) for top in tops):
        print("the order of the blend itself is kept in --data-cache-path FOLDER only: the run builds it again")
    return 0
