"""The page of all commands: the text of each verb's `--help`."""

from __future__ import annotations

import contextlib
import io
import os

from megatron_lite.cli.main import VERBS, main

# verb -> verbs of its own
PARTS = {"data": ("merge", "inspect", "index"), "retro": ("preprocess",), "checkpoint": ("inspect", "verify")}

HEAD = """# Every command

Training is `python pretrain_gpt.py` (`pretrain_bert.py`, `pretrain_t5.py`, `pretrain_retro.py`), or the same under
torchrun, srun or mpirun; its flags are on [their own page](flags.md). All else is `megatron-lite <verb>`:
"""


def page() -> str:
    """The Markdown of the page."""
    lines = [HEAD, "| verb | |", "|---|---|"]
    lines += [f"| [`{verb}`](#{verb}) | {text.replace('|', chr(92) + '|')} |" for verb, (_, text) in VERBS.items()]
    for verb in VERBS:
        lines += ["", f"## {verb}"]
        for words in [(verb,), *((verb, part) for part in PARTS.get(verb, ()))]:
            lines += ["", "```text", help_text(*words), "```"]
    return "\n".join(lines)


def help_text(*words: str) -> str:
    """What `megatron-lite WORDS --help` prints, at a width of 100."""
    out = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"  # argparse asks there
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            main([*words, "--help"])
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
    return out.getvalue().rstrip()
