"""`--config-logger-dir`: what the large parts of a run were really constructed with, as JSON files.

    GPTModel.rank_00000.iter0.json      one file for each object of a class that a rank constructs, numbered in order
    DistributedDataParallel.rank_00000.iter0.json

The argument list says what was typed; these files say what arrived: the model, its blocks, data parallelism, the
optimizer. They are told the folder by their config's `config_logger_dir`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_lite.log import rank_and_world_size

_numbers: Counter[str] = Counter()  # objects of a class so far, by the start of their file's name


def has_config_logger_enabled(config: Any) -> bool:
    """Whether a config names a folder."""
    return bool(getattr(config, "config_logger_dir", ""))


def log_config_to_disk(config: Any, dict_data: Mapping[str, Any], prefix: str = "", rank_str: str = "") -> None:
    """Write a constructor's arguments, if `config` asks for it.

    Args:
        config: has `config_logger_dir`.
        dict_data: `locals()` at the top of the constructor; `self` and `__class__` are left out.
        prefix: the class; by default that of `dict_data["self"]`.
        rank_str: in place of this rank's number.
    """
    if not has_config_logger_enabled(config):
        return
    folder = Path(config.config_logger_dir)
    folder.mkdir(parents=True, exist_ok=True)
    prefix = prefix or type(dict_data["self"]).__name__
    start = f"{prefix}.rank_{rank_str or format(rank_and_world_size()[0], '05d')}"
    path = folder / f"{start}.iter{_numbers[str(folder / start)]}.json"
    _numbers[str(folder / start)] += 1
    values = {name: plain(value) for name, value in dict_data.items() if name not in ("self", "__class__")}
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def plain(value: Any) -> Any:
    """A value as JSON has it: configs and specs field by field, functions and classes by name, all else as text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset, range)):
        return [plain(item) for item in value]
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if hasattr(value, "state_dict"):  # a module or an optimizer: its text is long and says nothing of its making
        return type(value).__qualname__
    return str(value)
