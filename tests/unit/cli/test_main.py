"""`megatron-lite <verb>`: finding the verb, and how errors end."""

import subprocess
import sys
import time

import pytest

import megatron_lite
from megatron_lite.cli import main as cli
from megatron_lite.errors import ConfigError, DataError


def test_help_lists_every_verb(capsys):
    assert cli.main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {verb} " in printed for verb in cli.VERBS)


def test_no_verb_at_all_is_a_failure_that_shows_the_usage(capsys):
    assert cli.main([]) == 2
    assert "usage: megatron-lite <verb>" in capsys.readouterr().out


def test_version_is_the_packages(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"megatron-lite {megatron_lite.__version__}"


@pytest.mark.parametrize("typed, meant", [("generat", "generate"), ("pre-process", "preprocess"), ("copus", "corpus")])
def test_an_unknown_verb_names_the_nearest_one(typed, meant, capsys):
    assert cli.main([typed]) == 2
    error = capsys.readouterr().err
    assert f"did you mean {meant!r}" in error and "Traceback" not in error


@pytest.mark.parametrize("error, status", [(ConfigError("no", why="so", fix="do"), 2), (DataError("no"), 1)])
def test_a_users_error_becomes_its_text_and_its_status(error, status, capsys):
    def work():
        raise error

    assert cli.run(work) == status
    assert capsys.readouterr().err == f"megatron-lite: {error}\n"


def test_a_bug_of_ours_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        cli.run(lambda: 1 // 0)


def test_verbs_are_found_without_torch():
    """`--help` must not wait for the two seconds that importing torch takes."""
    code = (
        "import sys; from megatron_lite.cli.main import main; main(['--help']);"
        "import megatron_lite.cli.corpus, megatron_lite.cli.report, megatron_lite.cli.preprocess;"
        "import megatron_lite.cli.data, megatron_lite.cli.data_merge, megatron_lite.cli.data_inspect;"
        "sys.exit('torch' in sys.modules)"
    )
    start = time.monotonic()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr or "torch was imported"
    assert time.monotonic() - start < 10


def test_the_module_and_the_installed_script_are_the_same_program():
    entry = megatron_lite.cli.main  # the console script of pyproject.toml names this module's main
    result = subprocess.run([sys.executable, "-m", "megatron_lite", "--version"], capture_output=True, text=True)
    assert result.stdout.strip() == f"megatron-lite {megatron_lite.__version__}" and callable(entry.main)
