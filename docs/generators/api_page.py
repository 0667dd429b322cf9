"""The page of public names, with signatures and docstrings: the table that `tests/test_public_names.py` holds true."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections import defaultdict
from typing import Any

from tests.test_public_names import NAMES

HEAD = """# Public names

The names that Megatron's users import, at Megatron's paths: `megatron.core.x` is `megatron_lite.x`, and
`megatron.training` is `megatron_lite.training`. Arguments, their order included, are Megatron's; a test
compares them. What is not on this page is ours to change.
"""


def page() -> str:
    """The Markdown of the page, with a directive of mkdocstrings for each name."""
    lines = [HEAD]
    for room, things in _by_room().items():
        lines += ["", f"## {room}", ""]
        for name, (thing, paths) in things.items():
            imports = "<br>".join(f"`from megatron_lite.{place} import {alias}`" for place, alias in paths)
            if inspect.isclass(thing) or inspect.isfunction(thing):
                lines += [f"::: {thing.__module__}.{thing.__qualname__}", *_options(thing), "", imports, ""]
            else:
                lines += [f"### {name}", "", f"A ready-made {type(thing).__name__}.", "", imports, ""]
    return "\n".join(lines)


def _by_room() -> dict[str, dict[str, tuple[Any, list[tuple[str, str]]]]]:
    """room -> name -> (object, the paths and names that offer it); each object once, in the room that comes first."""
    rooms: dict[str, dict[str, tuple[Any, list[tuple[str, str]]]]] = defaultdict(dict)
    first: dict[int, tuple[str, str]] = {}
    for path, names in NAMES.items():
        module = importlib.import_module(f"megatron_lite.{path}" if path != "mpu" else "megatron_lite.parallel_state")
        room = path.split(".")[0] if "." in path or hasattr(module, "__path__") else "ground"
        for name in names:
            thing = getattr(module, name)
            where, known = first.setdefault(id(thing), (room, name))
            rooms[where].setdefault(known, (thing, []))[1].append((path, name))
    return rooms


def _options(thing: Any) -> list[str]:
    """A config's fields are on the page of flags; of other classes the methods that have a docstring are shown."""
    if dataclasses.is_dataclass(thing) or not inspect.isclass(thing):
        return []
    methods = [
        name
        for name, value in vars(thing).items()
        if not name.startswith("_") and inspect.isfunction(value) and value.__doc__
    ]
    return ["    options:", f"      members: [{', '.join(methods)}]"] if methods else []
