"""Why is a loss or gradient bad? Runs the step once more with every module watched, and writes down what it finds.

    before      a ring of the last steps: losses, gradient norm, which samples
    forward     the first module whose output is NaN or Inf, and whether its input was whole; for a spike, the largest
    backward    the first output, seen from the loss, whose gradient is NaN or Inf
    weights     those that are NaN or Inf themselves
    data        the samples of the bad micro-batch, by number and by document

All ranks take part, each watches its own modules; rank 0 writes one file below `--save`. Costs nothing until then.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite import collectives
from megatron_lite.collectives import group_rank, group_size
from megatron_lite.log import rank_and_world_size, warn_rank_0
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.training.replay import Replay
from megatron_lite.training.rerun import Rejection, Verdict, causes
from megatron_lite.training.train_step import StepResult

HISTORY = 32  # steps that a report shows
_SHOWN = 8  # ranks, samples, modules of each kind in a report


@dataclass(frozen=True, order=True)
class Finding:
    """The first bad value that a rank has seen in one direction. Ordered as the values arose.

    Args:
        stage: place among all parts of the model, pipeline stages and their chunks in order.
        order: which module of the rank it was, in the order in which they ran.
    """

    microbatch: int
    stage: int
    order: int
    text: str


@dataclass
class Examined:
    """What one rank tells of the step."""

    rank: int
    place: str
    replica: tuple[int, int]  # data- and context-parallel rank: who reads the same samples
    forward: Finding | None
    backward: Finding | None
    largest: list[tuple[float, str]]
    weights: list[str]


class LossDoctor:
    """Remembers the last steps of a run, and examines a bad one."""

    def __init__(self, args: Namespace, model: Sequence[nn.Module], pg_collection: ProcessGroupCollection):
        self.args, self.model, self.pg_collection = args, model, pg_collection
        self._steps: deque[tuple[int, StepResult, list[list[int]]]] = deque(maxlen=HISTORY)

    def note(self, iteration: int, result: StepResult, samples: list[list[int]]) -> None:
        """A step is done; it read these samples, by micro-batch."""
        self._steps.append((iteration, result, samples))

    def examine(
        self, iteration: int, found: list[Rejection], verdict: Verdict, again: Callable[[], None], replay: Replay
    ) -> str:
        """Run the step again by `again`, and write the report; collective over all ranks.

        Args:
            replay: knows the samples of the step.
        Returns: a line that names the file, the same on all ranks; or the report itself, where there is no folder.
        """
        rank, _ = rank_and_world_size()
        groups, world = self.pg_collection, collectives.world()
        with _watched(self.model, groups) as probe:
            again()
        mine = Examined(
            rank,
            ", ".join(
                f"{name} {group_rank(getattr(groups, name))} of {group_size(getattr(groups, name))}"
                for name in ("tp", "pp", "cp", "dp")
                if group_size(getattr(groups, name)) > 1
            ),
            (group_rank(groups.dp), group_rank(groups.cp)),
            probe.forward,
            probe.backward,
            probe.largest(),
            _bad_weights(self.model),
        )
        by_rank: list[Examined] = collectives.all_gather_object(mine, world, purpose="examination of a bad loss")
        bad = _bad_batches(found, by_rank)
        origins = [
            (replica, microbatch, replay.origins(microbatch), replay.samples(microbatch))
            for replica, microbatch in bad
            if replica[0] == mine.replica[0]
        ]
        gathered = collectives.all_gather_object(
            (origins, self._recent() if rank == collectives.group_size(world) - 1 else []),
            world,
            purpose="samples of a bad loss",
        )
        line = ""
        if rank == 0:
            told = [entry for of_rank, _ in gathered for entry in of_rank]
            samples = {(replica, microbatch): lines for replica, microbatch, lines, _ in told if lines}
            text = _report(iteration, found, verdict, by_rank, samples, gathered[-1][1])
            ids = sorted({number for *_, batches in told for batch in batches for number in batch})
            line = f"samples {_some(ids)}; {self._write(iteration, text)}" if ids else self._write(iteration, text)
        return str(collectives.broadcast_object(line, world, purpose="report of a bad loss"))

    def _recent(self) -> list[str]:
        """The last steps, a line each, newest last."""
        lines = []
        for iteration, result, samples in self._steps:
            losses = ", ".join(f"{key} {value:.6g}" for key, value in result.losses.items())
            norm = "none" if result.grad_norm is None else f"{result.grad_norm:.4g}"
            line = f"iteration {iteration:8d}   {losses}   grad norm {norm}   learning rate {result.learning_rate:.4g}"
            flat = [number for batch in samples for number in batch]
            if flat:
                line += f"   samples {_some(flat)}"
            lines.append(line + ("   left out" if result.skipped else ""))
        return lines

    def _write(self, iteration: int, text: str) -> str:
        if not self.args.save:
            return text
        path = Path(self.args.save) / "faults" / f"iteration_{iteration:07d}.txt"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            warn_rank_0(f"{path} cannot be written: {error.strerror}")
            return text
        return f"report: {path}"


# -- watching --------------------------------------------------------------------------------------------------------


class _Probe:
    """What the modules of a rank showed in one run of the step."""

    def __init__(self, groups: ProcessGroupCollection):
        self._stages, self._stage = group_size(groups.pp), group_rank(groups.pp)
        self.forward: Finding | None = None
        self.backward: Finding | None = None
        self._passes: Counter[int] = Counter()  # forward passes of each chunk so far
        self._calls = 0
        self._peaks: dict[str, float] = {}

    def begin_pass(self, chunk: int, *_: Any) -> None:
        self._passes[chunk] += 1

    def output(self, chunk: int, called: str, inputs: Any, output: Any) -> None:
        """A module has computed `output`."""
        self._calls += 1
        microbatch, stage = self._passes[chunk] - 1, chunk * self._stages + self._stage
        for x in _floats(output):
            bad = _count_bad(x)
            if bad and self.forward is None:
                whole = not any(_count_bad(y) for y in _floats(inputs))
                self.forward = Finding(
                    microbatch,
                    stage,
                    self._calls,
                    f"the output of {called} holds {bad} of {x.numel()} values that are NaN or Inf; its inputs "
                    + ("are finite" if whole else "hold some already"),
                )
            if not bad and x.numel():
                self._peaks[called] = max(self._peaks.get(called, 0.0), float(x.detach().abs().max()))
            if x.requires_grad:
                x.register_hook(partial(self._gradient, microbatch, stage, called))

    def _gradient(self, microbatch: int, stage: int, called: str, grad: Tensor) -> None:
        self._calls += 1
        bad = _count_bad(grad)
        if bad and self.backward is None:
            text = f"the gradient of the output of {called} holds {bad} of {grad.numel()} values that are NaN or Inf"
            self.backward = Finding(microbatch, -stage, self._calls, text)

    def largest(self) -> list[tuple[float, str]]:
        return sorted(((peak, name) for name, peak in self._peaks.items()), reverse=True)[:_SHOWN]


@contextmanager
def _watched(model: Sequence[nn.Module], groups: ProcessGroupCollection) -> Iterator[_Probe]:
    probe = _Probe(groups)
    handles = []
    for number, chunk in enumerate(model):
        bare = chunk
        while isinstance(getattr(bare, "module", None), nn.Module):
            bare = bare.module  # type: ignore[assignment]
        handles.append(bare.register_forward_pre_hook(partial(_begin, probe, number)))
        layers = {name: module.layer_number for name, module in bare.named_modules() if hasattr(module, "layer_number")}
        for name, module in bare.named_modules():
            inside = max((layer for layer in layers if name.startswith(layer)), key=len, default=None)
            of_layer = "" if inside is None else f" of layer {layers[inside]}"
            called = f"{name or 'the model'} ({type(module).__name__}{of_layer})"
            handles.append(module.register_forward_hook(partial(_output, probe, number, called)))
    try:
        yield probe
    finally:
        for handle in handles:
            handle.remove()


def _begin(probe: _Probe, chunk: int, *_: Any) -> None:
    probe.begin_pass(chunk)


def _output(probe: _Probe, chunk: int, called: str, module: nn.Module, inputs: Any, output: Any) -> None:
    probe.output(chunk, called, inputs, output)


def _floats(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        if values.is_floating_point():
            yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _floats(value)


def _count_bad(x: Tensor) -> int:
    return int((~torch.isfinite(x.detach())).sum())


@torch.no_grad()
def _bad_weights(model: Sequence[nn.Module]) -> list[str]:
    return [
        f"{name}: {bad} of {param.numel()} values"
        for chunk in model
        for name, param in chunk.named_parameters()
        if (bad := _count_bad(param.to_local() if hasattr(param, "to_local") else param))  # of a sharded one its part
    ]


# -- the report ------------------------------------------------------------------------------------------------------


def _bad_batches(found: Sequence[Rejection], by_rank: Sequence[Examined]) -> list[tuple[tuple[int, int], int | None]]:
    """(replica, micro-batch) of what was rejected. Gradients are rejected by the step: then that of the first bad value
    of the rank is meant, or (None) the whole step."""
    batches = set()
    for rejection in causes(found):
        told = by_rank[rejection.rank]
        microbatch = rejection.microbatch
        if microbatch is None:
            first = told.forward or told.backward
            microbatch = None if first is None else first.microbatch
        batches.add((told.replica, microbatch))
    return sorted(batches, key=lambda batch: (batch[0], -1 if batch[1] is None else batch[1]))[:_SHOWN]


def _report(
    iteration: int,
    found: Sequence[Rejection],
    verdict: Verdict,
    by_rank: Sequence[Examined],
    samples: dict[tuple[tuple[int, int], int | None], list[str]],
    recent: Sequence[str],
) -> str:
    lines = [f"A bad result at iteration {iteration}", f"written {datetime.now():%Y-%m-%d %H:%M:%S}", ""]
    lines.append("WHAT")
    rejections = causes(found)
    for rejection in rejections[:_SHOWN]:
        place = by_rank[rejection.rank].place
        lines.append(f"  {rejection.text}")
        lines.append(f"    node {rejection.node}, device {rejection.device}" + (f"; {place}" if place else ""))
    lines += _more(rejections)
    lines += ["", "MACHINE", f"  {verdict.value}", "", "FIRST BAD VALUE, when the step was run once more"]
    forward = sorted((e.forward, e.rank) for e in by_rank if e.forward is not None)
    backward = sorted((e.backward, e.rank) for e in by_rank if e.backward is not None)
    for kind, findings in (("forward", forward), ("backward", backward)):
        for finding, rank in findings[:_SHOWN]:
            lines.append(f"  {kind}, rank {rank}, micro-batch {finding.microbatch}: {finding.text}")
        lines += _more(findings)
    if not forward:
        lines.append("  forward: the outputs of all modules are finite: a bad loss arose after the model, or by chance")
    if not forward and not backward:
        largest = sorted(((peak, name, e.rank) for e in by_rank for peak, name in e.largest), reverse=True)
        lines.append("  the largest outputs:")
        lines += [f"    {peak:.4g} in {name}, rank {rank}" for peak, name, rank in largest[:_SHOWN]]
    lines += ["", "WEIGHTS"]
    bad = [(e.rank, text) for e in by_rank for text in e.weights]
    lines += [f"  rank {rank}: NaN or Inf in {text}" for rank, text in bad[:_SHOWN]] + _more(bad)
    lines += [] if bad else ["  all finite"]
    lines += ["", "SAMPLES"]
    for (replica, microbatch), of_batch in sorted(samples.items(), key=str):
        where = "of the step" if microbatch is None else f"of micro-batch {microbatch}"
        lines.append(f"  {where}, data-parallel rank {replica[0]}")
        lines += [f"    {line}" for line in of_batch[:64]] + _more(of_batch, 64)
    lines += [] if samples else ["  not known: the data come from an iterator of the script"]
    lines += ["", f"RECENT STEPS, up to {HISTORY}; samples of the last rank, where it reads"]
    lines += [f"  {line}" for line in recent]
    return "\n".join(lines) + "\n"


def _more(items: Sequence[Any], shown: int = _SHOWN) -> list[str]:
    return [f"  and {len(items) - shown} more"] if len(items) > shown else []


def _some(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:16])) + (f" and {len(numbers) - 16} more" if len(numbers) > 16 else "")
