"""A few steps of a run, recorded as global tensors, so that layouts can be held against each other.

    arguments -> start-up -> model, optimizer, schedule -> data -> steps      the functions that every run calls
                                      |                              |
                                first weights            losses, norms, gradients, traffic, last weights

Each rank records what it holds, with its place in the global tensor (`RankRecord`); `joined` lays the ranks' parts
together (`Record`). Several ranks may hold one element: how far their values differ is recorded too, since copies must
be equal bit by bit.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite import collectives, parallel_state
from megatron_lite.enums import ModelType
from megatron_lite.errors import ConfigError
from megatron_lite.log import rank_and_world_size
from megatron_lite.num_microbatches_calculator import unset_num_microbatches_calculator
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.training import global_vars
from megatron_lite.training.arguments import validate_args
from megatron_lite.training.data_loading import build_train_valid_test_data_iterators
from megatron_lite.training.held import Held, exceeds, held_gradients, held_weights, join_parts
from megatron_lite.training.model_setup import setup_model_and_optimizer
from megatron_lite.training.stage_data import for_chunks
from megatron_lite.training.train_step import train_step
from megatron_lite.training.training import start

Counts = dict[tuple[str, str, str], tuple[int, int]]  # (group, kind, purpose) -> calls, bytes


@dataclass
class RankRecord:
    """What one rank saw. Gradients are those that the optimizer steps on, unscaled; tensors are copies in fp32."""

    rank: int
    first_weights: Held = field(default_factory=list)
    last_weights: Held = field(default_factory=list)
    gradients: list[Held] = field(default_factory=list)  # one a step
    losses: list[dict[str, float]] = field(default_factory=list)
    grad_norms: list[float | None] = field(default_factory=list)
    traffic: list[Counts] = field(default_factory=list)
    group_sizes: dict[str, int] = field(default_factory=dict)


@dataclass
class Record:
    """What all ranks saw together: global tensors by name, numbers by step.

    copies: what -> (largest difference between two ranks' values of one element, where).
    """

    first_weights: dict[str, Tensor]
    last_weights: dict[str, Tensor]
    gradients: list[dict[str, Tensor]]
    losses: list[dict[str, float]]
    grad_norms: list[float | None]
    copies: dict[str, tuple[float, str]]


# -- on a rank ---------------------------------------------------------------------------------------------------


def load_script(path: str | Path) -> Any:
    """The entry script as a module, which has `model_provider`, `forward_step` and
    `train_valid_test_datasets_provider`, as Megatron's scripts do. Its `__main__` part does not run.

    Raises: ConfigError for a file that is not there or lacks one of them.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"there is no script {path}", fix="the path of pretrain_gpt.py or of a script like it")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, f"{path} is no Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    if str(path.parent.resolve()) not in sys.path:  # for what the script imports from beside it
        sys.path.append(str(path.parent.resolve()))
    spec.loader.exec_module(module)
    missing = [name for name in _SCRIPT if not hasattr(module, name)]
    if missing:
        raise ConfigError(
            f"{path} has no {', '.join(missing)}",
            why="model, data and forward step are taken from the script",
            fix="functions with these names, as in pretrain_gpt.py",
        )
    return module


def args_defaults_of(script: Any) -> dict[str, Any]:
    """The defaults that a loaded script gives to `pretrain`, which say what kind of model it trains; none if it does
    not name them."""
    return dict(getattr(script, "ARGS_DEFAULTS", {}))


def extra_args_of(script: Any) -> Callable[[Any], Any] | None:
    """The function of a loaded script that adds its own flags, where it has one of this name (Megatron's argument)."""
    return getattr(script, "extra_args_provider", None)


_SCRIPT = ("model_provider", "forward_step", "train_valid_test_datasets_provider")


def record_rank(args: Namespace, script: Any, steps: int, prepare: Callable[..., None] | None = None) -> RankRecord:
    """Train `steps` steps as a run does; to be called on every rank of the world that `args` is meant for.

    What the run prints is dropped. Nothing of the run is left afterwards.

    Args:
        args: of `parse_args`, not validated yet; changed here.
        script: of `load_script`, or its path.
        prepare: called with (model chunks, optimizer) before the first step: for tests.
    """
    silent = io.StringIO()
    try:
        with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
            return _record(args, load_script(script) if isinstance(script, (str, Path)) else script, steps, prepare)
    finally:
        _forget_run()


