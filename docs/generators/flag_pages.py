"""The page of all flags, from where they are declared: config classes, the two tables, and the old spellings.

dataclass fields with flag()  -> works          noted_flags.tsv -> notice
refused_flags.tsv             -> refused        ALIASES         -> translated
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from megatron_lite.config import Flag, flags_of
from megatron_lite.errors import ConfigError
from megatron_lite.training.arguments import CONFIGS
from megatron_lite.training.flag_aliases import ALIASES, Context
from megatron_lite.training.flag_tables import NOTICES, REASONS, REFUSED_VALUES, noted, refused

HEAD = """# Every flag

Made from the code: a flag is declared once, beside what reads it. `python pretrain_gpt.py --help` prints the same.
Spelling, default and meaning are Megatron-LM's. Flags come from the command line, from a YAML file (`--config FILE`,
dashes as underscores), or both; the command line wins. They are not abbreviated; `--name value`
and `--name=value` are one.

What a flag may do here:

| | |
|---|---|
| [works](#flags-that-work) | it does what it says |
| [is noted](#flags-that-are-noted) | it buys speed on special hardware; a line says what is done instead |
| [is refused](#flags-that-are-refused) | no part of this project; the message names the alternative |
| [is translated](#old-spellings) | an older spelling; a line says what it became |
"""


def page() -> str:
    """The Markdown of the page."""
    lines = [HEAD, "## Flags that work", "", _config_file()]
    for config in CONFIGS:
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", config.__name__.removesuffix("Config"))
        lines += [f"### {words}", "", (config.__doc__ or "").strip().splitlines()[0], ""]
        lines += _table("flag | default | meaning", ((_name(f), _default(f), _meaning(f)) for f in flags_of(config)))
    lines += ["## Flags that are noted", ""]
    lines += _table(
        "flag | what is done | what it does in Megatron",
        ((_name(row.flag), NOTICES[row.key] or "nothing: obsolete there, too", row.flag.help) for row in noted()),
    )
    lines += ["## Flags that are refused", ""]
    lines += _table(
        "flag | why | instead | meaning in Megatron",
        ((_name(row.flag) + _only(row.values), *REASONS[row.key], row.flag.help) for row in refused()),
    )
    lines += ["Values, of flags that work, that are refused:", ""]
    lines += _table(
        "flag | value | why | instead",
        (
            (f"`--{name.replace('_', '-')}`", f"`{value}`", *REASONS[key])
            for name, values in REFUSED_VALUES.items()
            for value, key in values.items()
        ),
    )
    lines += ["## Old spellings", "", "`8` stands for the word after the flag.", ""]
    lines += _table("flag | becomes", ((f"`{old}`", _translation(old)) for old in ALIASES))
    return "\n".join(lines)


def _config_file() -> str:
    return "`--config FILE` (also `--yaml-cfg FILE`): a YAML file with flags; of several the last one wins.\n"


def _table(head: str, rows: Iterable[tuple[str, ...]]) -> list[str]:
    columns = head.count("|") + 1
    body = [" | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) for row in rows]
    return [f"| {head} |", "|" + "---|" * columns, *(f"| {row} |" for row in body), ""] if body else ["None.", ""]


def _name(flag: Flag) -> str:
    return ", ".join(f"`{spelling}`" for spelling in (*flag.spellings, *flag.negations))


def _only(values: tuple[str, ...]) -> str:
    if values:
        return f" with {', '.join(f'`{value}`' for value in values)}"
    return ""


def _default(flag: Flag) -> str:
    if flag.is_switch:
        # the spelling's effect, not the stored value: `--no-bias-x` stores False and is off unless it is given
        return "off" if flag.default == (not flag.stores) else "on"
    if flag.default is None:
        return ""
    if isinstance(flag.default, list | tuple):
        return f"`{' '.join(map(str, flag.default))}`" if flag.default else ""
    return f"`{flag.default}`" if flag.default != "" else "empty"


def _meaning(flag: Flag) -> str:
    text = flag.help + (f" [{flag.unit}]" if flag.unit else "")
    if flag.choices:
        text += f" One of {', '.join(f'`{choice}`' for choice in flag.choices)}."
    return text


def _translation(old: str) -> str:
    alias = ALIASES[old]
    given = ["8"] * abs(alias.takes)
    try:
        new = alias.becomes(given, Context([old, *given, "--micro-batch-size", "1"]))
    except ConfigError as error:
        return f"refused: {error.why}; {error.fix}"
    if not new and alias.notice:
        why = alias.notice.removeprefix("has no effect any more").lstrip(": ")
        return f"nothing: {why or 'it has no effect any more'}"
    return f"`{' '.join(new)}`" if new else "nothing"
