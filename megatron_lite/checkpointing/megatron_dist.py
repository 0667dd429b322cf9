"""Megatron-LM's own `torch_dist` checkpoints, read under our names. Nothing in them is run.

    decoder.layers.self_attention.linear_qkv.weight [4, 96, 32]     all layers of a kind in one tensor: here layer 2 is
        -> decoder.layers.2.self_attention.linear_qkv.weight [96, 32]    its third row; or one tensor a layer
    decoder.layers.mlp.experts.experts.linear_fc1.weight [4, 8, ...]     and all experts of all layers
        -> decoder.layers.2.mlp.experts.local_experts.5.linear_fc1.weight
    ...self_attention.linear_qkv.layer_norm_weight -> input_layernorm.weight      a norm is called by what follows it
    ...mlp.linear_fc1.layer_norm_weight            -> pre_mlp_layernorm.weight
    optimizer.state.exp_avg.NAME                   as ours, if saved with --dist-ckpt-optim-fully-reshardable

The tensors are in DCP's files, as ours are, so that each rank reads the boxes that it needs. `common.pt` holds the
arguments as a pickled Namespace, with enums and classes of Megatron: they are read as inert stand-ins.
"""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_lite.checkpointing import sharded
from megatron_lite.checkpointing.folders import FORMAT, MANIFEST
from megatron_lite.checkpointing.mismatch import describe_mismatch
from megatron_lite.checkpointing.plain_values import READ_ERRORS, to_json
from megatron_lite.checkpointing.reader import INDEX, Reader
from megatron_lite.checkpointing.sharded import Tensors
from megatron_lite.errors import CheckpointError
from megatron_lite.sharding import Piece, ShardSpec

COMMON = "common.pt"
_FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
_LAYER = re.compile(r"(.*\blayers)\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(.*\bexperts)\.local_experts\.(\d+)\.(.+)")
_STATE = re.compile(r"optimizer\.state\.\w+\.")
_NOT_A_MODEL = ("optimizer.", "chained_", "rng_state", "rerun_state", "opt_param_scheduler")


def is_megatron_dist(folder: Path) -> bool:
    """Whether Megatron-LM saved `folder` with `--ckpt-format torch_dist`."""
    try:
        facts = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return False
    ours = isinstance(facts, dict) and facts.get("format") == FORMAT
    return (
        isinstance(facts, dict)
        and not ours
        and facts.get("sharded_backend") == "torch_dist"
        and (folder / INDEX).is_file()
    )


# -- common.pt -----------------------------------------------------------------------------------------------------


class _StandIn:
    """What takes the place of an object of a class that is not known: its name, and nothing that acts."""

    args: tuple[Any, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any):
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __repr__(self) -> str:
        return ", ".join(map(repr, self.args)) or type(self).__name__


_INERT: dict[tuple[str, str], Any] = {
    ("argparse", "Namespace"): Namespace,
    ("types", "SimpleNamespace"): SimpleNamespace,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "slice"): slice,
    ("builtins", "complex"): complex,
    ("builtins", "bytearray"): bytearray,
    ("torch", "Size"): torch.Size,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
}


class _Unpickler(pickle.Unpickler):
    """Finds plain containers, tensors and types of numbers; stand-ins for everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _INERT:
            return _INERT[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return super().find_class(module, name)
        return type(name, (_StandIn,), {"__module__": module})


def read_common(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The plain values that all ranks share; and the run's arguments, in JSON's types.

    Raises: CheckpointError.
    """
    path = folder / COMMON
    _check_archive(path)
    module = SimpleNamespace(Unpickler=_Unpickler, load=None, __name__="inert")
    try:
        common = torch.load(path, map_location="cpu", weights_only=False, pickle_module=module)
        if not isinstance(common, dict):
            raise ValueError("it holds no table")
    except (AttributeError, TypeError, *READ_ERRORS) as error:
        raise CheckpointError(f"cannot read {path}: {error}", why="the file is damaged or missing") from error
    args = common.get("args")
    known = vars(args) if isinstance(args, Namespace) else {}
    return common, {name: to_json(value) for name, value in known.items() if not isinstance(value, _StandIn)}


def _check_archive(path: Path) -> None:
    """Only what torch.save writes is given to torch.load: scripted models and older kinds of files would be run."""
    try:
        with zipfile.ZipFile(path) as archive:
            scripted = any(name.endswith("constants.pkl") for name in archive.namelist())
    except (OSError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"cannot read {path}: {error}", why="the file is damaged or missing") from error
    if scripted:
        raise CheckpointError(f"{path} is a scripted model, not a table of values", why="reading it would run it")


# -- tensors -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a tensor of ours is in theirs: `key[index]`."""

    key: str
    index: tuple[int, ...]


def place_of(name: str, keys: Collection[str]) -> Place | None:
    """The place of our `name` among their `keys`; None where there is none."""
    state = _STATE.match(name)
    prefix = state[0] if state else ""
    for key, index in _candidates(name[len(prefix) :]):
        if prefix + key in keys:
            return Place(prefix + key, index)
    return None


