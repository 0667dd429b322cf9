"""Which ranks form a group: the worked example, properties for any sizes and order, and sizes that cannot be."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.errors import ConfigError
from megatron_lite.process_groups import communicator_options, rank_lists
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.rank_grid import (
    AXES,
    PIPELINE_BEFORE_DATA,
    RankGrid,
    grids,
    hierarchy,
    instances,
    nearest_multiples,
)


def groups(text: str) -> list[list[int]]:
    """`0-3,8 4,5` -> [[0, 1, 2, 3, 8], [4, 5]]."""

    def ranks(word: str) -> list[int]:
        first, _, last = word.partition("-")
        return list(range(int(first), int(last or first) + 1))

    return [[rank for word in group.split(",") for rank in ranks(word)] for group in text.split()]


# 16 ranks, tp 2, cp 2, dp 2, pp 2; experts: tp 1, ep 4, hence dp 2. Worked by hand from the order of the axes.
WORKED = {
    "tp": "0,1 2,3 4,5 6,7 8,9 10,11 12,13 14,15",
    "cp": "0,2 1,3 4,6 5,7 8,10 9,11 12,14 13,15",
    "dp": "0,4 1,5 2,6 3,7 8,12 9,13 10,14 11,15",
    "pp": "0,8 1,9 2,10 3,11 4,12 5,13 6,14 7,15",
    "embd": "0,8 1,9 2,10 3,11 4,12 5,13 6,14 7,15",
    "pos_embd": "0 1 2 3 4 5 6 7",
    "dp_cp": "0,2,4,6 1,3,5,7 8,10,12,14 9,11,13,15",
    "tp_cp": "0-3 4-7 8-11 12-15",
    "tp_dp": "0,1,4,5 2,3,6,7 8,9,12,13 10,11,14,15",
    "tp_dp_cp": "0-7 8-15",
    "mp": "0,1,8,9 2,3,10,11 4,5,12,13 6,7,14,15",
    "ep": "0-3 4-7 8-11 12-15",
    "tp_ep": "0-3 4-7 8-11 12-15",
    "expt_tp": " ".join(map(str, range(16))),
    "expt_dp": "0,4 1,5 2,6 3,7 8,12 9,13 10,14 11,15",
    "tp_ep_pp": "0-3,8-11 4-7,12-15",
}
ONE_INSTANCE = {"intra_dp_cp": WORKED["dp_cp"], "intra_dist_opt": "0-15", "inter_dist_opt": WORKED["expt_tp"]}
TWO_INSTANCES = {
    "intra_dp_cp": "0,2 4,6 1,3 5,7 8,10 12,14 9,11 13,15",
    "inter_dist_opt": "0,4 2,6 1,5 3,7 8,12 10,14 9,13 11,15",
    "intra_dist_opt": WORKED["tp_ep_pp"],
    "intra_expt_dp": "0 4 1 5 2 6 3 7 8 12 9 13 10 14 11 15",
    "inter_expt_dp": WORKED["expt_dp"],
}


@pytest.mark.parametrize(("count", "more"), [(1, ONE_INSTANCE), (2, TWO_INSTANCES)])
def test_the_worked_example(count, more):
    lists = rank_lists(*grids(16, tp=2, cp=2, pp=2, ep=4, expert_tp=1), optimizer_instances=count)
    for name, text in (WORKED | more).items():
        assert sorted(lists[name]) == sorted(groups(text)), name
    assert list(lists)[0] == "dp_cp"  # gradient reduction gets its communicator first
    assert set(lists) == set(ProcessGroupCollection.names()) - {"hcp", "pp_channels"}


def test_stages_of_a_copy_may_be_neighbours():
    """--use-tp-pp-dp-mapping."""
    lists = rank_lists(*grids(16, tp=2, cp=2, pp=2, ep=2, order=PIPELINE_BEFORE_DATA))
    assert sorted(lists["dp"]) == groups("0,8 1,9 2,10 3,11 4,12 5,13 6,14 7,15")
    assert sorted(lists["pp"]) == groups("0,4 1,5 2,6 3,7 8,12 9,13 10,14 11,15")


SIZES = st.fixed_dictionaries({axis: st.integers(1, 3) for axis in AXES})


@given(SIZES, st.permutations(AXES), st.sets(st.sampled_from(AXES), min_size=1))
def test_groups_share_out_the_world_and_cross_in_one_rank(sizes, order, axes):
    """Every rank once; a group over some axes and one over all the others have exactly one rank in common."""
    grid = RankGrid(**sizes, order="-".join(order))
    found = grid.groups(*axes)
    assert sorted(itertools.chain(*found)) == list(range(grid.world_size))
    assert {len(group) for group in found} == {math.prod(sizes[axis] for axis in axes)}
    across = grid.groups(*set(AXES) - axes)
    for group in found:
        assert group == sorted(group)
        for other in across:
            assert len(set(group) & set(other)) == 1
    for rank in range(grid.world_size):
        place = grid.coordinates(rank)
        assert rank in grid.group_of(rank, *axes)
        assert all(
            grid.coordinates(mate)[axis] == place[axis]
            for mate in grid.group_of(rank, *axes)
            for axis in set(AXES) - axes
        )


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 3))
def test_levels_of_a_hierarchy_share_out_each_group(sizes, count):
    """Level 0 joins neighbours; one group of each level meets another level's in at most one rank."""
    size = math.prod(sizes)
    whole = [list(range(i * size, (i + 1) * size)) for i in range(count)]
    levels = hierarchy(whole, sizes)
    for width, level in zip(sizes, levels):
        assert {len(group) for group in level} == {width}
        assert sorted(itertools.chain(*level)) == list(range(count * size))
    assert levels[0][0] == list(range(sizes[0]))
    for one, other in itertools.combinations(levels, 2):
        assert all(len(set(a) & set(b)) <= 1 for a in one for b in other)


