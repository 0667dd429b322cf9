"""How far a verb is: a bar with rate and time left on a terminal, now and then a plain line in a pipe or a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def progress(what: str, total: float, unit: str) -> Iterator[Callable[[float], None]]:
    """Hands out `advance(amount)`. Writes to standard error, so that a verb's output stays clean.

    Args:
        what: "reading", ...: a verb, before the numbers.
        total: the amount at which it is done, in `unit`.
        unit: such as "MB" or "files".
    """
    start = time.monotonic()
    done = 0.0

    def rate() -> str:
        return f"{done / max(time.monotonic() - start, 1e-9):,.1f} {unit}/s"

    if sys.stderr.isatty():
        from rich.console import Console  # only who sees the bar needs the package
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f} " + unit),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total, rate="")

            def advance_bar(amount: float) -> None:
                nonlocal done
                done += amount
                bar.update(task, completed=done, rate=rate())

            yield advance_bar
        return

    said = start

    def advance_line(amount: float) -> None:
        nonlocal done, said
        done += amount
        now = time.monotonic()
        if now - said >= SECONDS_BETWEEN_LINES:
            said = now
            left = (total - done) * (now - start) / max(done, 1e-9)
            print(
                f"{what}: {done:,.0f} of {total:,.0f} {unit}, {rate()}, {left:.0f} s left", file=sys.stderr, flush=True
            )

    yield advance_line