def _candidates(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield name, ()
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return
    stem, number, rest = layer[1], int(layer[2]), layer[3]
    expert = _EXPERT.fullmatch(rest)
    for ours, theirs in _FUSED.items():
        if rest.startswith(ours):
            rest = theirs + rest[len(ours) :]
    yield f"{stem}.{number}.{rest}", ()
    yield f"{stem}.{rest}", (number,)
    if expert is not None:
        whole = f"{expert[1]}.experts.{expert[3]}"
        yield f"{stem}.{number}.{whole}", (int(expert[2]),)
        yield f"{stem}.{whole}", (number, int(expert[2]))


def names_of(key: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Our names of what a tensor of theirs holds, and where in it each is: undoes `place_of`."""
    match = re.fullmatch(r"(.*?\blayers)\.(?:(\d+)\.)?(.+)", key)
    if match is None:
        yield key, ()
        return
    stem, rest = match[1], match[3]
    for ours, theirs in _FUSED.items():
        if rest.startswith(theirs):
            rest = ours + rest[len(theirs) :]
    front = 0 if match[2] else 1
    experts = re.fullmatch(r"(.*\bexperts)\.experts\.(.+)", rest)
    for layer in range(shape[0]) if front else (int(match[2]),):
        index = (layer,) * front
        if experts is None:
            yield f"{stem}.{layer}.{rest}", index
            continue
        for expert in range(shape[front]):
            yield f"{stem}.{layer}.{experts[1]}.local_experts.{expert}.{experts[2]}", (*index, expert)


def is_of_model(key: str) -> bool:
    """Whether a key of theirs is a weight or a buffer."""
    return not (key.startswith(_NOT_A_MODEL) or "_extra_state" in key)


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
    """`sharded.read`, from Megatron's folder; keys that are not read are named as Megatron names them."""
    reader = reader or Reader(folder)
    index = reader.read_metadata().state_dict_metadata
    saved = {key: item for key, item in index.items() if isinstance(item, TensorStorageMetadata)}
    places = {name: place_of(name, saved.keys()) for name in {*tensors, *requested_elsewhere}}
    claimed: dict[str, set[tuple[int, ...]]] = {}
    for place in places.values():
        if place is not None:
            claimed.setdefault(place.key, set()).add(place.index)
    missing = sorted(name for name in tensors if places[name] is None)
    unexpected = [
        key
        for key, item in sorted(saved.items())
        if is_of_model(key)
        and expected(key)
        and len(claimed.get(key, ())) < _number_of(item, claimed.get(key, {(): None}))
    ]
    shapes = {}
    rounds: list[dict[str, tuple[torch.Tensor, ShardSpec]]] = []
    recut = set()
    for name in sorted(tensors):
        place = places[name]
        if place is None:
            continue
        tensor, spec = tensors[name]
        size, front = tuple(saved[place.key].size), len(place.index)
        if any(number >= limit for number, limit in zip(place.index, size)) or (
            size[front:] != spec.global_shape
            and not (padded(name) and front == 0 and size[1:] == tuple(spec.global_shape[1:]))
        ):
            shapes[name] = (f"{list(size[front:])}", str(list(spec.global_shape)))
            continue
        if padded(name):
            recut.add(place.key)
        their = _within(place, size[:front], tensor, spec)
        for group in rounds:
            if place.key not in group:
                group[place.key] = their
                break
        else:
            rounds.append({place.key: their})
    if shapes or (missing and not allow_missing) or (unexpected and not allow_unexpected):
        raise describe_mismatch(folder, missing, unexpected, shapes)
    for group in rounds:
        sharded.read(folder, group, allow_unexpected=True, padded=lambda key: key in recut, reader=reader)
    return missing, unexpected


def _number_of(item: TensorStorageMetadata, indices: Collection[tuple[int, ...]]) -> int:
    """How many tensors of ours a tensor of theirs holds, from how one of them is found in it."""
    front = len(next(iter(indices)))
    return int(torch.Size(item.size[:front]).numel()) if front else 1


def _within(
    place: Place, front: tuple[int, ...], tensor: torch.Tensor, spec: ShardSpec
) -> tuple[torch.Tensor, ShardSpec]:
    """Our tensor as a part of theirs, which has dimensions of layers (and experts) in front."""
    ones = (1,) * len(place.index)
    shaped = all(len(piece.local_offset) == tensor.dim() for piece in spec.pieces) and tensor.dim() == len(
        spec.global_shape
    )
    pieces = tuple(
        Piece(
            place.index + piece.global_offset,
            (0,) * len(ones) + piece.local_offset if shaped else piece.local_offset,
            ones + piece.shape,
        )
        for piece in spec.pieces
    )
    if shaped:
        tensor = tensor.detach()[(None,) * len(ones)]
    return tensor, ShardSpec(place.key, front + tuple(spec.global_shape), pieces)
