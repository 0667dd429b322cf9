"""Several ranks of one save in one process: the same planner and writer as in a run, without the collectives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.checkpointing import sharded
from megatron_lite.checkpointing.dcp_files import no_checksums_of_records
from megatron_lite.checkpointing.sharded import Tensors
from megatron_lite.sharding import Piece, ShardSpec, boxes_of_range, whole


def write_as_ranks(folder: Path, ranks: list[Tensors], objects: list[dict[str, Any]] | None = None) -> list[list[str]]:
    """Save what each rank holds. Returns: per rank, the keys that it wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    planners, plans, writers = [], [], []
    for rank, tensors in enumerate(ranks):
        state: dict[str, Any] = {key: sharded.Boxes(tensor, spec) for key, (tensor, spec) in tensors.items()}
        state |= objects[rank] if objects else {}
        planner = sharded.SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(state, None, rank == 0)
        writer = sharded.Writer(folder)
        writer.set_up_storage_writer(rank == 0)
        planners.append(planner)
        writers.append(writer)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    with no_checksums_of_records():
        results = [
            writer.write_data(planner.finish_plan(plan), planner).value()
            for writer, planner, plan in zip(writers, planners, plans)
        ]
    writers[0].finish(metadata, results)
    return [[item.index.fqn for item in plan.items] for plan in plans]


def replicated(name: str, tensor: Tensor, size: int) -> list[tuple[Tensor, ShardSpec]]:
    """Every rank holds all of it."""
    return [(tensor.clone(), whole(name, tuple(tensor.shape))) for _ in range(size)]


def cut(name: str, tensor: Tensor, dim: int, bounds: list[int]) -> list[tuple[Tensor, ShardSpec]]:
    """Rank r holds `[bounds[r], bounds[r + 1])` of a dimension."""
    parts = []
    for begin, end in zip(bounds, bounds[1:]):
        local = tensor.narrow(dim, begin, end - begin).clone()
        offset = tuple(begin if d == dim else 0 for d in range(tensor.dim()))
        piece = Piece(offset, (0,) * tensor.dim(), tuple(local.shape))
        parts.append((local, ShardSpec(name, tuple(tensor.shape), (piece,) if end > begin else ())))
    return parts


def flat(name: str, tensor: Tensor, bounds: list[int]) -> list[tuple[Tensor, ShardSpec]]:
    """Rank r holds the range `[bounds[r], bounds[r + 1])` of the flattened tensor, as a flat tensor."""
    parts = []
    for begin, end in zip(bounds, bounds[1:]):
        pieces, at = [], 0
        for offset, shape in boxes_of_range(tuple(tensor.shape), begin, end):
            pieces.append(Piece(offset, (at,), shape))
            at += torch.Size(shape).numel()
        local = tensor.reshape(-1)[begin:end].clone()
        parts.append((local, ShardSpec(name, tuple(tensor.shape), tuple(pieces))))
    return parts


def emptied(parts: list[tuple[Tensor, ShardSpec]]) -> list[tuple[Tensor, ShardSpec]]:
    """The same layout, to be filled by a load."""
    return [(torch.full_like(tensor, 77 if tensor.dtype != torch.bool else True), spec) for tensor, spec in parts]
