"""What a run looked like: `loss.png` and a `report.html` that needs nothing beside itself.

    <save>/metrics.jsonl ----> Metrics ----> loss.png ---+
    <save>/config.yaml   ----> table  ------------------ +--> report.html (picture, numbers, settings, sample inside)
    sample text, timings of the steps before ----------- +

The loop appends to `metrics.jsonl` while it runs and calls `write_report` at its end; `megatron-lite report` does it
again from the files. A resumed run repeats the iterations after its checkpoint: of two entries the later one counts.
No torch here.
"""

from __future__ import annotations

import base64
import html
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron_lite.errors import DataError

METRICS, CONFIG = "metrics.jsonl", "config.yaml"
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
}
# Settings that say what was trained, for the short table; the whole configuration follows below it.
_HEADLINE = (
    "num_layers",
    "decoder_num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "seq_length",
    "decoder_seq_length",
    "padded_vocab_size",
    "position_embedding_type",
    "normalization",
    "swiglu",
    "micro_batch_size",
    "global_batch_size",
    "train_iters",
    "lr",
    "lr_decay_style",
    "bf16",
    "fp16",
    "world_size",
    "data_parallel_size",
    "seed",
)


@dataclass
class Metrics:
    """A run's entries by iteration, in order."""

    train: dict[int, dict[str, Any]] = field(default_factory=dict)
    validation: dict[int, dict[str, float]] = field(default_factory=dict)

    @property
    def loss_keys(self) -> list[str]:
        """Names of the losses, the one that was optimised first."""
        keys = dict.fromkeys(key for row in self.train.values() for key in row if key not in _NO_LOSS)
        keys |= dict.fromkeys(key for row in self.validation.values() for key in row)
        return list(keys)

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
        total, before = 0.0, 0
        for iteration, row in self.train.items():
            total += (iteration - before) * (row.get("elapsed_ms") or 0.0) / 1000.0
            before = iteration
        return total


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


# ------------------------------------------------------------------------------------------------------ the picture
def draw(metrics: Metrics, path: Path, title: str) -> None:
    """The losses large; learning rate, gradient norm and throughput small beside them. Writes a PNG."""
    from matplotlib.figure import Figure  # half a second, and a run that draws nothing need not wait for it

    figure = Figure(figsize=(11, 5.2), dpi=120, layout="constrained")
    figure.suptitle(title, fontsize=12)
    grid = figure.add_gridspec(3, 3)
    losses = figure.add_subplot(grid[:, :2])
    colours = ["#1f77b4", "#2ca02c", "#9467bd", "#8c564b"]
    for number, key in enumerate(metrics.loss_keys):
        colour = colours[number % len(colours)]
        iterations, values = metrics.series(key)
        if values:
            losses.plot(iterations, values, color=colour, linewidth=1.4, label=f"{key}, training")
        iterations, values = metrics.validation_series(key)
        if values:
            losses.plot(
                iterations, values, "o--", color="#d62728", markersize=5, linewidth=1, label=f"{key}, validation"
            )
            for end in {0, len(values) - 1}:
                losses.annotate(
                    f"{values[end]:.2f}",
                    (iterations[end], values[end]),
                    xytext=(6, 6) if end == 0 else (0, -14),
                    textcoords="offset points",
                    ha="left" if end == 0 else "right",
                    fontsize=9,
                    color="#d62728",
                )
    losses.set_xlabel("iteration")
    losses.set_ylabel("loss (nats per token)")
    losses.grid(alpha=0.3)
    losses.margins(x=0.02, y=0.08)
    if losses.lines:
        losses.legend(frameon=False)

    small = (("learning_rate", "learning rate"), ("grad_norm", "gradient norm"), ("tokens_per_s", "tokens/s"))
    for row, (key, label) in enumerate(small):
        axes = figure.add_subplot(grid[row, 2])
        iterations, values = metrics.series(key)
        if values:
            axes.plot(iterations, values, color="#444444", linewidth=1.1)
            axes.set_ylim(0, 1.1 * max(values) or 1)
        else:
            axes.text(0.5, 0.5, "not recorded", ha="center", va="center", transform=axes.transAxes, color="#888888")
        axes.set_title(label, fontsize=10, loc="left")
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=8, labelbottom=row == 2)
        if key == "learning_rate":
            axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        if row == 2:
            axes.set_xlabel("iteration", fontsize=9)
    temporary = path.with_name(path.name + ".partial")
    figure.savefig(temporary, format="png")
    temporary.replace(path)


