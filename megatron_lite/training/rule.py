"""A rule across flags, and the common kinds of it. The tables are `rules_given` and `rules_derived`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_lite.errors import ConfigError


@dataclass(frozen=True)
class Rule:
    """A condition that breaks a run.

    Args:
        when: arguments -> broken or not; a dict means broken, and adds names to the templates.
        what, why, fix: templates, `{name}` being the argument's value.
    """

    when: Callable[[Namespace], bool | dict[str, Any]]
    what: str
    why: str
    fix: str

    def error(self, args: Namespace) -> ConfigError | None:
        found = self.when(args)
        if found is False:
            return None
        names = vars(args) | (found if isinstance(found, dict) else {})
        return ConfigError(self.what.format_map(names), why=self.why.format_map(names), fix=self.fix.format_map(names))


def broken(rules: tuple[Rule, ...], args: Namespace) -> list[ConfigError]:
    """An error for every rule that the arguments break, in the order of the table."""
    return [error for rule in rules if (error := rule.error(args))]


def count_given(*names: str) -> Callable[[Namespace], int]:
    """How many of the arguments are there."""
    return lambda a: sum(bool(getattr(a, name)) for name in names)


def both(first: str, second: str) -> Callable[[Namespace], bool]:
    return lambda a: bool(getattr(a, first)) and bool(getattr(a, second))


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def exclusive(first: str, second: str, why: str) -> Rule:
    def when(a: Namespace) -> bool | dict[str, Any]:
        values = {name: getattr(a, name) for name in (first, second)}
        if any(value in (None, False) for value in values.values()):
            return False
        shown = [flag_of(name) if value is True else f"{flag_of(name)} {value}" for name, value in values.items()]
        return {"found": " and ".join(shown)}

    return Rule(when, "{found}", why, "leave one of them out")


def positive(name: str, least: float = 1, why: str = "", fix: str = "") -> Rule:
    """The argument, where given, is at least `least`."""
    return Rule(
        lambda a: getattr(a, name) is not None and getattr(a, name) < least,
        f"{flag_of(name)} {{{name}}}",
        why or f"it is at least {least}",
        fix or f"{flag_of(name)} N, N >= {least}",
    )


def missing(name: str) -> Rule:
    return Rule(
        lambda a: getattr(a, name) is None,
        f"{flag_of(name)} is missing",
        "no run can do without it",
        f"{flag_of(name)} N",
    )


def named(**names: str) -> bool | dict[str, Any]:
    """Broken where there is something to name."""
    return names if all(names.values()) else False


def reported(problem_of: Callable[[Namespace], ConfigError | None]) -> Rule:
    """The error that a check of the library gives, told with the others."""

    def problem(a: Namespace) -> bool | dict[str, Any]:
        found = problem_of(a)
        return False if found is None else {"what_": found.what, "why_": found.why, "fix_": found.fix}

    return Rule(problem, "{what_}", "{why_}", "{fix_}")
