"""`megatron-lite report`: draws `loss.png` and `report.html` of a run again, also while it still trains; or compares
several runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_lite.training.report import sample_and_timings, write_comparison, write_report


def main(argv: Sequence[str]) -> int:
    """The verb: prints the two paths."""
    parser = argparse.ArgumentParser(
        "megatron-lite report",
        description="loss.png and a self-contained report.html, from what a run has logged. With several runs: "
        "comparison.png and comparison.html, with all curves in one picture and the settings in which they differ.",
    )
    parser.add_argument(
        "folder", type=Path, nargs="+", help="a run's --save folder, with metrics.jsonl and config.yaml"
    )
    parser.add_argument(
        "--output", type=Path, help="the folder to write to (default: the run's; with several runs, the present one)"
    )
    args = parser.parse_args(argv)
    if len(args.folder) > 1:
        written = write_comparison(args.folder, args.output or Path())
    else:
        (folder,) = args.folder
        output = args.output or folder
        sample, timings = sample_and_timings(output)
        written = write_report(folder, output, sample=sample, timings=timings)
    for path in written:
        print(path)
    return 0
