"""The few helpers that users import from Megatron's `utils`. A closed list: nothing of ours belongs here."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from megatron_lite.collectives import group_rank, group_size
from megatron_lite.initialization import init_method_normal, scaled_init_method_normal

__all__ = [
    "divide",
    "get_attr_wrapped_model",
    "get_model_config",
    "get_pg_rank",
    "get_pg_size",
    "init_method_normal",
    "scaled_init_method_normal",
]


def divide(numerator: int, denominator: int) -> int:
    """The quotient. Raises: ValueError where a rest is left."""
    if numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")
    return numerator // denominator


def get_pg_size(group: ProcessGroup | None = None) -> int:
    """Ranks in a group; None is a group of one."""
    return group_size(group)


def get_pg_rank(group: ProcessGroup | None = None) -> int:
    """This rank's place in a group; None is a group of one."""
    return group_rank(group)


def get_attr_wrapped_model(model: nn.Module, attr: str, allow_none: bool = True, return_model_obj: bool = False) -> Any:
    """An attribute of the model under its wrappers (DDP, Float16Module, ...).

    Args:
        allow_none: whether a value of None counts as found.
        return_model_obj: return the module that has it.
    Raises: AttributeError where no layer has it.
    """
    module: Any = model
    while not hasattr(module, attr) or (not allow_none and getattr(module, attr) is None):
        if not hasattr(module, "module"):
            raise AttributeError(f"{type(model).__name__} has no {attr!r} under any of its wrappers")
        module = module.module
    return module if return_model_obj else getattr(module, attr)


def get_model_config(model: nn.Module) -> Any:
    """The config of the model under its wrappers."""
    return get_attr_wrapped_model(model, "config", allow_none=False)
