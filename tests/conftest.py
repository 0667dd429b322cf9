"""What all tests share: real worlds of gloo processes, and golden data that was made elsewhere."""

import os

# Before torch is imported: threads that spin while they wait make a busy machine a hundred times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest

from tests.world import World, Worlds

# An example's time says how busy the machine is, not whether it is right.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def _no_world_left() -> Iterator[None]:
    """Verbs that run in pytest's own process leave their world of one rank to it; the next test begins without."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], World]]:
    """`world(4).run(function, *args)` -> the results of 4 ranks. Worlds live as long as the session."""
    worlds = Worlds()
    yield worlds
    worlds.close()


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Any]:
    """`golden("split.json")` -> the parsed file; `.npz` gives a dict of arrays; anything else its path."""

    def load(name: str) -> Any:
        path = GOLDEN / name
        if path.suffix == ".json":
            return json.loads(path.read_text())
        if path.suffix == ".npz":
            with np.load(path) as arrays:
                return dict(arrays)
        return path

    return load
