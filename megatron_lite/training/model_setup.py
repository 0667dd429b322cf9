"""From the script's `model_provider` to what the loop needs: model chunks under DDP, optimizer, schedule.

model_provider(pre_process, post_process) -> module
    -> device -> Float16Module (fp16, bf16) -> DistributedDataParallel -> optimizer -> schedule
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from datetime import datetime
from typing import Any

import torch
from torch import nn

from megatron_lite import collectives
from megatron_lite.distributed import (
    DistributedDataParallel,
    broadcast_parameters,
    finalize_model_grads,
    held_part,
    whole_parameters,
)
from megatron_lite.enums import ModelType
from megatron_lite.fusions.backends import describe
from megatron_lite.initialization import parameters_on_meta
from megatron_lite.log import print_rank_0, say
from megatron_lite.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron_lite.optimizer_param_scheduler import OptimizerParamScheduler
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.tensor_parallel.random import vary_over_context_parallel_ranks
from megatron_lite.training.arguments import (
    core_transformer_config_from_args,
    ddp_config_from_args,
    fully_sharded_config_from_args,
    optimizer_config_from_args,
)
from megatron_lite.training.width_transfer import width_transfer
from megatron_lite.transformer.module import Float16Module
from megatron_lite.transformer.transformer_block import layout_of

ModelProvider = Callable[..., nn.Module]


def build_chunks(
    model_provider_func: ModelProvider, model_type: ModelType, args: Namespace, pg_collection: ProcessGroupCollection
) -> list[nn.Module]:
    """This rank's model chunks as the script builds them."""
    pp, stages = collectives.group_rank(pg_collection.pp), collectives.group_size(pg_collection.pp)
    virtual = args.virtual_pipeline_model_parallel_size
    modules = []
    for chunk in range(virtual or 1):
        ends = {
            "pre_process": pp == 0 and chunk == 0,
            "post_process": pp == stages - 1 and chunk == (virtual or 1) - 1,
        }
        module = model_provider_func(**ends) if virtual is None else model_provider_func(**ends, vp_stage=chunk)
        module.model_type = model_type  # type: ignore[assignment]
        modules.append(module)
    vary_over_context_parallel_ranks(pg_collection.cp)
    return modules


def get_model(
    model_provider_func: ModelProvider,
    model_type: ModelType,
    args: Namespace,
    pg_collection: ProcessGroupCollection,
    wrap_with_ddp: bool = True,
) -> list[nn.Module]:
    """This rank's model chunks, on its device, in its number format, under DDP."""
    on_meta = wrap_with_ddp and args.init_model_with_meta_device and args.is_fully_sharded
    with parameters_on_meta() if on_meta else nullcontext():
        modules = build_chunks(model_provider_func, model_type, args, pg_collection)
    if args.freeze_all_layers:
        for module in modules:
            module.requires_grad_(False)
    tp, pp = collectives.group_rank(pg_collection.tp), collectives.group_rank(pg_collection.pp)
    stages = collectives.group_size(pg_collection.pp)
    config: Any = getattr(modules[0], "config", None) or core_transformer_config_from_args(args)
    if collectives.group_rank(pg_collection.dp_cp) == 0:
        count = sum(p.numel() for module in modules for p in module.parameters())
        say(f" > number of parameters on (tensor, pipeline) model parallel rank ({tp}, {pp}): {count}")
        if stages > 1 and tp == 0:
            placed = getattr(modules[0], "stage_layout", None) or layout_of(config)  # a model of two stacks has its own
            say(f" > pipeline stage {pp} holds {placed.describe(pp)}")
    print_rank_0(f"> {describe(args.params_dtype, args.device.type)}")
    if args.fp8_format is not None:
        print_rank_0(
            f"> --fp8-format {args.fp8_format}, {args.fp8_recipe} scaling: casts are simulated. Linear layers multiply "
            f"{str(args.params_dtype).removeprefix('torch.')} numbers that were rounded to FP8: its numbers, not its "
            "speed or memory"
        )
    for number, module in enumerate(modules):
        module._apply(lambda t: t if t.is_meta else t.to(args.device))
        if args.fp16 or args.bf16:
            modules[number] = Float16Module(config, module)
    if not wrap_with_ddp:
        return modules
    if args.is_fully_sharded:
        return [_fully_sharded(config, module, args, pg_collection) for module in modules]
    chunks: list[nn.Module] = []
    for number, module in enumerate(modules):
        chunk_config = ddp_config_from_args(args, module)
        # Later chunks have their backward early: nothing is left to hide a bucket's communication behind.
        model = DistributedDataParallel(
            config,
            chunk_config,
            module,
            disable_bucketing=number > 0 or args.overlap_param_gather_with_optimizer_step,
            pg_collection=pg_collection,
        )
        if args.data_parallel_random_init:
            model.broadcast_params()
        chunks.append(model)
    return chunks


