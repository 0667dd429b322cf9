"""A converted model as a checkpoint: weights and arguments alone, in the folder `release`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_lite.checkpointing import folders
from megatron_lite.checkpointing.checkpoint import Content, write_checkpoint
from megatron_lite.checkpointing.sharded import LateTensor
from megatron_lite.errors import ConfigError
from megatron_lite.training.checkpointing import CHECKPOINT_VERSION

_LAYOUT = {"tp": 1, "pp": 1, "dp": 1, "cp": 1}
_NOT_OF_A_MODEL = ("micro_batch_size", "global_batch_size", "train_iters", "lr", "min_lr", "load", "save")


def check_no_run(root: Path) -> None:
    """Raises: ConfigError where `root` holds the checkpoints of a run."""
    tracked = folders.read_tracker(root)
    if isinstance(tracked, int):
        raise ConfigError(
            f"--save-dir {root} holds the checkpoints of a run, the latest of iteration {tracked}",
            why="a converted model would take the place of the latest one",
            fix="--save-dir with a folder of its own",
        )


def write_release(root: Path, tensors: Mapping[str, LateTensor], args: Mapping[str, Any], source: Path) -> Path:
    """Write `root/release`.

    Args:
        args: of the model; those of the run that had it are left out.
        source: where the model comes from, for the description.
    Returns: the folder.
    Raises: CheckpointError.
    """
    common = {
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": 0,
        "num_floating_point_operations_so_far": 0.0,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "skipped_train_samples": 0,
        "layout": _LAYOUT,
    }
    kept = {name: value for name, value in args.items() if name not in _NOT_OF_A_MODEL}
    description = {"layout": _LAYOUT, "world_size": 1, "converted_from": str(source.resolve())}
    folders.check_save_folder(root)
    content = Content(tensors=tensors, common=common, args=kept, description=description)
    return write_checkpoint(root, "release", content, None)
