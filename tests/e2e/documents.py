"""The shell blocks of README.md, docs/*.md and examples/*/README.md, each in a class: run, checked, or shown.

<!-- run {add: "--train-iters 2", prints: "gradients", leaves: "runs/x"} -->      an HTML comment right above the block
```sh
megatron-lite verify ...
```

run     `add` is appended to the command (a list: one for each command of the block), `prints` must be in what it
        prints, `leaves` must exist afterwards. `by`: the test that runs it.
check   the default: the program that it starts must be able to read every flag; a training run must be one that can
        start (`add` completes it). `ranks`: of the launcher, where the command does not say it.
shown   neither, with the reason in `because`.
before  a command that runs ahead of the page's next block, for what the page takes as given.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from megatron_lite.cli import main as cli
from megatron_lite.training.arguments import build_parser, parse_args, validate_args
from megatron_lite.training.record import args_defaults_of, load_script
from tests.e2e.launch import ROOT, environment

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*/README.md"))]
KINDS = {"run": {"add", "prints", "leaves", "by"}, "check": {"add", "ranks"}, "shown": {"because"}}
_BLOCK = re.compile(
    r"(?P<marks>(?:^<!--(?:(?!-->).)*-->\n+)*)^```(?P<language>[a-z]*)[^\n]*\n(?P<text>.*?)^```", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """A shell block of a page, with what its comment says."""

    page: Path
    line: int
    commands: tuple[str, ...]
    kind: str = "check"
    options: dict[str, Any] = field(default_factory=dict)
    before: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        return f"{name_of(self.page)}:{self.line}"

    def additions(self) -> list[list[str]]:
        """What is appended to each command."""
        add = self.options.get("add", "")
        each = add if isinstance(add, list) else [add, *[""] * (len(self.commands) - 1)]
        assert len(each) == len(self.commands), f"{self.where}: `add` as a list has one entry for each command"
        return [shlex.split(words) for words in each]


def name_of(page: Path) -> str:
    """As messages have it: the path in the checkout."""
    return str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name


def blocks(page: Path) -> Iterator[Block]:
    """The shell blocks of a page, in order. AssertionError for a comment that says nothing that is known."""
    text = page.read_text(encoding="utf-8")
    before: list[str] = []
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("language")) + 1
        where = f"{name_of(page)}:{line}"
        kind, options = "check", {}
        for word, rest in re.findall(r"<!--\s*(run|check|shown|before)\b(.*?)-->", found["marks"], re.S):
            if word == "before":
                before.append(" ".join(rest.split()).removeprefix(": "))
                continue
            kind, options = word, yaml.safe_load(rest) or {}
            assert set(options) <= KINDS[kind], f"{where}: {kind} takes {', '.join(sorted(KINDS[kind]))}"
        if found["language"] in ("sh", "bash", "shell", "console"):
            assert kind != "shown" or options.get("because"), f"{where}: `shown` needs a reason"
            yield Block(page, line, tuple(_commands(found["text"])), kind, options, tuple(before))
            before = []


def other_fences(page: Path) -> Iterator[tuple[str, str]]:
    """(language, text) of the page's blocks that are no shell."""
    for found in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        if found["language"] not in ("sh", "bash", "shell", "console"):
            yield found["language"], found["text"]


def _commands(text: str) -> Iterator[str]:
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        line = re.sub(r"(^|\s+)#.*", "", line).strip()
        if line:
            yield line


# -- run ---------------------------------------------------------------------------------------------------------------
def run(block: Block) -> None:
    """Runs the block's commands in the current directory, which holds links to the checkout's scripts."""
    for line in block.before:
        _run(line, [], block.where)
    out = "".join(_run(line, more, block.where) for line, more in zip(block.commands, block.additions()))
    assert str(block.options.get("prints", "")) in out, f"{block.where} printed\n{out[-3000:]}"
    left = block.options.get("leaves")
    assert left is None or Path(left).exists(), f"{block.where} left no {left}"


