"""A run that saves, or goes on from a save, under any layout: what the table of layouts is made of.

Start-up, model, optimizer, schedule, data, step, save and load are the functions that `pretrain_gpt.py` calls.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_lite import collectives
from megatron_lite.checkpointing.plain_values import to_bytes
from megatron_lite.enums import ModelType
from megatron_lite.log import rank_and_world_size
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.training.arguments import parse_args, validate_args
from megatron_lite.training.checkpointing import load_checkpoint, save_checkpoint
from megatron_lite.training.data_loading import build_train_valid_test_data_iterators
from megatron_lite.training.families import defaults_of
from megatron_lite.training.model_setup import setup_model_and_optimizer
from megatron_lite.training.record import _forget_run, load_script
from megatron_lite.training.rng_state import get_rng_state
from megatron_lite.training.stage_data import for_chunks
from megatron_lite.training.train_step import train_step
from megatron_lite.training.training import start
from tests.distributed.layouts import MODELS, Layout


@dataclass
class Seen:
    """What one rank saw. losses: one a step, empty where this rank computes none. said: what was printed.

    generators: a digest of the states of all random generators at the save, or right after the load.
    """

    iteration: int = 0
    generators: str = ""
    losses: list[float] = field(default_factory=list)
    read_bytes: int = 0
    said: str = ""


def train(layout: Layout, words: list[str], steps: int, *, save_after: int | None = None) -> Seen:
    """One rank's part of a run, in a world of `layout.world_size`: loads if `--load` is among the words, then takes so
    many steps, with a save (`--save`) amid."""
    model = MODELS[layout.model]
    args = parse_args(layout.words() + words, args_defaults=defaults_of(model.family))
    seen, out = Seen(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            _train(args, load_script(model.script), steps, save_after, seen)
    finally:
        _forget_run()
    seen.said = out.getvalue()
    return seen


def _train(args: Any, script: Any, steps: int, save_after: int | None, seen: Seen) -> None:
    validate_args(args, rank_and_world_size()[1])
    start(args)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model_type = getattr(script, "MODEL_TYPE", ModelType.encoder_or_decoder)
    run = setup_model_and_optimizer(script.model_provider, model_type, args, groups)
    model, optimizer, scheduler = run
    assert optimizer is not None and scheduler is not None
    args.iteration, args.num_floating_point_operations_so_far = 0, 0.0
    args.consumed_train_samples = args.consumed_valid_samples = args.skipped_train_samples = 0
    if args.load:
        args.iteration, _ = load_checkpoint(*run)
        seen.generators = _digest(get_rng_state())
    seen.iteration = args.iteration
    data: Any = build_train_valid_test_data_iterators(script.train_valid_test_datasets_provider, args, groups)
    data = for_chunks(data.train, args, groups)
    for _ in range(steps):
        args.iteration += 1
        result = train_step(script.forward_step, data, model, optimizer, scheduler, args, args.iteration, groups)
        args.consumed_train_samples += args.global_batch_size
        seen.losses += [result.losses["lm loss"]] if result.losses else []
        if args.iteration == save_after:
            seen.generators = _digest(get_rng_state())
            save_checkpoint(args.iteration, *run, 0.0)
    collectives.barrier(collectives.world(), purpose="end of a test's run")


def _digest(states: dict[str, Any]) -> str:
    return hashlib.sha256(to_bytes(states, "generators")).hexdigest()


def losses_of(ranks: list[Seen]) -> list[float]:
    """The losses, by the last rank that has them."""
    return next(seen.losses for seen in reversed(ranks) if seen.losses)


def folder_words(save: Path | None = None, load: Path | None = None) -> list[str]:
    """The flags."""
    words = ["--save", str(save), "--save-interval", "1"] if save else []
    return words + (["--load", str(load)] if load else [])


def saver(world: Any, tmp_path_factory: Any, layouts: dict[str, Layout], train_and_save: Any, steps: int) -> Any:
    """`saver(...)(name)` -> (folder of that layout's checkpoint at `steps`, its losses after that), made once."""
    done: dict[str, tuple[Path, list[float]]] = {}

    def save(name: str) -> tuple[Path, list[float]]:
        if name not in done:
            root, layout = tmp_path_factory.mktemp(name), layouts[name]
            seen = world(layout.world_size).run(train_and_save, layout, folder_words(save=root))
            done[name] = root, losses_of(seen)[steps:]
        return done[name]

    return save
