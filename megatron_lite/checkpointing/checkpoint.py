"""One checkpoint, written or read by all ranks together: it exists for all of them or for none.

    write   rank 0: begin folder -> all: boxes and objects (sharded.py) -> rank 0: common.pt, args.json, publish
    read    rank 0: sizes of all files -> all: common.pt, boxes that overlap theirs

Whatever fails on one rank is raised on every rank, so nobody waits for a rank that gave up. Nothing here knows the
arguments of a run: they are handed in as values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import ProcessGroup

from megatron_lite.checkpointing import folders, sharded
from megatron_lite.checkpointing.dcp_files import shares
from megatron_lite.checkpointing.folders import Which
from megatron_lite.checkpointing.plain_values import from_bytes, to_bytes, to_json
from megatron_lite.checkpointing.sharded import Boxes, Planned, Tensors
from megatron_lite.collectives import all_gather_object, broadcast, broadcast_object, group_rank, is_fake
from megatron_lite.errors import CheckpointError
from megatron_lite.sharding import ShardSpec

COMMON, ARGS = "common.pt", "args.json"
T = TypeVar("T")


@dataclass(kw_only=True)
class Content:
    """What a checkpoint holds.

    `tensors`: this rank's part of model and optimizer, under global names. `objects`: plain values that this rank
    alone has, under names of its own (states of random generators). `common`: plain values that all ranks share.
    `args`: the arguments of the run, for people and for `--use-checkpoint-args`. `files`: further files, by name.
    `description`: facts about the run for metadata.json.
    """

    tensors: Tensors | Mapping[str, Boxes]
    objects: Mapping[str, Any] = field(default_factory=dict)
    common: Mapping[str, Any] = field(default_factory=dict)
    args: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    description: Mapping[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class HowToWrite:
    """What changes how a checkpoint is written and not what is in it.

    files: of a rank, written at the same time. spread: replicas are shared among the ranks that hold them; otherwise
    the first of them writes. partial: the tensors need not be covered, since others keep the rest elsewhere.
    plans: what earlier saves have agreed on, which holds for all saves to come, by whether they are a release; None:
    each save agrees anew.
    """

    files: int = 1
    spread: bool = True
    partial: bool = False
    plans: dict[bool, Planned] | None = None

    def known(self, which: Which) -> Planned | None:
        return None if self.plans is None else self.plans.get(which == "release")

    def keep(self, which: Which, planned: Planned) -> None:
        if self.plans is not None:
            self.plans[which == "release"] = planned


def write_checkpoint(
    root: Path, which: Which, content: Content, group: ProcessGroup | None, how: HowToWrite | None = None
) -> Path:
    """Save under `root`; collective over `group`. When it fails, what was there before is unchanged.

    Returns: the folder.
    Raises: CheckpointError, the same on every rank.
    """
    how = how or HowToWrite()
    temporary = on_rank_0(lambda: folders.begin(root, which), group)
    try:
        checksums, planned = sharded.write(
            temporary,
            content.tensors,
            content.objects,
            group,
            files=how.files,
            spread=how.spread,
            partial=how.partial,
            known=how.known(which),
        )
        how.keep(which, planned)
        texts = files_of(content)
        return on_rank_0(lambda: finish(temporary, root, which, content.description, texts, checksums), group)
    except BaseException:
        if group_rank(group) == 0:
            folders.abandon(temporary)
        raise


def files_of(content: Content) -> dict[str, bytes]:
    """The files that rank 0 writes beside the tensors, by name. Raises: CheckpointError for values that are no data."""
    args = json.dumps(to_json(dict(content.args)), indent=1, sort_keys=True)
    return {COMMON: to_bytes(dict(content.common), COMMON), ARGS: (args + "\n").encode(), **content.files}


def finish(
    temporary: Path,
    root: Path,
    which: Which,
    description: Mapping[str, Any],
    files: Mapping[str, bytes],
    checksums: dict[str, str],
) -> Path:
    """Rank 0's part of a save, after all tensors are on the disk: its own files, then the name and the tracker."""
    with folders.explained(f"save to {root}"):
        for name, data in files.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            folders.write_file(temporary / name, data)
    return folders.publish(temporary, root, which, dict(description), checksums)


def read_common(folder: Path) -> dict[str, Any]:
    """The plain values that all ranks share. Raises: CheckpointError."""
    with folders.explained(f"load {folder}"):
        data = (folder / COMMON).read_bytes()
    common = from_bytes(data, str(folder / COMMON))
    if not isinstance(common, dict):
        raise CheckpointError(f"{folder / COMMON} holds no table", why="the file is damaged")
    return common


def read_args(folder: Path) -> dict[str, Any]:
    """The arguments of the run that saved, in JSON's types. Raises: CheckpointError."""
    path = folder / ARGS
    try:
        args = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}", why="the file is damaged or missing") from error
    if not isinstance(args, dict):
        raise CheckpointError(f"{path} holds no table", why="the file is damaged")
    return args


