"""From a config and a model under DDP to its optimizer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from megatron_lite import collectives
from megatron_lite.collectives import group_rank, group_size
from megatron_lite.config_logger import log_config_to_disk
from megatron_lite.distributed.data_parallel_base import DataParallelBase
from megatron_lite.distributed.param_and_grad_buffer import ParamAndGradBuffer
from megatron_lite.errors import ConfigError
from megatron_lite.log import rank_and_world_size
from megatron_lite.optimizer.distrib_optimizer import DistributedOptimizer, owned_ranges, whole_range
from megatron_lite.optimizer.flat_shard import ApartShard, FlatShard, Storage, divide_for_host
from megatron_lite.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler, MegatronGradScaler
from megatron_lite.optimizer.inner import check_optimizer, torch_optimizers
from megatron_lite.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron_lite.optimizer.optimizer_config import OptimizerConfig
from megatron_lite.optimizer.param_groups import Condition, get_param_groups
from megatron_lite.process_groups_config import ProcessGroupCollection


def get_megatron_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[nn.Module],
    no_weight_decay_cond: Condition | None = None,
    scale_lr_cond: Condition | None = None,
    lr_mult: float = 1.0,
    use_gloo_process_groups: bool = True,
    pg_collection: ProcessGroupCollection | None = None,
    dump_param_to_param_group_map: str | None = None,
) -> MegatronOptimizer:
    """The optimizer of a model copy's chunks on this rank. Collective over the ranks of the copy.

    Args:
        model_chunks: under DistributedDataParallel or fully sharded: their flat buffers are stepped on.
        no_weight_decay_cond, scale_lr_cond, lr_mult: see `get_param_groups`.
        use_gloo_process_groups: accepted for scripts written for Megatron; nothing here needs CPU groups of its own.
        pg_collection: None = the registered groups.
        dump_param_to_param_group_map: write {global name of a parameter: number of its group} to this JSON file;
            collective over all ranks.
    Raises: ConfigError.
    """
    log_config_to_disk(config, locals(), prefix="get_megatron_optimizer")
    check_optimizer(config)
    if config.lr is None:
        raise ConfigError("--lr is missing", why="an optimizer needs a learning rate", fix="for example --lr 3e-4")
    chunks: list[DataParallelBase] = []
    for chunk in model_chunks:
        if not isinstance(chunk, DataParallelBase):
            raise ConfigError(
                f"get_megatron_optimizer was given a bare {type(chunk).__name__}",
                why="the optimizer steps on the flat buffers of DistributedDataParallel, also on one rank",
                fix="DistributedDataParallel(config, ddp_config, module)",
            )
        if chunk.is_fully_sharded:
            _check_fully_sharded(config)
        elif chunk.ddp_config.use_distributed_optimizer != config.use_distributed_optimizer:
            raise ConfigError(
                f"use_distributed_optimizer is {chunk.ddp_config.use_distributed_optimizer} in "
                f"DistributedDataParallelConfig and {config.use_distributed_optimizer} in OptimizerConfig",
                why="the buffers are laid out for the optimizer",
                fix="the same value in both",
            )
        chunks.append(chunk)
    pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    groups = get_param_groups(chunks, config, no_weight_decay_cond, scale_lr_cond, lr_mult, mp_group=pg_collection.mp)
    group_of = {param: number for number, group in enumerate(groups) for param in group["params"]}
    if dump_param_to_param_group_map is not None:
        _dump_groups(Path(dump_param_to_param_group_map), chunks, group_of)
    stacked = _stacked_matrices(chunks, config, pg_collection)
    matrices = {number for number, group in enumerate(groups) if group["is_matrix"]}
    counted = {param for param in group_of if _counts_here(param, pg_collection)}
    device = next((param.device for chunk in chunks for param in chunk.parameters()), torch.device("cpu"))
    scaler = _grad_scaler(config)
    parts: list[MegatronOptimizer] = []
    for is_expert in sorted({group["is_expert_parallel"] for group in groups}):
        buffers: list[Any] = [b for chunk in chunks for b in chunk.grad_buffers if b.is_expert == is_expert]
        numbers = [number for number, group in enumerate(groups) if group["is_expert_parallel"] == is_expert]
        shards = [
            shard
            for chunk in chunks
            for buffer in chunk.grad_buffers
            if buffer.is_expert == is_expert
            for shard in _shards(chunk, buffer, config, group_of, counted, matrices)
        ]
        own_groups = {number: groups[number] for number in numbers}
        optimizers = torch_optimizers(config, own_groups, shards, buffers, pg_collection, stacked)
        whole = not any(chunk.is_fully_sharded for chunk in chunks)
        if config.use_distributed_optimizer or not whole:
            group = _stats_group_of_shards(pg_collection, buffers, is_expert)
        else:
            group = pg_collection.tp_ep_pp if is_expert else pg_collection.mp
        if config.use_distributed_optimizer and whole:
            parts.append(DistributedOptimizer(optimizers, config, shards, scaler, group, device, chunks))
        else:
            parts.append(MegatronOptimizer(optimizers, config, shards, scaler, group, device))
    return parts[0] if len(parts) == 1 else ChainedOptimizer(parts)


def _dump_groups(path: Path, chunks: Sequence[DataParallelBase], group_of: Mapping[nn.Parameter, int]) -> None:
    """Write the group of every parameter of the whole model, by global name. Collective; rank 0 writes."""
    mine = {
        getattr(getattr(param, "shard", None), "name", name): group_of[param]
        for chunk in chunks
        for name, param in chunk.module.named_parameters()
        if param in group_of
    }
    everyone = collectives.all_gather_object(mine, collectives.world(), purpose="parameter groups")
    if rank_and_world_size()[0] == 0:
        groups = {name: number for of_rank in everyone for name, number in of_rank.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(groups, indent=1) + "\n", encoding="utf-8")


def _shards(
    chunk: DataParallelBase,
    buffer: Any,
    config: OptimizerConfig,
    group_of: dict[nn.Parameter, int],
    counted: set[nn.Parameter],
    matrices: set[int],
) -> Iterator[FlatShard]:
    """What this rank's optimizer owns of a buffer."""
    if chunk.is_fully_sharded:
        is_16_bit = chunk.model_dtype != torch.float32
        yield ApartShard(buffer, group_of, counted, is_16_bit, _storage(config, on_host=False))
        return
    device = buffer.grad_data.device
    for range in owned_ranges(buffer) if config.use_distributed_optimizer else [whole_range(buffer)]:
        for part, on_host in divide_for_host(buffer, range, _offloaded(config, device)):
            yield FlatShard(buffer, part, group_of, counted, apart=matrices, storage=_storage(config, on_host))


