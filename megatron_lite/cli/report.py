"""`megatron-lite report`: draws `loss.png` and `report.html` of a run again, also while it still trains."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_lite.training.report import sample_and_timings, write_report


def main(argv: Sequence[str]) -> int:
    """The verb: prints the two paths."""
    parser = argparse.ArgumentParser(
        "megatron-lite report", description="loss.png and a self-contained report.html, from what a run has logged."
    )
    parser.add_argument("folder", type=Path, help="the run's --save folder, with metrics.jsonl and config.yaml")
    parser.add_argument("--output", type=Path, help="the folder to write to (default: the same)")
    args = parser.parse_args(argv)
    output = args.output or args.folder
    sample, timings = sample_and_timings(output)
    for path in write_report(args.folder, output, sample=sample, timings=timings):
        print(path)
    return 0
