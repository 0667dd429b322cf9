"""The page of all messages: what, why and fix of every error that the package raises, read from the source.

raise ConfigError(f"--seq-length {n} with ...", why=..., fix=...)  -->  --seq-length ... with ... | why | fix
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_lite"

# error -> heading, exit status
KINDS = {
    "ConfigError": "Flags, and calls of the library: exit status 2",
    "DataError": "Corpora, tokenizers, caches: exit status 1",
    "CheckpointError": "Checkpoints: exit status 1",
    "RankFailure": "Ranks: exit status 1",
    "ResultRejected": "Bad losses and gradients: exit status 17",
    "RerunElsewhere": "Bad losses and gradients, to be computed again elsewhere: exit status 16",
    "PeerLost": "Other ranks: exit status 1",
}

HEAD = """# Every message

What is wrong and yours to mend ends in one text: what was found, why it cannot be, and the fix as something to type.
This page is read from the source; `...` stands for your values. [Troubleshooting](troubleshooting.md) explains the
frequent ones.
"""


class Message(NamedTuple):
    """An error of the source: its class, the file that raises it, and its three parts with `...` for values."""

    kind: str
    file: str
    what: str
    why: str
    fix: str


@cache
def messages() -> tuple[Message, ...]:
    """Every error whose text the source states, in order of files; those that only pass another one on are left out."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
            if not isinstance(node, ast.Call) or name not in (*KINDS, "Rule") or not node.args:
                continue
            if name == "Rule":  # (when it is broken, what, why, fix), with {names} of arguments
                texts = [re.sub(r"\{[\w.]+\}", "...", _text(part)) for part in [*node.args[1:4], *[_NOTHING] * 3]]
                name, (what, why, fix) = "ConfigError", texts[:3]
            else:
                parts = {word.arg: _text(word.value) for word in node.keywords}
                what, why, fix = _text(node.args[0]), parts.get("why", ""), parts.get("fix", "")
            if re.search(r"[a-z]{3}", what):
                found.append(Message(name, str(path.relative_to(PACKAGE)), what, why, fix))
    return tuple(found)


def page() -> str:
    """The Markdown of the page."""
    lines = [HEAD]
    for kind, heading in KINDS.items():
        lines += ["", f"## {heading}", "", "| message | why | fix |", "|---|---|---|"]
        seen = dict.fromkeys((m.what, m.why, m.fix) for m in messages() if m.kind == kind)
        lines += ["| " + " | ".join(_cell(part) for part in row) + " |" for row in sorted(seen)]
    return "\n".join(lines)


_NOTHING = ast.Constant("")


def _text(node: ast.expr) -> str:
    """What an expression makes, with `...` for what only a run knows."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return _joined([_text(part) for part in node.values])
    if isinstance(node, ast.BinOp):
        return _joined([_text(node.left), _text(node.right)])
    return "..."


def _joined(parts: list[str]) -> str:
    return re.sub(r"\.\.\.(\.\.\.)+", "...", "".join(parts))


def _cell(text: str) -> str:
    text = " ".join(text.split())
    return "" if text in ("", "...") else "`" + text.replace("|", "\\|").replace("`", "'") + "`"