def _check_fully_sharded(config: OptimizerConfig) -> None:
    """Raises: ConfigError for what needs more of a matrix, or another place for it, than a rank's rows."""
    refused = {
        "--optimizer muon": (config.optimizer == "muon", "it needs whole matrices"),
        "--optimizer-cpu-offload": (
            config.optimizer_cpu_offload,
            "weights are stepped on where they are gathered from",
        ),
        "--main-grads-dtype bf16": (
            config.main_grads_dtype != torch.float32,
            "the parts' gradients are summed in fp32",
        ),
    }
    for flag, (asked, why) in refused.items():
        if asked:
            raise ConfigError(
                f"{flag} with fully sharded data parallelism",
                why=why,
                fix="leave it out, or --use-distributed-optimizer in place of the full sharding",
            )


def _offloaded(config: OptimizerConfig, device: torch.device) -> float:
    """The share of the state that is moved to the host; on a CPU it is there."""
    return config.optimizer_offload_fraction if config.optimizer_cpu_offload and device.type != "cpu" else 0.0


def _storage(config: OptimizerConfig, on_host: bool) -> Storage:
    return Storage(
        main_grads=config.main_grads_dtype,
        states={"exp_avg": config.exp_avg_dtype, "exp_avg_sq": config.exp_avg_sq_dtype},
        on_host=on_host,
        pin_params=config.pin_cpu_params,
        pin_grads=config.pin_cpu_grads,
    )


def _stacked_matrices(
    chunks: Sequence[DataParallelBase], config: OptimizerConfig, pg_collection: ProcessGroupCollection
) -> dict[nn.Parameter, tuple[int, ...]]:
    """Weights that hold queries, keys and values: rows of each, in a query group."""
    stacked: dict[nn.Parameter, tuple[int, ...]] = {}
    if config.optimizer != "muon":
        return stacked
    for chunk in chunks:
        model: Any = chunk.config
        for name, param in chunk.module.named_parameters():
            if not name.endswith("linear_qkv.weight"):
                continue
            heads, groups, size = model.num_attention_heads, model.num_query_groups, model.kv_channels
            if group_size(pg_collection.tp) > groups:
                raise ConfigError(
                    f"--optimizer muon with {groups} query groups on {group_size(pg_collection.tp)} tensor-parallel "
                    "ranks",
                    why="ranks then hold copies of keys and values, and the matrix is no longer the ranks' blocks",
                    fix=f"--tensor-model-parallel-size {groups}, or another optimizer",
                )
            if config.muon_split_qkv:
                stacked[param] = (heads // groups * size, size, size)
    return stacked


def _stats_group_of_shards(
    pg_collection: ProcessGroupCollection, buffers: Sequence[ParamAndGradBuffer], is_expert: bool
) -> ProcessGroup | None:
    """Ranks whose shards are one model copy."""
    sharing = max((group_size(buffer.shard_group) for buffer in buffers), default=1)
    copy = group_size(pg_collection.tp_ep_pp if is_expert else pg_collection.mp)
    found = group_size(pg_collection.intra_dist_opt)
    if found != sharing * copy and buffers:
        raise ConfigError(
            f"ProcessGroupCollection.intra_dist_opt has {found} ranks, not {copy} x {sharing}",
            why="with a distributed optimizer a model's gradients are spread over the ranks that share one set of "
            "optimizer states, and norms are summed over them",
            fix="name these ranks (all ranks, with one instance); initialize_model_parallel does",
        )
    return pg_collection.intra_dist_opt


def _counts_here(param: nn.Parameter, pg_collection: ProcessGroupCollection) -> bool:
    """Whether this rank counts the parameter in norms: of several copies exactly one rank does."""
    if getattr(param, "shared", False):
        return False
    is_expert = not getattr(param, "allreduce", True)
    tp = pg_collection.expt_tp if is_expert else pg_collection.tp
    return getattr(param, "tensor_model_parallel", False) or group_rank(tp) == 0


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
