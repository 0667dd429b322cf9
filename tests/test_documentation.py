"""Pages that are made from the code leave nothing out. The site itself is built by `make lint`, warnings as errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.generators import api_page, case_page, command_pages, flag_pages, message_page, pictures
from megatron_lite.cli.main import VERBS
from megatron_lite.training.arguments import build_parser
from tests.test_public_names import NAMES

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def flags() -> str:
    return flag_pages.page()


def test_every_flag_of_the_parser_has_its_row(flags: str) -> None:
    """Whatever the command line understands: what works, what is noted, what waits, what is refused."""
    spellings = {word for action in build_parser()._actions for word in action.option_strings if word.startswith("--")}
    spellings -= {"--help"}
    assert len(spellings) > 800
    assert not [word for word in sorted(spellings) if f"`{word}`" not in flags and f"`{word} FILE`" not in flags]


def test_every_flag_of_megatron_is_on_the_page(flags: str) -> None:
    """`golden/flags.tsv` lists Megatron's; old spellings are there with what they become."""
    rows = (ROOT / "tests/golden/flags.tsv").read_text(encoding="utf-8").splitlines()[1:]
    spellings = [word for row in rows for word in row.split("\t")[0].split()]
    missing = [word for word in spellings if f"`{word}`" not in flags and f"`{word} FILE`" not in flags]
    assert not missing


def test_the_columns_of_each_table_fit(flags: str) -> None:
    """A bar in a text of help would move every cell behind it."""
    width = 0
    for line in flags.splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        assert not (width and cells) or cells == width, line
        width = cells


@pytest.mark.parametrize("case", case_page.cases(), ids=lambda case: case.id)
def test_a_reported_case_has_a_test_of_its_name(case: case_page.Case) -> None:
    assert case.id in case_page.tests(), f"no test is named test_{case.id}_..."
    assert case.title and case.reported


def test_no_test_is_named_after_a_case_that_is_not_listed() -> None:
    assert set(case_page.tests()) <= {case.id for case in case_page.cases()}


def test_the_page_of_public_names_shows_every_class_and_function() -> None:
    page = api_page.index() + "".join(map(api_page.page, api_page.ROOMS))
    for path, names in NAMES.items():
        for name in names:
            assert f"import {name}`" in page, f"{path}.{name}"


def test_a_message_that_is_explained_is_one_that_the_code_can_print() -> None:
    """The headings of docs/troubleshooting.md, with `...` for values, against the texts in the source."""
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    explained = re.findall(r"^### `(.*)`$", text, re.M)
    known = {message.what.splitlines()[0] for message in message_page.messages()}
    assert len(explained) > 25
    assert not [message for message in explained if message not in known]


def test_the_pictures_are_drawn_by_the_script(tmp_path: Path) -> None:
    """Each of them is a file in docs/, too, which a page shows."""
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    for path in pictures.draw(tmp_path):
        assert path.stat().st_size > 5000 and (ROOT / "docs" / path.name).exists()
        assert f"]({path.name})" in pages, f"no page shows {path.name}"


def test_the_path_through_the_code_is_the_readmes() -> None:
    """tests/e2e/test_readme.py looks whether its files exist."""

    def path(page: str) -> list[str]:
        lines = re.findall(r"^\d\. (.*(?:`|py\)).*)$", (ROOT / page).read_text(encoding="utf-8"), re.M)
        return [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", line).replace("`", "") for line in lines][-8:]

    assert path("docs/reading.md") == path("README.md") and len(path("README.md")) == 8


def test_the_page_of_commands_has_every_verb() -> None:
    page = command_pages.page()
    assert all(f"## {verb}\n" in page for verb in VERBS)
    assert page.count("usage: megatron-lite") + page.count("megatron-lite data index") >= len(VERBS)