# --------------------------------------------------------------------------------------------------------- the page
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
 body {{ font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }}
 h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.1rem; margin-top: 2rem; border-bottom: 1px solid #ddd; }}
 img {{ width: 100%; height: auto; }}
 table {{ border-collapse: collapse; }} td {{ padding: .15rem 1.5rem .15rem 0; vertical-align: top; }}
 td:first-child {{ color: #666; white-space: nowrap; }} td:last-child {{ overflow-wrap: anywhere; }}
 pre {{ background: #f6f6f4; padding: 1rem; overflow-x: auto; white-space: pre-wrap; font-size: 13px; }}
 summary {{ cursor: pointer; }}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


def _table(rows: Mapping[str, Any]) -> str:
    cells = "\n".join(
        f"<tr><td>{html.escape(str(name))}</td><td>{html.escape(str(value))}</td></tr>" for name, value in rows.items()
    )
    return f"<table>\n{cells}\n</table>"


def page(
    title: str,
    picture: bytes,
    metrics: Metrics,
    config: Mapping[str, Any],
    sample: str | None = None,
    timings: Mapping[str, float] | None = None,
) -> str:
    """The HTML text, with the picture inside.

    Args:
        picture: a PNG.
        sample: what the trained model wrote.
        timings: seconds by step.
    """
    parts = [
        f'<img alt="losses over iterations" src="data:image/png;base64,{base64.b64encode(picture).decode()}">',
        "<h2>Result</h2>",
        _table(summary(metrics)),
    ]
    if timings:
        parts += ["<h2>Time</h2>", _table({step: duration(seconds) for step, seconds in timings.items()})]
    if sample:
        parts += ["<h2>Sample</h2>", f"<pre>{html.escape(sample)}</pre>"]
    if config:
        headline = {name: config[name] for name in _HEADLINE if config.get(name) not in (None, False)}
        if headline:
            parts += ["<h2>Model and run</h2>", _table(headline)]
        parts.append(f"<details><summary>All {len(config)} settings</summary>{_table(config)}</details>")
    return _PAGE.format(title=html.escape(title), body="\n".join(parts))


def read_config(path: Path) -> dict[str, Any]:
    """Every setting by name, also those that the file only remarks (`  # name: value`): defaults and derived values."""
    lines = path.read_text(encoding="utf-8").splitlines()
    settings = {}
    for line in lines:
        found = re.fullmatch(r"(?:  )?(?:# )?([A-Za-z]\w*): (.+)", line)
        if found:
            settings[found[1]] = yaml.safe_load(found[2])
    return settings


def write_report(
    folder: str | Path,
    output: str | Path | None = None,
    *,
    sample: str | None = None,
    timings: Mapping[str, float] | None = None,
) -> list[Path]:
    """`loss.png` and `report.html` of a run.

    Args:
        folder: what `--save` was: it holds `metrics.jsonl` and, if the run got so far, `config.yaml`.
        output: the folder to write to; by default the same.
    Returns: the two paths.
    Raises: DataError if there are no metrics, or the files cannot be written.
    """
    folder = Path(folder)
    output = folder if output is None else Path(output)
    metrics = read_metrics(folder / METRICS)
    settings = folder / CONFIG
    config = read_config(settings) if settings.exists() else {}
    title = f"Training run in {folder}"
    picture, report = output / "loss.png", output / "report.html"
    try:
        output.mkdir(parents=True, exist_ok=True)
        draw(metrics, picture, title)
        temporary = report.with_name(report.name + ".partial")
        temporary.write_text(page(title, picture.read_bytes(), metrics, config, sample, timings), encoding="utf-8")
        temporary.replace(report)
    except OSError as problem:
        raise DataError(f"cannot write the report to {output}: {problem.strerror}", fix="another --output") from problem
    return [picture, report]


def sample_and_timings(folder: Path) -> tuple[str | None, dict[str, float] | None]:
    """What the quickstart leaves beside a report: `sample.txt` and `timings.json`, where they exist."""
    sample, timings = folder / "sample.txt", folder / "timings.json"
    return (
        sample.read_text(encoding="utf-8") if sample.exists() else None,
        json.loads(timings.read_text()) if timings.exists() else None,
    )
