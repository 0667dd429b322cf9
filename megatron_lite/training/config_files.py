"""Flags from a YAML file, and a run's configuration back into one.

A file says the same as the command line. Keys are names of the namespace (`hidden_size`), flags without their dashes
(`disable-bias-linear`) or fields of a config (`layernorm_epsilon`); a mapping is a section and its name is free. So
Megatron's `--yaml-cfg` files read as well. A file becomes words in front of the command line: one parser, one set of
rules, and the command line wins because the last of two wins.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from megatron_lite.config import did_you_mean
from megatron_lite.errors import ConfigError
from megatron_lite.training.flag_aliases import ALIASES

# What Megatron's YAML says with fields of its config class and the command line with a switch.
_ACTIVATIONS = {
    "gelu": [],
    "swiglu": ["--swiglu"],
    "squared_relu": ["--squared-relu"],
    "squaredrelu": ["--squared-relu"],
    "quick_geglu": ["--quick-geglu"],
    "geglu": ["--geglu"],
    "relu": ["--relu"],
}
_IMPLIED = {"gated_linear_unit", "bias_activation_fusion", "memory_efficient_layer_norm"}  # follow from other keys


def words_of(
    file: str, actions: dict[str, argparse.Action], by_field: dict[str, str]
) -> tuple[list[str], list[ConfigError]]:
    """The words that a file stands for.

    Args:
        file: path of the YAML file.
        actions: spelling -> action of the parser.
        by_field: field of a config -> name in the namespace.
    Returns: words, and what is wrong with the file.
    Raises: ConfigError if it cannot be read at all.
    """
    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"--config {file} cannot be read: {error.strerror}", why="flags come from it", fix="the path of a YAML file"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--config {file} is not YAML: {error}", why="flags come from it", fix="mend the file"
        ) from None
    if content is None:
        return [], []
    if not isinstance(content, dict):
        raise ConfigError(
            f"--config {file} holds a {type(content).__name__}",
            why="it maps flags to values",
            fix="lines `name: value`",
        )
    by_name: dict[str, list[argparse.Action]] = {}
    for action in dict.fromkeys(actions.values()):
        by_name.setdefault(action.dest, []).append(action)
    words: list[str] = []
    problems: list[ConfigError] = []
    for key, value in _flat(content):
        try:
            words += _words(key, value, actions, by_name, by_field)
        except ConfigError as error:
            problems.append(ConfigError(f"{file}: {error.what}", why=error.why, fix=error.fix))
    return words, problems


def _flat(content: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _flat(value)
        else:
            yield str(key), value


def _words(
    key: str,
    value: Any,
    actions: dict[str, argparse.Action],
    by_name: dict[str, list[argparse.Action]],
    by_field: dict[str, str],
) -> list[str]:
    if value is None:
        return []
    if key == "activation_func" and str(value) in _ACTIVATIONS:
        return _ACTIVATIONS[value]
    if key in _IMPLIED:
        return []
    name = by_field.get(key, key)
    spelling = next((s for s in ("--" + key, "--" + key.replace("_", "-")) if s in actions or s in ALIASES), None)
    if name in by_name:
        candidates = by_name[name]
        switches = [action for action in candidates if action.nargs == 0]
        if switches:
            if not isinstance(value, bool):
                raise ConfigError(f"{key}: {value}", why="it is true or false", fix=f"{key}: true")
            fitting = [action for action in switches if action.const is value]
            return [fitting[0].option_strings[0]] if fitting else []
        spelling = candidates[0].option_strings[0]
    elif spelling is None:
        known = [*by_name, *by_field]
        likely = did_you_mean(name, known)
        raise ConfigError(
            f"unknown key {key}",
            why="no flag is called so",
            fix=f"did you mean {' or '.join(likely)}?" if likely else "--help lists every flag",
        )
    assert spelling is not None
    if isinstance(value, bool) and (spelling not in actions or actions[spelling].nargs == 0):
        return [spelling] if value else []
    kind = getattr(actions.get(spelling), "nargs", None)
    if isinstance(value, list):
        if kind is None:  # one word that is a list: a pattern of layers, a window
            text = ",".join(map(str, value))
            return [f"{spelling}={text}" if _is_pair(actions.get(spelling)) else f"{spelling}=[{text}]"]
        return [spelling, *map(str, value)]
    if kind is None:
        return [f"{spelling}={value}"] if spelling in actions else [spelling, str(value)]
    return [spelling, *str(value).split()]


def _is_pair(action: argparse.Action | None) -> bool:
    return action is not None and action.metavar == "N,N"


def save(path: str, groups: dict[str, dict[str, Any]], typed: set[str]) -> None:
    """Writes a configuration that reads back to the same one.

    What was typed is a setting; all else, a default or derived, stands beside it as a comment. Were it a setting, a
    derived value would contradict the next change of what it follows from.

    Args:
        path: file to write.
        groups: title -> name -> value.
        typed: the names that are settings.
    """
    lines = [
        "# The configuration of a run; `--config` with this file starts it again.",
        "# Commented lines are defaults and derived values, for the reader.",
    ]
    for title, group in groups.items():
        settings = [name for name in group if name in typed]
        lines += ["", f"{title.replace(' ', '_')}:" if settings else f"# {title}"]
        for name, value in group.items():
            text = yaml.safe_dump({name: _plain(value)}, default_flow_style=True, width=10**6).strip()[1:-1]
            lines.append(f"  {text}" if name in settings else f"  # {text}")
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    """A value that YAML can hold."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
