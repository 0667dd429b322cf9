"""Flags that belong to something that is off in this run: told at start-up, each once.

    --num-query-groups 4    without --group-query-attention      "--num-query-groups: no effect without ..."

Scripts keep such flags when they drop the other one, so that they are no mistake; but nobody should believe in them.
IDLE says for every flag that not all runs read when one does; a test keeps it whole. What can only be a mistake is
refused instead: `rules`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch

from megatron_lite.config import Flag
from megatron_lite.tokenizers.tokenizer_config import FIELDS_OF_TYPE
from megatron_lite.training.derived import is_gated
from megatron_lite.training.fully_sharded import is_full

Condition = Callable[[Namespace], bool]


def _has_files(a: Namespace) -> bool:
    """Whether samples come from files."""
    return bool(
        a.data_path
        or a.data_args_path
        or a.per_split_data_args_path
        or a.train_data_path
        or a.valid_data_path
        or a.test_data_path
    )


def _has_gelu(a: Namespace) -> bool:
    return not (a.swiglu or a.relu or a.squared_relu)


def _writes_events(a: Namespace) -> bool:
    return bool(a.tensorboard_dir or a.wandb_project)


def _serves(a: Namespace) -> bool:
    """Whether this is no training: the verb says so, no flag."""
    return bool(getattr(a, "serves", False))


def _steps_by(name: str) -> Condition:
    """Whether the optimizer is so called, or is Muon's for what is no matrix."""
    return lambda a: a.optimizer == name or (a.optimizer == "muon" and a.muon_scalar_optimizer == name)