def _record(args: Namespace, script: Any, steps: int, prepare: Callable[..., None] | None) -> RankRecord:
    rank, world_size = rank_and_world_size()
    validate_args(args, world_size)
    start(args)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model_type = getattr(script, "MODEL_TYPE", ModelType.encoder_or_decoder)
    model, optimizer, scheduler = setup_model_and_optimizer(script.model_provider, model_type, args, groups)
    assert optimizer is not None and scheduler is not None, "--skip-train trains nothing that could be compared"
    if prepare is not None:
        prepare(model, optimizer)
    data: Any = build_train_valid_test_data_iterators(script.train_valid_test_datasets_provider, args, groups)
    data = for_chunks(data.train, args, groups)
    seen = RankRecord(rank, first_weights=held_weights(model))
    config: Any = model[0].config
    config.finalize_model_grads_func = _then(
        config.finalize_model_grads_func, lambda: seen.gradients.append(held_gradients(optimizer))
    )
    for iteration in range(1, steps + 1):
        before = collectives.counts()
        result = train_step(script.forward_step, data, model, optimizer, scheduler, args, iteration, groups)
        seen.traffic.append(collectives.difference(collectives.counts(), before))
        seen.losses.append(result.losses)
        seen.grad_norms.append(result.grad_norm)
    seen.last_weights = held_weights(model)
    seen.group_sizes = collectives.group_sizes()
    return seen


def _then(function: Callable[..., Any], what: Callable[[], Any]) -> Callable[..., Any]:
    def both(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        what()
        return result

    return both


def _forget_run() -> None:
    """Undo start-up, so that the next run on this process may have another layout."""
    groups = {group for group in _process_groups() if group is not dist.group.WORLD}
    parallel_state.destroy_model_parallel()
    global_vars.destroy_global_vars()
    unset_num_microbatches_calculator()
    collectives.forget_groups()
    for group in groups:
        dist.destroy_process_group(group)


def _process_groups() -> Iterable[dist.ProcessGroup]:
    for value in vars(ProcessGroupCollection.use_mpu_process_groups()).values():
        for group in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(group, dist.ProcessGroup):
                yield group


# -- all ranks together ------------------------------------------------------------------------------------------


def joined(ranks: Sequence[RankRecord]) -> Record:
    """The ranks' records as one. Losses and norms are those of the last rank that has them.

    Raises: RankFailure naming a tensor of which no rank holds a part.
    """
    copies: dict[str, tuple[float, str]] = {}

    def join(what: str, parts: Iterable[Held]) -> dict[str, Tensor]:
        tensors, difference, where = join_parts(what, parts)
        if what not in copies or exceeds(difference, copies[what][0]):
            copies[what] = (difference, where)
        return tensors

    steps = range(len(ranks[0].grad_norms))
    first = join("first weights", (rank.first_weights for rank in ranks))
    gradients = [join("gradients", (rank.gradients[step] for rank in ranks)) for step in steps]
    last = join("last weights", (rank.last_weights for rank in ranks))
    losses = [next((r.losses[step] for r in reversed(ranks) if r.losses[step]), {}) for step in steps]
    norms = [
        next((r.grad_norms[step] for r in reversed(ranks) if r.grad_norms[step] is not None), None) for step in steps
    ]
    copies["losses"] = _spread([[r.losses[step] for r in ranks if r.losses[step]] for step in steps])
    copies["gradient norms"] = _spread([[{"": _number(r.grad_norms[step])} for r in ranks] for step in steps])
    return Record(first, last, gradients, losses, norms, copies)


def _number(norm: float | None) -> float:
    return math.nan if norm is None else norm


def _spread(steps: list[list[dict[str, float]]]) -> tuple[float, str]:
    """The largest difference between ranks' numbers, and the step where."""
    worst, where = 0.0, ""
    for step, rows in enumerate(steps, start=1):
        for key in rows[0] if rows else ():
            values = torch.tensor([row[key] for row in rows], dtype=torch.float64)
            difference = float(values.max() - values.min())
            if exceeds(difference, worst):
                worst, where = difference, f"{key} step {step}".strip()
    return worst, where
