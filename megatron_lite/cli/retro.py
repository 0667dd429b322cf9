"""`megatron-lite retro <verb>`: what Retro needs before it trains."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence

from megatron_lite.errors import ConfigError

# verb -> (module with `main(argv) -> int`, what `--help` says)
VERBS = {
    "preprocess": (
        "megatron_lite.cli.retro_preprocess",
        "chunk database, index, and the neighbours of every chunk that training will see",
    ),
}


def usage() -> str:
    verbs = "\n".join(f"  {verb:<12} {text}" for verb, (_, text) in VERBS.items())
    return f"usage: megatron-lite retro <verb> [options]\n\n{verbs}"


def main(argv: Sequence[str]) -> int:
    """The verb's verb."""
    words = list(argv)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 2
    if words[0] not in VERBS:
        close = difflib.get_close_matches(words[0], VERBS, n=1, cutoff=0.5)
        raise ConfigError(
            f"megatron-lite retro has no verb {words[0]!r}" + (f"; did you mean {close[0]!r}?" if close else ""),
            why=f"the verbs are {', '.join(VERBS)}",
            fix="megatron-lite retro --help",
        )
    return importlib.import_module(VERBS[words[0]][0]).main(words[1:])
