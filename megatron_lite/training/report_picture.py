"""The picture of a report: losses large; learning rate, gradient norm, throughput and experts' load small beside them.

one run        all its losses, of training and of validation
several        the first loss of each, a colour a run; in the small pictures too
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_lite.training.report_metrics import LOAD, Metrics

_COLOURS = ("#1f77b4", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#17becf", "#bcbd22", "#ff7f0e")
_VALIDATION = "#d62728"
_SMALL = (("learning_rate", "learning rate"), ("grad_norm", "gradient norm"), ("tokens_per_s", "tokens/s"))


def draw(runs: Mapping[str, Metrics], path: Path, title: str) -> None:
    """Writes a PNG.

    Args:
        runs: what was logged, by the run's name.
    """
    from matplotlib.figure import Figure  # half a second, and a run that draws nothing need not wait for it

    small = list(_SMALL)
    if any(metrics.series(LOAD)[1] for metrics in runs.values()):
        small.append((LOAD, "experts: busiest / mean"))
    figure = Figure(figsize=(11, 5.2 + 0.9 * (len(small) - len(_SMALL))), dpi=120, layout="constrained")
    figure.suptitle(title, fontsize=12)
    grid = figure.add_gridspec(len(small), 3)
    losses = figure.add_subplot(grid[:, :2])
    if len(runs) == 1:
        _losses_of_one(losses, next(iter(runs.values())))
    else:
        _losses_of_several(losses, runs)
    losses.set_xlabel("iteration")
    losses.set_ylabel("loss (nats per token)")
    losses.grid(alpha=0.3)
    losses.margins(x=0.02, y=0.08)
    if losses.lines:
        losses.legend(frameon=False)

    for row, (key, label) in enumerate(small):
        axes = figure.add_subplot(grid[row, 2])
        highest = 0.0
        for number, metrics in enumerate(runs.values()):
            iterations, values = metrics.series(key)
            if values:
                colour = "#444444" if len(runs) == 1 else _COLOURS[number % len(_COLOURS)]
                axes.plot(iterations, values, color=colour, linewidth=1.1)
                highest = max(highest, *values)
        if axes.lines:
            axes.set_ylim(0, 1.1 * highest or 1)
        else:
            axes.text(0.5, 0.5, "not recorded", ha="center", va="center", transform=axes.transAxes, color="#888888")
        last = row == len(small) - 1
        axes.set_title(label, fontsize=10, loc="left")
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=8, labelbottom=last)
        if key == "learning_rate":
            axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        if last:
            axes.set_xlabel("iteration", fontsize=9)
    temporary = path.with_name(path.name + ".partial")
    figure.savefig(temporary, format="png")
    temporary.replace(path)


def _losses_of_one(axes: Any, metrics: Metrics) -> None:
    for number, key in enumerate(metrics.loss_keys):
        iterations, values = metrics.series(key)
        if values:
            axes.plot(
                iterations, values, color=_COLOURS[number % len(_COLOURS)], linewidth=1.4, label=f"{key}, training"
            )
        iterations, values = metrics.validation_series(key)
        if values:
            axes.plot(
                iterations, values, "o--", color=_VALIDATION, markersize=5, linewidth=1, label=f"{key}, validation"
            )
            for end in {0, len(values) - 1}:
                axes.annotate(
                    f"{values[end]:.2f}",
                    (iterations[end], values[end]),
                    xytext=(6, 6) if end == 0 else (0, -14),
                    textcoords="offset points",
                    ha="left" if end == 0 else "right",
                    fontsize=9,
                    color=_VALIDATION,
                )


def _losses_of_several(axes: Any, runs: Mapping[str, Metrics]) -> None:
    for number, (name, metrics) in enumerate(runs.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        for key in metrics.loss_keys[:1]:
            iterations, values = metrics.series(key)
            if values:
                axes.plot(iterations, values, color=colour, linewidth=1.4, label=f"{name}: {key}")
            iterations, values = metrics.validation_series(key)
            if values:
                label = f"{name}: {key}, validation"
                axes.plot(iterations, values, "o--", color=colour, markersize=4, linewidth=1, alpha=0.8, label=label)
