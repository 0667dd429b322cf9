"""The groups of a layout on real ranks, and Megatron's accessors over them."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_lite import parallel_state as mpu
from megatron_lite.errors import ConfigError
from megatron_lite.process_groups import set_timeout
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.rank_grid import DEFAULT_ORDER, PIPELINE_BEFORE_DATA


def places(order: str):
    """What every rank says of its place, and the sums over its groups of 10^rank."""
    mpu.initialize_model_parallel(1, 2, order=order)
    sums = {}
    for name, group in {
        "tp": mpu.get_tensor_model_parallel_group(),
        "pp": mpu.get_pipeline_model_parallel_group(),
        "dp": mpu.get_data_parallel_group(),
        "cp": mpu.get_context_parallel_group(),
        "embd": mpu.get_embedding_group(),
        "pos_embd": mpu.get_position_embedding_group(),
        "mp": mpu.get_model_parallel_group(),
        "dp_cp": mpu.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True),
        "expt_dp": mpu.get_expert_data_parallel_group(),
        "all": mpu.get_intra_distributed_optimizer_instance_group(),
    }.items():
        x = torch.tensor(10 ** dist.get_rank())
        dist.all_reduce(x, group=group)  # as a user's script does
        sums[name] = f"{x.item():04d}"[::-1]  # a digit for every rank, rank 0 first
    return (
        sums,
        (mpu.get_pipeline_model_parallel_rank(), mpu.get_data_parallel_rank(), mpu.get_tensor_model_parallel_rank()),
        (mpu.get_pipeline_model_parallel_next_rank(), mpu.get_pipeline_model_parallel_prev_rank()),
        (mpu.get_data_parallel_src_rank(), mpu.get_tensor_model_parallel_src_rank()),
        (mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage(), mpu.is_rank_in_embedding_group()),
    )


@pytest.mark.parametrize("order", [DEFAULT_ORDER, PIPELINE_BEFORE_DATA])
def test_accessors_tell_each_ranks_place(world, order):
    """A rank that is alone in a group got None, over which torch.distributed reduces everything."""
    ranks = world(4).run(places, order)
    stages = [0, 0, 1, 1] if order == DEFAULT_ORDER else [0, 1, 0, 1]
    copies = [0, 1, 0, 1] if order == DEFAULT_ORDER else [0, 0, 1, 1]
    for rank, (sums, place, neighbours, sources, ends) in enumerate(ranks):
        stage, copy = stages[rank], copies[rank]
        pipeline = [r for r in range(4) if copies[r] == copy]
        replicas = [r for r in range(4) if stages[r] == stage]
        alone, in_pipeline, in_replicas = (
            "".join("01"[r in held] for r in range(4)) for held in ([rank], pipeline, replicas)
        )
        assert place == (stage, copy, 0)
        assert {sums[name] for name in ("tp", "cp", "pos_embd")} == {alone}
        assert {sums[name] for name in ("pp", "mp", "embd")} == {in_pipeline}
        assert {sums[name] for name in ("dp", "dp_cp", "expt_dp")} == {in_replicas} and sums["all"] == "1111"
        other = next(r for r in pipeline if r != rank)
        assert neighbours == (other, other) and sources == (replicas[0], rank)
        assert ends == (stage == 0, stage == 1, True)


def hierarchical_and_shared():
    groups = mpu.initialize_model_parallel(context_parallel_size=4, hierarchical_context_parallel_sizes=[2, 2])
    levels = [dist.get_process_group_ranks(group) for group in mpu.get_hierarchical_context_parallel_groups()]
    try:
        mpu.initialize_model_parallel()
    except ConfigError as error:
        twice = error.what
    set_timeout(groups, timedelta(seconds=77))
    backend = groups.hcp[0]._get_backend(torch.device("cpu"))
    seconds = backend.options._timeout.total_seconds()
    set_timeout(groups, timedelta(seconds=120))  # as the world of the tests has it
    return levels, groups.cp is groups.dp_cp is groups.tp_cp, twice, seconds


def test_levels_of_context_parallelism_one_communicator_for_equal_ranks_and_a_later_timeout(world):
    for rank, (levels, shared, twice, seconds) in enumerate(world(4).run(hierarchical_and_shared)):
        assert levels == [[rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]]
        assert shared and "twice" in twice and seconds == 77


def test_a_lone_process_without_torch_distributed_has_no_groups():
    assert mpu.get_tensor_model_parallel_group() is None and mpu.get_data_parallel_src_rank() == 0
    assert not mpu.model_parallel_is_initialized() and mpu.get_hierarchical_context_parallel_groups() == []
    assert ProcessGroupCollection().hcp is None