# Names in the namespace (`*`: all that begin so), whether a run reads them, what would make it.
IDLE: tuple[tuple[str, Condition, str], ...] = (
    # -- the model
    ("num_query_groups", lambda a: a.group_query_attention, "--group-query-attention"),
    (
        "rotary_base rotary_percent rotary_interleaved rotary_seq_len_interpolation_factor no_rope_freq",
        lambda a: a.position_embedding_type in ("rope", "yarn", "mrope"),
        "--position-embedding-type rope",
    ),
    ("mrope_section", lambda a: a.position_embedding_type == "mrope", "--position-embedding-type mrope"),
    ("relative_attention_*", lambda a: a.position_embedding_type == "relative", "--position-embedding-type relative"),
    (
        "rotary_scaling_factor mscale mscale_all_dim yarn_*",
        lambda a: a.rope_type != "rope" if a.multi_latent_attention else a.position_embedding_type == "yarn",
        "--position-embedding-type yarn, or --multi-latent-attention with --rope-type yarn",
    ),
    ("rope_scaling_factor", lambda a: a.use_rope_scaling, "--use-rope-scaling"),
    (
        "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type",
        lambda a: a.multi_latent_attention,
        "--multi-latent-attention",
    ),
    (
        "mtp_loss_scaling_factor mtp_use_repeated_layer mtp_detach_heads",
        lambda a: bool(a.mtp_num_layers),
        "--mtp-num-layers N",
    ),
    ("glu_linear_offset", is_gated, "--swiglu, --quick-geglu or --geglu"),
    ("bias_swiglu_fusion", lambda a: a.swiglu, "--swiglu"),
    ("bias_gelu_fusion", lambda a: _has_gelu(a) and a.add_bias_linear, "GELU with a bias"),
    ("openai_gelu", _has_gelu, "GELU"),
    (
        "attention_softmax_in_fp32",
        lambda a: a.fp16 or a.bf16,
        "--bf16 or --fp16 (all is fp32)",
    ),
    ("lm_head_bias", lambda a: not a.untie_embeddings_and_output_weights, "an output layer that is tied"),
    (
        "reset_position_ids",
        lambda a: a.position_embedding_type == "learned_absolute",
        "--position-embedding-type learned_absolute (rotary positions are relative: --reset-attention-mask parts "
        "documents)",
    ),
    ("mup_*", lambda a: a.use_mup, "--use-mup"),
    (
        "fp8_amax_* fp8_margin",
        lambda a: a.fp8_format is not None and a.fp8_recipe == "delayed",
        "--fp8-format X with --fp8-recipe delayed",
    ),
    ("fp8_amax_compute_algo", lambda a: a.fp8_amax_history_len > 1, "--fp8-amax-history-len N, N > 1"),
    ("fp8_amax_history_len", lambda a: a.fp8_amax_compute_algo == "max", "--fp8-amax-compute-algo max"),
    ("fp8_recipe fp8_wgrad first_last_layers_bf16", lambda a: a.fp8_format is not None, "--fp8-format e4m3 or hybrid"),
    ("num_layers_at_*_in_bf16", lambda a: a.first_last_layers_bf16, "--first-last-layers-bf16"),
    # -- experts
    (
        "moe_aux_loss_coeff",
        lambda a: not a.num_experts or a.moe_router_load_balancing_type not in ("none", "sinkhorn"),
        "--moe-router-load-balancing-type aux_loss",
    ),
    ("moe_router_bias_update_rate", lambda a: a.moe_router_enable_expert_bias, "--moe-router-enable-expert-bias"),
    (
        "moe_token_drop_policy moe_pad_expert_input_to_capacity",
        lambda a: a.moe_expert_capacity_factor is not None,
        "--moe-expert-capacity-factor X",
    ),
    ("moe_upcycling_granularity", lambda a: a.moe_use_upcycling, "--moe-use-upcycling"),
    ("moe_routing_trace_*", lambda a: bool(a.moe_routing_trace_path), "--moe-routing-trace-path FOLDER"),
    ("moe_per_layer_logging", lambda a: not a.num_experts or _writes_events(a), "--tensorboard-dir FOLDER"),
    ("moe_* expert_model_parallel_size expert_tensor_parallel_size", lambda a: bool(a.num_experts), "--num-experts N"),
    # -- retrieval
    (
        "retro_off retro_encoder_* retro_num_neighbors retro_num_retrieved_chunks retro_missing_chunks retro_layers "
        "retro_verify_neighbor_count",
        lambda a: a.retro_add_retriever,
        "--retro-add-retriever",
    ),
    # -- numbers and updates
    (
        "initial_loss_scale min_loss_scale loss_scale_window hysteresis",
        lambda a: a.fp16 and a.loss_scale is None,
        "--fp16 and a loss scale that is not fixed",
    ),
    ("loss_scale", lambda a: a.fp16, "--fp16"),
    ("grad_reduce_in_bf16", lambda a: a.bf16, "--bf16"),
    ("adam_*", _steps_by("adam"), "--optimizer adam"),
    ("sgd_momentum", lambda a: a.optimizer == "sgd", "--optimizer sgd"),
    ("lion_*", _steps_by("lion"), "--optimizer lion"),
    ("muon_*", lambda a: a.optimizer == "muon", "--optimizer muon"),
    ("apply_wd_to_qk_layernorm", lambda a: a.qk_layernorm, "--qk-layernorm"),
    (
        "optimizer_offload_fraction pin_cpu_grads pin_cpu_params",
        lambda a: a.optimizer_cpu_offload,
        "--optimizer-cpu-offload",
    ),
    ("lr_wsd_*", lambda a: a.lr_decay_style == "WSD", "--lr-decay-style WSD"),
    ("min_lr", lambda a: a.lr_decay_style != "constant", "a --lr-decay-style that decays"),
    (
        "lr_decay_iters lr_decay_samples",
        lambda a: a.lr_decay_style != "constant" or a.lr_warmup_fraction is not None,
        "a --lr-decay-style that decays",
    ),
    (
        "lr_warmup_init",
        lambda a: bool(a.lr_warmup_iters or a.lr_warmup_samples or a.lr_warmup_fraction),
        "a warm-up, such as --lr-warmup-iters N",
    ),
    # -- ranks
    (
        "cp_comm_type hierarchical_context_parallel_sizes",
        lambda a: a.context_parallel_size > 1,
        "--context-parallel-size N",
    ),
    ("clone_scatter_output_in_embedding", lambda a: a.sequence_parallel, "--sequence-parallel"),
    ("tp_comm_overlap_* tp_comm_bulk_*", lambda a: a.tp_comm_overlap, "--tp-comm-overlap"),
    (
        "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers account_for_embedding_in_pipeline_split "
        "account_for_loss_in_pipeline_split pipeline_model_parallel_split_rank",
        lambda a: a.pipeline_model_parallel_size > 1,
        "--pipeline-model-parallel-size N",
    ),
    (
        "overlap_p2p_comm microbatch_group_size_per_virtual_pipeline_stage",
        lambda a: a.virtual_pipeline_model_parallel_size is not None,
        "virtual pipeline stages",
    ),
    (
        "align_grad_reduce",
        lambda a: a.overlap_grad_reduce and a.pipeline_model_parallel_size > 1,
        "--overlap-grad-reduce and pipeline stages",
    ),
    (
        "align_param_gather",
        lambda a: a.overlap_param_gather and a.virtual_pipeline_model_parallel_size is not None,
        "--overlap-param-gather and virtual pipeline stages",
    ),
    ("ddp_bucket_size ddp_num_buckets", lambda a: a.overlap_grad_reduce, "--overlap-grad-reduce"),
    ("init_model_with_meta_device", is_full, "--use-torch-fsdp2, or --use-megatron-fsdp that shards weights"),
    ("torch_fsdp2_reshard_after_forward", lambda a: a.use_torch_fsdp2, "--use-torch-fsdp2"),
    (
        "data_parallel_sharding_strategy enable_full_sharding_in_hsdp megatron_fsdp_* "
        "suggested_communication_unit_size",
        lambda a: a.use_megatron_fsdp,
        "--use-megatron-fsdp",
    ),
    ("disable_symmetric_registration", lambda a: a.use_nccl_ub, "--use-nccl-ub"),
    # -- data
    ("split", lambda a: bool(a.data_path or a.data_args_path), "--data-path PREFIX"),
    (
        "data_cache_path num_dataset_builder_threads mid_level_dataset_surplus mmap_bin_files "
        "dataloader_fast_cache_load dataloader_defer_npy_index_mmap per_dataset_sequences_path",
        _has_files,
        "--data-path PREFIX",
    ),
    ("data_sharding", lambda a: a.dataloader_type == "cyclic", "--dataloader-type cyclic"),
    (
        "fim_rate fim_spm_rate fim_split_sample fim_fragment_rate fim_no_prefix fim_*_token",
        lambda a: a.fim_data,
        "--fim-data",
    ),
    *(
        (
            name,
            lambda a, name=name: name in [x for names in FIELDS_OF_TYPE.get(a.tokenizer_type, ()) for x in names],
            f"--tokenizer-type {' or '.join(kind for kind, names in FIELDS_OF_TYPE.items() if name in sum(names, ()))}",
        )
        for name in sorted({x for needed, read in FIELDS_OF_TYPE.values() for x in (*needed, *read)} - {"vocab_size"})
    ),
    # -- when to stop, what to keep
    ("exit_signal", lambda a: a.exit_signal_handler or a.exit_signal_handler_for_dataloader, "--exit-signal-handler"),
    ("exit_signal_handler_for_dataloader", lambda a: a.num_workers > 0, "--num-workers N"),
    ("manual_gc_*", lambda a: a.manual_gc, "--manual-gc"),
    (
        "save_interval save_retain_interval save_keep_last no_save_optim no_save_rng log_progress async_save "
        "dist_ckpt_workers ckpt_fully_parallel_save ckpt_assume_constant_structure non_persistent_save_interval "
        "save_tokenizer_assets",
        lambda a: bool(a.save),
        "--save FOLDER",
    ),
    (
        "non_persistent_global_ckpt_dir",
        lambda a: a.non_persistent_ckpt_type == "global",
        "--non-persistent-ckpt-type global",
    ),
    (
        "non_persistent_local_ckpt_dir",
        lambda a: a.non_persistent_ckpt_type == "local",
        "--non-persistent-ckpt-type local",
    ),
    ("ckpt_convert_save", lambda a: a.ckpt_convert_format is not None, "--ckpt-convert-format torch_dist"),
    (
        "use_persistent_ckpt_worker async_ckpt_cpu_priority async_ckpt_io_priority",
        lambda a: a.async_save,
        "--async-save",
    ),
    (
        "use_mp_args_from_checkpoint_args use_tokenizer_model_from_checkpoint_args",
        lambda a: a.use_checkpoint_args,
        "--use-checkpoint-args",
    ),
    (
        "no_load_optim no_load_rng finetune force verify_integrity dist_ckpt_strictness auto_detect_ckpt_format "
        "ckpt_fully_parallel_load ckpt_load_validate_sharding_integrity override_ckpt_iteration "
        "load_main_params_from_ckpt override_opt_param_scheduler use_checkpoint_opt_param_scheduler",
        lambda a: bool(a.load or a.pretrained_checkpoint),
        "--load FOLDER",
    ),
    # -- faults
    ("spiky_loss_*", lambda a: a.check_for_spiky_loss, "--check-for-spiky-loss"),
    ("bad_loss_window", lambda a: a.on_bad_loss == "rollback", "--on-bad-loss rollback"),
    (
        "on_bad_loss result_rejected_tracker_filename",
        lambda a: (
            a.check_for_nan_in_loss_and_grad
            or a.check_for_spiky_loss
            or a.check_for_large_grads
            or a.error_injection_rate > 0
        ),
        "--check-for-nan-in-loss-and-grad",
    ),
    ("bad_loss_limit", lambda a: a.on_bad_loss != "stop", "--on-bad-loss skip"),
    ("error_injection_type", lambda a: a.error_injection_rate > 0, "--error-injection-rate N"),
    # -- evaluation and logs
    ("start_eval_at_iter", lambda a: bool(a.eval_interval), "--eval-interval N"),
    (
        "eval_interval eval_before_training eval_global_batch_size eval_micro_batch_size",
        lambda a: a.eval_iters > 0 or a.full_validation,
        "--eval-iters N",
    ),
    ("validation_set_names", lambda a: a.multiple_validation_sets, "--multiple-validation-sets"),
    ("barrier_with_L1_time", lambda a: a.timing_log_level > 0, "--timing-log-level 1"),
    (
        "tensorboard_log_interval log_timers_to_tensorboard log_validation_ppl_to_tensorboard "
        "log_memory_to_tensorboard log_world_size_to_tensorboard log_loss_scale_to_tensorboard",
        _writes_events,
        "--tensorboard-dir FOLDER",
    ),
    ("tensorboard_queue_size", lambda a: bool(a.tensorboard_dir), "--tensorboard-dir FOLDER"),
    ("wandb_exp_name wandb_save_dir wandb_entity", lambda a: bool(a.wandb_project), "--wandb-project NAME"),
    ("straggler_* disable_straggler_on_startup", lambda a: a.log_straggler, "--log-straggler"),
    ("profile_ranks", lambda a: a.profile or a.record_memory_history, "--profile"),
    ("profile_* use_pytorch_profiler pytorch_profiler_* nvtx_ranges record_shapes", lambda a: a.profile, "--profile"),
    ("memory_snapshot_path", lambda a: a.record_memory_history, "--record-memory-history"),
    (
        "inference_dynamic_batching_* enable_chunked_prefill",
        lambda a: not _serves(a) or a.inference_dynamic_batching,
        "--inference-dynamic-batching",
    ),
    (
        "inference_* max_tokens_to_oom enable_chunked_prefill offset_sampling_seed_by_dp_rank",
        _serves,
        "megatron-lite serve",
    ),
)


