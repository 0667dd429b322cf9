"""The words of a command line, before argparse sees them: quotes, files, unknown flags, values that cannot be read.

Each step takes words and returns the words that are left, with a list of problems. argparse stops at the first mistake;
a user wants to see all of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from megatron_lite.config import did_you_mean
from megatron_lite.errors import ConfigError
from megatron_lite.training.flag_aliases import ALIASES, foreign

Actions = dict[str, argparse.Action]  # spelling -> what argparse does with it


def joined(problems: list[ConfigError]) -> ConfigError:
    """One error that tells all of them, numbered."""
    if len(problems) == 1:
        return problems[0]
    lines = [f"{len(problems)} problems with the flags"]
    for number, problem in enumerate(problems, start=1):
        first, *rest = str(problem).splitlines()
        lines += [f"{number:3d}. {first}", *(f"   {line}" for line in rest)]
    return ConfigError("\n".join(lines))


def strip_stray_quotes(words: Iterable[str]) -> list[str]:
    """Removes the quotes that survive when a script expands an array unquoted.

    `--split '99,1,0'` arrives with its quotes; a quoted value with blanks arrives in pieces, which are joined again:
    `"0:384`, `3B:768"` -> `0:384 3B:768`.
    """
    result: list[str] = []
    pieces: list[str] = []
    quote = opening = ""
    for word in words:
        if pieces:
            pieces.append(word)
            if word.endswith(quote):
                result.append(" ".join(pieces)[:-1])
                pieces = []
            continue
        head, equals, tail = word.partition("=") if word.startswith("--") else ("", "", word)
        value = tail if equals or not head else head
        front = head + equals if value is tail else ""
        if value[:1] in ("'", '"') and len(value) > 1:
            quote = value[0]
            if value.endswith(quote):
                result.append(front + value[1:-1])
            else:
                pieces, opening = [front + value[1:]], word
        elif value[:1] in ("'", '"'):
            quote, pieces, opening = value, [front], word
        else:
            result.append(word)
    return [*result, opening, *pieces[1:]] if pieces else result  # never closed: left as it is


def take_config_files(words: list[str]) -> tuple[list[str], list[str]]:
    """The files of `--config` and `--yaml-cfg`, the first that wins last, and the other words."""
    files, rest = [], []
    at = 0
    while at < len(words):
        name, equals, value = words[at].partition("=")
        at += 1
        if name not in ("--config", "--yaml-cfg"):
            rest.append(words[at - 1])
            continue
        if not equals:
            if at == len(words) or words[at].startswith("--"):
                raise ConfigError(f"{name} needs a file", why="nothing follows it", fix=f"{name} configs/my_run.yaml")
            value = words[at]
            at += 1
        files.append(value)
    return files[::-1], rest


def drop_unknown(words: list[str], actions: Actions) -> tuple[list[str], list[ConfigError]]:
    """Unknown flags with their words taken out, each an error, so that the rest can be judged as well."""
    rest, problems = [], []
    dropping = False
    for word in words:
        name = word.partition("=")[0]
        if not word.startswith("--") or word == "--":
            if not dropping:
                rest.append(word)
            continue
        dropping = name not in actions
        if not dropping:
            rest.append(word)
            continue
        elsewhere = foreign(name)
        if elsewhere:
            why, fix = elsewhere
            problems.append(ConfigError(f"{name} is not supported: {why}", fix=fix))
            continue
        known = [*actions, *ALIASES]
        longer = sorted(spelling for spelling in known if spelling.startswith(name) and len(name) > 4)
        likely = list(dict.fromkeys(longer[:2] + did_you_mean(name, known)))[:3]
        problems.append(
            ConfigError(
                f"unknown flag {name}",
                why="flags are not abbreviated" if longer else "no flag is spelled so",
                fix=f"did you mean {' or '.join(likely)}?" if likely else "--help lists every flag",
            )
        )
    return rest, problems


def drop_unreadable(words: list[str], actions: Actions) -> tuple[list[str], list[ConfigError]]:
    """Values that are no number, or no choice, of their flag: taken out, each an error.

    A value that starts with a minus sign is tied to its flag with "=", because argparse takes `-1,0` for a flag.
    """
    rest: list[str] = []
    problems = []
    at = 0
    while at < len(words):
        name, equals, value = words[at].partition("=")
        action = actions.get(name)
        at += 1
        if action is None or action.nargs == 0:
            if action is not None and equals:
                problems.append(ConfigError(f"{words[at - 1]}", why=f"{name} is a switch and takes no value", fix=name))
            else:
                rest.append(words[at - 1])
            continue
        values = [value] if equals else []
        while not equals and at < len(words) and not words[at].startswith("--"):
            if action.nargs is None and values:
                break
            values.append(words[at])
            at += 1
        wrong = list(_unreadable(name, values, action))
        problems += wrong
        if wrong:
            continue
        rest += [f"{name}={values[0]}"] if action.nargs is None else [name, *values]
    return rest, problems


def _unreadable(name: str, values: list[str], action: argparse.Action) -> Iterable[ConfigError]:
    needed = action.nargs if isinstance(action.nargs, int) else 1 if action.nargs in (None, "+") else 0
    if len(values) < needed:
        found = f"{name} {' '.join(values)}".rstrip()
        yield ConfigError(
            f"{found}: {needed} value{'s' * (needed > 1)} expected",
            why="the flag needs words",
            fix=name + " X" * needed,
        )
    for value in values:
        try:
            parsed = action.type(value) if callable(action.type) else value
        except argparse.ArgumentTypeError as error:
            yield ConfigError(f"{name} {value}", why=str(error), fix="another value")
        except (TypeError, ValueError):
            kind = getattr(action.type, "__name__", "value")
            yield ConfigError(f"{name} {value}", why=f"{value!r} is no {kind}", fix=f"{name} X, X being {kind}")
        else:
            if action.choices is not None and parsed not in action.choices:
                words = list(map(str, action.choices))
                likely = did_you_mean(value, words, 1)
                yield ConfigError(
                    f"{name} {value}",
                    why="it is none of the choices",
                    fix=f"did you mean {likely[0]}? (of {', '.join(words)})"
                    if likely
                    else f"one of {', '.join(words)}",
                )
