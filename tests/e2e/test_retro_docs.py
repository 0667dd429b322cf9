"""The commands of docs/retro.md, word for word, on 50 documents: each ends well and writes what the next one reads."""

from __future__ import annotations

import json
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lite.cli import main as cli
from tests.e2e.launch import ROOT, environment

COMMANDS = [
    block.strip()
    for block in re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "retro.md").read_text(encoding="utf-8"), re.S)
]


def write_documents(path: Path, count: int = 50) -> None:
    generator = random.Random(0)
    words = "the first words of a text that says again what another one said before it in other".split()
    sentences = [" ".join(generator.choices(words, k=9)) + "." for _ in range(30)]
    with path.open("w") as file:
        for _ in range(count):
            file.write(json.dumps({"text": " ".join(generator.choices(sentences, k=6))}) + "\n")


@pytest.mark.slow
def test_C132_the_documented_commands_run_word_for_word(tmp_path, monkeypatch, capsys):
    """Preprocess, retro preprocess, train with and without retrieval, generate."""
    monkeypatch.chdir(tmp_path)
    write_documents(tmp_path / "corpus.jsonl")
    assert [command.split()[0] for command in COMMANDS].count("python") == 2 and len(COMMANDS) == 5
    leaves = {
        0: "corpus_text_document.idx",
        1: "project/config.json",
        2: "checkpoints/latest_checkpointed_iteration.txt",
    }
    for number, command in enumerate(COMMANDS):
        program, *words = shlex.split(command)
        if program == "megatron-lite" and words[0] != "generate":
            assert cli.main(words) == 0, command
        else:
            start = ["-m", "megatron_lite"] if program == "megatron-lite" else [str(ROOT / words.pop(0))]
            done = subprocess.run(
                [sys.executable, *start, *words],
                capture_output=True,
                text=True,
                env=environment(PYTHONPATH=str(ROOT)),
                check=False,
            )
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr
            if program == "python":
                assert "iteration       20/      20" in done.stdout and "validation loss at iteration 20" in done.stdout
            else:
                assert done.stdout.startswith("the first words") and "tokens" in done.stderr
        assert number not in leaves or (tmp_path / leaves[number]).exists(), command
    capsys.readouterr()
