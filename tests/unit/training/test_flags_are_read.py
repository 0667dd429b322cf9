"""Every flag of `--help` is read by code that acts on it: a flag that nothing reads would be accepted and not done.

The package and the entry scripts are parsed, and what counts as a read is `args.x`, `config.x`, `self.config.x`,
`getattr(args, "x")`, a config's own `self.x`, and names that a loop hands to getattr. What only talks about flags does
not count: tables, rules that refuse, translations of old spellings.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_lite.config import Flag, flag, flags_of
from megatron_lite.training.arguments import CONFIGS, build_parser, parse_args
from megatron_lite.training.flag_tables import AS_IT_IS, noted, refused

ROOT = Path(__file__).parents[3]
SOURCES = [*sorted((ROOT / "megatron_lite").rglob("*.py")), *sorted(ROOT.glob("pretrain_*.py"))]

# Files that talk about flags and act on none. rules_retro.py fills arguments in, beside its rules.
TABLES = re.compile(r"(flag_tables|flag_aliases|checkpoint_args|idle_flags|families)\.py$")
RULES = re.compile(r"(^|_)rules?(_(?!retro\.)\w+)?\.py$")
REFUSING = re.compile(r"problem|^_?check_(?!args$)|missing|unread")  # functions that only refuse
HOLDERS = re.compile(r"(^|_)(args|config|settings|small|given)$|^[ac]$")  # `args.x`, `self.ddp_config.x`, `a.x`


def names_read(source: str, *, is_config: bool = False) -> Iterator[str]:
    """The attributes of arguments and configs that a file reads.

    Args:
        is_config: `self.x` is the config's own field.
    """
    yield from _reads(ast.parse(source), is_config, loops=False)


def _reads(node: ast.AST, is_config: bool, loops: bool) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        if REFUSING.search(node.name):
            return
        loops = _hands_names_to_getattr(node)
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        holder = _last_name(node.value)
        if HOLDERS.search(holder) or (is_config and holder == "self"):
            yield node.attr
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
        named = node.args[1]
        if isinstance(named, ast.Constant) and isinstance(named.value, str):
            yield named.value
    if loops and isinstance(node, (ast.For, ast.comprehension)):
        yield from (
            item.value for item in ast.walk(node.iter) if isinstance(item, ast.Constant) and isinstance(item.value, str)
        )
    for child in ast.iter_child_nodes(node):
        yield from _reads(child, is_config, loops)


def _hands_names_to_getattr(function: ast.AST) -> bool:
    calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
    return any(
        isinstance(call.func, ast.Name) and call.func.id == "getattr" and not isinstance(call.args[1], ast.Constant)
        for call in calls
    )


def _last_name(node: ast.AST) -> str:
    """`self.config` -> "config", `get_args()` -> "get_args"."""
    if isinstance(node, ast.Call):
        return _last_name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


CONFIG_FILES = {inspect.getfile(base) for config in CONFIGS for base in config.__mro__ if base is not object}


def all_reads(sources: Iterable[Path]) -> set[str]:
    found: set[str] = set()
    for path in sources:
        if not TABLES.search(path.name) and not RULES.search(path.name):
            is_config = str(path) in CONFIG_FILES
            found.update(names_read(path.read_text(encoding="utf-8"), is_config=is_config))
    return found


def unread(flags: Iterable[Flag], sources: Iterable[Path]) -> list[str]:
    """Names of flags whose value no source reads, be it by the namespace's name or by the config's field."""
    reads = all_reads(sources)
    return sorted({flag.dest for flag in flags if not reads & {flag.dest, flag.field}})


FLAGS = [flag for config in CONFIGS for flag in flags_of(config)]


def test_every_flag_is_read_or_says_why_not():
    """A flag in this list and in no table needs code that reads it, or must say what is so instead: AS_IT_IS."""
    late = {row.flag.dest for row in noted() if not row.values}
    assert set(unread(FLAGS, SOURCES)) - late == set(AS_IT_IS)


def test_help_shows_no_flag_of_unknown_origin():
    """Each is of a config, of a table that answers for it, or the parser's own."""
    known = {flag.dest for flag in FLAGS} | {row.flag.dest for row in (*noted(), *refused())} | {"help", "config"}
    assert {action.dest for action in build_parser()._actions} - known == set()


@pytest.mark.parametrize("name", AS_IT_IS)
def test_what_nothing_reads_is_told(name, capsys):
    (flag,) = (flag for flag in FLAGS if flag.dest == name)
    parse_args([flag.spellings[0]] if flag.is_switch else [f"{flag.spellings[0]}={(flag.choices or (3,))[-1]}"])
    line = capsys.readouterr().out
    assert line.startswith(flag.spellings[0]) and line.rstrip().endswith(f" has no effect here: {AS_IT_IS[name]}")


@dataclass(kw_only=True)
class Planted:
    """Flags that nobody reads, but for one."""

    flag_that_is_declared: bool = flag(False, "Declared.")
    flag_in_a_rule: bool = flag(False, "A rule refuses it.")
    flag_in_a_table: bool = flag(False, "A table names it.")
    flag_that_is_set: bool = flag(False, "Written, never read.")
    flag_of_others: bool = flag(False, "An attribute of something else.")
    flag_that_is_read: bool = flag(False, "Read.")
    flag_in_a_loop: bool = flag(False, "Read by name.")


def test_a_planted_flag_that_nothing_reads_is_found(tmp_path):
    code = {
        "rules_new.py": "RULES = (lambda a: a.flag_in_a_rule,)",
        "idle_flags.py": "ROWS = (('flag_in_a_table', lambda args: args.flag_in_a_table),)",
        "new_config.py": "class C:\n    flag_that_is_declared: bool = flag(False, 'x')",
        "start.py": "def start(args):\n    args.flag_that_is_set = True\n    return model.flag_of_others",
        "step.py": "def step(args):\n    for name in ('flag_in_a_loop',):\n        print(getattr(args, name))\n"
        "    return args.flag_that_is_read",
        "problems.py": "def problems_of(args):\n    return args.flag_that_is_declared",
    }
    for name, text in code.items():
        (tmp_path / name).write_text(text)
    assert unread(flags_of(Planted), tmp_path.glob("*.py")) == [
        "flag_in_a_rule",
        "flag_in_a_table",
        "flag_of_others",
        "flag_that_is_declared",
        "flag_that_is_set",
    ]
    assert len(unread(flags_of(Planted), SOURCES)) == 7
