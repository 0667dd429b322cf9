"""The pages of public names, with signatures and docstrings: the table that `tests/test_public_names.py` holds true.

api.md          which name is at which path
api_ROOM.md     a room's names, as mkdocstrings shows them; of a config class a table of its fields
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections import defaultdict
from pathlib import Path
from typing import Any

from megatron_lite.config import default_of
from tests.test_public_names import NAMES

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_lite"

HEAD = """# Public names

The names that Megatron's users import, at Megatron's paths: `megatron.core.x` is `megatron_lite.x`, and
`megatron.training` is `megatron_lite.training`. Arguments, their order included, are Megatron's; a test
compares them. What is not here is ours to change.

| room | path | names |
|---|---|---|
"""


def room_of(path: str) -> str:
    """`optimizer.clip_grads` -> `optimizer`; a file at the package's root -> `ground`."""
    first = path.split(".")[0]
    return first if (PACKAGE / first).is_dir() else "ground"


ROOMS = list(dict.fromkeys(room_of(path) for path in NAMES))


def index() -> str:
    """The Markdown of api.md."""
    lines = []
    for path, names in NAMES.items():
        room = room_of(path)
        shown = ", ".join(f"`{name}`" for name in names) or "the module"
        lines.append(f"| [{room}](api_{room}.md) | `megatron_lite.{path}` | {shown} |")
    return HEAD + "\n".join(lines)


def page(room: str) -> str:
    """The Markdown of a room's page, with a directive of mkdocstrings for each name. An object is shown once."""
    lines = [f"# {room}"]
    for name, (thing, places) in _things()[room].items():
        imports = "<br>".join(f"`from megatron_lite.{path} import {alias}`" for path, alias in places)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            lines += ["", f"::: {thing.__module__}.{thing.__qualname__}", *_options(thing)]
        else:
            lines += ["", f"### {name}", "", f"A ready-made {type(thing).__name__}."]
        lines += ["", imports, *_fields(thing)]
    return "\n".join(lines)


def _things() -> dict[str, dict[str, tuple[Any, list[tuple[str, str]]]]]:
    """room -> name -> (object, the paths and names that offer it); each object in the room that comes first."""
    rooms: dict[str, dict[str, tuple[Any, list[tuple[str, str]]]]] = defaultdict(dict)
    first: dict[int, tuple[str, str]] = {}
    for path, names in NAMES.items():
        module = importlib.import_module(f"megatron_lite.{path}" if path != "mpu" else "megatron_lite.parallel_state")
        for name in names:
            thing = getattr(module, name)
            where, known = first.setdefault(id(thing), (room_of(path), name))
            rooms[where].setdefault(known, (thing, []))[1].append((path, name))
    return rooms


def _is_config(thing: Any) -> bool:
    return dataclasses.is_dataclass(thing) and any("help" in item.metadata for item in dataclasses.fields(thing))


def _options(thing: Any) -> list[str]:
    """Of a config neither the long signature nor the source; of other classes the methods that have a docstring."""
    if _is_config(thing):
        return ["    options:", "      show_source: false", "      show_signature: false"]
    if dataclasses.is_dataclass(thing) or not inspect.isclass(thing):
        return []
    methods = [
        name
        for name, value in vars(thing).items()
        if not name.startswith("_") and inspect.isfunction(value) and value.__doc__
    ]
    return ["    options:", f"      members: [{', '.join(methods)}]"] if methods else []


def _fields(thing: Any) -> list[str]:
    """The table of a config's fields; what code alone sets has no meaning in words."""
    if not _is_config(thing):
        return []
    lines = ["", "| field | default | meaning |", "|---|---|---|"]
    for item in dataclasses.fields(thing):
        default = default_of(item)
        shown = "" if default is dataclasses.MISSING else getattr(default, "__name__", None) or repr(default)
        meaning = item.metadata.get("help", "").replace("|", "\\|")
        if default is True and meaning and not item.metadata["pair"]:  # the flag's words are about what it switches off
            meaning = f"False: {meaning}"
        lines.append(f"| `{item.name}` | `{shown}` | {meaning} |" if shown else f"| `{item.name}` | | {meaning} |")
    return lines
