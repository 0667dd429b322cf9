"""The import law: files at the root are the ground, folders are rooms, a room imports only lower levels.

Reads every import, also those inside functions and those for types alone.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "megatron_lite"
LEVELS: list[set[str]] = [
    {""},  # the files at the package root
    {"fusions"},
    {
        "tensor_parallel",
        "context_parallel",
        "pipeline_parallel",
        "distributed",
        "checkpointing",
        "datasets",
        "tokenizers",
    },
    {"transformer", "optimizer", "extensions"},
    {"models"},
    {"training"},
    {"planning"},
    {"cli"},
]
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
FILES = sorted(path for path in ROOT.rglob("*.py") if path.name != "__main__.py" or path.parent != ROOT)
SCRIPTS = sorted(ROOT.parent.glob("pretrain_*.py"))


def room(module: str) -> str:
    """'megatron_lite.optimizer.clip_grads' -> 'optimizer'; a file at the root -> ''."""
    first = module.split(".")[1] if "." in module else ""
    return first if (ROOT / first).is_dir() else ""


def imports(source: str) -> list[tuple[int, str]]:
    """(line, module or name in full) of every import, hidden ones and those for types too."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write the import in full"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
    return [(line, name) for line, name in found if name.split(".")[0] == "megatron_lite"]


def offences(here: str, source: str) -> list[str]:
    return [
        f"line {line}: {here or 'the ground'} may not know {there}: move what both need down, or hand it in"
        for line, there in ((line, room(name)) for line, name in imports(source))
        if here != there and not LEVEL[there] < LEVEL[here]
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_downwards(path: Path) -> None:
    here = room(".".join(path.relative_to(ROOT.parent).with_suffix("").parts))
    assert not offences(here, path.read_text(encoding="utf-8"))


def test_every_room_has_a_level() -> None:
    rooms = {path.name for path in ROOT.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert rooms <= set(LEVEL), "a new folder takes its place in LEVELS"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_entry_scripts_know_no_command_line_tool(path: Path) -> None:
    rooms = {room(name) for _, name in imports(path.read_text(encoding="utf-8"))}
    assert not rooms & {"cli", "planning"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_training_reads_global_variables(path: Path) -> None:
    """`get_args()` below `training/` would make a library that only runs inside our own script."""
    if path.relative_to(ROOT).parts[0] not in ("training", "planning", "cli"):
        names = [name for _, name in imports(path.read_text(encoding="utf-8"))]
        assert not [name for name in names if "global_vars" in name or name.endswith(".get_args")]


@pytest.mark.parametrize(
    ("here", "source"),
    [
        ("", "from megatron_lite.optimizer.clip_grads import x"),
        ("optimizer", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from megatron_lite import training"),
        ("distributed", "def f():\n    import megatron_lite.tensor_parallel.layers"),
    ],
)
def test_the_law_finds_what_it_looks_for(here: str, source: str) -> None:
    assert offences(here, source)


def test_only_collectives_calls_torch_distributed_for_data() -> None:
    """One file moves data between ranks, so that every byte is counted; groups are made in process_groups."""
    moving = {
        "all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "broadcast",
        "all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv", "batch_isend_irecv", "all_gather_object",
        "broadcast_object_list", "gather", "gather_object", "scatter", "scatter_object_list", "reduce", "barrier",
    }  # fmt: skip
    found = []
    for path in FILES:
        if path.name == "collectives.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in moving:
                owner = ast.unparse(node.func.value)
                if owner in ("dist", "torch.distributed"):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {owner}.{node.func.attr}")
    assert not found
