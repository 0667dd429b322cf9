"""From sizes to process groups: made once, in one order on all ranks; a group of one rank makes no communicator.

`new_group` is collective: every rank takes part in making every group, in the same order, also those that it is not
in. Groups with the same ranks share one communicator (tp_cp is tp when cp is 1).
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from megatron_lite.collectives import name_group
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.rank_grid import RankGrid

# name -> (grid, axes); the order is the order of creation, gradient reduction first
_AXES: dict[str, tuple[str, tuple[str, ...]]] = {
    "dp_cp": ("dense", ("dp", "cp")),
    "dp": ("dense", ("dp",)),
    "cp": ("dense", ("cp",)),
    "tp": ("dense", ("tp",)),
    "mp": ("dense", ("tp", "pp")),
    "pp": ("dense", ("pp",)),
    "tp_cp": ("dense", ("tp", "cp")),
    "tp_dp": ("dense", ("tp", "dp")),
    "tp_dp_cp": ("dense", ("tp", "dp", "cp")),
    "ep": ("expert", ("ep",)),
    "expt_tp": ("expert", ("tp",)),
    "tp_ep": ("expert", ("tp", "ep")),
    "tp_ep_pp": ("expert", ("tp", "ep", "pp")),
    "expt_dp": ("expert", ("dp",)),
}


def rank_lists(dense: RankGrid, expert: RankGrid) -> dict[str, list[list[int]]]:
    """Every group's ranks by the group's name, in the order of creation."""
    grids = {"dense": dense, "expert": expert}
    lists = {name: grids[grid].groups(*axes) for name, (grid, axes) in _AXES.items()}
    stages = dense.groups("pp")
    lists["embd"] = [sorted({ranks[0], ranks[-1]}, key=ranks.index) for ranks in stages]
    lists["pos_embd"] = [ranks[:1] for ranks in stages]
    return lists


def make_process_groups(
    dense: RankGrid, expert: RankGrid, timeout: timedelta | None = None, backend: str | None = None
) -> ProcessGroupCollection:
    """Make every group of the two grids; collective over all ranks.

    Args:
        timeout, backend: as in `torch.distributed.new_group`.
    Returns: this rank's groups, None where it is alone.
    """
    mine: dict[str, dist.ProcessGroup | None] = {}
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}
    if dist.is_initialized() and dist.get_world_size() > 1:
        rank = dist.get_rank()
        everyone = tuple(range(dist.get_world_size()))
        world = dist.group.WORLD
        assert world is not None, "torch.distributed is initialised"
        made[everyone] = world
        for name, lists in rank_lists(dense, expert).items():
            for ranks in map(tuple, lists):
                if len(ranks) > 1 and ranks not in made:
                    made[ranks] = dist.new_group(ranks, timeout=timeout, backend=backend)
                if rank in ranks and len(ranks) > 1:
                    mine[name] = made[ranks]
                    name_group(mine[name], name)
    return ProcessGroupCollection(**mine)
