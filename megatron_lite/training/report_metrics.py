"""What a run has logged, read back: `metrics.jsonl` -> series by iteration, and the numbers that one looks for first.

A resumed run repeats the iterations after its checkpoint: of two entries the later one counts. A rollback undoes those
behind its checkpoint, also where they are not repeated. No torch here.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_lite.errors import DataError

METRICS = "metrics.jsonl"
LOAD, DROPPED = "expert load (max / mean)", "dropped share"  # as in the log line of runs with experts
# What a training entry holds besides its losses.
_NO_LOSS = {
    "iteration",
    "consumed_samples",
    "learning_rate",
    "global_batch_size",
    "grad_norm",
    "loss_scale",
    "elapsed_ms",
    "tokens_per_s",
    "tflops_per_device",
    "skipped_iterations",
    "nan_iterations",
    "communication",
    "joules_per_device",
    "watts_per_device",
    "max_attention_logit",
    LOAD,
    DROPPED,
}


@dataclass
class Metrics:
    """A run's entries by iteration, in order."""

    train: dict[int, dict[str, Any]] = field(default_factory=dict)
    validation: dict[int, dict[str, float]] = field(default_factory=dict)

    @property
    def loss_keys(self) -> list[str]:
        """Names of the losses, the one that was optimised first; without those of routers."""
        keys = dict.fromkeys(key for row in self.train.values() for key in row if key not in _NO_LOSS)
        keys |= dict.fromkeys(key for row in self.validation.values() for key in row)
        return [key for key in keys if not key.endswith("_loss")]

    @property
    def router_keys(self) -> list[str]:
        """Names of what routers add to the loss: they have another scale."""
        return list(dict.fromkeys(key for row in self.train.values() for key in row if key.endswith("_loss")))

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """(iterations, values) of a training quantity, without the entries that lack it."""
        points = [(i, row[key]) for i, row in self.train.items() if row.get(key) is not None]
        return [i for i, _ in points], [value for _, value in points]

    def validation_series(self, key: str) -> tuple[list[int], list[float]]:
        """(iterations, values) of a validation loss."""
        points = [(i, row[key]) for i, row in self.validation.items() if row.get(key) is not None]
        return [i for i, _ in points], [value for _, value in points]

    @property
    def seconds(self) -> float:
        """Time spent in training steps: an entry's mean time counts for the iterations since the entry before it."""
        steps = _steps(self.train)
        return sum((i - before) * (self.train[i].get("elapsed_ms") or 0.0) / 1000.0 for i, before in steps)


def _steps(train: dict[int, dict[str, Any]]) -> list[tuple[int, int]]:
    """Iterations of entries, each with that of the entry before."""
    return list(zip(train, [0, *train]))


def read_metrics(path: Path) -> Metrics:
    """The entries of a metrics file. A line torn by a crash is left out.

    Raises: DataError if the file is missing or has no entry.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as problem:
        raise DataError(
            f"cannot read {path}: {problem.strerror}",
            why="a report is drawn from the metrics that a run writes into its --save folder",
            fix="name the folder that --save had",
        ) from problem
    train: dict[int, dict[str, Any]] = {}
    validation: dict[int, dict[str, float]] = {}
    for line in lines:
        try:
            row = json.loads(line)
            if "rolled_back_to" in row:
                last = int(row["rolled_back_to"])
                train, validation = ({i: v for i, v in rows.items() if i <= last} for rows in (train, validation))
                continue
            iteration = int(row["iteration"])
        except (ValueError, KeyError, TypeError):
            continue
        if "validation" in row:
            validation.setdefault(iteration, {}).update(row["validation"])  # a row for each of several sets
        else:
            train[iteration] = row
    if not train and not validation:
        raise DataError(f"{path} holds no entry", why="the run ended before its first logged iteration")
    return Metrics(dict(sorted(train.items())), dict(sorted(validation.items())))


def summary(metrics: Metrics) -> dict[str, str]:
    """The numbers that one looks for first, as text."""
    rows: dict[str, str] = {}
    if metrics.train:
        last_iteration, last = next(reversed(metrics.train.items()))
        rows["iterations"] = f"{last_iteration:,}"
        if last.get("consumed_samples") is not None:
            rows["samples"] = f"{last['consumed_samples']:,}"
    for key in metrics.loss_keys:
        for name, (iterations, values) in (
            (f"{key}, training", metrics.series(key)),
            (f"{key}, validation", metrics.validation_series(key)),
        ):
            if values:
                text = f"{values[0]:.3f} (iteration {iterations[0]})"
                if len(values) > 1:
                    text += f" -> {values[-1]:.3f} (iteration {iterations[-1]}), {values[-1] / values[0] - 1:+.0%}"
                rows[name] = text
        _, values = metrics.validation_series(key)
        if values:
            rows[f"{key}, validation perplexity"] = f"{math.exp(min(20.0, values[-1])):,.1f}"
    if metrics.seconds:
        rows["time in training steps"] = duration(metrics.seconds)
    _, speed = metrics.series("tokens_per_s")
    if speed:
        rows["throughput, median"] = f"{sorted(speed)[len(speed) // 2]:,.0f} tokens/s"
    for key in metrics.router_keys:
        _, values = metrics.series(key)
        if values:
            rows[f"{key}, last"] = f"{values[-1]:.4g}"
    for key, name in ((LOAD, "expert load (max / mean), last"), (DROPPED, "dropped share of tokens, last")):
        _, values = metrics.series(key)
        if values:
            rows[name] = f"{values[-1]:.2f}"
    joules = sum((i - j) * (metrics.train[i].get("joules_per_device") or 0.0) for i, j in _steps(metrics.train))
    if joules:
        rows["energy per device"] = f"{joules / 3.6e6:.3g} kWh"
    _, flops = metrics.series("tflops_per_device")
    if flops:
        rows["model TFLOP/s per device, median"] = f"{sorted(flops)[len(flops) // 2]:.3g}"
    skipped = sum(row.get("skipped_iterations") or 0 for row in metrics.train.values())
    if skipped:
        rows["skipped iterations"] = str(skipped)
    return rows


def duration(seconds: float) -> str:
    """75.2 -> "1 min 15 s"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
