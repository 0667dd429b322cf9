"""TensorBoard's files of a run that goes on: steps that are done again are taken out of the files of the runs before.

    run 1    steps 1 2 3 4 5 6 7 8 9, killed; its last save was at 7
    run 2    steps 8 9 10 ...                   before it begins, 8 and 9 leave run 1's file

TensorBoard has a mark for this (`purge_step`), but a mark is one number for all tags: it counts iterations, and "vs
samples" twins count samples, so that a reader which obeys it forgets all of their history.
"""

from __future__ import annotations

import os
from pathlib import Path


def forget_after(folder: str | Path, iteration: int, samples: int) -> int:
    """Take out what was written after a checkpoint.

    Args:
        iteration, samples: of the checkpoint; twins by samples have a tag that ends in " vs samples".
    Returns: how many events left.
    """
    total = 0
    # Names begin with the time, so the newest is the last; before a file without a later step there is none.
    for path in sorted(Path(folder).glob("events.out.tfevents.*"), reverse=True):
        kept, left, scalars = _divide(path, iteration, samples)
        total += left
        if left:
            _rewrite(path, kept)
        elif scalars:
            break
    return total


def _divide(path: Path, iteration: int, samples: int) -> tuple[list[bytes], int, int]:
    """A file's records to keep, the number of those that leave, and of scalars. A record torn by a kill is the end."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    kept, left, scalars = [], 0, 0
    for record in RawEventFileLoader(str(path)).Load():
        event = Event.FromString(record)
        tags = [value.tag for value in event.summary.value]
        scalars += bool(tags)
        last = samples if any(tag.endswith(" vs samples") for tag in tags) else iteration
        if event.step > last:
            left += 1
        else:
            kept.append(record)
    return kept, left, scalars


def _rewrite(path: Path, records: list[bytes]) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    temporary = path.with_name(f"rewriting.{os.getpid()}")  # no name that TensorBoard would read
    with open(temporary, "wb") as file:
        writer = RecordWriter(file)
        for record in records:
            writer.write(record)
        writer.flush()
    os.replace(temporary, path)
