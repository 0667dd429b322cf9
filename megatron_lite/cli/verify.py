"""`megatron-lite verify <training flags>`: does this layout train what one process trains?

    flags --scale down--> N processes of this machine under the layout --+
                    \\---> one process without any layout                 +--> a table of the largest deviations

Both run the steps of `pretrain_gpt.py`, or of `--script`, from the same first weights on the same samples. Compared
are first weights (bit by bit), losses, the gradients of all steps, their norms, the weights after the last step, and
whether ranks that hold copies hold the same. Exit status 0: all within tolerance; 1: not.

A model in bf16 or fp16 is checked twice: in fp32, where a wrong formula shows, and in its own format.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from argparse import Namespace
from collections.abc import Iterable, Sequence
from copy import deepcopy
from pathlib import Path

import numpy as np

import megatron_lite
from megatron_lite.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron_lite.errors import ConfigError
from megatron_lite.training.arguments import parse_args, validate_args
from megatron_lite.training.families import FAMILIES, family_of
from megatron_lite.training.fully_sharded import is_full
from megatron_lite.training.layout_check import TOLERANCE, Tolerance, compare, table
from megatron_lite.training.local_world import World
from megatron_lite.training.record import Record, args_defaults_of, extra_args_of, joined, load_script, record_rank
from megatron_lite.training.scale_down import VOCABULARY, alone, scale_down, without_precision

CHECKOUT = Path(megatron_lite.__file__).resolve().parent.parent
_TIMEOUT_S = 300.0  # of the slowest machine's small run


def main(argv: Sequence[str]) -> int:
    """The verb."""
    own, words = _parser().parse_known_args(list(argv))
    script = own.script or CHECKOUT / FAMILIES["gpt"].script
    loaded = load_script(script)
    given = parse_args(words, extra_args_of(loaded), args_defaults_of(loaded))
    if own.ranks is not None:  # the run is known in full: it must be one that can start
        with contextlib.redirect_stdout(None):
            validate_args(deepcopy(given), own.ranks)
    small, changes = scale_down(given, _data_parallel_size(own, given), own.steps, own.max_processes)
    with tempfile.TemporaryDirectory(prefix="verify") as folder:
        (_use_sentences if FAMILIES[family_of(small)].reads_sentences else _use_corpus)(small, Path(folder))
        return _verify(own, script, small, changes)


def _verify(own: Namespace, script: Path, small: Namespace, changes: list[str]) -> int:
    """Run, compare, print. Returns: the exit status."""
    runs = {"fp32": without_precision(small)}
    if small.bf16 or small.fp16:
        runs["bf16" if small.bf16 else "fp16"] = small
    for args in runs.values():  # mistakes are told here, once, and not by every process
        with contextlib.redirect_stdout(None):
            validate_args(deepcopy(args), small.world_size)
            validate_args(alone(args), 1)

    print(f"checking {_layout(small)} on {small.world_size} processes against one; not as in your run:")
    for change in changes:
        print(f"  {change}")
    good = True
    with World(1, _TIMEOUT_S) as one, World(small.world_size, _TIMEOUT_S) as many:
        for precision, args in runs.items():
            tolerance = TOLERANCE[precision]
            if own.tolerance is not None and precision == "fp32":
                tolerance = Tolerance(*[own.tolerance] * 4)
            rows = compare(
                _record(one, alone(args), script, own.steps), _record(many, args, script, own.steps), tolerance
            )
            print(f"\n{precision}: largest deviation, relative to one process")
            print(table(rows))
            good = good and all(row.is_ok for row in rows)
    print("\nthis layout trains as one process does" if good else "\nthis layout does NOT train as one process does")
    return 0 if good else 1


def _use_corpus(args: Namespace, folder: Path) -> None:
    """Random documents, enough for every step. (Made-up data would do, but their index takes seconds to build.)"""
    generator = np.random.default_rng(args.seed)
    samples = args.train_iters * args.global_batch_size
    lengths = generator.integers(20, 200, size=2 + samples * (args.seq_length + 1) // 20)
    _write(args, folder, (generator.integers(0, args.vocab_size, size=(1, length)) for length in lengths))


def _use_sentences(args: Namespace, folder: Path) -> None:
    """The same for models that read sentences of a WordPiece vocabulary."""
    words = VOCABULARY - len(_SPECIAL) - 8 - args.vocab_extra_ids  # a few rows of padding, beside [BOS] and [EOS]
    tokens = [*_SPECIAL, *(f"{'##' * (i % 3 == 2)}w{i}" for i in range(words))]
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n")
    args.vocab_file, args.vocab_size = str(folder / "vocab.txt"), None
    args.tokenizer_type = FAMILIES[family_of(args)].defaults["tokenizer_type"]
    generator = np.random.default_rng(args.seed)
    documents = 2 + args.train_iters * args.global_batch_size
    _write(
        args,
        folder,
        (
            [
                generator.integers(len(_SPECIAL), len(tokens), size=length)
                for length in generator.integers(3, 14, size=4)
            ]
            for _ in range(documents)
        ),
    )


_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def _write(args: Namespace, folder: Path, documents: Iterable[Iterable[np.ndarray]]) -> None:
    """The corpus of some documents, and the flags that read it."""
    builder = IndexedDatasetBuilder(str(folder / "corpus.bin"), np.uint16)
    for document in documents:
        sentences = list(document)
        builder.add_document(np.concatenate(sentences), [len(sentence) for sentence in sentences])
    builder.finalize(str(folder / "corpus.idx"))
    args.mock_data, args.data_path, args.split = False, [str(folder / "corpus")], "1,0,0"
    args.data_cache_path = str(folder / "cache")


def _record(world: World, args: Namespace, script: Path, steps: int) -> Record:
    return joined(world.run(record_rank, args, str(script), steps))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "megatron-lite verify",
        description="Train a small copy of your model under your layout, on processes of this machine, and in one "
        "process, and compare. All other flags are those of training.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="processes of the real run (default: two copies of the model)"
    )
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="optimizer steps (default: 5)")
    parser.add_argument(
        "--max-processes", type=int, default=8, metavar="N", help="most processes to start here (default: 8)"
    )
    parser.add_argument(
        "--tolerance", type=float, metavar="X", help=f"of fp32, relative (default: {TOLERANCE['fp32'].losses:g})"
    )
    parser.add_argument("--script", type=Path, metavar="FILE", help="the training script (default: pretrain_gpt.py)")
    return parser


def _data_parallel_size(own: Namespace, given: Namespace) -> int:
    """Copies of the model in the real run."""
    ranks = given.tensor_model_parallel_size * given.pipeline_model_parallel_size * given.context_parallel_size
    if own.ranks is None:
        return 2
    if own.ranks < 1 or own.ranks % ranks:
        raise ConfigError(
            f"--ranks {own.ranks} with {ranks} rank(s) for one copy of the model",
            why="ranks are copies times the ranks of one copy (tensor x pipeline x context)",
            fix=f"--ranks {max(1, round(own.ranks / ranks)) * ranks}",
        )
    return own.ranks // ranks


def _layout(args: Namespace) -> str:
    sizes = {
        "tp": args.tensor_model_parallel_size,
        "pp": args.pipeline_model_parallel_size,
        "cp": args.context_parallel_size,
        "dp": args.data_parallel_size,
    }
    words = [f"{name} {size}" for name, size in sizes.items() if size > 1] or ["one rank"]
    if args.sequence_parallel:
        words.append("sequence parallel")
    if is_full(args):
        words.append("fully sharded")
    elif args.use_distributed_optimizer:
        words.append("distributed optimizer")
    return ", ".join(words)
