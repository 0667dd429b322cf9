"""What a run writes beside its checkpoints, by flag: a path that cannot be written is told before anything is built.

Each rank tries the paths that it will write itself, and all raise what any has found; `--save` has a check of its own.
"""

from __future__ import annotations

import os
import tempfile
from argparse import Namespace
from pathlib import Path

from megatron_lite import collectives
from megatron_lite.errors import ConfigError
from megatron_lite.log import rank_and_world_size
from megatron_lite.training.rule import flag_of


def check_output_paths(args: Namespace) -> None:
    """Make the folders that this rank writes to. Collective over all ranks.

    Raises: ConfigError naming every flag whose path cannot be written, on every rank.
    """
    rank, size = rank_and_world_size()
    folders, files = ["config_logger_dir"], []
    if rank == size - 1:
        folders += ["tensorboard_dir", "wandb_save_dir"]
    if rank == 0:
        files += ["heartbeat_file", "result_rejected_tracker_filename", "dump_param_to_param_group_map"]
    problems = [_problem(name, getattr(args, name), is_file=False) for name in folders if getattr(args, name)]
    problems += [_problem(name, getattr(args, name), is_file=True) for name in files if getattr(args, name)]
    by_rank = collectives.all_gather_object(problems, collectives.world(), purpose="paths that cannot be written")
    found = dict.fromkeys(problem for of_rank in by_rank for problem in of_rank if problem)
    if found:
        raise ConfigError(
            "; ".join(found),
            why="what the flag asks for could not be written, and that would be found out later",
            fix="another path, or leave the flag out",
        )


def _problem(name: str, path: str, *, is_file: bool) -> str:
    """Why this path cannot be written, or nothing. What is there is left as it is."""
    try:
        folder = Path(path).parent if is_file else Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # permissions alone do not tell: a file system may be read-only
            pass
        if is_file and os.path.isdir(path):
            raise IsADirectoryError(0, "it is a folder")
    except OSError as error:
        return f"{flag_of(name)} {path} cannot be written: {error.strerror}"
    return ""
