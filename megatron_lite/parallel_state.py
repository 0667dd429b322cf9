"""Megatron's accessors over the registered process groups, for start-up and for users' scripts.

Library code takes a `ProcessGroupCollection`; only start-up, and a public function whose `pg_collection` is None, ask
here. Where this rank is alone in a group, an accessor of a group gives a real group of one: a script that hands it to
`torch.distributed` would else reduce over the whole world, which is what None means there.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_lite.collectives import group_rank, group_ranks, group_size
from megatron_lite.errors import ConfigError
from megatron_lite.log import warn_rank_0
from megatron_lite.process_groups import communicator_options, make_process_groups, rank_lists
from megatron_lite.process_groups_config import (
    ProcessGroupCollection,
    register_process_groups,
    registered_process_groups,
)
from megatron_lite.rank_grid import DEFAULT_ORDER, grids

_virtual_size: int | None = None
_virtual_rank: int | None = None
_alone: ProcessGroup | None = None


# -- start and end -----------------------------------------------------------------------------------------------


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    *,
    context_parallel_size: int = 1,
    hierarchical_context_parallel_sizes: list[int] | None = None,
    expert_model_parallel_size: int = 1,
    num_distributed_optimizer_instances: int = 1,
    expert_tensor_parallel_size: int | None = None,
    nccl_communicator_config_path: str | None = None,
    distributed_timeout_minutes: float = 30,
    order: str = DEFAULT_ORDER,
    create_gloo_process_groups: bool = True,
    high_priority_stream_groups: list[str] | None = None,
) -> ProcessGroupCollection:
    """Make and register the groups of this layout; collective over all ranks.

    Args:
        create_gloo_process_groups: accepted as Megatron has it: no CPU groups beside the others are made either way.
        nccl_communicator_config_path, high_priority_stream_groups: settings of NCCL's communicators by group; read and
            checked, but without effect, which is said, on another backend.
    Raises: ConfigError for sizes that do not fit the world.
    """
    global _virtual_size
    if model_parallel_is_initialized():
        raise ConfigError(
            "initialize_model_parallel was called twice",
            why="groups that are in use would stay behind",
            fix="destroy_model_parallel() first",
        )
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
    names = rank_lists(dense, expert, hierarchical_context_parallel_sizes, num_distributed_optimizer_instances)
    options = communicator_options(nccl_communicator_config_path, high_priority_stream_groups, names)
    if options and not (dist.is_initialized() and dist.get_backend() == "nccl"):
        warn_rank_0("settings of NCCL's communicators have no effect: this run's backend is not NCCL")
        options = {}
    collection = make_process_groups(
        dense,
        expert,
        timeout=timedelta(minutes=distributed_timeout_minutes),
        hierarchical_cp_sizes=hierarchical_context_parallel_sizes,
        optimizer_instances=num_distributed_optimizer_instances,
        nccl_options=options,
    )
    register_process_groups(collection)
    _virtual_size = virtual_pipeline_model_parallel_size
    return collection


def model_parallel_is_initialized() -> bool:
    """Whether `initialize_model_parallel` was called."""
    return registered_process_groups() is not None


is_initialized = model_parallel_is_initialized


def destroy_model_parallel() -> None:
    """Forget the registered groups."""
    global _virtual_size, _virtual_rank, _alone
    _virtual_size = _virtual_rank = _alone = None
    register_process_groups(None)


def _groups() -> ProcessGroupCollection:
    return ProcessGroupCollection.use_mpu_process_groups()


def _real(group: ProcessGroup | None) -> ProcessGroup | None:
    """The group itself, or one of this rank alone; None where torch.distributed is not in use."""
    global _alone
    if group is not None or not dist.is_initialized():
        return group
    if dist.get_world_size() == 1:
        return dist.group.WORLD
    if _alone is None:  # made by this rank for itself: no other one takes part
        _alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return _alone


# -- tensor parallel ---------------------------------------------------------------------------------------------


def get_tensor_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Ranks that split each layer with this one."""
    return _real(_groups().tp)


