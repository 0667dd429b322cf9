"""The process groups of one run, as one object that is handed to whatever communicates.

    tp   ranks that split a layer            dp_cp    gradient reduction (context parallelism counts as data)
    pp   ranks that split the layer stack    mp       tp x pp: one copy of the model
    dp   ranks that split the batch          embd     stages that hold the tied word embedding
    cp   ranks that split the sequence       ep, ...  experts

With several optimizer instances dp_cp falls into consecutive parts:

    intra_dp_cp      one part: ranks that share out one copy of the optimizer state
    inter_dist_opt   ranks at the same place of all parts: they hold the same shard
    intra_dist_opt   all ranks of one instance: gradient norm, found-inf

A group is None when this rank is alone in it: `collectives` then returns the input, and no communicator exists.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_registered: ProcessGroupCollection | None = None


@dataclass(kw_only=True)
class ProcessGroupCollection:
    """Groups by name; all None is a run of one process.

    hcp: the levels of hierarchical context parallelism, innermost first; None without it.
    pp_channels: pp again, per (forward, around) of the messages between stages, where the backend does not tell
        messages of two ranks apart; None: pp carries all of them.
    """

    tp: ProcessGroup | None = None
    cp: ProcessGroup | None = None
    dp: ProcessGroup | None = None
    pp: ProcessGroup | None = None
    dp_cp: ProcessGroup | None = None
    tp_cp: ProcessGroup | None = None
    tp_dp: ProcessGroup | None = None
    tp_dp_cp: ProcessGroup | None = None
    mp: ProcessGroup | None = None
    embd: ProcessGroup | None = None
    pos_embd: ProcessGroup | None = None
    ep: ProcessGroup | None = None
    expt_tp: ProcessGroup | None = None
    tp_ep: ProcessGroup | None = None
    tp_ep_pp: ProcessGroup | None = None
    expt_dp: ProcessGroup | None = None
    intra_dp_cp: ProcessGroup | None = None
    inter_dist_opt: ProcessGroup | None = None
    intra_expt_dp: ProcessGroup | None = None
    inter_expt_dp: ProcessGroup | None = None
    intra_dist_opt: ProcessGroup | None = None
    hcp: list[ProcessGroup | None] | None = None
    pp_channels: dict[tuple[bool, bool], ProcessGroup] | None = None

    @classmethod
    def names(cls) -> list[str]:
        """Every field's name."""
        return [f.name for f in fields(cls)]

    @staticmethod
    def use_mpu_process_groups(required_pgs: list[str] | None = None) -> ProcessGroupCollection:
        """The collection that start-up registered (one of a lone process if none was).

        Args:
            required_pgs: accepted for scripts written for Megatron; the whole collection is returned.
        """
        return _registered if _registered is not None else ProcessGroupCollection()


def register_process_groups(collection: ProcessGroupCollection | None) -> None:
    """Make `collection` the default that `use_mpu_process_groups` and `parallel_state` answer with; None forgets it."""
    global _registered
    _registered = collection


def registered_process_groups() -> ProcessGroupCollection | None:
    """The default collection, or None before `initialize_model_parallel`."""
    return _registered
