"""Every command of README.md, docs/ and examples/ is run, made small, or read by the program that it starts.

How a block says which: `documents`.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from megatron_lite.errors import MegatronLiteError
from tests.e2e import documents
from tests.e2e.documents import PAGES, Block
from tests.e2e.launch import ROOT

BLOCKS = {page: list(documents.blocks(page)) for page in PAGES}
CHECKED = [block for found in BLOCKS.values() for block in found if block.kind == "check"]
RUN = [page for page, found in BLOCKS.items() if any(b.kind == "run" and "by" not in b.options for b in found)]


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=documents.name_of)
def test_the_commands_of_a_page_run_one_after_the_other(page: Path, tmp_path, monkeypatch) -> None:
    """In one folder, so that a later command finds what an earlier one wrote, as it does for a reader."""
    documents.link_checkout(tmp_path)
    monkeypatch.chdir(tmp_path)
    for block in BLOCKS[page]:
        if block.kind == "run" and "by" not in block.options:
            documents.run(block)


def test_commands_that_are_not_run_can_be_read(tmp_path, monkeypatch) -> None:
    documents.link_checkout(tmp_path)
    monkeypatch.chdir(tmp_path)
    problems = [f"{block.where}: {problem}" for block in CHECKED if (problem := _problem(block))]
    assert not problems, "\n".join(problems)


def _problem(block: Block) -> str:
    try:
        documents.check(block)
    except (AssertionError, MegatronLiteError, SystemExit) as error:
        return str(error) or repr(error)
    return ""


GOOD = "megatron-lite plan --pipeline-model-parallel-size 2 --num-microbatches 4"


@pytest.mark.parametrize(
    "line, problem",
    [
        (GOOD, ""),
        ("megatron-lite plan --pipeline-model-parallel-size 2", "required"),
        ("megatron-lite plam --num-microbatches 4", "no verb"),
        ("megatron-lite generate --load x --prompt y --bf17", "unknown flag --bf17"),
        ("megatron-lite preprocess --input x --output-prefix y --tokeniser-type ByteTokenizer", "does not know"),
        ("python pretrain_gpt.py --num-layers 2", "--lr is missing"),
        (
            "torchrun --nproc_per_node 3 pretrain_gpt.py --config configs/llama3_8b.yaml --tokenizer-model x",
            "world size 3",
        ),
        ("make trian", "No rule"),
        ("pip install 'megatron_lite[everything]'", "everything"),
        ("kubectl apply", "cannot be checked"),
    ],
)
def test_a_wrong_command_is_found(line, problem, tmp_path, monkeypatch, capsys) -> None:
    documents.link_checkout(tmp_path)
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    page.write_text(f"text\n\n```sh\n{line}\n```\n")
    (block,) = documents.blocks(page)
    assert block.kind == "check" and block.line == 3
    found = _problem(block) + capsys.readouterr().err
    assert problem in found if problem else not found


@pytest.mark.parametrize(
    "mark, problem",
    [
        ("<!-- run {adds: x} -->", "run takes"),
        ("<!-- shown -->", "needs a reason"),
        ("<!-- run {prints: nonsense} -->", "printed"),
        ("<!-- run {leaves: nothing.svg} -->", "left no"),
        ('<!-- run {add: "--num-microbatches many"} -->', "2"),
    ],
)
def test_a_wrong_comment_or_a_wrong_outcome_is_found(mark, problem, tmp_path, capsys) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{mark}\n```sh\n{GOOD}\n```\n")
    with pytest.raises((AssertionError, SystemExit), match=problem):
        documents.run(*documents.blocks(page))


def test_a_block_that_another_test_runs_names_one_that_is_there() -> None:
    for block in (block for found in BLOCKS.values() for block in found if "by" in block.options):
        file, _, name = block.options["by"].partition("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, block.where


def test_few_blocks_are_only_shown() -> None:
    shown = [block for found in BLOCKS.values() for block in found if block.kind == "shown"]
    assert len(shown) <= 6, [block.where for block in shown]


@pytest.mark.parametrize("page", PAGES, ids=documents.name_of)
def test_commands_stand_in_shell_blocks(page: Path) -> None:
    """In a block of text they would escape this file."""
    for language, text in documents.other_fences(page):
        starts = [line for line in text.splitlines() if re.match(r"(megatron-lite|torchrun|python|make|pip) \S", line)]
        assert not starts, f"{documents.name_of(page)}: a block of {language or 'no language'} has {starts}"


@pytest.fixture(scope="module")
def spellings() -> set[str]:
    return documents.known_spellings()


# flags of other programs that the pages speak of
OTHERS = set(
    "--nproc_per_node --nnodes --standalone --max-restarts --max_restarts --shutdown-timeout --logdir --help --requeue "
    "--ignore-signal --capture-range".split()
)


@pytest.mark.parametrize("page", PAGES, ids=documents.name_of)
def test_flags_that_a_page_speaks_of_exist(page: Path, spellings: set[str]) -> None:
    text = re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.S)
    named = set(re.findall(r"(?<![\w`-])`?(--[a-zA-Z][\w-]*)(?![\w*.>-])", text))
    unknown = named - spellings - OTHERS - _of_scripts(text)
    assert not unknown, f"{documents.name_of(page)} speaks of {unknown}"


def _of_scripts(text: str) -> set[str]:
    """Flags that scripts of examples/ and benchmarks/ add, of those that the page starts."""
    scripts = {ROOT / name for name in re.findall(r"(?:examples|benchmarks)/[\w/]+\.py", text)}
    return {flag for path in scripts for flag in re.findall(r'"(--[\w-]+)"', path.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("page", PAGES, ids=documents.name_of)
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:megatron_lite|tests|docs|examples|configs|benchmarks)/[\w./-]*)`", text):
        assert (ROOT / name).exists(), f"{documents.name_of(page)}: {name}"
