"""Which parameters share a learning rate and a weight decay.

    wd_mult 0     every 1-d parameter and every name that ends in .bias (norms of queries and keys may be excepted)
    lr_mult       what the caller's condition picks
    own bounds    --decoupled-lr: the input embedding and the output layer
    is_matrix     --optimizer muon: matrices that it makes orthogonal; the rest is stepped on by another optimizer

Groups are the same, in the same order, on all ranks of a model copy, also where a pipeline stage holds no parameter of
one: schedules and checkpoints speak of them by number. The group with nothing special comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from megatron_lite import collectives
from megatron_lite.optimizer.optimizer_config import OptimizerConfig

Condition = Callable[[str, nn.Parameter], bool]
Key = tuple[float, float, bool, bool, bool]  # wd_mult, lr_mult, is_expert, is_decoupled_lr, is_matrix


def get_param_groups(
    model_chunks: Sequence[nn.Module],
    config: OptimizerConfig,
    no_weight_decay_cond: Condition | None = None,
    scale_lr_cond: Condition | None = None,
    lr_mult: float = 1.0,
    mp_group: ProcessGroup | None = None,
) -> list[dict[str, Any]]:
    """The groups with this rank's parameters.

    Args:
        no_weight_decay_cond: `(name, parameter) -> bool` in place of the rule above.
        scale_lr_cond, lr_mult: parameters for which the condition holds run at `lr_mult` times the learning rate.
        mp_group: the ranks of a model copy; keys are gathered over it.
    Returns: dicts with `params` (in module order), `wd_mult`, `lr_mult`, `is_expert_parallel`, `is_decoupled_lr`,
        `is_matrix`, and `max_lr`, `min_lr` where the group has its own.
    """
    members: dict[Key, list[nn.Parameter]] = {}
    for chunk in model_chunks:
        for name, param in chunk.named_parameters():
            if param.requires_grad:
                no_decay = (
                    no_weight_decay_cond(name, param)
                    if no_weight_decay_cond is not None
                    else _has_no_weight_decay(name, param, config)
                )
                scaled = scale_lr_cond is not None and scale_lr_cond(name, param)
                key = (
                    0.0 if no_decay else 1.0,
                    lr_mult if scaled else 1.0,
                    not getattr(param, "allreduce", True),
                    config.decoupled_lr is not None and getattr(param, "is_embedding_or_output_parameter", False),
                    config.optimizer == "muon" and is_matrix(param),
                )
                members.setdefault(key, []).append(param)
    everywhere = collectives.all_gather_object(list(members), mp_group, purpose="parameter groups")
    keys = sorted({tuple(key) for rank in everywhere for key in rank} or {(1.0, 1.0, False, False, False)}, key=_order)
    groups = []
    for key in keys:
        wd_mult, group_lr_mult, is_expert, is_decoupled, matrix = key
        group: dict[str, Any] = {
            "params": members.get(key, []),
            "wd_mult": wd_mult,
            "lr_mult": group_lr_mult,
            "is_expert_parallel": is_expert,
            "is_decoupled_lr": is_decoupled,
            "is_matrix": matrix,
        }
        if is_decoupled:
            group["max_lr"] = config.decoupled_lr
            group["min_lr"] = config.min_lr if config.decoupled_min_lr is None else config.decoupled_min_lr
        groups.append(group)
    return groups


def is_matrix(param: nn.Parameter) -> bool:
    """Whether a parameter maps hidden vectors to hidden vectors: not a table of words, not a bias or a norm."""
    return param.dim() == 2 and not getattr(param, "is_embedding_or_output_parameter", False)


def _has_no_weight_decay(name: str, param: nn.Parameter, config: OptimizerConfig) -> bool:
    if config.apply_wd_to_qk_layernorm and ("q_layernorm." in name or "k_layernorm." in name):
        return name.endswith(".bias")
    if config.embedding_init_method_std is not None and "embedding" in name:
        return True
    return name.endswith(".bias") or param.dim() == 1


def _order(key: Key) -> tuple[Any, ...]:
    """Nothing special first."""
    wd_mult, lr_mult, is_expert, is_decoupled, matrix = key
    return is_expert, matrix, is_decoupled, lr_mult != 1.0, lr_mult, -wd_mult
