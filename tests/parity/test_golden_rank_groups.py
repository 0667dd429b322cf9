"""Groups of every order string equal those that Megatron forms."""

import json
from pathlib import Path

import pytest

from megatron_lite.errors import ConfigError
from megatron_lite.process_groups import rank_lists
from megatron_lite.rank_grid import RankGrid, grids

CASES = json.loads((Path(__file__).parents[1] / "golden" / "rank_groups.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['world']}-{c['order']}-{c['tp']}{c['cp']}{c['pp']}{c['ep']}")
def test_groups_equal_golden(case):
    """A wrong axis order, or ranks listed in the wrong order inside a group, shows here."""
    sizes = {axis: case[axis] for axis in ("tp", "cp", "pp")}
    if "error" in case:
        with pytest.raises(ConfigError, match="leaves out"):
            RankGrid(**sizes, dp=case.get("dp", 1), ep=case["ep"], order=case["order"])
        return
    dense = RankGrid(**sizes, dp=case["dp"], order=case["order"])
    expert = RankGrid(tp=case["etp"], ep=case["ep"], dp=case["expert_dp"], pp=case["pp"], order=case["order"])
    assert dense.world_size == expert.world_size == case["world"]
    for token, ranks in case["decoder"].items():
        assert dense.groups(*token.split("-")) == ranks, token
    for token, ranks in case["expert"].items():
        assert expert.groups(*token.split("-")) == ranks, token


def test_embedding_groups_are_the_ends_of_each_pipeline():
    """A middle stage in the tied-embedding group would add gradients of a table that it does not hold."""
    lists = rank_lists(*grids(16, tp=2, pp=4))
    assert lists["embd"] == [[0, 12], [1, 13], [2, 14], [3, 15]] or lists["embd"] == [[r, r + 12] for r in (0, 1, 2, 3)]
    assert lists["pos_embd"] == [[0], [1], [2], [3]]
