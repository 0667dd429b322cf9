"""What training any tokenizer begins and ends with: a bounded sample of the texts, and a file written at once."""

import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron_lite.errors import DataError


def sampled_lines(texts: Iterable[str], total_bytes: int | None, sample_bytes: int) -> list[str]:
    """Lines, with their ends, of about `sample_bytes` of the texts.

    Args:
        texts: one document each, read once and not kept beyond the sample.
        total_bytes: size of all texts; where it is larger than `sample_bytes` the sample is drawn from all of them
            (always the same one). None: the sample is their beginning.

    Raises: DataError if there is no text.
    """
    lines = list(_sample(texts, total_bytes, sample_bytes))
    if not lines:
        raise DataError("there is no text to train a tokenizer on", fix="check --input and --json-key")
    return lines


def _sample(texts: Iterable[str], total_bytes: int | None, sample_bytes: int) -> Iterator[str]:
    share = 1.0 if not total_bytes else sample_bytes / total_bytes
    chance = random.Random(1234)
    taken = 0
    for text in texts:
        if share < 1.0 and chance.random() >= share:
            continue
        for line in text.splitlines(keepends=True):
            yield line
            taken += len(line)
        if taken >= sample_bytes:
            return


def write(path: str, content: bytes) -> None:
    """The file is there whole or not at all. Raises: DataError if it cannot be written."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
        Path(temporary).write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise DataError(f"cannot write {path}: {error.strerror or error}", fix="give another --output") from error
