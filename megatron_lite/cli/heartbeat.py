"""`megatron-lite heartbeat FILE --max-age SECONDS`: does the run that writes this file live? For cron, supervisors."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron_lite.errors import DataError
from megatron_lite.training.heartbeat import age


def main(argv: Sequence[str] | None = None) -> int:
    """Status 0: it lives, or is done; 1: it has been silent for longer, or there is no such file."""
    parser = argparse.ArgumentParser(
        prog="megatron-lite heartbeat",
        description="Status 0 while a run lives or when it is done, 1 when it is silent.",
    )
    parser.add_argument("file", help="what the run was given as --heartbeat-file")
    parser.add_argument(
        "--max-age",
        type=float,
        default=600.0,
        help="seconds of silence that are no worry; a save is one (default: 600)",
    )
    words = parser.parse_args(argv)
    try:
        text, seconds = age(words.file)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{words.file} holds no heartbeat: {error}",
            why="a run writes it when it starts to train",
            fix="the path that the run was given as --heartbeat-file",
        ) from None
    silent = seconds > words.max_age
    print(f"{'SILENT' if silent else 'alive'} for {seconds:.0f} s: {text}" if seconds or silent else text)
    return int(silent)