# What only start-up knows: names, whether a run on this device and over this library reads them, what would make it.
IDLE_ON_DEVICE: tuple[tuple[str, Callable[[str, str], bool], str], ...] = (
    ("empty_unused_memory_level train_sync_interval", lambda device, backend: device == "cuda", "CUDA"),
    (
        "nccl_communicator_config_path high_priority_stream_groups flight_recorder_*",
        lambda device, backend: backend == "nccl",
        "NCCL",
    ),
)


def idle(args: Namespace, flags: Iterable[Flag]) -> list[str]:
    """A line for each thing that is off and of which something was typed, naming what was; no flag is told twice.

    Args:
        args: derived arguments.
        flags: those of the parser.
    """
    return _lines(args, flags, ((names, is_on(args), switch) for names, is_on, switch in IDLE))


def idle_on_device(args: Namespace, flags: Iterable[Flag], device: str, backend: str) -> list[str]:
    """The same for flags of a device ("cuda") or of a library of communication ("nccl") that this run is without."""
    rows = ((names, is_on(device, backend), switch) for names, is_on, switch in IDLE_ON_DEVICE)
    return _lines(args, flags, rows)


def _lines(args: Namespace, flags: Iterable[Flag], rows: Iterable[tuple[str, bool, str]]) -> list[str]:
    typed = [flag for flag in flags if flag.dest in args.typed]
    told: set[str] = set()
    lines: dict[str, list[str]] = {}
    for names, is_on, switch in rows:
        found = [flag for flag in typed if flag.dest not in told and is_among(flag.dest, names)]
        if found and not is_on:
            told.update(flag.dest for flag in found)
            lines.setdefault(switch, []).extend(_as_typed(flag, getattr(args, flag.dest)) for flag in found)
    return [f"{' '.join(spellings)}: no effect without {switch}" for switch, spellings in lines.items()]


def _as_typed(flag: Flag, value: object) -> str:
    return flag.negations[0] if flag.negations and value != flag.stores else flag.spellings[0]


def is_among(name: str, names: str) -> bool:
    """Whether a row is about this flag."""
    return any(fnmatch(name, pattern) for pattern in names.split())


def rows_of(name: str) -> Iterator[tuple[str, Condition, str]]:
    """The rows that are about this flag."""
    return (row for row in IDLE if is_among(name, row[0]))
