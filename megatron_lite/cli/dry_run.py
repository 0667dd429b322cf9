"""`megatron-lite dry-run --ranks N <training flags>`: may this run start on N ranks, and what would each hold?

    flags --rules--> validated for N ranks --> every stage's model under fake groups, without memory --> a table

Nothing is computed and nothing is sent; a wrong flag, a layout that does not fit or a model that cannot be built ends
as it would on the cluster.
"""

from __future__ import annotations

import argparse
import contextlib
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import megatron_lite
from megatron_lite.errors import ConfigError
from megatron_lite.planning.dry_run import stage_sizes
from megatron_lite.training import global_vars
from megatron_lite.training.arguments import parse_args, validate_args
from megatron_lite.training.families import FAMILIES
from megatron_lite.training.memory_estimate import as_size
from megatron_lite.training.record import args_defaults_of, extra_args_of, load_script

CHECKOUT = Path(megatron_lite.__file__).resolve().parent.parent


def main(argv: Sequence[str]) -> None:
    """The verb."""
    own, words = _parser().parse_known_args(list(argv))
    if own.ranks < 1:
        raise ConfigError(f"--ranks {own.ranks}", why="a run has a process at least", fix="--ranks 1, or more")
    script = load_script(own.script or CHECKOUT / FAMILIES["gpt"].script)
    args = parse_args(words, extra_args_of(script), args_defaults_of(script))
    args.rank, args.world_size = 0, own.ranks
    _stand_in(args, own.vocabulary)
    with contextlib.redirect_stdout(None):
        validate_args(args, own.ranks)
        _stand_in(args, own.vocabulary)  # a Retro project names its own
        global_vars.build_tokenizer(args)
    with contextlib.redirect_stdout(None):
        sizes = stage_sizes(args, script.model_provider)
    print(_layout(args))
    print(f"{'stage':>5}  {'parameters of a rank':>20}  {'memory of a rank':>16}  holds")
    for row in sizes:
        print(f"{row.stage:5}  {row.parameters:20,}  {as_size(row.memory.total):>16}  {row.holds}")
    print(f"the largest: {max(sizes, key=lambda row: row.memory.total).memory}, and activations")
    print(f"the model has {sum(row.unique for row in sizes):,} parameters (vocabulary of {args.padded_vocab_size:,})")


def _stand_in(args: Namespace, vocabulary: int | None) -> None:
    """A tokenizer with as many ids that needs no files; its last id ends documents."""
    if vocabulary is not None:
        args.tokenizer_type, args.vocab_size = "NullTokenizer", vocabulary - 1


def _layout(args: Namespace) -> str:
    names = {
        "tp": args.tensor_model_parallel_size,
        "cp": args.context_parallel_size,
        "dp": args.data_parallel_size,
        "pp": args.pipeline_model_parallel_size,
    }
    text = f"{args.world_size} ranks = " + " x ".join(f"{name} {size}" for name, size in names.items())
    if args.virtual_pipeline_model_parallel_size:
        text += f", {args.virtual_pipeline_model_parallel_size} chunks a stage"
    if args.expert_model_parallel_size > 1:
        text += f", experts over {args.expert_model_parallel_size}"
    samples = args.micro_batch_size * args.data_parallel_size
    return (
        f"{text}\na step: {args.global_batch_size:,} samples x {args.seq_length:,} = "
        f"{args.global_batch_size * args.seq_length:,} tokens, {args.global_batch_size // samples} micro-batches a rank"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "megatron-lite dry-run",
        description="Check a run of N ranks without them: flags, layout, and the parameters and memory of every stage. "
        "All other flags are those of training.",
        allow_abbrev=False,
    )
    parser.add_argument("--ranks", type=int, metavar="N", required=True, help="processes of the run")
    parser.add_argument("--script", type=Path, metavar="FILE", help="the training script (default: pretrain_gpt.py)")
    parser.add_argument(
        "--vocabulary", type=int, metavar="N", help="size of the tokenizer's, where its files are not on this machine"
    )
    return parser