def get_tensor_model_parallel_world_size() -> int:
    """Size of the tensor-parallel group."""
    return group_size(_groups().tp)


def get_tensor_model_parallel_rank() -> int:
    """This rank's place in the tensor-parallel group."""
    return group_rank(_groups().tp)


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the first rank of the tensor-parallel group: it reads the data."""
    return group_ranks(_groups().tp)[0]


# -- pipeline parallel -------------------------------------------------------------------------------------------


def get_pipeline_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """The stages of this rank's copy of the model."""
    return _real(_groups().pp)


def get_pipeline_model_parallel_world_size() -> int:
    """Number of pipeline stages."""
    return group_size(_groups().pp)


def get_pipeline_model_parallel_rank() -> int:
    """This rank's stage."""
    return group_rank(_groups().pp)


def get_pipeline_model_parallel_first_rank() -> int:
    """Global rank of the first stage."""
    return group_ranks(_groups().pp)[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Global rank of the last stage."""
    return group_ranks(_groups().pp)[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Global rank of the next stage; the last stage's is the first."""
    ranks = group_ranks(_groups().pp)
    return ranks[(get_pipeline_model_parallel_rank() + 1) % len(ranks)]


def get_pipeline_model_parallel_prev_rank() -> int:
    """Global rank of the stage before; the first stage's is the last."""
    ranks = group_ranks(_groups().pp)
    return ranks[get_pipeline_model_parallel_rank() - 1]


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Model chunks a rank, or None without interleaving."""
    return _virtual_size


def set_virtual_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """For scripts that build their chunks themselves."""
    global _virtual_size
    _virtual_size = world_size


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """The chunk that a script has said it is at, or None."""
    return _virtual_rank


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Say which chunk is built or run next. Nothing in this package asks: chunks know their `vp_stage`."""
    global _virtual_rank
    _virtual_rank = rank


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


def get_embedding_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Stages that hold the tied word embedding."""
    return _real(_groups().embd)


def get_position_embedding_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Stages that hold the table of learned positions."""
    return _real(_groups().pos_embd)


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank (and, unless ignored, this chunk) holds the tied word embedding."""
    return is_pipeline_first_stage(ignore_virtual, vp_stage) or is_pipeline_last_stage(ignore_virtual, vp_stage)


def is_rank_in_position_embedding_group() -> bool:
    """Whether this rank holds the table of learned positions."""
    return is_pipeline_first_stage()


# -- data and context parallel -----------------------------------------------------------------------------------


def _data_parallel(with_context_parallel: bool, partial_data_parallel: bool) -> ProcessGroup | None:
    groups = _groups()
    if partial_data_parallel:
        if not with_context_parallel:
            raise ConfigError(
                "the data-parallel group of one optimizer instance, without context parallelism",
                why="instances are parts of data x context parallelism",
                fix="with_context_parallel=True",
            )
        return groups.intra_dp_cp
    return groups.dp_cp if with_context_parallel else groups.dp


def get_data_parallel_group(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> ProcessGroup | None:
    """Ranks that hold the same parameters and see other samples (with context parallelism: or other tokens).

    Args:
        partial_data_parallel: those of this rank's optimizer instance only.
    """
    return _real(_data_parallel(with_context_parallel, partial_data_parallel))


def get_data_parallel_world_size(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    """Size of the data-parallel group."""
    return group_size(_data_parallel(with_context_parallel, partial_data_parallel))


def get_data_parallel_rank(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    """This rank's place in the data-parallel group."""
    return group_rank(_data_parallel(with_context_parallel, partial_data_parallel))


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Global rank of the first rank of the data-parallel group."""
    return group_ranks(_data_parallel(with_context_parallel, False))[0]


def get_context_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Ranks that split the sequence with this one."""
    return _real(_groups().cp)


def get_context_parallel_global_ranks(check_initialized: bool = True) -> list[int]:
    """Their global ranks."""
    return group_ranks(_groups().cp)


def get_context_parallel_world_size() -> int:
    """Size of the context-parallel group."""
    return group_size(_groups().cp)


def get_context_parallel_rank() -> int:
    """This rank's place in the context-parallel group."""
    return group_rank(_groups().cp)


def get_hierarchical_context_parallel_groups(check_initialized: bool = True) -> list[ProcessGroup | None]:
    """The levels of hierarchical context parallelism, innermost first; empty without it."""
    return [_real(group) for group in _groups().hcp or ()]


# -- products ----------------------------------------------------------------------------------------------------


def get_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """All ranks of this rank's copy of the model."""
    return _real(_groups().mp)


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> ProcessGroup | None:
    """Ranks of this pipeline stage (and, without context parallelism, of this part of the sequence)."""
    return _real(_groups().tp_dp_cp if with_context_parallel else _groups().tp_dp)


def get_tensor_and_context_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Ranks that see the same samples in this stage."""
    return _real(_groups().tp_cp)


def get_tensor_and_context_parallel_world_size() -> int:
    """Size of that group."""
    return group_size(_groups().tp_cp)


def get_tensor_and_context_parallel_rank() -> int:
    """This rank's place in that group."""
    return group_rank(_groups().tp_cp)


def get_amax_reduction_group(
    with_context_parallel: bool = False, tp_only_amax_red: bool = False
) -> ProcessGroup | None:
    """Ranks whose activations share an FP8 scale."""
    if tp_only_amax_red:
        return _real(_groups().tp_cp if with_context_parallel else _groups().tp)
    return get_tensor_and_data_parallel_group(with_context_parallel=with_context_parallel)


# -- experts -----------------------------------------------------------------------------------------------------


def get_expert_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Ranks over which experts are spread."""
    return _real(_groups().ep)


def get_expert_model_parallel_world_size() -> int:
    """Size of the expert-parallel group."""
    return group_size(_groups().ep)


def get_expert_model_parallel_rank() -> int:
    """This rank's place in the expert-parallel group."""
    return group_rank(_groups().ep)


def get_expert_tensor_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Ranks that split each expert."""
    return _real(_groups().expt_tp)


def get_expert_tensor_parallel_world_size() -> int:
    """Size of that group."""
    return group_size(_groups().expt_tp)


def get_expert_tensor_parallel_rank() -> int:
    """This rank's place in that group."""
    return group_rank(_groups().expt_tp)


def get_expert_tensor_and_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Ranks that together hold all experts of this stage."""
    return _real(_groups().tp_ep)


def get_expert_tensor_and_model_parallel_world_size() -> int:
    """Size of that group."""
    return group_size(_groups().tp_ep)


def get_expert_tensor_and_model_parallel_rank() -> int:
    """This rank's place in that group."""
    return group_rank(_groups().tp_ep)


def get_expert_tensor_model_pipeline_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Ranks that together hold all experts of all stages."""
    return _real(_groups().tp_ep_pp)


def _expert_data_parallel(partial: bool) -> ProcessGroup | None:
    return _groups().intra_expt_dp if partial else _groups().expt_dp


def get_expert_data_parallel_group(
    check_initialized: bool = True, partial_expert_data_parallel: bool = False
) -> ProcessGroup | None:
    """Ranks that hold the same experts.

    Args:
        partial_expert_data_parallel: those of this rank's optimizer instance only.
    """
    return _real(_expert_data_parallel(partial_expert_data_parallel))


def get_expert_data_parallel_world_size(partial_expert_data_parallel: bool = False) -> int:
    """Size of that group."""
    return group_size(_expert_data_parallel(partial_expert_data_parallel))


def get_expert_data_parallel_rank(partial_expert_data_parallel: bool = False) -> int:
    """This rank's place in that group."""
    return group_rank(_expert_data_parallel(partial_expert_data_parallel))


# -- optimizer instances -----------------------------------------------------------------------------------------


def get_intra_distributed_optimizer_instance_group(check_initialized: bool = True) -> ProcessGroup | None:
    """All ranks of this rank's optimizer instance."""
    return _real(_groups().intra_dist_opt)


def get_inter_distributed_optimizer_instance_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Ranks of all instances that hold the same shard."""
    return _real(_groups().inter_dist_opt)
