"""A dataclass field states its flag: spelling, kind, default, and the way back from the namespace."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import pytest

from megatron_lite.config import did_you_mean, flag, flags_of, from_namespace


@dataclass(kw_only=True)
class Example:
    """A room's settings."""

    lr: float | None = flag(None, "Peak.", unit="1/step")
    epsilon: float = flag(1e-5, "Epsilon.", name="--norm-epsilon")
    bias: bool = flag(True, "No bias.", off="--disable-bias")
    sharded: bool = flag(True, "Whole.")
    fast: bool = flag(False, "Fast.", aliases=("--quick",))
    names: list[str] = flag([], "Names.")
    ranks: list[int] | None = flag(None, "Ranks.", nargs=2)
    kind: str = flag("a", "Kind.", choices=("a", "b"))
    window: tuple[int, int] | None = flag(None, "Window.")
    layers: int | list[int] | None = flag(None, "Layers.")
    hook: Any = None


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    for item in flags_of(Example):
        item.add_to(parser)
    return parser


def test_a_field_without_flag_is_none_of_the_command_line() -> None:
    assert [item.field for item in flags_of(Example)][-1] == "layers"


def test_every_kind_is_parsed_and_comes_back_as_a_config(parser: argparse.ArgumentParser) -> None:
    words = (
        "--lr 0.5 --norm-epsilon 1e-6 --disable-bias --disable-sharded --quick --names x y --ranks 3 4 --kind b "
        "--window=-1,0 --layers [0]*2+[1]"
    )
    config = from_namespace(Example, parser.parse_args(words.split()), hook="set by code")
    assert config == Example(
        lr=0.5,
        epsilon=1e-6,
        bias=False,
        sharded=False,
        fast=True,
        names=["x", "y"],
        ranks=[3, 4],
        kind="b",
        window=(-1, 0),
        layers=[0, 0, 1],
        hook="set by code",
    )


def test_the_namespace_has_the_flags_name_and_the_config_the_fields(parser: argparse.ArgumentParser) -> None:
    args = parser.parse_args([])
    assert args.norm_epsilon == 1e-5 and args.bias is True and not hasattr(args, "hook")
    assert from_namespace(Example, args) == Example()


def test_instances_share_no_default() -> None:
    Example().names.append("x")
    assert Example().names == []


def test_help_names_unit_and_choices(parser: argparse.ArgumentParser) -> None:
    text = parser.format_help()
    assert "Peak. [1/step]" in text and "{a,b}" in text and "--no-sharded" in text


def test_a_kind_that_nothing_tells_is_our_bug() -> None:
    @dataclass
    class Bad:
        values: dict[str, int] | None = flag(None, "Values.")

    with pytest.raises(AssertionError, match=r"Bad\.values: say kind="):
        flags_of(Bad)


def test_the_closest_spellings_come_first_and_far_ones_not_at_all() -> None:
    known = ["--hidden-size", "--hidden-dropout", "--seq-length"]
    assert did_you_mean("--hiden-size", known)[0] == "--hidden-size"
    assert did_you_mean("--HIDDEN-SIZE", known)[0] == "--hidden-size"
    assert did_you_mean("--zzz", known) == []
