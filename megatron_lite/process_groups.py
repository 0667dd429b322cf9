"""From sizes to process groups: made once, in one order on all ranks; a group of one rank makes no communicator.

`new_group` is collective: every rank takes part in making every group, in the same order, also those that it is not
in. Groups with the same ranks share one communicator (tp_cp is tp when cp is 1), unless NCCL options tell them apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_lite.collectives import name_group
from megatron_lite.errors import ConfigError
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.rank_grid import RankGrid, hierarchy, instances, joined

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
# Megatron's names of groups in its NCCL options, where ours differ.
_ALIASES = {"ep_tp": "expt_tp", "tp_ep_mp": "tp_ep", "ep_dp": "expt_dp", "intra_ep_dp": "intra_expt_dp"}
_HIERARCHY = "hcp_"


def rank_lists(
    dense: RankGrid,
    expert: RankGrid,
    hierarchical_cp_sizes: list[int] | None = None,
    optimizer_instances: int = 1,
) -> dict[str, list[list[int]]]:
    """Every group's ranks by the group's name, in the order of creation; `hcp_0`, `hcp_1`, ... are the levels of hcp.

    Raises: ConfigError for instances or levels that do not fit.
    """
    grids = {"dense": dense, "expert": expert}
    lists = {name: grids[grid].groups(*axes) for name, (grid, axes) in _AXES.items()}
    stages = dense.groups("pp")
    lists["embd"] = [sorted({ranks[0], ranks[-1]}, key=ranks.index) for ranks in stages]
    lists["pos_embd"] = [ranks[:1] for ranks in stages]
    count = optimizer_instances
    lists["intra_dp_cp"], lists["inter_dist_opt"] = instances(lists["dp_cp"], count, "data x context parallelism")
    lists["intra_expt_dp"], lists["inter_expt_dp"] = instances(lists["expt_dp"], count, "the experts' data parallelism")
    lists["intra_dist_opt"] = joined(lists["tp_ep_pp"], expert.dp // count)
    if hierarchical_cp_sizes is not None:
        for level, groups in enumerate(hierarchy(lists["cp"], hierarchical_cp_sizes)):
            lists[f"{_HIERARCHY}{level}"] = groups
    return lists


def make_process_groups(
    dense: RankGrid,
    expert: RankGrid,
    timeout: timedelta | None = None,
    backend: str | None = None,
    *,
    hierarchical_cp_sizes: list[int] | None = None,
    optimizer_instances: int = 1,
    nccl_options: Mapping[str, Mapping[str, Any]] | None = None,
    separate_channels: bool | None = None,
) -> ProcessGroupCollection:
    """Make every group of the two grids; collective over all ranks.

    Args:
        timeout, backend: as in `torch.distributed.new_group`.
        hierarchical_cp_sizes: levels of context parallelism, whose product is its size.
        optimizer_instances: parts of dp_cp that hold an optimizer state each.
        nccl_options: group name -> settings of its communicator (`communicator_options`); empty where the backend is
            another one.
        separate_channels: give each kind of message between stages a group of its own (`pp_channels`); None: where the
            backend needs it, which is everywhere but on gloo.
    Returns: this rank's groups, None where it is alone.
    """
    lists = rank_lists(dense, expert, hierarchical_cp_sizes, optimizer_instances)
    mine: dict[str, dist.ProcessGroup | None] = dict.fromkeys(lists)
    options = dict(nccl_options or {})
    if dist.is_initialized() and dist.get_world_size() > 1:
        made: dict[Any, dist.ProcessGroup] = {}
        rank = dist.get_rank()
        world = dist.group.WORLD
        assert world is not None, "torch.distributed is initialised"
        made[tuple(range(dist.get_world_size())), None] = world
        for name, groups in lists.items():
            wanted = options.get(name)
            settings = tuple(sorted(wanted.items())) if wanted else None
            for ranks in map(tuple, groups):
                if len(ranks) == 1:
                    continue
                if (ranks, settings) not in made:
                    made[ranks, settings] = dist.new_group(
                        ranks, timeout=timeout, backend=backend, pg_options=_nccl_options(wanted) if wanted else None
                    )
                if rank in ranks:
                    mine[name] = made[ranks, settings]
                    name_group(mine[name], name)
    levels = [mine.pop(name) for name in sorted(mine) if name.startswith(_HIERARCHY)]
    hcp = levels if hierarchical_cp_sizes is not None else None
    if separate_channels is None:
        separate_channels = dist.is_initialized() and (backend or dist.get_backend()) != "gloo"
    channels = _channels(lists["pp"], timeout, backend, options.get("pp")) if separate_channels else None
    named: dict[str, Any] = mine
    return ProcessGroupCollection(**named, hcp=hcp, pp_channels=channels)


def _channels(
    pipelines: list[list[int]], timeout: timedelta | None, backend: str | None, settings: Mapping[str, Any] | None
) -> dict[tuple[bool, bool], dist.ProcessGroup] | None:
    """Groups of this rank's pipeline for activations and for gradients; collective over all ranks.

    NCCL works off what two ranks send each other in the order in which it was asked for: a send whose receiver is busy
    would hold up the receive behind it. Two stages are each other's neighbours on both sides: there the way round from
    the last stage to the first needs groups of its own too.
    """
    stages = len(pipelines[0])
    if stages == 1:
        return None
    mine: dict[tuple[bool, bool], dist.ProcessGroup] = {}
    for around in (False, True) if stages == 2 else (False,):
        for forward in (True, False):
            for ranks in pipelines:
                options = _nccl_options(settings) if settings else None
                group = dist.new_group(ranks, timeout=timeout, backend=backend, pg_options=options)
                if dist.get_rank() in ranks:
                    mine[forward, around] = group
                    name_group(group, "pp")
    for forward in (True, False):
        mine.setdefault((forward, True), mine[forward, False])
    return mine


def side_group(name: str, timeout: timedelta | None = None) -> dist.ProcessGroup | None:
    """One more group of all ranks, over gloo, for what goes on beside the training; collective over all ranks.

    Returns: None in a run of one process. `destroy_process_group` ends it.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    group = dist.new_group(timeout=timeout, backend="gloo")
    name_group(group, name)
    return group


