"""`megatron-lite plan`: a pipeline schedule before it runs: its lists, its bubble, what lives at once, a picture.

    megatron-lite plan --pipeline-model-parallel-size 4 --num-microbatches 8 --schedule 1f1b zero-bubble --output a.png

The schedules are the ones that training runs, proved and timed by `schedule_check`. Messages take no time here, and a
stage's forward and backward pass take what `--forward-time` and `--backward-time` say, a chunk's its share of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lite.cli.timeline import FORMATS, draw
from megatron_lite.errors import ConfigError
from megatron_lite.pipeline_parallel.actions import (
    Action,
    Kind,
    Schedule,
    check_microbatch_groups,
    gpipe,
    make_schedule,
)
from megatron_lite.pipeline_parallel.schedule_check import Proof, check_schedule, receive_depth
from megatron_lite.pipeline_parallel.stage_layout import (
    Cell,
    StageLayout,
    encoder_decoder_layout,
    parse_layout,
    stage_layout,
)

TITLES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved 1F1B", "zero-bubble": "Zero bubble (ZB-H1)"}
_SHOWN = 24  # actions of a list that are printed in full


@dataclass(frozen=True)
class Planned:
    """A schedule with what is known of it."""

    name: str
    chunks: int
    lists: Schedule
    proof: Proof
    depth: int

    @property
    def title(self) -> str:
        """One line that says which and how good."""
        many = f", {self.chunks} chunks a stage" if self.chunks > 1 else ""
        return f"{TITLES[self.name]}{many}: bubble {self.proof.bubble:.1%}"


def main(argv: Sequence[str]) -> int:
    """The verb: prints the schedules, and draws them if there is a place for the picture."""
    args = _parser().parse_args(list(argv))
    _check(args)
    placed = None if args.num_layers is None else _place(args)
    plans = [_plan(name, args) for name in args.schedule or [_default(args)]]
    if args.output is not None:  # first: `... | head` takes no picture away
        draw([(plan.title, plan.proof) for plan in plans], args.output)
    for plan in plans:
        print(_describe(plan))
    if placed is not None:
        print(_table(placed, args.pipeline_model_parallel_size))
    if args.output is not None:
        print(f"\n{args.output}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "megatron-lite plan",
        description="What the stages of a pipeline do and when: lists, bubble, micro-batches alive at once, timeline; "
        "with --num-layers also which stage holds which layers.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--pipeline-model-parallel-size", type=int, required=True, metavar="P", help="stages")
    add(
        "--num-microbatches",
        type=int,
        required=True,
        metavar="M",
        help="of a step: global batch / micro batch / data-parallel size",
    )
    add(
        "--schedule",
        nargs="+",
        choices=tuple(TITLES),
        help="one or several, for one picture (default: what training takes: interleaved with virtual stages, else "
        "1f1b; zero-bubble is --delay-wgrad-compute there, gpipe is here for comparison)",
    )
    add("--num-virtual-stages-per-pipeline-rank", type=int, metavar="V", help="interleaved: chunks of a stage")
    add(
        "--microbatch-group-size-per-virtual-pipeline-stage",
        type=int,
        metavar="N",
        help="interleaved: micro-batches that go through a chunk before the next chunk's turn (default: P)",
    )
    add("--forward-time", type=float, default=1.0, metavar="T", help="of a micro-batch on a stage (default: 1)")
    add("--backward-time", type=float, default=2.0, metavar="T", help="the same (default: 2)")
    add("--output", type=Path, metavar="FILE", help=f"draw a timeline: {', '.join(FORMATS)}")
    layers = parser.add_argument_group("which stage holds what")
    layers.add_argument("--num-layers", "--encoder-num-layers", type=int, metavar="L")
    layers.add_argument("--decoder-num-layers", type=int, metavar="D", help="behind an encoder of L layers (T5)")
    layers.add_argument(
        "--pipeline-model-parallel-split-rank", type=int, metavar="STAGE", help="T5: the decoder's first stage"
    )
    layers.add_argument("--decoder-first-pipeline-num-layers", type=int, metavar="N")
    layers.add_argument("--decoder-last-pipeline-num-layers", type=int, metavar="N")
    layers.add_argument("--account-for-embedding-in-pipeline-split", action="store_true")
    layers.add_argument("--account-for-loss-in-pipeline-split", action="store_true")
    layers.add_argument("--pipeline-model-parallel-layout", metavar="TEXT", help="for example 'Ett|(tt|)*2,tL'")
    layers.add_argument("--mtp-num-layers", type=int, default=0, metavar="N", help="further layers, m in the string")
    return parser


def _check(args: argparse.Namespace) -> None:
    """Numbers that mean nothing, before anything is computed from them. A layout string also tells V."""
    sizes = {
        "--pipeline-model-parallel-size": args.pipeline_model_parallel_size,
        "--num-microbatches": args.num_microbatches,
        "--num-virtual-stages-per-pipeline-rank": args.num_virtual_stages_per_pipeline_rank,
        "--microbatch-group-size-per-virtual-pipeline-stage": args.microbatch_group_size_per_virtual_pipeline_stage,
        "--num-layers": args.num_layers,
        "--decoder-num-layers": args.decoder_num_layers,
    }
    for flag, size in sizes.items():
        if size is not None and size < 1:
            raise ConfigError(f"{flag} {size}", why="it is a number of things", fix="1 or more")
    for flag, time in (("--forward-time", args.forward_time), ("--backward-time", args.backward_time)):
        if not time > 0:
            raise ConfigError(f"{flag} {time:g}", why="a pass takes time", fix="a number above 0")
    if args.output is not None and args.output.suffix not in FORMATS:
        raise ConfigError(f"--output {args.output}", why="the name's ending is the format", fix=" or ".join(FORMATS))
    text, stages = args.pipeline_model_parallel_layout, args.pipeline_model_parallel_size
    if text is not None:
        chunks, rest = divmod(len(parse_layout(text)), stages)
        if args.num_virtual_stages_per_pipeline_rank is None and chunks > 1 and not rest:
            args.num_virtual_stages_per_pipeline_rank = chunks
    placing = (
        args.decoder_first_pipeline_num_layers is not None
        or args.decoder_last_pipeline_num_layers is not None
        or args.account_for_embedding_in_pipeline_split
        or args.account_for_loss_in_pipeline_split
        or text is not None
        or args.decoder_num_layers is not None
        or args.pipeline_model_parallel_split_rank is not None
    )
    if placing and args.num_layers is None:
        raise ConfigError("layers are placed, but there are none", why="--num-layers is missing", fix="--num-layers L")


def _default(args: argparse.Namespace) -> str:
    return "interleaved" if (args.num_virtual_stages_per_pipeline_rank or 1) > 1 else "1f1b"


def _plan(name: str, args: argparse.Namespace) -> Planned:
    """Make a schedule, prove and time it. Raises: ConfigError for numbers that the schedule cannot take."""
    stages, microbatches = args.pipeline_model_parallel_size, args.num_microbatches
    chunks, group = 1, None
    if name == "interleaved":
        chunks, group = args.num_virtual_stages_per_pipeline_rank or 1, _group(args)
        if chunks == 1 or stages == 1:
            raise ConfigError(
                f"--schedule interleaved with {stages} stage(s) of {chunks} chunk(s)",
                why="chunks of a stage take turns while it would wait for other stages",
                fix="--num-virtual-stages-per-pipeline-rank 2 or more and --pipeline-model-parallel-size 2 or more",
            )
        check_microbatch_groups(microbatches, stages, group)
    if name == "gpipe":
        lists = [gpipe(stages, microbatches, rank) for rank in range(stages)]
    else:
        lists = make_schedule(stages, microbatches, chunks, group, zero_bubble=name == "zero-bubble")
    half = args.backward_time / 2 / chunks
    durations = {
        Kind.FORWARD: args.forward_time / chunks,
        Kind.BACKWARD: args.backward_time / chunks,
        Kind.INPUT_GRAD: half,
        Kind.WEIGHT_GRAD: half,
    }
    proof = check_schedule(lists, chunks, durations, num_microbatches=microbatches)
    return Planned(name, chunks, lists, proof, receive_depth(lists, chunks))


def _group(args: argparse.Namespace) -> int:
    return args.microbatch_group_size_per_virtual_pipeline_stage or args.pipeline_model_parallel_size


# -- what is printed ---------------------------------------------------------------------------------------------


def _describe(plan: Planned) -> str:
    proof = plan.proof
    busy = proof.span / (1 + proof.bubble)
    lines = [f"\n{plan.title}"]
    for rank, actions in enumerate(plan.lists):
        lines.append(f"  stage {rank:<2}  alive at once {proof.peaks[rank] / plan.chunks:<4.3g}  {_short(actions)}")
    lines += [
        f"  a step takes {proof.span:g}, a stage computes for {busy:g} of it and waits for {proof.span - busy:g}",
        "  alive at once: micro-batches whose activations are kept for backward"
        + (f", each of {plan.chunks} chunks counts a part" if plan.chunks > 1 else ""),
        f"  receives posted ahead on each channel, so that sends that wait cannot block each other: {plan.depth}",
    ]
    return "\n".join(lines)


def _short(actions: Sequence[Action]) -> str:
    words = [str(action) for action in actions]
    if len(words) > _SHOWN:
        words = [*words[: _SHOWN * 2 // 3], "...", *words[-_SHOWN // 3 :]]
    return " ".join(words)


def _place(args: argparse.Namespace) -> StageLayout:
    stages, chunks = args.pipeline_model_parallel_size, args.num_virtual_stages_per_pipeline_rank or 1
    ways: dict[str, Any] = {
        "first": args.decoder_first_pipeline_num_layers,
        "last": args.decoder_last_pipeline_num_layers,
        "count_embedding": args.account_for_embedding_in_pipeline_split,
        "count_loss": args.account_for_loss_in_pipeline_split,
        "layout": args.pipeline_model_parallel_layout,
    }
    split = args.pipeline_model_parallel_split_rank
    if args.decoder_num_layers is not None:
        return encoder_decoder_layout(args.num_layers, args.decoder_num_layers, stages, chunks, split or None, **ways)
    if split:
        raise ConfigError(
            f"--pipeline-model-parallel-split-rank {split}",
            why="it is the first stage of a decoder behind an encoder, and there is one stack",
            fix="--encoder-num-layers and --decoder-num-layers",
        )
    return stage_layout(args.num_layers, stages, chunks, **ways, mtp_layers=args.mtp_num_layers)


def _layers(cell: Cell) -> int:
    return len(cell.layers) + len(cell.encoder or ())


def _table(placed: StageLayout, stages: int) -> str:
    """Stages down, chunks across, layers counted from 0; the model runs down the columns."""
    chunks = len(placed.cells)
    rows = [["", *(f"chunk {chunk}" if chunks > 1 else "holds" for chunk in range(chunks)), "layers"]]
    for stage in range(stages):
        cells = [row[stage] for row in placed.cells]
        rows.append([f"stage {stage}", *map(str, cells), str(sum(map(_layers, cells)))])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n" + "\n".join(
        "  " + "   ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    )
