"""Timelines of pipeline schedules as a picture: a row for each stage, a box with its micro-batch for each pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_lite.errors import ConfigError
from megatron_lite.pipeline_parallel.actions import Kind
from megatron_lite.pipeline_parallel.schedule_check import Proof

FORMATS = (".svg", ".png")
_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "backward, input gradients",
    Kind.WEIGHT_GRAD: "backward, weight gradients",
}
# First and last shade of a kind: chunks in between are mixed. Also apart without colours: dark, middle, light.
_SHADES = {
    Kind.FORWARD: ((0.20, 0.42, 0.72), (0.68, 0.81, 0.95)),
    Kind.BACKWARD: ((0.22, 0.56, 0.32), (0.72, 0.89, 0.70)),
    Kind.INPUT_GRAD: ((0.22, 0.56, 0.32), (0.72, 0.89, 0.70)),
    Kind.WEIGHT_GRAD: ((0.93, 0.62, 0.22), (0.99, 0.84, 0.60)),
}
_INCHES_HIGH = 0.34  # of a stage's row
_WIDTHS = (8.0, 22.0)  # inches of the picture, least and most


def draw(plans: Sequence[tuple[str, Proof]], path: Path) -> None:
    """Draw schedules below one another on one scale of time.

    Args:
        plans: (title, proof) each.
        path: `.svg` or `.png`.
    Raises: ConfigError if the file cannot be written.
    """
    from matplotlib.figure import Figure  # half a second that printing need not wait for

    span = max(proof.span for _, proof in plans)
    smallest = min(t.end - t.start for _, proof in plans for line in proof.timeline for t in line)
    width = min(max(0.24 * span / smallest, _WIDTHS[0]), _WIDTHS[1])
    rows = [len(proof.timeline) for _, proof in plans]
    heights = [_INCHES_HIGH * count + 0.75 for count in rows]
    figure = Figure(figsize=(width, sum(heights) + 0.35), dpi=120, layout="constrained")
    axes = figure.subplots(len(plans), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights})[:, 0]
    points = 72 * (width - 0.8) / span  # of one unit of time
    for (title, proof), axis in zip(plans, axes):
        _rows(axis, proof, points)
        axis.set_title(f"{title}, activations of {_listed(proof)} alive at once", loc="left", fontsize=10)
        axis.set_xlim(0, span)
        axis.tick_params(labelbottom=True, labelsize=8)
    axes[-1].set_xlabel("time", fontsize=9)
    figure.legend(handles=_legend([proof for _, proof in plans]), loc="outside lower center", ncols=4, fontsize=8)
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(
            f"--output {path}", why=error.strerror or str(error), fix="a file in a folder that exists and is yours"
        ) from error


def _rows(axis: Any, proof: Proof, points: float) -> None:
    """The boxes of one schedule; what is left grey is the bubble."""
    stages, chunks = len(proof.timeline), _chunks(proof)
    digits = max(len(str(timed.action.microbatch)) for line in proof.timeline for timed in line)
    axis.axhspan(-0.5, stages - 0.5, color="0.93", zorder=0)
    for stage, line in enumerate(proof.timeline):
        for timed in line:
            action, long = timed.action, timed.end - timed.start
            colour = shade(action.kind, action.chunk, chunks)
            edge = min(0.6, 0.1 * long * points)
            axis.barh(stage, long, 0.86, timed.start, color=colour, edgecolor="white", linewidth=edge, zorder=1)
            text = str(action.microbatch)
            size = min(9.0, 1.5 * long * points / digits)  # all boxes of a width have their number, or none has
            if size >= 4.0:
                axis.text(
                    timed.start + long / 2,
                    stage,
                    text,
                    ha="center",
                    va="center_baseline",
                    fontsize=size,
                    color="white" if _is_dark(colour) else "0.1",
                    zorder=2,
                    clip_on=True,
                )
    axis.set_ylim(stages - 0.5, -0.5)
    axis.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)], fontsize=8)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.axvline(proof.span, color="0.35", linewidth=1.0, linestyle=":", zorder=3)


def shade(kind: Kind, chunk: int, chunks: int) -> tuple[float, float, float]:
    """Red, green, blue of a pass: the kind's colour, lighter from chunk to chunk."""
    first, last = _SHADES[kind]
    part = chunk / (chunks - 1) if chunks > 1 else 0.0
    red, green, blue = (a + (b - a) * part for a, b in zip(first, last))
    return red, green, blue


def _is_dark(colour: tuple[float, float, float]) -> bool:
    return 0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2] < 0.55


def _chunks(proof: Proof) -> int:
    return 1 + max(timed.action.chunk for line in proof.timeline for timed in line)


def _legend(proofs: Sequence[Proof]) -> list[Any]:
    """A box for each kind (and chunk) that occurs, and one for the bubble."""
    from matplotlib.patches import Patch

    chunks = max(map(_chunks, proofs))
    seen = {timed.action.kind for proof in proofs for line in proof.timeline for timed in line}
    boxes = []
    for kind in Kind:
        if kind not in seen:
            continue
        whole = kind in (Kind.FORWARD, Kind.BACKWARD)  # the halves occur without chunks
        for chunk in range(chunks if whole else 1):
            name = _NAMES[kind] + (f", chunk {chunk}" if whole and chunks > 1 else "")
            boxes.append(Patch(color=shade(kind, chunk, chunks if whole else 1), label=name))
    return [*boxes, Patch(color="0.93", label="waiting (the bubble)")]


def _listed(proof: Proof) -> str:
    """The first to the last stage's peak, in whole micro-batches: one that is in half of the chunks counts half."""
    peaks = [peak / _chunks(proof) for peak in proof.peaks]
    many = f"{peaks[0]:.3g}" if len(set(peaks)) == 1 else f"{max(peaks):.3g} to {min(peaks):.3g}"
    return f"{many} micro-batches"
