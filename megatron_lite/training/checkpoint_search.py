"""Which checkpoint the arguments mean: what `--load` and its kin find in folders, and what they refuse."""

from __future__ import annotations

from argparse import Namespace
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup

from megatron_lite.checkpointing import folders
from megatron_lite.checkpointing.folders import Which
from megatron_lite.collectives import all_gather_object, group_rank
from megatron_lite.errors import CheckpointError
from megatron_lite.log import warn_rank_0

ROLLING = "non_persistent"  # below the folder of checkpoints, unless --non-persistent-global-ckpt-dir names another


@dataclass(frozen=True)
class Found:
    """A checkpoint to load. `weights_only`: a start from its weights, not the continuation of its run.

    `of_rank`: the folder is this rank's own (--non-persistent-ckpt-type local), others have others.
    """

    root: Path
    which: Which
    folder: Path
    weights_only: bool
    of_rank: bool = False


def find_checkpoint(args: Namespace, load_arg: str = "load") -> Found | None:
    """Which checkpoint the arguments mean. None: a first start, whose `--load` is its `--save` and holds nothing yet.

    Raises: CheckpointError when there is none and the user meant one, with what is there instead.
    """
    load: str | None = getattr(args, load_arg)
    if load is not None:
        root, which = _newer(Path(load), args)
        if which is not None:
            weights_only = args.finetune or which == "release"
            return Found(root, which, folders.find(root, which), weights_only)
    if args.pretrained_checkpoint is not None:
        root = Path(args.pretrained_checkpoint)
        which = _which(root, None)
        if which is None:
            raise _nothing_in(root, "--pretrained-checkpoint")
        return Found(root, which, folders.find(root, which), weights_only=True)
    if load is None:
        return None
    same = args.save is not None and Path(args.save).resolve() == Path(load).resolve()
    if not same or args.exit_on_missing_checkpoint or args.ckpt_convert_format:
        raise _nothing_in(Path(load), "--" + load_arg.replace("_", "-"))
    return None


def find_in(root: Path, ckpt_step: int | None, flag: str) -> Path:
    """The folder of one checkpoint of `root`, for a tool: the iteration given, or the one that the tracker names.

    Args:
        flag: which named `root`, for the error.
    Raises: CheckpointError.
    """
    which = _which(root, ckpt_step)
    if which is None:
        raise _nothing_in(root, flag)
    return folders.find(root, which)


def rolling_root(args: Namespace, root: str | Path) -> Path:
    """The folder of the rolling checkpoint beside the checkpoints of `root`."""
    return Path(args.non_persistent_global_ckpt_dir or Path(root) / ROLLING)


def local_root(args: Namespace, rank: int) -> Path:
    """The folder of this rank's own rolling checkpoint, on a disk of its machine."""
    return Path(args.non_persistent_local_ckpt_dir) / f"rank_{rank:05d}"


def find_local(args: Namespace, facts: dict[str, Any], group: ProcessGroup | None) -> Found | None:
    """The newest iteration of which every rank has its own part on its own disk, saved under this very layout.

    Args:
        facts: of metadata.json, which have to agree.
    """
    root = local_root(args, group_rank(group))
    mine = []
    for iteration in folders.complete_iterations(root):
        with suppress(CheckpointError):  # damaged: not there, then
            manifest = folders.read_manifest(folders.find(root, iteration))
            if all(manifest.get(name) == value for name, value in facts.items()):
                mine.append(iteration)
    by_rank = all_gather_object(mine, group, purpose="local checkpoints")
    common = set(by_rank[0]).intersection(*by_rank)
    if not common:
        return None
    newest = max(common)
    return Found(root, newest, folders.find(root, newest), weights_only=args.finetune, of_rank=True)


def _newer(load: Path, args: Namespace) -> tuple[Path, Which | None]:
    """The checkpoint of `load`, or the rolling one beside it where that is newer."""
    which = _which(load, args.ckpt_step)
    if args.non_persistent_ckpt_type != "global" or args.ckpt_step is not None or which == "release":
        return load, which
    root = rolling_root(args, load)
    rolling = _which(root, None) if root.is_dir() else None
    newer = isinstance(rolling, int) and (not isinstance(which, int) or rolling > which)
    return (root, rolling) if newer else (load, which)


def _which(root: Path, ckpt_step: int | None) -> Which | None:
    if ckpt_step is not None:
        return ckpt_step
    tracked = folders.read_tracker(root)
    if tracked is not None:
        return tracked
    complete = folders.complete_iterations(root)
    if complete:  # killed after the first checkpoint was complete and before the tracker named it
        warn_rank_0(
            f"{root} has no {folders.TRACKER}; its newest complete checkpoint is {complete[-1]}, which is loaded"
        )
        return complete[-1]
    return None


def _nothing_in(root: Path, flag: str) -> CheckpointError:
    if (root / folders.MANIFEST).is_file():
        return CheckpointError(
            f"{flag} {root} is one checkpoint, not a folder of checkpoints",
            why=f"the flag names the folder that holds {folders.TRACKER}",
            fix=f"{flag} {root.parent}, with --ckpt-step for an older one",
        )
    state = "does not exist" if not root.exists() else "holds no checkpoint" if root.is_dir() else "is a file"
    return CheckpointError(
        f"{flag} {root}: the folder {state}",
        why="training would start from random weights, which is meant only when --load equals --save",
        fix=f"correct the path; for a first start leave {flag} out, or let --save name the same folder",
    )
