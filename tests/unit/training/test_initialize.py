"""Start-up of one process: deterministic mode refuses what contradicts it, and sets the rest."""

import os

import pytest
import torch

from megatron_lite.errors import ConfigError, PeerLost
from megatron_lite.training import initialize

VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO")


@pytest.fixture
def clean(monkeypatch):
    """An environment without these variables, and torch as it was afterwards."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "x")  # so that it is put back
        monkeypatch.delenv(name)
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    yield monkeypatch
    torch.use_deterministic_algorithms(before[0])
    torch.backends.cudnn.benchmark = before[1]


def test_deterministic_mode_sets_what_is_missing(clean):
    torch.backends.cudnn.benchmark = True
    initialize._deterministic()
    assert {name: os.environ[name] for name in VARIABLES} == dict(zip(VARIABLES, (":4096:8", "Ring", "0")))
    assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark


@pytest.mark.parametrize("algorithm", ["Ring", "CollnetDirect", "CollnetChain", "^NVLS", "Ring,CollnetChain"])
def test_deterministic_mode_keeps_a_setting_that_is_deterministic(clean, algorithm):
    clean.setenv("NCCL_ALGO", algorithm)
    clean.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    initialize._deterministic()
    assert os.environ["NCCL_ALGO"] == algorithm and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.parametrize(
    "name, value",
    [
        ("NCCL_ALGO", "Tree"),
        ("NCCL_ALGO", "Ring,NVLS"),
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0"),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1"),
    ],
)
def test_deterministic_mode_refuses_a_setting_that_contradicts_it(clean, name, value):
    """Overruled in silence, a run would not be the one that its environment describes."""
    torch.use_deterministic_algorithms(False)
    clean.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        initialize._deterministic()
    assert os.environ[name] == value and not torch.are_deterministic_algorithms_enabled()


def test_a_rank_that_finds_nobody_at_an_address_is_a_witness_and_other_errors_are_their_own():
    """Its traceback stood above the error of the rank that had died."""
    told = "rank 2 could not connect to the others: Gloo connectFullMesh failed with x"
    with pytest.raises(PeerLost, match=told), initialize._connecting(2):
        raise RuntimeError("Gloo connectFullMesh failed with x\nand more")
    with pytest.raises(RuntimeError, match="something else"), initialize._connecting(2):
        raise RuntimeError("something else")
