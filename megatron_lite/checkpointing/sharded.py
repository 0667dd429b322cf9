"""Tensors on disk under global names with global shapes: every rank writes and reads its own boxes, without a gather.

    rank 0 holds rows 0-3 of w [8, 6]        rank 1 holds a flat range of it: [26, 45)
    w, one box (0,0) 4x6                     w, three boxes  (4,2) 1x4   (5,0) 2x6   (7,0) 1x3

`ShardSpec` says which boxes a tensor is made of. `Boxes` tells torch Distributed Checkpoint (DCP) so, which writes each
box once - replicas are spread over the ranks that hold them - and an index, `.metadata`, of all boxes. Reading asks the
index which saved boxes overlap the wanted ones: the layout at saving and the layout at loading need not agree.

A rank's tensor is either shaped like its boxes (`Piece.local_offset` has a number for each dimension), or flat: then
`local_offset` is one number, and the box lies in the tensor from there on, row by row.

Neither the tensors nor the index can run code when read: DCP's index is a pickle, so ours is read by an unpickler that
knows DCP's few classes and no other.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from megatron_lite.checkpointing.dcp_files import Writer, no_checksums_of_records
from megatron_lite.checkpointing.folders import explain
from megatron_lite.checkpointing.mismatch import describe_mismatch
from megatron_lite.checkpointing.plain_values import from_bytes, to_bytes
from megatron_lite.checkpointing.reader import Reader
from megatron_lite.errors import CheckpointError
from megatron_lite.sharding import Piece, ShardSpec, whole

Tensors = Mapping[str, tuple[Tensor, ShardSpec]]  # key on disk -> this rank's tensor and its place


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a checkpoint, as the index has it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Boxes:
    """A rank's part of one global tensor, speaking the protocol by which DCP asks for it."""

    def __init__(self, tensor: Tensor, spec: ShardSpec):
        self.tensor, self.spec = tensor.detach(), spec
        self.size = torch.Size(spec.global_shape)
        empty = math.prod(spec.global_shape) == 0
        self.pieces = {p.global_offset: p for p in spec.pieces if empty or math.prod(p.shape) > 0}

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.tensor.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(p.global_offset), torch.Size(p.shape)) for p in self.pieces.values()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The box at `index.offset`, as a view."""
        assert index.offset is not None, index
        return view_of_piece(self.tensor, self.pieces[tuple(index.offset)])


def _boxes(value: tuple[Tensor, ShardSpec] | Boxes) -> Boxes:
    return value if isinstance(value, Boxes) else Boxes(*value)


class LateTensor(Boxes):
    """A whole tensor that is made at the moment it is written and dropped afterwards.

    Args:
        facts: its shape and dtype.
        make: makes it; called once.
    """

    def __init__(self, name: str, facts: SavedTensor, make: Callable[[], Tensor]):
        super().__init__(torch.empty(facts.shape, dtype=facts.dtype, device="meta"), whole(name, facts.shape))
        self._make = make

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        tensor = self._make()
        assert tensor.shape == self.size and tensor.dtype == self.tensor.dtype, (index, tensor.shape, tensor.dtype)
        return tensor


def view_of_piece(tensor: Tensor, piece: Piece) -> Tensor:
    """One box of a rank's tensor, as a view of the box's shape."""
    if len(piece.local_offset) == tensor.dim() == len(piece.shape):
        return tensor[piece.local_slices()]
    assert tensor.dim() == 1 and len(piece.local_offset) == 1, (tuple(tensor.shape), piece)
    return tensor.narrow(0, piece.local_offset[0], math.prod(piece.shape)).view(piece.shape)


# -- writing -----------------------------------------------------------------------------------------------------


@dataclass
class Planned:
    """What this rank is to write, agreed with all ranks. It holds for further saves of the same structure.

    metadata: on rank 0, the index to be, without the places in files.
    """

    local: SavePlan
    agreed: SavePlan
    metadata: Metadata | None


def plan(
    writer: Writer,
    tensors: Tensors | Mapping[str, Boxes],
    objects: Mapping[str, Any],
    group: ProcessGroup | None,
    *,
    spread: bool = True,
    partial: bool = False,
    known: Planned | None = None,
) -> tuple[SavePlan, SavePlanner, Planned]:
    """Agree with all ranks of `group` on who writes what; collective. See `write` for the arguments.

    Args:
        spread: share what several ranks hold among them; otherwise the first of them writes it.
        partial: the boxes need not cover the tensors.
        known: of an earlier save with the same tensors and objects: there is nothing to agree on then.
    Returns: this rank's plan; who resolves its items; what to keep for a later save.
    Raises: CheckpointError, the same on every rank; also when the structure is not that of `known`.
    """
    state: dict[str, Any] = {key: _boxes(tensors[key]) for key in sorted(tensors)}
    state |= objects
    planner = SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=not spread)
    planner.partial = partial
    ranks = _DistWrapper(group, group is not None, 0)
    metadata: Metadata | None = None if known is None else known.metadata

    def local_step() -> SavePlan:
        planner.set_up_planner(state, None, ranks.is_coordinator)
        writer.set_up_storage_writer(ranks.is_coordinator)
        local = writer.prepare_local_plan(planner.create_local_plan())
        if known is not None and local != known.local:
            raise CheckpointError(
                "the tensors of this save are not those of the last one",
                why="--ckpt-assume-constant-structure keeps the plan of the first save",
                fix="leave --ckpt-assume-constant-structure out",
            )
        return local

    def global_step(plans: list[SavePlan]) -> list[SavePlan]:
        nonlocal metadata
        plans, metadata = planner.create_global_plan(plans)
        return writer.prepare_global_plan(plans)

    with _one_error("plan the checkpoint"):
        if known is None:
            agreed = ranks.reduce_scatter("plan", local_step, global_step)
            local = planner.local
        else:
            ranks.all_reduce("plan", local_step, lambda plans: None)
            local, agreed = known.local, known.agreed
    return planner.finish_plan(agreed), planner, Planned(local, agreed, metadata)


def write(
    folder: Path,
    tensors: Tensors | Mapping[str, Boxes],
    objects: Mapping[str, Any],
    group: ProcessGroup | None,
    *,
    files: int = 1,
    spread: bool = True,
    partial: bool = False,
    known: Planned | None = None,
) -> tuple[dict[str, str], Planned]:
    """Write this rank's boxes and objects to the (new, shared) `folder`; collective over `group`.

    Args:
        tensors: a key that several ranks hold with the same boxes is written once. All boxes together must cover
            the tensor exactly.
        objects: plain values (see plain_values.py) under keys that no other rank uses.
        group: the ranks that save; None: this one alone, no process group needed.
        files: of a rank, written at the same time.
        spread, partial, known: see `plan`.
    Returns: on rank 0, the checksum of every file of tensors, taken from the bytes on their way to the disk; and what
        was agreed on.
    Raises: CheckpointError, the same on every rank.
    """
    writer = Writer(folder, files)
    final, planner, planned = plan(writer, tensors, objects, group, spread=spread, partial=partial, known=known)
    ranks = _DistWrapper(group, group is not None, 0)

    def finish(results: list[list[WriteResult]]) -> None:
        assert planned.metadata is not None
        writer.finish(planned.metadata, results)

    with _one_error(f"save to {folder}"), no_checksums_of_records():
        ranks.all_reduce("write", lambda: writer.write_data(final, planner).value(), finish)
    return writer.checksums, planned


class SavePlanner(DefaultSavePlanner):
    """Plans `Boxes` and plain objects, and lets nothing pass that could not be loaded again.

    `local`: what this rank would write if it were alone. `partial`: others keep the rest elsewhere.
    """

    local: SavePlan
    partial = False

    def create_local_plan(self) -> SavePlan:
        items: list[WriteItem] = []
        for key, value in self.state_dict.items():
            if isinstance(value, Boxes):
                items += value.__create_write_items__(key, value)
            else:
                items.append(WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO))
        self.local = self.plan = SavePlan(items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        _check_agreement(item for plan in all_plans for item in plan.items)
        if self.partial:
            return create_default_global_save_plan(all_plans)
        plans, metadata = super().create_global_plan(all_plans)  # replicas once, spread by size; no overlaps
        for key, saved in metadata.state_dict_metadata.items():
            if isinstance(saved, TensorStorageMetadata):
                covered = sum(math.prod(chunk.sizes) for chunk in saved.chunks)
                assert covered == math.prod(saved.size), f"{key}: boxes cover {covered} of {tuple(saved.size)}"
        return plans, metadata

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        # Contiguous: what is on disk is the box row by row, whatever the strides in memory were.
        return value.__get_tensor_shard__(index).contiguous() if isinstance(value, Boxes) else value

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(to_bytes(object, write_item.index.fqn))
        return object


def _check_agreement(items: Iterable[WriteItem]) -> None:
    """All ranks mean the same tensor by a key: a bug of ours (two parameters of one name) would show here."""
    seen: dict[str, tuple[torch.Size, torch.dtype] | None] = {}
    for item in items:
        facts = (item.tensor_data.size, item.tensor_data.properties.dtype) if item.tensor_data else None
        first = seen.setdefault(item.index.fqn, facts)
        assert first == facts, f"{item.index.fqn}: ranks hold {first} and {facts} under one name"


# -- reading -----------------------------------------------------------------------------------------------------


def read(
    folder: Path,
    tensors: Tensors,
    *,
    expected: Callable[[str], bool] = lambda key: True,
    allow_missing: bool = False,
    allow_unexpected: bool = False,
    requested_elsewhere: Iterable[str] = (),
    padded: Callable[[str], bool] = lambda key: False,
    reader: Reader | None = None,
) -> tuple[list[str], list[str]]:
    """Fill this rank's tensors in place; only the boxes that overlap them are read. Not collective.

    Values are cast to the dtype of the given tensor (floats to floats, integers to integers).

    Args:
        expected: keys of the checkpoint that some rank should ask for. One that nobody asks for is an error.
        allow_missing: tensors that the checkpoint lacks keep their values.
        allow_unexpected: tensors that nobody asks for are left.
        requested_elsewhere: keys that other ranks ask for.
        padded: keys whose last rows are padding: they may have more or fewer rows in the checkpoint. Rows of both are
            read, further ones of ours become zero.
        reader: of this folder, kept by who reads it tensor by tensor.
    Returns: the keys that only the run has, and those that only the checkpoint has.
    Raises: CheckpointError naming all missing, unexpected and differently shaped tensors, before anything is changed.
    """
    reader = reader or Reader(folder)
    index = reader.read_metadata().state_dict_metadata
    saved = {key: item for key, item in index.items() if isinstance(item, TensorStorageMetadata)}
    requested = {*tensors, *requested_elsewhere}
    missing = sorted(tensors.keys() - saved.keys())
    unexpected = sorted(key for key in saved.keys() - requested if expected(key))
    shapes, recut = {}, {}
    for key in tensors.keys() & saved.keys():
        tensor, spec = tensors[key]
        there = saved[key]
        if padded(key) and there.size != torch.Size(spec.global_shape) and there.size[1:] == spec.global_shape[1:]:
            recut[key] = there.size[0]
        elif tuple(there.size) != tuple(spec.global_shape) or _kind(there.properties.dtype) != _kind(tensor.dtype):
            here = SavedTensor(tuple(spec.global_shape), tensor.dtype)
            shapes[key] = (SavedTensor(tuple(there.size), there.properties.dtype), here)
    if shapes or (missing and not allow_missing) or (unexpected and not allow_unexpected):
        raise describe_mismatch(folder, missing, unexpected, {key: _both(*pair) for key, pair in shapes.items()})
    wanted = {
        key: Boxes(tensors[key][0], _rows_below(recut[key], tensors[key][1]) if key in recut else tensors[key][1])
        for key in sorted(tensors)
        if key in saved
    }
    for key in recut:
        tensors[key][0].detach().zero_()
    with _one_error(f"load {folder}"):
        dcp.load(wanted, storage_reader=reader, planner=_LoadPlanner(False, False), no_dist=True)
    return missing, unexpected


def _rows_below(rows: int, spec: ShardSpec) -> ShardSpec:
    """The part of a rank's tensor that a tensor of so many rows has too."""
    pieces = []
    for piece in spec.pieces:
        kept = min(piece.shape[0], rows - piece.global_offset[0])
        if kept > 0:
            pieces.append(Piece(piece.global_offset, piece.local_offset, (kept, *piece.shape[1:])))
    return ShardSpec(spec.name, (rows, *spec.global_shape[1:]), tuple(pieces))


