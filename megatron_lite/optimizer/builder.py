"""From a config and a model under DDP to its optimizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_lite.collectives import group_rank
from megatron_lite.distributed.buffer_layout import Range
from megatron_lite.distributed.distributed_data_parallel import DistributedDataParallel
from megatron_lite.errors import ConfigError
from megatron_lite.optimizer.flat_shard import FlatShard
from megatron_lite.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler, MegatronGradScaler
from megatron_lite.optimizer.optimizer import MegatronOptimizer
from megatron_lite.optimizer.optimizer_config import OptimizerConfig
from megatron_lite.optimizer.param_groups import Condition, get_param_groups
from megatron_lite.process_groups_config import ProcessGroupCollection

# optimizer -> names of its moments in torch's state
_MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


def get_megatron_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[nn.Module],
    no_weight_decay_cond: Condition | None = None,
    scale_lr_cond: Condition | None = None,
    lr_mult: float = 1.0,
    pg_collection: ProcessGroupCollection | None = None,
    dump_param_to_param_group_map: str | None = None,
) -> MegatronOptimizer:
    """The optimizer of a model copy's chunks on this rank. Collective over the ranks of the copy.

    Args:
        model_chunks: under DistributedDataParallel, whose flat buffers are stepped on.
        no_weight_decay_cond, scale_lr_cond, lr_mult: see `get_param_groups`.
        pg_collection: None = the registered groups.
        dump_param_to_param_group_map: write {parameter name: number of its group} to this JSON file.
    Raises: ConfigError.
    """
    if config.optimizer not in _MOMENTS:
        raise ConfigError(
            f"--optimizer {config.optimizer}", why="not built in this version", fix="--optimizer adam or sgd"
        )
    if config.use_distributed_optimizer:
        raise ConfigError(
            "--use-distributed-optimizer", why="not built in this version", fix="leave --use-distributed-optimizer out"
        )
    if config.lr is None:
        raise ConfigError("--lr is missing", why="an optimizer needs a learning rate", fix="for example --lr 3e-4")
    chunks: list[DistributedDataParallel] = []
    for chunk in model_chunks:
        if not isinstance(chunk, DistributedDataParallel):
            raise ConfigError(
                f"get_megatron_optimizer was given a bare {type(chunk).__name__}",
                why="the optimizer steps on the flat buffers of DistributedDataParallel, also on one rank",
                fix="DistributedDataParallel(config, ddp_config, module)",
            )
        chunks.append(chunk)
    pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    groups = get_param_groups(chunks, config, no_weight_decay_cond, scale_lr_cond, lr_mult, mp_group=pg_collection.mp)
    group_of = {param: number for number, group in enumerate(groups) for param in group["params"]}
    if dump_param_to_param_group_map is not None:
        names = {name: group_of[p] for chunk in chunks for name, p in chunk.module.named_parameters() if p in group_of}
        Path(dump_param_to_param_group_map).write_text(json.dumps(names, indent=1) + "\n")
    counted = {param for param in group_of if _counts_here(param, pg_collection)}
    shards = [
        FlatShard(buffer, Range(0, buffer.layout.numel), group_of, counted)
        for chunk in chunks
        for buffer in chunk.grad_buffers
    ]
    return MegatronOptimizer(
        _torch_optimizer(config, groups, shards),
        config,
        shards,
        _grad_scaler(config),
        pg_collection.mp,
        pg_collection.tp_ep_pp,
        has_experts=any(group["is_expert_parallel"] for group in groups),
    )


def _counts_here(param: nn.Parameter, pg_collection: ProcessGroupCollection) -> bool:
    """Whether this rank counts the parameter in norms: of several copies exactly one rank does."""
    if getattr(param, "shared", False):
        return False
    is_expert = not getattr(param, "allreduce", True)
    tp = pg_collection.expt_tp if is_expert else pg_collection.tp
    return getattr(param, "tensor_model_parallel", False) or group_rank(tp) == 0


def _torch_optimizer(
    config: OptimizerConfig, groups: list[dict[str, Any]], shards: Sequence[FlatShard]
) -> torch.optim.Optimizer:
    """torch's fused optimizer over the shards' segments, its moments already there: views of flat tensors."""
    settings: list[dict[str, Any]] = []
    for number, group in enumerate(groups):
        tensors = [
            tensor
            for shard in shards
            for (owner, _), (tensor, _) in zip(shard.segments, shard.segment_tensors)
            if owner == number
        ]
        peak = config.lr if group.get("max_lr") is None else group["max_lr"]
        values = {key: value for key, value in group.items() if key != "params"}
        values |= {"lr": peak * group["lr_mult"], "weight_decay": config.weight_decay * group["wd_mult"]}
        settings.append({"params": tensors, **values})
    optimizer: torch.optim.Optimizer
    if config.optimizer == "adam":
        kind = torch.optim.AdamW if config.decoupled_weight_decay else torch.optim.Adam
        betas = (config.adam_beta1, config.adam_beta2)
        optimizer = kind(settings, lr=config.lr or 0.0, betas=betas, eps=config.adam_eps, fused=True)
    else:
        optimizer = torch.optim.SGD(settings, lr=config.lr or 0.0, momentum=config.sgd_momentum, fused=True)
    names = _MOMENTS[config.optimizer]
    if config.optimizer == "sgd" and config.sgd_momentum == 0.0:
        names = ()
    for shard in shards:
        moments = {name: shard.add_state(name) for name in names}
        for i, (tensor, _) in enumerate(shard.segment_tensors):
            state: dict[str, Any] = {name: views[i] for name, views in moments.items()}
            if config.optimizer == "adam":
                state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
            optimizer.state[tensor] = state
    return optimizer


def _grad_scaler(config: OptimizerConfig) -> MegatronGradScaler | None:
    """A given scale is constant; fp16 without one is dynamic; fp32 and bf16 need none."""
    if config.loss_scale is not None:
        return ConstantGradScaler(config.loss_scale)
    if not config.fp16:
        return None
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=int(config.loss_scale_window),
        hysteresis=config.hysteresis,
    )