def test_levels_as_printed():
    assert hierarchy([list(range(8))], [2, 4]) == [groups("0,1 2,3 4,5 6,7"), groups("0,2,4,6 1,3,5,7")]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: grids(12, tp=2, pp=2, cp=2),
            ["parallel-size 2 x --pipeline-model-parallel-size 2 x --context-parallel-size 2 = 8", "12", "8 or 16"],
        ),
        (lambda: grids(8, tp=2, ep=3), ["--expert-model-parallel-size 3", "= 6", "world size 8", "6 or 12"]),
        (lambda: grids(3, tp=4), ["= 4", "world size 3", "start 4 processes"]),
        (lambda: grids(8, tp=2, pp=2, ep=4, expert_tp=1, order=PIPELINE_BEFORE_DATA), ["other pipeline groups"]),
        (lambda: RankGrid(tp=2, order="dp-pp-cp-ep"), ["leaves out tp", "2"]),
        (lambda: RankGrid(order="tp-tp"), ["twice"]),
        (lambda: RankGrid(order="tp-xp"), ["'xp'"]),
        (lambda: instances([[0, 1, 2, 3]], 3, "data parallelism"), ["optimizer-instances 3", "4 ranks"]),
        (lambda: hierarchy([[0, 1, 2, 3]], [2, 4]), ["--hierarchical-context-parallel-sizes 2 4", "size 4", "8"]),
    ],
)
def test_sizes_that_cannot_be_are_told_with_their_product_and_what_would_fit(make, words):
    with pytest.raises(ConfigError) as error:
        make()
    assert all(word in str(error.value) for word in words), str(error.value)


def test_nearest_multiples():
    assert [nearest_multiples(*case) for case in ((7, 2), (1, 4), (8, 4))] == ["6 or 8", "4", "8 or 12"]


# -- settings of NCCL's communicators ----------------------------------------------------------------------------
NAMES = ProcessGroupCollection.names()


def test_communicator_settings_by_megatrons_names(tmp_path):
    file = tmp_path / "nccl.yaml"
    file.write_text("tp: {max_ctas: 16, min_ctas: 4, cga_cluster_size: 2}\nep_dp: {net_name: IB}\n")
    found = communicator_options(str(file), ["tp", "pp"], NAMES)
    assert found == {
        "tp": {"max_ctas": 16, "min_ctas": 4, "cga_cluster_size": 2, "is_high_priority_stream": True},
        "expt_dp": {"net_name": "IB"},
        "pp": {"is_high_priority_stream": True},
    }
    assert communicator_options(None, [], NAMES) == {}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("xp: {max_ctas: 1}", "xp"),
        ("tp: 5", "tp: 5"),
        ("tp: {max_ctas: many}", "max_ctas: many"),
        ("tp: {colour: 1}", "colour"),
        ("tp: {net_name: Wire}", "net_name: Wire"),
        ("- tp", "no settings"),
        ("tp: {", "cannot be read"),
    ],
)
def test_communicator_settings_that_mean_nothing_are_told(tmp_path, text, word):
    file = tmp_path / "nccl.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        communicator_options(str(file), [], NAMES)
    assert word in str(error.value) and str(file) in str(error.value)


def test_a_missing_file_and_an_unknown_group_are_told(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        communicator_options(str(tmp_path / "none.yaml"), [], NAMES)
    with pytest.raises(ConfigError, match="--high-priority-stream-groups xp"):
        communicator_options(None, ["xp"], NAMES)
