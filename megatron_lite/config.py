"""A setting is declared once: a dataclass field that also states its command-line flag.

    @dataclass(kw_only=True)
    class OptimizerConfig:
        lr: float | None = flag(None, "Peak learning rate.")
        betas: ...

    field --------------> Flag (spellings, kind, default, choices) --> argparse --> Namespace (Megatron's names)
                                                                                        |
    OptimizerConfig(...) <---------------- from_namespace(OptimizerConfig, args) <------+

`training/arguments` makes one parser of all configs; nothing below `training/` knows the parser. No torch here:
`--help` must be quick. A field without `flag()` is set by code only.
"""

from __future__ import annotations

import argparse
import difflib
import re
import signal
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypeVar

Config = TypeVar("Config")


def flag(
    default: Any,
    help: str,
    *,
    name: str | None = None,
    off: str | tuple[str, ...] | None = None,
    pair: bool = False,
    aliases: tuple[str, ...] = (),
    choices: tuple[Any, ...] | None = None,
    nargs: int | str | None = None,
    unit: str | None = None,
    kind: str | None = None,
) -> Any:
    """A dataclass field that states its flag.

    Args:
        default: of the field and of the flag. A list or dict is copied for each instance.
        help: one sentence for `--help`.
        name: Megatron's spelling, where it differs from `--field-name`. It also names the value in the namespace.
        off: the spelling (or spellings) that sets a True default to False, e.g. `--disable-bias-linear`. The value in
            the namespace keeps the field's name, or `name`'s.
        pair: a True default keeps its own spelling beside `--no-...`.
        aliases: further spellings with the same meaning.
        choices: the legal values.
        nargs: as argparse has it; by default "+" for lists.
        unit: shown in `--help`.
        kind: a key of `KINDS`; by default it follows from the annotation.
    """
    metadata = {
        "help": help,
        "name": name,
        "off": (off,) if isinstance(off, str) else off,
        "pair": pair,
        "aliases": aliases,
        "choices": choices,
        "nargs": nargs,
        "unit": unit,
        "kind": kind,
    }
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


# ---------------------------------------------------------------------------------------------------- words -> values
def _number_or_list(text: str) -> int | list[int]:
    """`4`, or a list expression such as `([0]*3+[1]*2)*4`: an integer or a list of integers.

    Only digits, commas, brackets, parentheses, `+` and `*` may occur, so that evaluating it can do nothing else; the
    length is bounded because `[1]*9**9` would fill the memory (and `**` is refused).
    """
    text = text.strip()
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    if not re.fullmatch(r"[\d,\[\]()+* ]+", text) or "**" in text or len(text) > 1000 or re.search(r"\d{6}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor a list such as [0]*3+[1]*58")
    try:
        value = eval(text, {"__builtins__": {}})  # the pattern above admits arithmetic on lists only
    except Exception:
        value = None
    if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers such as [0]*3+[1]*58")
    return value