def _fully_sharded(config: Any, module: nn.Module, args: Namespace, pg_collection: ProcessGroupCollection) -> nn.Module:
    """A rank's rows of every weight of the model."""
    # Torch's part of it takes seconds to import, and only such runs need it.
    from megatron_lite.distributed import torch_fully_sharded_data_parallel as fully_sharded

    wrapper = (
        fully_sharded.FullyShardedDataParallel
        if args.use_megatron_fsdp
        else fully_sharded.TorchFullyShardedDataParallel
    )
    on_meta = any(param.is_meta for param in module.parameters())
    if args.data_parallel_random_init and not on_meta:
        broadcast_parameters(module.parameters(), pg_collection)
    model = wrapper(config, fully_sharded_config_from_args(args), module, pg_collection=pg_collection)
    if on_meta:
        model.fill_parameters(args.seed)
    return model


def setup_model_and_optimizer(
    model_provider_func: ModelProvider, model_type: ModelType, args: Namespace, pg_collection: ProcessGroupCollection
) -> tuple[list[nn.Module], MegatronOptimizer | None, OptimizerParamScheduler | None]:
    """Model chunks, optimizer and schedule, with the schedule's hooks wired into the model's config.

    Returns: with `--skip-train` the bare model, None and None: no gradients, no moments, no schedule to agree on.
    """
    model = get_model(model_provider_func, model_type, args, pg_collection, wrap_with_ddp=not args.skip_train)
    config: Any = model[0].config
    config.timers = args.timers
    if args.skip_train:
        return model, None, None
    optimizer_config = optimizer_config_from_args(args)
    optimizer_config.timers = args.timers
    if args.optimizer_cpu_offload and args.device.type == "cpu":
        print_rank_0("--optimizer-cpu-offload has no effect here: on a CPU the optimizer's state is in host memory")
    is_scaled, factor = width_transfer(config, optimizer_config.optimizer)
    optimizer = get_megatron_optimizer(
        optimizer_config,
        model,
        scale_lr_cond=is_scaled,
        lr_mult=factor,
        pg_collection=pg_collection,
        dump_param_to_param_group_map=args.dump_param_to_param_group_map,
    )
    scheduler = get_optimizer_param_scheduler(optimizer, args)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = [chunk.no_sync for chunk in model]
    if args.overlap_grad_reduce and args.align_grad_reduce:
        config.grad_sync_func = [chunk.start_grad_sync for chunk in model]
    if args.overlap_param_gather and args.align_param_gather:
        config.param_sync_func = [chunk.start_param_sync for chunk in model]
    return model, optimizer, scheduler


def get_optimizer_param_scheduler(optimizer: MegatronOptimizer, args: Namespace) -> OptimizerParamScheduler:
    """The schedule of learning rate and weight decay; its clock counts samples."""
    batch = args.global_batch_size
    if args.train_samples:
        total = args.train_samples
        decay = args.lr_decay_samples or total
        warmup = args.lr_warmup_samples
        anneal = args.lr_wsd_decay_samples
    else:
        total = args.train_iters * batch
        decay = (args.lr_decay_iters or args.train_iters) * batch
        warmup = args.lr_warmup_iters * batch
        anneal = args.lr_wsd_decay_iters * batch if args.lr_wsd_decay_iters is not None else None
    if args.lr_warmup_fraction is not None:
        warmup = args.lr_warmup_fraction * decay
    if total == 0:  # --train-iters 0: a schedule that is never asked
        decay, warmup = max(decay, 1), 0
    print_rank_0(f"> learning rate decay style: {args.lr_decay_style}")
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=total,
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
        wsd_decay_steps=anneal,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )


def print_datetime(what: str) -> None:
    """`[what] datetime: ...`, by rank 0, when all ranks are here."""
    collectives.barrier(collectives.world(), purpose="print_datetime")
    print_rank_0(f"[{what}] datetime: {datetime.now():%Y-%m-%d %H:%M:%S.%f} ")


@torch.no_grad()
def params_norm(model: list[nn.Module], pg_collection: ProcessGroupCollection) -> float:
    """L2 norm of all parameters, each counted once over the ranks of the model."""
    whole_parameters(model)
    config: Any = model[0].config
    # Experts that are spread over ranks in another way than the rest are summed over other ranks: also by a stage that
    # has none.
    spread = config.expert_model_parallel_size > 1
    spread |= collectives.group_size(pg_collection.expt_tp) != collectives.group_size(pg_collection.tp)
    total = 0.0
    for is_expert in (False, True) if spread else (False,):
        tp = pg_collection.expt_tp if is_expert else pg_collection.tp
        params = [
            held_part(p).float() if p.dtype != torch.float32 else held_part(p)
            for chunk in model
            for p in chunk.parameters()
            if is_expert == (not getattr(p, "allreduce", True))
            and not getattr(p, "shared", False)
            and (collectives.group_rank(tp) == 0 or getattr(p, "tensor_model_parallel", False))
        ]
        squares = torch.zeros((), device=held_part(next(model[0].parameters())).device)
        if params:
            squares = torch.stack(list(torch._foreach_norm(params))).float().square().sum()
        group = pg_collection.tp_ep_pp if is_expert else pg_collection.mp
        if model[0].is_fully_sharded:  # then ranks hold different rows
            group = pg_collection.intra_dist_opt
        collectives.all_reduce(squares, group, purpose="params norm")
        total += float(squares)
    return math.sqrt(total)
