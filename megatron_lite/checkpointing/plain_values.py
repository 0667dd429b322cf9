"""Values on disk that are data and never code.

Two forms. JSON for what a person may want to read (the arguments); `torch.save` for nested dicts, lists, numbers and
tensors, always read with `weights_only=True`, so that a hostile file can do nothing but fail.
"""

from __future__ import annotations

import enum
import io
import pickle
from pathlib import Path
from typing import Any

import torch

from megatron_lite.errors import CheckpointError

READ_ERRORS = (RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError, OSError)


def to_json(value: Any) -> Any:
    """`value` in JSON's types: tuples become lists, dtypes, enums and paths their names. Others become their repr."""
    if value is None or isinstance(value, (bool, int, float, str)) and not isinstance(value, enum.Enum):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((to_json(item) for item in value), key=str)
    if isinstance(value, (torch.dtype, torch.device, Path)):
        return str(value)
    return repr(value)


def to_bytes(value: Any, what: str) -> bytes:
    """`value` as `torch.save` writes it, after a trial that it can be read again without running code.

    Args:
        what: names the value in the error.
    Raises: CheckpointError for a value that holds other classes than plain ones and tensors.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except (AttributeError, TypeError, *READ_ERRORS) as error:
        raise CheckpointError(
            f"{what} cannot be saved: {_first_line(error)}",
            why="a checkpoint holds numbers, text, lists, dicts and tensors, so that reading one runs no code",
        ) from error
    return buffer.getvalue()


def from_bytes(data: bytes, what: str) -> Any:
    """Undoes `to_bytes`; tensors come back on the CPU.

    Raises: CheckpointError for damaged data, and for data that would run code.
    """
    try:
        return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except READ_ERRORS as error:
        raise CheckpointError(
            f"cannot read {what}: {_first_line(error)}",
            why="the file is damaged, or it holds more than plain values and tensors",
            fix="--ckpt-step with another checkpoint",
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
