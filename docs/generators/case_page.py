"""The page of reported cases: `cases.tsv` beside the tests whose names carry the ids, as `test_C055_...` does."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

HEAD = """# Reported cases

What users of this kind of software ran into and reported, in our words, and the tests that hold it right here. The list
is `docs/generators/cases.tsv`; a test belongs to a case when its name carries the id. Try one case with
`python -m pytest -k C055`.
"""


class Case(NamedTuple):
    """A line of `cases.tsv`."""

    id: str
    area: str
    title: str
    reported: str


def cases() -> list[Case]:
    """All reported cases, in order."""
    lines = Path(__file__).with_name("cases.tsv").read_text(encoding="utf-8").splitlines()[1:]
    return [Case(*line.split("\t")) for line in lines]


@cache
def tests() -> dict[str, list[tuple[str, str]]]:
    """id -> (file, name) of each test function that carries it in its name."""
    found = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for number in re.findall(r"_[cC](\d{3})(?=_)", node.name):
                    found[f"C{number}"].append((str(path.relative_to(ROOT / "tests")), node.name))
    return dict(found)


def page() -> str:
    """The Markdown of the page."""
    held, lines, area = tests(), [HEAD], ""
    for case in cases():
        if case.area != area:
            area = case.area
            lines += ["", f"## {area.capitalize()}", "", "| | reported | tests |", "|---|---|---|"]
        names = "<br>".join(f"`{file}` {_sentence(name)}" for file, name in held.get(case.id, []))
        lines.append(f"| {case.id} | {case.title} ({case.reported}) | {names} |")
    return "\n".join(lines)


def _sentence(name: str) -> str:
    """`test_c066_a_transposed_view_is_summed` -> `a transposed view is summed`."""
    return re.sub(r"^test(_[cC]\d{3})*_", "", name).replace("_", " ")