@dataclass(kw_only=True)
class HowToRead:
    """What changes how tensors are found and read.

    read: `sharded.read`, or the like for another program's folder. allow_missing, allow_unexpected: see there.
    check_cover: the ranks' boxes together must cover each tensor. shared: ranks of which those that want the same read
    a part each, and send it to the others; None: every rank reads what it needs.
    """

    read: Callable[..., tuple[list[str], list[str]]] = sharded.read
    allow_missing: bool = False
    allow_unexpected: bool = False
    check_cover: bool = True
    shared: ProcessGroup | None = None


def read_tensors(
    folder: Path,
    tensors: Tensors,
    group: ProcessGroup | None,
    *,
    expected: Callable[[str], bool] = lambda key: True,
    padded: Callable[[str], bool] = lambda key: False,
    how: HowToRead | None = None,
) -> tuple[list[str], list[str]]:
    """`sharded.read` on every rank of `group`, which knows what the other ranks ask for and fails on all or none."""
    how = how or HowToRead()
    names: set[str] = set()
    if group is not None:
        asked = {key: spec for key, (_, spec) in tensors.items()} if how.check_cover else dict.fromkeys(tensors)
        by_rank = all_gather_object(asked, group, purpose="checkpoint names")
        names = names.union(*by_rank)
        if how.check_cover:
            _check_cover(by_rank)
    theirs = _read_by_others(tensors, how.shared)
    mine = {
        key: part for key, part in tensors.items() if theirs.get(key, group_rank(how.shared)) == group_rank(how.shared)
    }
    left = together(
        lambda: how.read(
            folder,
            mine,
            expected=expected,
            allow_missing=how.allow_missing,
            allow_unexpected=how.allow_unexpected,
            requested_elsewhere=names | tensors.keys(),
            padded=padded,
        ),
        group,
    )
    for key, reader in theirs.items():
        part = tensors[key][0].detach()
        sent = part.contiguous()
        broadcast(sent, how.shared, source=reader, purpose="checkpoint parts")
        if sent is not part:
            part.copy_(sent)
    return left


def _read_by_others(tensors: Tensors, shared: ProcessGroup | None) -> dict[str, int]:
    """Who of `shared` reads a tensor that all of them want alike, by key; about the same bytes for each."""
    if shared is None:
        return {}
    facts = {key: (tensor.dtype, spec) for key, (tensor, spec) in tensors.items()}
    everyone = all_gather_object(facts, shared, purpose="checkpoint parts")
    common = sorted(key for key in facts if all(other.get(key) == facts[key] for other in everyone))
    dealt = shares([tensors[key][0].nbytes for key in common], len(everyone))
    return {common[place]: reader for reader, places in enumerate(dealt) for place in places}


def _check_cover(by_rank: Sequence[Mapping[str, ShardSpec]]) -> None:
    """Raises: CheckpointError naming a tensor of which the ranks together want less, or more, than there is."""
    boxes: dict[str, dict[tuple[int, ...], int]] = {}
    sizes: dict[str, int] = {}
    for rank in by_rank:
        for key, spec in rank.items():
            sizes[key] = math.prod(spec.global_shape)
            for piece in spec.pieces:
                boxes.setdefault(key, {})[piece.global_offset] = math.prod(piece.shape)
    for key, size in sizes.items():
        found = sum(boxes.get(key, {}).values())
        if found != size:
            raise CheckpointError(
                f"the ranks' parts of {key} have {found} elements of {size}",
                why="its description of who holds what has a gap or an overlap",
                fix="mend the shard description, or --no-ckpt-load-validate-sharding-integrity to load all the same",
            )


# -- agreement ---------------------------------------------------------------------------------------------------


def on_rank_0(step: Callable[[], T], group: ProcessGroup | None) -> T:
    """The result of `step` on rank 0, or its error, on every rank."""
    if group is None or is_fake(group):
        return step()
    value, failure = _attempt(step) if group_rank(group) == 0 else (None, None)
    value, seen = broadcast_object((value, _for_others(failure, 0)), group, purpose="checkpoint step of rank 0")
    if seen is not None:
        raise failure or seen
    return value


def together(step: Callable[[], T], group: ProcessGroup | None) -> T:
    """Each rank's own result of `step`; if it fails on any rank, every rank raises: its own error, or the first one."""
    if group is None:
        return step()
    value, failure = _attempt(step)
    seen = all_gather_object(_for_others(failure, group_rank(group)), group, purpose="checkpoint errors")
    first = next((error for error in seen if error is not None), None)
    if first is not None:
        raise failure or first
    return value  # type: ignore[return-value]


def _attempt(step: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return step(), None
    except Exception as error:  # whatever it is, the others must not wait for this rank
        return None, error


def _for_others(error: Exception | None, rank: int) -> CheckpointError | None:
    if error is None:
        return None
    if isinstance(error, CheckpointError):
        return CheckpointError(f"rank {rank}: {error.what}", why=error.why, fix=error.fix)
    return CheckpointError(f"rank {rank}: {type(error).__name__}: {error}")


def merge(parts: Iterable[Tensors]) -> dict[str, Any]:
    """Several tables of tensors as one; a key may occur once."""
    merged: dict[str, Any] = {}
    for part in parts:
        double = merged.keys() & part.keys()
        assert not double, f"two tensors of one rank have the key {sorted(double)[0]}"
        merged.update(part)
    return merged
