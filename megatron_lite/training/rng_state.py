"""The states of all random generators of a rank, as plain values: with them a resumed run draws the same masks.

Four generators count: Python's, numpy's, torch's on the CPU (and on the CUDA device), and the regions of
`tensor_parallel.random`. A rank is named by its place in the layout, so that another number of ranks finds its states.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from megatron_lite.collectives import group_rank, group_size
from megatron_lite.errors import CheckpointError
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.tensor_parallel.random import get_cuda_rng_tracker


def layout_of(groups: ProcessGroupCollection) -> dict[str, int]:
    """Sizes of the dimensions that decide which random numbers a rank draws."""
    return {name: group_size(getattr(groups, name)) for name in ("tp", "pp", "cp", "dp")}


def state_name(groups: ProcessGroupCollection, dp_rank: int | None = None) -> str:
    """The name on disk of this rank's states, or of those of its peer at `dp_rank`."""
    tp, pp, cp, dp = (group_rank(getattr(groups, name)) for name in ("tp", "pp", "cp", "dp"))
    return f"rng_state.tp{tp}.pp{pp}.cp{cp}.dp{dp if dp_rank is None else dp_rank}"


def find_state(saved: Collection[str], groups: ProcessGroupCollection) -> str | None:
    """The name of the states for this rank among the saved ones: its own, or those of data-parallel rank 0."""
    candidates = (state_name(groups), state_name(groups, 0))
    return next((name for name in candidates if name in saved), None)


class RngSnapshot:
    """The generators' states as they are now, in memory: cheap enough to take before every step."""

    def __init__(self) -> None:
        self._python, self._numpy, self._torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if _on_cuda() else None
        self._tracker = get_cuda_rng_tracker().get_states()

    def restore(self) -> None:
        """Draw from here on what was drawn after the snapshot."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        get_cuda_rng_tracker().set_states(self._tracker)


def _on_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def get_rng_state() -> dict[str, Any]:
    """All states, as numbers, lists and tensors."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    on_cuda = _on_cuda()
    return {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {
            "kind": str(kind),
            "keys": [int(key) for key in np.asarray(keys)],
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if on_cuda else None,
        "tracker": {name: state.cpu() for name, state in get_cuda_rng_tracker().get_states().items()},
    }


def set_rng_state(state: dict[str, Any]) -> bool:
    """Undoes `get_rng_state`.

    Returns: whether everything was restored. A run that moved between CPU and GPU keeps its own seeds on the device.
    Raises: CheckpointError for states that no generator takes.
    """
    on_cuda = _on_cuda()
    try:
        python, numpy_state = state["python"], state["numpy"]
        random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
        np.random.set_state(
            (
                numpy_state["kind"],
                np.array(numpy_state["keys"], dtype=np.uint32),
                numpy_state["position"],
                numpy_state["has_gauss"],
                numpy_state["cached"],
            )
        )
        torch.set_rng_state(state["torch"])
        if (state["cuda"] is not None) != on_cuda:
            return False
        if on_cuda:
            torch.cuda.set_rng_state(state["cuda"])
        tracker = get_cuda_rng_tracker()
        if state["tracker"].keys() != tracker.get_states().keys():
            return False
        tracker.set_states(state["tracker"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"the states of the random generators cannot be restored: {error!r}",
            why="they were saved by another version of Python, numpy or torch, or are damaged",
            fix="--no-load-rng starts from --seed",
        ) from error
    return True
