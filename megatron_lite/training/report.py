"""What a run looked like: `loss.png` and a `report.html` that needs nothing beside itself. For several runs beside each
other: `comparison.png` and `comparison.html`.

    <save>/metrics.jsonl ----> Metrics ----> loss.png ---+
    <save>/config.yaml   ----> table  ------------------ +--> report.html (picture, numbers, settings, sample inside)
    sample text, timings of the steps before ----------- +

The loop appends to `metrics.jsonl` while it runs and calls `write_report` at its end; `megatron-lite report` does it
again from the files. No torch here.
"""

from __future__ import annotations

import base64
import html
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_lite.errors import DataError
from megatron_lite.training.report_metrics import METRICS, Metrics, duration, read_metrics, summary
from megatron_lite.training.report_picture import draw

CONFIG = "config.yaml"
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
    "num_experts",
    "moe_router_topk",
    "micro_batch_size",
    "global_batch_size",
    "train_iters",
    "lr",
    "lr_decay_style",
    "bf16",
    "fp16",
    "world_size",
    "data_parallel_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "seed",
)


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
    return _columns([(name, value) for name, value in rows.items()])


def _columns(rows: Iterable[Sequence[Any]]) -> str:
    """A table of any number of columns; the first one names the row."""
    lines = ("".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in rows)
    cells = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table>\n{cells}\n</table>"


def _image(picture: bytes) -> str:
    data = base64.b64encode(picture).decode()
    return f'<img alt="losses over iterations" src="data:image/png;base64,{data}">'


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
        _image(picture),
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

    def text() -> str:
        return page(title, picture.read_bytes(), metrics, config, sample, timings)

    return _write({folder.name: metrics}, title, picture, report, text)


def _write(runs: Mapping[str, Metrics], title: str, picture: Path, page: Path, text: Callable[[], str]) -> list[Path]:
    """The picture, and the page with the picture inside."""
    try:
        picture.parent.mkdir(parents=True, exist_ok=True)
        draw(runs, picture, title)
        temporary = page.with_name(page.name + ".partial")
        temporary.write_text(text(), encoding="utf-8")
        temporary.replace(page)
    except OSError as problem:
        where = f"the report to {picture.parent}"
        raise DataError(f"cannot write {where}: {problem.strerror}", fix="another --output") from problem
    return [picture, page]


def write_comparison(folders: Sequence[str | Path], output: str | Path) -> list[Path]:
    """`comparison.png` and `comparison.html` of several runs: curves in one picture, a column of numbers for each, and
    the settings in which they differ.

    Args:
        folders: as `write_report`'s.
    Returns: the two paths.
    Raises: as `write_report`.
    """
    output = Path(output)
    names = _short_names([Path(folder) for folder in folders])
    runs = {name: read_metrics(folder / METRICS) for name, folder in names.items()}
    settings = {name: folder / CONFIG for name, folder in names.items()}
    configs = {name: read_config(path) if path.exists() else {} for name, path in settings.items()}
    title = f"{len(runs)} training runs"
    picture, report = output / "comparison.png", output / "comparison.html"

    def text() -> str:
        parts = [_image(picture.read_bytes()), "<h2>Result</h2>"]
        parts.append(_side_by_side({name: summary(metrics) for name, metrics in runs.items()}))
        parts += ["<h2>Settings that differ</h2>", _side_by_side(_different(configs))]
        return _PAGE.format(title=html.escape(title), body="\n".join(parts))

    return _write(runs, title, picture, report, text)


def _side_by_side(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """A column for each run."""
    keys = dict.fromkeys(key for values in runs.values() for key in values)
    rows = [[key, *(values.get(key, "-") for values in runs.values())] for key in keys]
    return _columns([["", *runs], *rows])


def _different(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The settings that are not the same in all runs; without the folders that only name the run."""
    keys = dict.fromkeys(key for config in configs.values() for key in config if key not in ("save", "load"))
    differing = [key for key in keys if len({repr(config.get(key)) for config in configs.values()}) > 1]
    return {name: {key: config.get(key, "-") for key in differing} for name, config in configs.items()}


def _short_names(folders: Sequence[Path]) -> dict[str, Path]:
    """Runs by the end of their path that tells them apart."""
    resolved = [folder.resolve() for folder in folders]
    depth = 1
    while len({path.parts[-depth:] for path in resolved}) < len(set(resolved)):
        depth += 1
    return {os.path.join(*path.parts[-depth:]): folder for path, folder in zip(resolved, folders)}


def sample_and_timings(folder: Path) -> tuple[str | None, dict[str, float] | None]:
    """What the quickstart leaves beside a report: `sample.txt` and `timings.json`, where they exist."""
    sample, timings = folder / "sample.txt", folder / "timings.json"
    return (
        sample.read_text(encoding="utf-8") if sample.exists() else None,
        json.loads(timings.read_text()) if timings.exists() else None,
    )