def _pair(text: str) -> tuple[int, int]:
    """`128,0` or `(128,0)` -> (128, 0)."""
    match = re.fullmatch(r"\(?\s*(-?\d+)\s*,\s*(-?\d+)\s*\)?", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not two integers such as 128,0")
    return int(match[1]), int(match[2])


def _boolean(text: str | bool) -> bool:
    value = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if isinstance(text, bool):
        return text
    if text.lower() not in value:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return value[text.lower()]


def _integer(text: str) -> int:
    """An integer; `4294967296.0` and `1e6` count, because a whole number written so is meant as one."""
    try:
        return int(text)
    except ValueError:
        value = float(text)
        if value != int(value):
            raise
        return int(value)


def _signal(text: str) -> int:
    """`15`, `SIGTERM` or `TERM` -> 15."""
    name = text.upper()
    for number in signal.Signals:
        if text == str(number.value) or name in (number.name, number.name.removeprefix("SIG")):
            return number.value
    raise argparse.ArgumentTypeError(f"{text!r} is no signal of this machine, such as SIGTERM or 15")


_integer.__name__ = "int"  # argparse names the function in its message
_boolean.__name__ = "true or false"

# kind of a flag -> (word -> value, nargs). A switch takes no word.
KINDS: dict[str, tuple[Callable[[str], Any] | None, int | str | None]] = {
    "switch": (None, None),
    "int": (_integer, None),
    "float": (float, None),
    "str": (str, None),
    "bool": (_boolean, None),
    "int list": (_integer, "+"),
    "float list": (float, "+"),
    "str list": (str, "*"),
    "name list": (str, "*"),
    "int or list expr": (_number_or_list, None),
    "int,int": (_pair, None),
    "signal": (_signal, None),
}
_ANNOTATIONS = {
    "bool": "switch",
    "int": "int",
    "float": "float",
    "str": "str",
    "list[int]": "int list",
    "list[float]": "float list",
    "list[str]": "str list",
    "tuple[int, int]": "int,int",
    "int | list[int]": "int or list expr",
}


@dataclass(frozen=True)
class Flag:
    """One flag of the command line, whoever declared it.

    `stores` is what a spelling without a word stores; None for flags that take words.
    """

    dest: str
    spellings: tuple[str, ...]
    kind: str
    default: Any
    help: str
    choices: tuple[Any, ...] | None = None
    nargs: int | str | None = None
    unit: str | None = None
    stores: Any = None
    field: str = ""
    negations: tuple[str, ...] = ()  # `--no-x` beside `--x`: an on/off pair

    @property
    def is_switch(self) -> bool:
        return self.kind == "switch"

    def add_to(self, group: Any, hidden: bool = False) -> None:
        """Adds the flag to an argparse parser or group; hidden from `--help` on request."""
        text = f"{self.help} [{self.unit}]" if self.unit else self.help
        text = argparse.SUPPRESS if hidden else text.replace("%", "%%")
        if self.is_switch:
            group.add_argument(
                *self.spellings,
                dest=self.dest,
                action="store_const",
                const=self.stores,
                default=self.default,
                help=text,
            )
            if self.negations:
                group.add_argument(
                    *self.negations,
                    dest=self.dest,
                    action="store_const",
                    const=not self.stores,
                    default=self.default,
                    help=argparse.SUPPRESS,
                )
            return
        parse, nargs = KINDS[self.kind]
        group.add_argument(
            *self.spellings,
            dest=self.dest,
            type=parse,
            nargs=self.nargs if self.nargs is not None else nargs,
            choices=self.choices,
            default=self.default,
            help=text,
            metavar=None if self.choices else _METAVAR.get(self.kind, "X"),
        )


_METAVAR = {
    "int": "N",
    "int list": "N",
    "int,int": "N,N",
    "int or list expr": "N|LIST",
    "str": "TEXT",
    "str list": "TEXT",
}


def destination(spelling: str) -> str:
    """`--override-opt_param-scheduler` -> `override_opt_param_scheduler`."""
    return spelling.lstrip("-").replace("-", "_")


def default_of(item: Field) -> Any:
    return item.default_factory() if item.default_factory is not MISSING else item.default


def flags_of(config: type) -> list[Flag]:
    """The flags that a config class states, in the order of its fields."""
    return [_flag_of(config, item) for item in fields(config) if "help" in item.metadata]


def _flag_of(config: type, item: Field) -> Flag:
    meta, default = item.metadata, default_of(item)
    annotation = re.sub(r"\s*\|\s*None$", "", str(item.type))
    kind = meta["kind"] or _ANNOTATIONS.get(annotation)
    assert kind in KINDS, f"{config.__name__}.{item.name}: say kind=, {annotation!r} does not tell it"
    name = meta["name"] or "--" + item.name.replace("_", "-")
    spellings, stores = (name, *meta["aliases"]), None
    negations: tuple[str, ...] = ()
    if kind == "switch":
        stores = not default
        bare = name.removeprefix("--")
        if meta["pair"]:
            stores, negations = True, (f"--no-{bare}",)
        elif default is True:
            spellings = (*(meta["off"] or (f"--no-{bare}", f"--disable-{bare}")), *meta["aliases"])
    return Flag(
        dest=destination(name),
        spellings=spellings,
        kind=kind,
        default=default,
        help=meta["help"],
        choices=meta["choices"],
        nargs=meta["nargs"],
        unit=meta["unit"],
        stores=stores,
        field=item.name,
        negations=negations,
    )


def from_namespace(config: type[Config], args: argparse.Namespace, **values: Any) -> Config:
    """Builds a config from the namespace: every field whose flag, or whose name, is there; `values` win."""
    known = vars(args)
    for item in fields(config):  # type: ignore[arg-type]
        name = destination(item.metadata.get("name") or item.name)
        if item.init and item.name not in values and name in known:
            values[item.name] = known[name]
    return config(**values)


def did_you_mean(word: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known spellings closest to a mistyped one, best first; at most `count`, none when nothing is close.

    Capitals do not count.
    """
    by_lower = {spelling.lower(): spelling for spelling in known}
    return [by_lower[match] for match in difflib.get_close_matches(word.lower(), list(by_lower), n=count, cutoff=0.7)]