def saved_tensors(folder: Path) -> dict[str, SavedTensor]:
    """Key -> global shape and dtype of every tensor in the checkpoint."""
    index = Reader(folder).read_metadata().state_dict_metadata
    return {
        key: SavedTensor(tuple(item.size), item.properties.dtype)
        for key, item in index.items()
        if isinstance(item, TensorStorageMetadata)
    }


def saved_files(folder: Path) -> set[str]:
    """Names of the files in which the index places something."""
    return {place.relative_path for place in Reader(folder).read_metadata().storage_data.values()}


def saved_objects(folder: Path) -> list[str]:
    """Keys of the plain objects in the checkpoint."""
    index = Reader(folder).read_metadata().state_dict_metadata
    return sorted(key for key, item in index.items() if isinstance(item, BytesStorageMetadata))


def read_object(folder: Path, key: str) -> Any:
    """One plain object. Raises: CheckpointError; KeyError when there is none of that key."""
    place = Reader(folder).read_metadata().storage_data[MetadataIndex(key)]
    try:
        with open(folder / place.relative_path, "rb") as file:
            file.seek(place.offset)
            data = file.read(place.length)
    except OSError as error:
        raise explain(error, f"load {folder}") from error
    return from_bytes(data, f"{key} in {folder / place.relative_path}")