def _run(line: str, more: list[str], where: str) -> str:
    words = [*shlex.split(line), *more]
    if words[0] == "megatron-lite" and words[1] != "generate":  # in this process: importing torch takes seconds
        return _verb(words[1:], where)
    program = {"megatron-lite": ["-m", "megatron_lite"], "torchrun": ["-m", "torch.distributed.run", "--standalone"]}
    start = [sys.executable, *program.get(words[0], [])] if words[0] in (*program, "python") else [words[0]]
    done = subprocess.run(
        [*start, *words[1:]],
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, f"{where}: {line}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def _verb(words: list[str], where: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        status = cli.main(words)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    assert status == 0, f"{where}: megatron-lite {' '.join(words)}\n{out.getvalue()[-3000:]}"
    return out.getvalue()


# -- check -------------------------------------------------------------------------------------------------------------
class _Read(Exception):
    """A verb's parser has read its words; these it leaves to training."""

    def __init__(self, rest: list[str]):
        self.rest = rest


def check(block: Block) -> None:
    """The programs of the block can read their words. AssertionError, or the program's own error."""
    for line, more in zip(block.commands, block.additions()):
        words = [*shlex.split(line), *more]
        variables = {}
        while re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # VARIABLE=value command
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
        ranks = int(block.options.get("ranks", 1))
        with contextlib.redirect_stdout(io.StringIO()):
            if words[0] == "bash" or words[0].endswith(".sh"):
                _check_example([word for word in words if word != "bash"], variables)
                continue
            checker = CHECKS.get(words[0])
            assert checker, f"{words[0]} cannot be checked; run the block, or say why it is only shown"
            checker(words, ranks)


def _check_verb(words: list[str], ranks: int) -> None:
    """The verb's own parser, then training's for what the verb hands on."""
    verb, rest = words[1], words[2:]
    if (verb, *rest[:1]) == ("data", "index"):
        importlib.import_module("megatron_lite.cli.data_index")._arguments(rest[1:])
        return
    original = argparse.ArgumentParser.parse_known_args

    def read(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        namespace, unknown = original(self, *args, **kwargs)
        if self.prog.count(" ") == 1 + (verb in ("data", "retro")) and self.prog.startswith("megatron-lite"):
            raise _Read([f"--ranks={namespace.ranks}", *unknown] if hasattr(namespace, "ranks") else unknown)
        return namespace, unknown

    argparse.ArgumentParser.parse_known_args = read  # type: ignore[method-assign,assignment]
    try:
        cli.find_verb(verb)(rest)
    except _Read as done:
        unread = done.rest
    else:
        raise AssertionError(f"megatron-lite {verb} did not read its words")
    finally:
        argparse.ArgumentParser.parse_known_args = original  # type: ignore[method-assign]
    if unread and verb in ("verify", "dry-run"):
        given, *flags = unread
        size = given.removeprefix("--ranks=")
        if size.isdigit():
            _check_training([], flags, int(size))
        else:  # as many ranks as two copies of the model need
            parse_args(flags)
    elif unread:
        assert verb in ("generate", "convert", "quickstart", "serve"), f"megatron-lite {verb} does not know {unread}"
        parse_args(unread)


def _check_python(words: list[str], ranks: int) -> None:
    """An entry script, another script of the checkout, or `-m pytest`."""
    script = words[1]
    if script == "-m":
        assert words[2] in ("pytest", "megatron_lite"), words
    elif re.fullmatch(r"pretrain_\w+\.py", script):
        _check_training([script], words[2:], ranks)
    else:
        text = (ROOT / script).read_text(encoding="utf-8")
        assert all(f'"{word.split("=")[0]}"' in text for word in words[2:] if word.startswith("--")), words


def _check_training(script: list[str], flags: list[str], ranks: int) -> None:
    """This run may start: what `pretrain` does before it needs a device."""
    defaults = args_defaults_of(load_script(ROOT / (script[0] if script else "pretrain_gpt.py")))
    validate_args(parse_args(flags, args_defaults=defaults), ranks)


def _check_torchrun(words: list[str], ranks: int) -> None:
    at = next(i for i, word in enumerate(words) if word.endswith(".py"))
    launcher = re.findall(r"--(nproc[_-]per[_-]node|nnodes)[ =](\d+)", " ".join(words[:at]))
    size = 1
    for _, number in launcher:
        size *= int(number)
    _check_training([words[at]], words[at + 1 :], size if launcher else ranks)


def _check_make(words: list[str], ranks: int) -> None:
    done = subprocess.run(
        ["make", "-n", "-C", str(ROOT), "-o", f"{sys.prefix}/.installed", f"VENV={sys.prefix}", *words[1:]],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def _check_pip(words: list[str], ranks: int) -> None:
    stated = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("[project.optional-dependencies]")[1]
    assert words[1] == "install"
    for extra in ",".join(re.findall(r"\[([\w,]+)\]", " ".join(words))).split(","):
        assert not extra or f"\n{extra} = [" in stated.split("\n[")[0], extra


def _check_example(words: list[str], variables: dict[str, str]) -> None:
    """A script of examples/: what it would start may start."""
    env = environment(**{**variables, "LAUNCHER": "echo"})
    done = subprocess.run(["bash", *words], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    _check_torchrun(["torchrun", *done.stdout.split()], 1)


def _check_file(words: list[str], ranks: int) -> None:
    script = next(word for word in words[1:] if not word.startswith("-"))
    assert (ROOT / script).exists(), script


CHECKS = {
    "megatron-lite": _check_verb,
    "python": _check_python,
    "torchrun": _check_torchrun,
    "make": _check_make,
    "pip": _check_pip,
    "sbatch": _check_file,
}


def known_spellings() -> set[str]:
    """Every flag that training or a verb understands, from the parser and from the texts of help."""
    from docs.generators import command_pages, flag_pages

    words = {word for action in build_parser()._actions for word in action.option_strings}
    return words | set(re.findall(r"(?<![\w-])--[\w-]+", command_pages.page() + flag_pages.page()))


def link_checkout(folder: Path) -> None:
    """Links in `folder` to what commands start: the entry scripts, configs/, examples/, benchmarks/."""
    for path in [*ROOT.glob("pretrain_*.py"), *(ROOT / name for name in ("configs", "examples", "benchmarks", "docs"))]:
        os.symlink(path, folder / path.name)
