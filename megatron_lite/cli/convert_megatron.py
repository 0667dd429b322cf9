"""`megatron-lite convert` of Megatron-LM's own `torch_dist` checkpoints: tensor by tensor into ours.

All layers of a kind come in one tensor, which is taken apart; a part is in memory at a time. The arguments are those
that Megatron saved, or flags of training where it saved none. Optimizer state stays behind.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.checkpointing import megatron_dist
from megatron_lite.checkpointing.sharded import LateTensor, Reader, SavedTensor, saved_tensors
from megatron_lite.cli.progress import progress
from megatron_lite.cli.release import check_no_run, write_release
from megatron_lite.errors import CheckpointError, ConfigError
from megatron_lite.sharding import whole
from megatron_lite.training.arguments import parse_args
from megatron_lite.training.checkpoint_args import args_to_save

_EMBEDDING = "embedding.word_embeddings.weight"


def import_megatron(
    folder: Path,
    root: Path,
    dtype: torch.dtype | None,
    flags: list[str],
    arguments: Callable[[list[str], str], Any],
) -> Path:
    """Write the model of Megatron's `folder` as `root/release`.

    Args:
        dtype: of the tensors; None: as they are.
        flags: of training; they win over what Megatron saved.
        arguments: flags and the family (gpt) -> the arguments of a run.
    Returns: the folder of the checkpoint.
    Raises: ConfigError, CheckpointError.
    """
    check_no_run(root)
    saved = saved_tensors(folder)
    _, args = megatron_dist.read_common(folder)
    if _EMBEDDING not in saved:
        raise CheckpointError(f"{folder} has no {_EMBEDDING}", why="it is no language model's")
    if args:
        typed = parse_args(flags)
        args |= {name: value for name, value in args_to_save(typed).items() if name in typed.typed}
    elif flags:
        args = args_to_save(arguments(flags, "gpt"))
    else:
        raise ConfigError(
            f"{folder / megatron_dist.COMMON} holds no arguments",
            why="a checkpoint here says which model it is of",
            fix="the flags of training that describe the model, after those of the verb",
        )
    reader, late = Reader(folder), {}
    total = sum(facts.dtype.itemsize * torch.Size(facts.shape).numel() for facts in saved.values())
    with progress("converting", total / 1e6, "MB") as advance:
        for key, facts in saved.items():
            if not megatron_dist.is_of_model(key):
                continue
            for name, index in megatron_dist.names_of(key, facts.shape):
                part = SavedTensor(facts.shape[len(index) :], dtype or facts.dtype)

                def make(name: str = name, part: SavedTensor = part) -> Tensor:
                    tensor = torch.empty(part.shape, dtype=part.dtype)
                    wanted = {name: (tensor, whole(name, part.shape))}
                    megatron_dist.read(folder, wanted, expected=lambda key: False, reader=reader)
                    advance(tensor.nbytes / 1e6)
                    return tensor

                late[name] = LateTensor(name, part, make)
        return write_release(root, late, args, folder)