def set_timeout(collection: ProcessGroupCollection, timeout: timedelta) -> None:
    """From now on this is how long a collective of the run may take."""
    from torch.distributed.distributed_c10d import _set_pg_timeout  # torch has no public name for it

    if not dist.is_initialized():
        return
    found: Iterable[Any] = [
        getattr(collection, name) for name in collection.names() if name not in ("hcp", "pp_channels")
    ]
    channels = (collection.pp_channels or {}).values()
    for group in {dist.group.WORLD, *found, *(collection.hcp or ()), *channels} - {None}:
        _set_pg_timeout(timeout, group)


# -- NCCL --------------------------------------------------------------------------------------------------------

_COMMUNICATOR_SETTINGS = {
    "cga_cluster_size": int,
    "max_ctas": int,
    "min_ctas": int,
    "net_name": str,
    "is_high_priority_stream": bool,
}


def communicator_options(
    path: str | None, high_priority: Collection[str] | None, names: Collection[str]
) -> dict[str, dict[str, Any]]:
    """Group name -> settings of its NCCL communicator, from `--nccl-communicator-config-path` and
    `--high-priority-stream-groups`.

    Args:
        path: YAML: group name -> {cga_cluster_size, max_ctas, min_ctas, net_name, is_high_priority_stream}.
        names: of all groups.
    Raises: ConfigError for a file that cannot be read, and for names, settings and values that mean nothing.
    """
    found: dict[str, dict[str, Any]] = {}
    if path is not None:
        flag = f"--nccl-communicator-config-path {path}"
        for name, settings in _read_yaml(path, flag).items():
            group = _ALIASES.get(name, name)
            if group not in names or not isinstance(settings, dict):
                raise ConfigError(f"{flag}: {name}: {settings}", why="settings by group", fix=_listed(names))
            for key, value in settings.items():
                kind = _COMMUNICATOR_SETTINGS.get(key)
                if kind is None or not isinstance(value, kind) or (key == "net_name" and value not in ("IB", "Socket")):
                    raise ConfigError(
                        f"{flag}: {name}: {key}: {value}",
                        why="no such setting, or no such value of it",
                        fix=f"{', '.join(_COMMUNICATOR_SETTINGS)}; net_name is IB or Socket",
                    )
            found[group] = dict(settings)
    for name in high_priority or ():
        group = _ALIASES.get(name, name)
        if group not in names:
            raise ConfigError(f"--high-priority-stream-groups {name}", why="no such group", fix=_listed(names))
        found.setdefault(group, {})["is_high_priority_stream"] = True
    return found


def _listed(names: Collection[str]) -> str:
    return f"the groups are {', '.join(sorted(names))}"


def _read_yaml(path: str, flag: str) -> dict[str, Any]:
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{flag} cannot be read: {error}", fix="check the path and the file") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{flag} holds no settings by group", fix="tp: {max_ctas: 16}, one group a line")
    return content


def _nccl_options(settings: Mapping[str, Any]) -> Any:
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=settings.get("is_high_priority_stream", False))
    for key, value in settings.items():
        if key != "is_high_priority_stream":
            setattr(options.config, key, value)
    return options