class _LoadPlanner(DefaultLoadPlanner):
    """Asks for the saved boxes that overlap this rank's."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for key, boxes in self.state_dict.items():
            saved = self.metadata.state_dict_metadata[key]
            assert isinstance(saved, TensorStorageMetadata), key
            reads = create_read_items_for_chunk_list(key, saved, boxes.__create_chunk_list__())
            found = sum(math.prod(item.lengths) for item in reads)
            wanted = sum(math.prod(piece.shape) for piece in boxes.pieces.values())
            if found != wanted:
                raise CheckpointError(
                    f"the index of the checkpoint has {found} of {wanted} elements of this rank's part of {key}",
                    why="it is damaged",
                    fix="--ckpt-step with another checkpoint",
                )
            items += reads
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


# -- errors ------------------------------------------------------------------------------------------------------


@contextmanager
def _one_error(action: str) -> Iterator[None]:
    """DCP gathers the failures of all ranks into one exception; the user gets the first of them, as a CheckpointError.

    Also silences DCP's warning that a lone process saves alone: it is meant so.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        rank, (first, stack) = min(error.failures.items())
        if isinstance(first, CheckpointError) or not isinstance(first, Exception):
            raise first from error
        if isinstance(first, OSError):
            raise explain(first, action) from error
        if isinstance(first, AssertionError):  # a bug of ours: keep the trace
            raise AssertionError(f"rank {rank}: {first}\n{''.join(stack.format())}") from error
        raise CheckpointError(f"cannot {action}: rank {rank}: {type(first).__name__}: {first}") from error


def _kind(dtype: torch.dtype) -> str:
    return "float" if dtype.is_floating_point else "complex" if dtype.is_complex else "integer"


def _both(there: SavedTensor, here: SavedTensor) -> tuple[str, str]:
    if there.shape != here.shape:
        return str(list(there.shape)), str(list(here.shape))
    return str(there.dtype), str(here.dtype)
