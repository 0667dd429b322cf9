"""NCCL's recorder is told in torch's variables, before it starts; gloo's runs are left alone."""

import os

import pytest

from megatron_lite.training import flight_recorder
from megatron_lite.training.arguments import parse_args

OURS = {
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_INCLUDE_STACK_TRACE",
    "TORCH_INCLUDE_ONLY_ACTIVE",
    "TORCH_NCCL_EXTRA_DUMP_ON_EXEC",
    "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}


@pytest.fixture
def variables(monkeypatch):
    """The variables that a command line sets."""
    monkeypatch.setattr(os, "environ", {key: value for key, value in os.environ.items() if key not in OURS})

    def after(words, backend="nccl", **before):
        os.environ.update(before)
        flight_recorder.set_up(parse_args(words.split()), backend)
        return {key: value for key, value in os.environ.items() if key in OURS}

    return after


def test_nothing_is_set_without_a_flag_or_on_gloo(variables, tmp_path):
    assert variables("") == {}
    assert variables(f"--flight-recorder-dump-path {tmp_path / 'x'}", "gloo") == {} and not (tmp_path / "x").exists()


def test_every_flag_reaches_its_variable(variables, tmp_path):
    folder = tmp_path / "traces"
    words = f"--flight-recorder-dump-path {folder} --flight-recorder-trace-buffer-size 7 "
    words += "--no-flight-recorder-dump-on-timeout --flight-recorder-include-stack-trace "
    words += "--disable-flight-recorder-include-only-active --no-flight-recorder-extra-dump-on-exec"
    assert variables(words) == {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "7",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_INCLUDE_STACK_TRACE": "1",
        "TORCH_INCLUDE_ONLY_ACTIVE": "0",
        "TORCH_NCCL_EXTRA_DUMP_ON_EXEC": "0",
        "TORCH_FR_DUMP_TEMP_FILE": f"{folder}/nccl_trace_rank_",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{folder}/nccl_trace_rank_",
    }
    assert folder.is_dir()


def test_defaults_come_along_with_a_path(variables, tmp_path):
    found = variables(f"--flight-recorder-dump-path {tmp_path}")
    assert found["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "2000" and found["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert found["TORCH_INCLUDE_STACK_TRACE"] == "0" and found["TORCH_INCLUDE_ONLY_ACTIVE"] == "1"


def test_a_variable_that_is_set_wins_and_that_is_said(variables, capsys):
    found = variables("--flight-recorder-trace-buffer-size 7", TORCH_NCCL_TRACE_BUFFER_SIZE="9")
    assert found["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "9"
    assert "TORCH_NCCL_TRACE_BUFFER_SIZE=9 is set already and wins over the flag's 7" in capsys.readouterr().err
