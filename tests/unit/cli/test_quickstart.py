"""What the quickstart takes for done, and what it makes anew."""

import json

import pytest

from megatron_lite.cli import quickstart
from megatron_lite.cli.main import main
from megatron_lite.errors import ConfigError

CONFIG = "model:\n  num-layers: 2\ntraining:\n  train-iters: 7\n"


@pytest.fixture
def place(tmp_path):
    (tmp_path / "text.txt").write_text("some text\n")
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


def start(place, flags=(), iterations=None):
    return quickstart.Quickstart(place / "run", place / "text.txt", place / "config.yaml", iterations, list(flags))


def pretend(place):
    """Outputs of all steps, as if made from what is there now."""
    run = start(place)
    run.forget_what_no_longer_fits()
    for file in (run.corpus, run.tokenizer, *run._token_files()):
        file.write_text("made")
    run.checkpoints.mkdir()
    (run.checkpoints / "latest_checkpointed_iteration.txt").write_text("7")
    return run


def test_the_config_says_how_long_unless_the_command_does(place):
    assert start(place).iterations == 7 and start(place, iterations=3).iterations == 3


def test_outputs_made_from_the_same_inputs_are_kept(place):
    pretend(place)
    run = start(place, iterations=99)  # the length of a run is no other run
    run.forget_what_no_longer_fits()
    assert run.corpus.exists() and run._trained() == 7


def test_a_changed_text_makes_data_anew_and_keeps_the_old_training(place, capsys):
    pretend(place)
    (place / "text.txt").write_text("another text\n")
    run = start(place)
    run.forget_what_no_longer_fits()
    assert not run.corpus.exists() and not any(file.exists() for file in run._token_files())
    assert run._trained() == 0
    assert (place / "run/checkpoints-before-1/latest_checkpointed_iteration.txt").read_text() == "7"
    printed = capsys.readouterr().out
    assert "the text has changed" in printed and "checkpoints-before-1" in printed


@pytest.mark.parametrize("change", ["config", "flags"])
def test_another_config_or_flag_is_another_training_on_the_same_data(place, change):
    pretend(place)
    if change == "config":
        (place / "config.yaml").write_text(CONFIG + "  lr: 1\n")
    run = start(place, flags=["--lr", "1"] if change == "flags" else [])
    run.forget_what_no_longer_fits()
    assert run.corpus.exists() and run._trained() == 0 and (place / "run/checkpoints-before-1").exists()


def test_a_torn_state_file_counts_as_none(place):
    pretend(place)
    (place / "run/state.json").write_text('{"data": {')
    run = start(place)
    run.forget_what_no_longer_fits()
    assert not run.corpus.exists() and json.loads((place / "run/state.json").read_text())["training"]["flags"] == []


def test_too_few_documents_are_refused_before_anything_is_trained(place, capsys):
    with pytest.raises(quickstart.DataError, match="documents"):
        start(place).steps()


def test_a_failed_training_gives_its_own_status(place, monkeypatch):
    run = pretend(place)
    monkeypatch.setattr(quickstart.subprocess, "run", lambda words: type("Done", (), {"returncode": 3}))
    (run.checkpoints / "latest_checkpointed_iteration.txt").write_text("2")
    with pytest.raises(quickstart.TrainingEnded, match="status 3 after iteration 2 of 7") as raised:
        run.steps()
    assert raised.value.exit_status == 3


@pytest.mark.parametrize(
    "words, text",
    [
        (["--model", "gptt"], "--model gptt"),
        (["--iters", "0"], "--iters 0"),
        (["--text", "/nowhere/at/all"], "/nowhere/at/all does not exist"),
    ],
)
def test_wrong_words_are_refused(words, text, capsys, tmp_path):
    assert main(["quickstart", "--run", str(tmp_path / "run"), *words]) in (1, 2)
    assert text in capsys.readouterr().err


def test_a_config_without_a_length_is_refused(place):
    (place / "config.yaml").write_text("model:\n  num-layers: 2\n")
    with pytest.raises(ConfigError, match="train-iters"):
        start(place)


def test_precision_is_one_that_torch_has():
    assert quickstart.fast_precision() in ("bf16", "fp32")
