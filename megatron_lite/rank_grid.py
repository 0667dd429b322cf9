"""Which ranks form a group: pure arithmetic on the grid of all ranks, no torch.

The ranks are the cells of a grid whose axes are named in an order string; the left-most axis varies fastest:

    order tp-cp-ep-dp-pp, tp=2 dp=2 pp=2      rank = tp + 2 * dp + 4 * pp
    tp  [0 1] [2 3] [4 5] [6 7]      dp  [0 2] [1 3] [4 6] [5 7]      pp  [0 4] [1 5] [2 6] [3 7]

A group over some axes varies those and fixes the rest. Dense and expert parameters see the same ranks through two
grids: the expert grid has its own tp, and ep instead of cp; both have the same pipeline groups.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

from megatron_lite.errors import ConfigError

AXES = ("tp", "cp", "ep", "dp", "pp")
DEFAULT_ORDER = "tp-cp-ep-dp-pp"
PIPELINE_BEFORE_DATA = "tp-cp-ep-pp-dp"  # --use-tp-pp-dp-mapping: the stages of a copy are neighbours


@dataclass(frozen=True)
class RankGrid:
    """All ranks, laid out along tp, cp, ep, dp and pp.

    Args:
        order: axis names joined by '-', fastest first. An axis that is left out must have size 1.
    Raises: ConfigError for an unknown, repeated or missing axis.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    order: str = DEFAULT_ORDER
    axes: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        axes = self.order.lower().split("-")
        if wrong := [axis for axis in axes if axis not in AXES]:
            raise ConfigError(f"rank order {self.order!r} names {wrong[0]!r}", why=f"the axes are {', '.join(AXES)}")
        if len(set(axes)) < len(axes):
            raise ConfigError(f"rank order {self.order!r} names an axis twice", why="each axis has one place")
        for axis in (axis for axis in AXES if axis not in axes):
            if getattr(self, axis) != 1:
                raise ConfigError(
                    f"rank order {self.order!r} leaves out {axis}, whose size is {getattr(self, axis)}",
                    why="only an axis of size 1 may be left out",
                    fix=f"add {axis} to the order, e.g. {DEFAULT_ORDER}",
                )
            axes.append(axis)
        object.__setattr__(self, "axes", tuple(axes))

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return math.prod(getattr(self, axis) for axis in AXES)

    def groups(self, *axes: str) -> list[list[int]]:
        """Every group over `axes`: the ranks of a group vary these axes (in the grid's order) and share the others."""
        inside = [a for a in self.axes if a in axes]
        outside = [a for a in self.axes if a not in axes]
        return [[self._rank({**fixed, **moving}) for moving in self._cells(inside)] for fixed in self._cells(outside)]

    def group_of(self, rank: int, *axes: str) -> list[int]:
        """The group over `axes` that `rank` is in."""
        return next(group for group in self.groups(*axes) if rank in group)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of `rank` along each axis."""
        place = {}
        for axis in self.axes:
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return place

    def _cells(self, axes: list[str]) -> list[dict[str, int]]:
        ranges = [range(getattr(self, axis)) for axis in reversed(axes)]  # the last of a product varies fastest
        return [dict(zip(reversed(axes), cell)) for cell in itertools.product(*ranges)]

    def _rank(self, place: dict[str, int]) -> int:
        rank, stride = 0, 1
        for axis in self.axes:
            rank += place[axis] * stride
            stride *= getattr(self, axis)
        return rank


def nearest_multiples(number: int, unit: int) -> str:
    """The multiples of `unit` around `number`, as a message has them: "6 or 8"; what is not positive is left out."""
    below = number // unit * unit
    return " or ".join(str(n) for n in (below, below + unit) if n > 0)


def grids(
    world_size: int,
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    expert_tp: int | None = None,
    order: str = DEFAULT_ORDER,
) -> tuple[RankGrid, RankGrid]:
    """The dense and the expert grid of a world; the data-parallel sizes follow from the others.

    Raises: ConfigError where the sizes do not divide the world, or the two grids disagree on the pipeline groups.
    """
    etp = tp if expert_tp is None else expert_tp
    flags = "--tensor-model-parallel-size {} x --pipeline-model-parallel-size {} x --context-parallel-size {}"
    for model, what in (
        (tp * pp * cp, flags.format(tp, pp, cp)),
        (etp * ep * pp, f"expert tensor size {etp} x --expert-model-parallel-size {ep} x pipeline size {pp}"),
    ):
        if model <= 0 or world_size % model:
            nearest = nearest_multiples(world_size, max(model, 1))
            raise ConfigError(
                f"{what} = {model} does not divide the world size {world_size}",
                why="every copy of the model takes that many ranks",
                fix=f"start {nearest} processes, or choose other parallel sizes",
            )
    dense = RankGrid(tp=tp, cp=cp, dp=world_size // (tp * pp * cp), pp=pp, order=order)
    expert = RankGrid(tp=etp, ep=ep, dp=world_size // (etp * ep * pp), pp=pp, order=order)
    if sorted(dense.groups("pp")) != sorted(expert.groups("pp")):
        raise ConfigError(
            f"rank order {order!r} gives experts other pipeline groups than dense layers",
            why=f"data-parallel sizes differ: dense {dense.dp} (x cp {cp}), expert {expert.dp}",
            fix=f"use the order {DEFAULT_ORDER}, where the pipeline axis is last",
        )
    return dense, expert


# -- groups inside groups ----------------------------------------------------------------------------------------


def instances(groups: list[list[int]], count: int, name: str) -> tuple[list[list[int]], list[list[int]]]:
    """Each group cut into `count` consecutive parts, and the ranks at the same place of all parts of a group.

        groups [0 2 4 6], count 2      parts [0 2] [4 6]      across [0 4] [2 6]

    Args:
        name: of the groups, for the message.
    Raises: ConfigError if the parts would not be equal.
    """
    size = len(groups[0])
    if count < 1 or size % count:
        raise ConfigError(
            f"--num-distributed-optimizer-instances {count} with {size} ranks in {name}",
            why="the instances are equal parts of these ranks",
            fix=f"a divisor of {size}",
        )
    part = size // count
    parts = [group[i * part : (i + 1) * part] for group in groups for i in range(count)]
    across = [group[place::part] for group in groups for place in range(part)]
    return parts, across


def joined(groups: list[list[int]], count: int) -> list[list[int]]:
    """The groups, `count` successive ones joined into one, ranks in order of rank."""
    return [sorted(rank for group in groups[i : i + count] for rank in group) for i in range(0, len(groups), count)]


def hierarchy(groups: list[list[int]], sizes: list[int]) -> list[list[list[int]]]:
    """Levels of sub-groups: level 0 joins neighbours, each next level joins ranks at the same place of the level below.

        groups [0 1 2 3 4 5 6 7], sizes [2, 4]      level 0 [0 1] [2 3] [4 5] [6 7]      level 1 [0 2 4 6] [1 3 5 7]

    Raises: ConfigError if the sizes do not multiply to the size of a group.
    """
    size = len(groups[0])
    if math.prod(sizes) != size or min(sizes) < 1:
        raise ConfigError(
            f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes))} with --context-parallel-size {size}",
            why=f"the levels multiply to the context-parallel size, and these to {math.prod(sizes)}",
            fix="sizes whose product is the context-parallel size",
        )
    levels, below = [], 1
    for width in sizes:
        levels.append(
            [
                group[block + place : block + place + below * width : below]
                for group in groups
                for block in range(0, size, below * width)
                for place in range(below)
            ]
        )
        below *= width
    return levels
