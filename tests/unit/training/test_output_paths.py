"""Paths that a run writes to are tried before it begins."""

from argparse import Namespace

import pytest

from megatron_lite import log
from megatron_lite.errors import ConfigError
from megatron_lite.training.output_paths import check_output_paths

NAMES = (
    "config_logger_dir",
    "tensorboard_dir",
    "wandb_save_dir",
    "heartbeat_file",
    "result_rejected_tracker_filename",
    "dump_param_to_param_group_map",
)


def _args(**paths):
    return Namespace(**{**dict.fromkeys(NAMES), **{name: str(path) for name, path in paths.items()}})


@pytest.mark.parametrize("name", NAMES)
def test_a_path_below_a_file_is_named_with_its_flag(name, tmp_path):
    """Each of them ended in a traceback once the model was built, or was told too late."""
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "x" / "y"
    with pytest.raises(ConfigError) as error:
        check_output_paths(_args(**{name: path}))
    assert error.value.what == f"--{name.replace('_', '-')} {path} cannot be written: Not a directory"


def test_folders_are_made_and_files_are_not_touched(tmp_path):
    beat = tmp_path / "new" / "beat.json"
    check_output_paths(_args(tensorboard_dir=tmp_path / "tb", heartbeat_file=beat))
    assert (tmp_path / "tb").is_dir() and list((tmp_path / "new").iterdir()) == []
    beat.write_text("a beat")
    check_output_paths(_args(heartbeat_file=beat))
    assert beat.read_text() == "a beat"


def test_all_bad_paths_stand_in_one_error_and_a_folder_is_no_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as error:
        check_output_paths(_args(tensorboard_dir=tmp_path / "file", heartbeat_file=tmp_path))
    assert "--tensorboard-dir" in error.value.what and f"--heartbeat-file {tmp_path} cannot" in error.value.what


def test_a_rank_tries_what_it_writes_itself(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    args = _args(heartbeat_file=tmp_path / "file" / "x", tensorboard_dir=tmp_path / "file" / "y")
    monkeypatch.setattr(log, "_rank", (1, 3))
    check_output_paths(args)
    monkeypatch.setattr(log, "_rank", (2, 3))
    with pytest.raises(ConfigError, match="^--tensorboard-dir"):
        check_output_paths(args)


def test_what_another_rank_cannot_write_stands_in_this_ranks_error(tmp_path, monkeypatch):
    """Rank 0 speaks for all: --tensorboard-dir is the last rank's."""
    both = lambda mine, group, purpose: [mine, ["--tensorboard-dir x cannot be written: it is full"]]  # noqa: E731
    monkeypatch.setattr("megatron_lite.training.output_paths.collectives.all_gather_object", both)
    monkeypatch.setattr(log, "_rank", (0, 2))
    with pytest.raises(ConfigError, match="--tensorboard-dir x cannot be written: it is full"):
        check_output_paths(_args())
