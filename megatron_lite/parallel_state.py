"""Megatron's accessors over the registered process groups, for start-up and for users' scripts.

Library code takes a `ProcessGroupCollection`; only start-up, and a public function whose `pg_collection` is None, ask
here. An accessor for a group of one rank returns None, and its size is 1.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_lite.collectives import group_rank, group_size
from megatron_lite.process_groups import make_process_groups
from megatron_lite.process_groups_config import (
    ProcessGroupCollection,
    register_process_groups,
    registered_process_groups,
)
from megatron_lite.rank_grid import DEFAULT_ORDER, grids


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    distributed_timeout_minutes: float = 30,
    order: str = DEFAULT_ORDER,
) -> ProcessGroupCollection:
    """Make and register the groups of this layout; collective over all ranks.

    Raises: ConfigError for sizes that do not fit the world.
    """
    global _virtual_size
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    dense, expert = grids(
        world_size,
        tp=tensor_model_parallel_size,
        pp=pipeline_model_parallel_size,
        cp=context_parallel_size,
        ep=expert_model_parallel_size,
        expert_tp=expert_tensor_parallel_size,
        order=order,
    )
    collection = make_process_groups(dense, expert, timeout=timedelta(minutes=distributed_timeout_minutes))
    register_process_groups(collection)
    _virtual_size = virtual_pipeline_model_parallel_size
    return collection


_virtual_size: int | None = None


def _groups() -> ProcessGroupCollection:
    return ProcessGroupCollection.use_mpu_process_groups()


def model_parallel_is_initialized() -> bool:
    """Whether `initialize_model_parallel` was called."""
    return registered_process_groups() is not None


def destroy_model_parallel() -> None:
    """Forget the registered groups."""
    global _virtual_size
    _virtual_size = None
    register_process_groups(None)


def get_tensor_model_parallel_group() -> ProcessGroup | None:
    """Ranks that split each layer with this one."""
    return _groups().tp


def get_tensor_model_parallel_world_size() -> int:
    """Size of the tensor-parallel group."""
    return group_size(_groups().tp)


def get_tensor_model_parallel_rank() -> int:
    """This rank's place in the tensor-parallel group."""
    return group_rank(_groups().tp)


def get_pipeline_model_parallel_group() -> ProcessGroup | None:
    """The stages of this rank's copy of the model."""
    return _groups().pp


def get_pipeline_model_parallel_world_size() -> int:
    """Number of pipeline stages."""
    return group_size(_groups().pp)


def get_pipeline_model_parallel_rank() -> int:
    """This rank's stage."""
    return group_rank(_groups().pp)


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Model chunks a rank, or None without interleaving."""
    return _virtual_size


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank (and, unless ignored, this chunk) holds the embedding."""
    if not ignore_virtual and _virtual_size is not None and vp_stage not in (None, 0):
        return False
    return get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank (and, unless ignored, this chunk) holds the output layer."""
    if not ignore_virtual and _virtual_size is not None and vp_stage not in (None, _virtual_size - 1):
        return False
    return get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1


def get_data_parallel_group(with_context_parallel: bool = False) -> ProcessGroup | None:
    """Ranks that hold the same parameters and see other samples (with context parallelism: or other tokens)."""
    return _groups().dp_cp if with_context_parallel else _groups().dp


def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
    """Size of the data-parallel group."""
    return group_size(get_data_parallel_group(with_context_parallel))


def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    """This rank's place in the data-parallel group."""
    return group_rank(get_data_parallel_group(with_context_parallel))


def get_context_parallel_group() -> ProcessGroup | None:
    """Ranks that split the sequence with this one."""
    return _groups().cp


def get_context_parallel_world_size() -> int:
    """Size of the context-parallel group."""
    return group_size(_groups().cp)


def get_context_parallel_rank() -> int:
    """This rank's place in the context-parallel group."""
    return group_rank(_groups().cp)


def get_model_parallel_group() -> ProcessGroup | None:
    """All ranks of this rank's copy of the model."""
    return _groups().mp


def get_embedding_group() -> ProcessGroup | None:
    """Stages that hold the tied word embedding."""
    return _groups().embd


def get_expert_model_parallel_group() -> ProcessGroup | None:
    """Ranks over which experts are spread."""
    return _groups().ep


def get_expert_model_parallel_world_size() -> int:
    """Size of the expert-parallel group."""
    return group_size(_groups().ep)


def get_expert_model_parallel_rank() -> int:
    """This rank's place in the expert-parallel group."""
    return group_rank(_groups().ep)
