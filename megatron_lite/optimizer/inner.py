"""The torch optimizers that a step runs, their states laid in flat memory beforehand.

--optimizer adam    torch.optim.AdamW, fused      exp_avg, exp_avg_sq
                      reduced_adam.py where a moment has 16 bits
            sgd     torch.optim.SGD, fused        momentum_buffer
            lion    lion.py                       exp_avg
            muon    muon.py for matrices          momentum_buffer
                      and adam or lion for the rest
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lite.distributed.param_and_grad_buffer import ParamAndGradBuffer
from megatron_lite.errors import ConfigError
from megatron_lite.fusions.adam import packaged_adam
from megatron_lite.log import print_rank_0
from megatron_lite.optimizer.flat_shard import FlatShard
from megatron_lite.optimizer.lion import Lion
from megatron_lite.optimizer.muon import Matrix, Muon, PartExchange
from megatron_lite.optimizer.optimizer_config import OptimizerConfig
from megatron_lite.optimizer.reduced_adam import ReducedAdam
from megatron_lite.process_groups_config import ProcessGroupCollection

# optimizer -> names of its states of parameter size
STATES = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",), "lion": ("exp_avg",), "muon": ()}
Groups = Mapping[int, dict[str, Any]]


def check_optimizer(config: OptimizerConfig) -> None:
    """Raises ConfigError for an optimizer that does not exist here."""
    if config.optimizer not in STATES:
        raise ConfigError(
            f"--optimizer {config.optimizer}", why="not built in this version", fix=f"one of {', '.join(STATES)}"
        )


def torch_optimizers(
    config: OptimizerConfig,
    groups: Groups,
    shards: Sequence[FlatShard],
    buffers: Sequence[ParamAndGradBuffer],
    pg_collection: ProcessGroupCollection,
    stacked: Mapping[torch.nn.Parameter, tuple[int, ...]],
) -> list[torch.optim.Optimizer]:
    """Optimizers over the shards' segments, whose states are views of flat tensors; groups keep their order.

    Args:
        groups: by the number by which the shards know them.
        buffers: all, also those of which this rank owns nothing.
        stacked: see `Matrix`.
    """
    scalars = {number: group for number, group in groups.items() if not group["is_matrix"]}
    matrices = {number: group for number, group in groups.items() if group["is_matrix"]}
    optimizers: list[torch.optim.Optimizer] = []
    if scalars:
        optimizers.append(_elementwise(config, scalars, shards))
    if matrices:
        optimizers.append(_muon(config, matrices, shards, buffers, pg_collection, stacked))
    return optimizers


def _settings(config: OptimizerConfig, groups: Groups, shards: Sequence[FlatShard]) -> list[dict[str, Any]]:
    """torch's groups: the segments, learning rate and weight decay of each."""
    settings: dict[int, dict[str, Any]] = {}
    for number, group in groups.items():
        peak = config.lr if group.get("max_lr") is None else group["max_lr"]
        values = {key: value for key, value in group.items() if key != "params"}
        values |= {"lr": peak * group["lr_mult"], "weight_decay": config.weight_decay * group["wd_mult"]}
        settings[number] = {"params": [], **values}
    for shard in shards:
        for (number, _), (tensor, _) in zip(shard.segments, shard.segment_tensors):
            if number in settings:
                settings[number]["params"].append(tensor)
    return list(settings.values())


def _add_states(optimizer: torch.optim.Optimizer, names: Sequence[str], groups: Groups, shards: Any) -> None:
    for shard in shards:
        for name in names:
            for main, view in shard.add_state(name, groups.keys()).items():
                optimizer.state[main][name] = view


def _elementwise(config: OptimizerConfig, groups: Groups, shards: Sequence[FlatShard]) -> torch.optim.Optimizer:
    kind = config.muon_scalar_optimizer if config.optimizer == "muon" else config.optimizer
    settings, lr, names = _settings(config, groups, shards), config.lr or 0.0, STATES[kind]
    betas = (config.adam_beta1, config.adam_beta2)
    optimizer: torch.optim.Optimizer
    if kind == "sgd":
        optimizer = torch.optim.SGD(settings, lr=lr, momentum=config.sgd_momentum, fused=True)
        names = names if config.sgd_momentum else ()
    elif kind == "lion":
        optimizer = Lion(settings, lr=lr, betas=(config.lion_beta1, config.lion_beta2))
    elif _is_reduced(config):
        optimizer = ReducedAdam(settings, lr, betas, config.adam_eps, config.decoupled_weight_decay)
    else:
        optimizer = _adam(config, settings, shards)
    _add_states(optimizer, names, groups, shards)
    if kind == "adam" and "step" not in optimizer.param_groups[0]:
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                optimizer.state[tensor]["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
    return optimizer


def _adam(
    config: OptimizerConfig, settings: list[dict[str, Any]], shards: Sequence[FlatShard]
) -> torch.optim.Optimizer:
    """A package's kernel where all of the state is on a GPU and there is one, else torch's."""
    lr, betas, eps, decoupled = (
        config.lr or 0.0,
        (config.adam_beta1, config.adam_beta2),
        config.adam_eps,
        config.decoupled_weight_decay,
    )
    places = {shard.device.type for shard in shards}
    packaged: Any = packaged_adam(places.pop()) if len(places) == 1 else None
    if packaged is not None:
        print_rank_0(f"> Adam is {packaged.__qualname__}")
        steps = [{**group, "step": 0} for group in settings]  # it counts by group
        return packaged(steps, lr=lr, betas=betas, eps=eps, adam_w_mode=decoupled)
    adam = torch.optim.AdamW if decoupled else torch.optim.Adam
    return adam(settings, lr=lr, betas=betas, eps=eps, fused=True)


def _is_reduced(config: OptimizerConfig) -> bool:
    formats = (config.main_grads_dtype, config.exp_avg_dtype, config.exp_avg_sq_dtype)
    return any(dtype != torch.float32 for dtype in formats)


def _muon(
    config: OptimizerConfig,
    groups: Groups,
    shards: Sequence[FlatShard],
    buffers: Sequence[ParamAndGradBuffer],
    pg_collection: ProcessGroupCollection,
    stacked: Mapping[torch.nn.Parameter, tuple[int, ...]],
) -> torch.optim.Optimizer:
    params = [param for group in groups.values() for param in group["params"]]
    matrices: dict[Tensor, Matrix] = {}
    for shard in shards:
        for (number, run), (tensor, _) in zip(shard.segments, shard.segment_tensors):
            if number in groups:
                (part,) = run.parts
                is_cut = getattr(part.param, "tensor_model_parallel", False)
                tp = pg_collection.expt_tp if shard.buffer.is_expert else pg_collection.tp
                matrices[tensor] = Matrix(
                    part.param,
                    part.in_param,
                    cut=part.param.partition_dim if is_cut else None,  # type: ignore[attr-defined]
                    tp=tp if is_cut else None,
                    stacked=stacked.get(part.param),
                )
    optimizer = Muon(
        _settings(config, groups, shards),
        config.lr or 0.0,
        matrices,
        [PartExchange(buffer, params) for buffer in buffers],
        momentum=config.muon_momentum,
        nesterov=config.muon_nesterov,
        tp_mode=config.muon_tp_mode,
        coefficient_type=config.muon_coefficient_type,
        num_ns_steps=config.muon_num_ns_steps,
        scale_mode=config.muon_scale_mode,
        extra_scale_factor=config.muon_extra_scale_factor,
        matmul=config.muon_fp32_matmul_prec,
    )
    _add_states(optimizer, ("momentum_buffer",), groups, shards)
    return optimizer
