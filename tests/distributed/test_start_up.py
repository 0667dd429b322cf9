"""Start-up on several ranks: seeds, what stages talk over."""

from types import SimpleNamespace

import pytest
import torch

from megatron_lite import collectives
from megatron_lite.errors import ConfigError
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.tensor_parallel.random import get_cuda_rng_tracker
from megatron_lite.training.initialize import check_stage_transport, seed_of_rank, set_random_seed


def _draws(flag):
    """What dropout would draw outside and inside of the tensor-parallel region."""
    groups = ProcessGroupCollection(dp=collectives.world(), dp_cp=collectives.world())
    args = SimpleNamespace(seed=5, data_parallel_random_init=flag)
    set_random_seed(seed_of_rank(args, groups))
    outside = torch.rand(4)
    with get_cuda_rng_tracker().fork():
        inside = torch.rand(4)
    return outside, inside


def test_data_parallel_random_init_gives_each_rank_its_own_random_numbers(world):
    """The flag was parsed and changed nothing."""
    first, second = world(2).run(_draws, True)
    assert not torch.equal(first[0], second[0]) and not torch.equal(first[1], second[1])
    alike = world(2).run(_draws, False)
    assert all(torch.equal(a, b) for a, b in zip(*alike))
    assert all(torch.equal(a, b) for a, b in zip(first, alike[0]))  # the first rank's are those of --seed itself


def test_a_transport_between_stages_that_the_run_has_not_is_refused():
    """On a CPU the flag was accepted, and gloo taken."""
    check_stage_transport(SimpleNamespace(pipeline_model_parallel_comm_backend=None), "gloo")
    check_stage_transport(SimpleNamespace(pipeline_model_parallel_comm_backend="nccl"), "nccl")
    with pytest.raises(ConfigError, match="comm-backend nccl in a run over gloo"):
        check_stage_transport(SimpleNamespace(pipeline_model_parallel_comm_backend="nccl"), "gloo")
