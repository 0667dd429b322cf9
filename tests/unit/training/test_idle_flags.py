"""Flags that belong to something switched off: accepted, because scripts keep them, and told."""

from argparse import Namespace

import pytest

from megatron_lite.config import flags_of
from megatron_lite.training.arguments import CONFIGS, parse_args, validate_args
from megatron_lite.training.flag_tables import AS_IT_IS
from megatron_lite.training.idle_flags import IDLE, IDLE_ON_DEVICE, idle, idle_on_device, is_among, rows_of

SHAPE = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 "
    "--micro-batch-size 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 7 --train-iters 9"
)
EXPERTS = {"num_experts": 4}
# The first name of each row -> what switches it on, as `derive` leaves it.
ON = {
    "num_query_groups": {"group_query_attention": True},
    "rotary_base": {"position_embedding_type": "rope"},
    "mrope_section": {"position_embedding_type": "mrope"},
    "relative_attention_*": {"position_embedding_type": "relative"},
    "rotary_scaling_factor": {"position_embedding_type": "yarn"},
    "rope_scaling_factor": {"use_rope_scaling": True},
    "q_lora_rank": {"multi_latent_attention": True},
    "mtp_loss_scaling_factor": {"mtp_num_layers": 1},
    "glu_linear_offset": {"quick_geglu": True},
    "bias_swiglu_fusion": {"swiglu": True},
    "bias_gelu_fusion": {},
    "openai_gelu": {"geglu": True},
    "attention_softmax_in_fp32": {"bf16": True},
    "lm_head_bias": {},
    "reset_position_ids": {},
    "fp8_amax_*": {"fp8_format": "hybrid", "fp8_amax_history_len": 16, "fp8_amax_compute_algo": "max"},
    "fp8_amax_compute_algo": {"fp8_format": "hybrid", "fp8_amax_history_len": 16},
    "fp8_amax_history_len": {"fp8_format": "hybrid", "fp8_amax_compute_algo": "max"},
    "fp8_recipe": {"fp8_format": "hybrid"},
    "num_layers_at_*_in_bf16": {"first_last_layers_bf16": True},
    "mup_*": {"use_mup": True},
    "moe_aux_loss_coeff": {**EXPERTS, "moe_router_load_balancing_type": "aux_loss"},
    "moe_router_bias_update_rate": {**EXPERTS, "moe_router_enable_expert_bias": True},
    "moe_token_drop_policy": {**EXPERTS, "moe_expert_capacity_factor": 1.0},
    "moe_upcycling_granularity": {**EXPERTS, "moe_use_upcycling": True},
    "moe_routing_trace_*": {**EXPERTS, "moe_routing_trace_path": "x"},
    "moe_per_layer_logging": {**EXPERTS, "tensorboard_dir": "x"},
    "moe_*": EXPERTS,
    "retro_off": {"retro_add_retriever": True},
    "initial_loss_scale": {"fp16": True},
    "loss_scale": {"fp16": True, "loss_scale": 1.0},
    "grad_reduce_in_bf16": {"bf16": True},
    "adam_*": {"optimizer": "adam"},
    "sgd_momentum": {"optimizer": "sgd"},
    "lion_*": {"optimizer": "muon", "muon_scalar_optimizer": "lion"},
    "muon_*": {"optimizer": "muon"},
    "apply_wd_to_qk_layernorm": {"qk_layernorm": True},
    "optimizer_offload_fraction": {"optimizer_cpu_offload": True},
    "lr_wsd_*": {"lr_decay_style": "WSD"},
    "min_lr": {},
    "lr_decay_iters": {"lr_decay_style": "constant", "lr_warmup_fraction": 0.1},
    "lr_warmup_init": {"lr_warmup_iters": 1},
    "cp_comm_type": {"context_parallel_size": 2},
    "clone_scatter_output_in_embedding": {"sequence_parallel": True},
    "tp_comm_overlap_*": {"tp_comm_overlap": True},
    "decoder_first_pipeline_num_layers": {"pipeline_model_parallel_size": 2},
    "overlap_p2p_comm": {"virtual_pipeline_model_parallel_size": 2},
    "align_grad_reduce": {"overlap_grad_reduce": True, "pipeline_model_parallel_size": 2},
    "align_param_gather": {"overlap_param_gather": True, "virtual_pipeline_model_parallel_size": 2},
    "ddp_bucket_size": {"overlap_grad_reduce": True},
    "init_model_with_meta_device": {"use_torch_fsdp2": True},
    "torch_fsdp2_reshard_after_forward": {"use_torch_fsdp2": True},
    "data_parallel_sharding_strategy": {"use_megatron_fsdp": True},
    "disable_symmetric_registration": {"use_nccl_ub": True},
    "split": {"data_path": ["x"]},
    "data_cache_path": {"train_data_path": ["x"]},
    "data_sharding": {"dataloader_type": "cyclic"},
    "fim_rate": {"fim_data": True},
    "chat_template": {"tokenizer_type": "SFTTokenizer"},
    "merge_file": {"tokenizer_type": "GPT2BPETokenizer"},
    "null_tokenizer_eod_id": {"tokenizer_type": "NullTokenizer"},
    "null_tokenizer_pad_id": {"tokenizer_type": "NullTokenizer"},
    "sft_tokenizer_prompt_format": {"tokenizer_type": "SFTTokenizer"},
    "tiktoken_num_special_tokens": {"tokenizer_type": "TikTokenizer"},
    "tiktoken_pattern": {"tokenizer_type": "TikTokenizer"},
    "tokenizer_hf_no_include_special_tokens": {"tokenizer_type": "HuggingFaceTokenizer"},
    "tokenizer_hf_no_use_fast": {"tokenizer_type": "HuggingFaceTokenizer"},
    "tokenizer_model": {"tokenizer_type": "Llama2Tokenizer"},
    "tokenizer_sentencepiece_ignore_extra_whitespaces": {"tokenizer_type": "Llama2Tokenizer"},
    "tokenizer_sentencepiece_legacy": {"tokenizer_type": "SentencePieceTokenizer"},
    "tokenizer_special_tokens": {"tokenizer_type": "TikTokenizer"},
    "vocab_file": {"tokenizer_type": "BertWordPieceCase"},
    "exit_signal": {"exit_signal_handler": True},
    "exit_signal_handler_for_dataloader": {"num_workers": 1},
    "manual_gc_*": {"manual_gc": True},
    "save_interval": {"save": "x"},
    "non_persistent_global_ckpt_dir": {"non_persistent_ckpt_type": "global"},
    "non_persistent_local_ckpt_dir": {"non_persistent_ckpt_type": "local"},
    "ckpt_convert_save": {"ckpt_convert_format": "torch_dist"},
    "use_persistent_ckpt_worker": {"async_save": True},
    "use_mp_args_from_checkpoint_args": {"use_checkpoint_args": True},
    "no_load_optim": {"pretrained_checkpoint": "x"},
    "spiky_loss_*": {"check_for_spiky_loss": True},
    "on_bad_loss": {"check_for_large_grads": True},
    "bad_loss_window": {"on_bad_loss": "rollback"},
    "bad_loss_limit": {"on_bad_loss": "rollback"},
    "error_injection_type": {"error_injection_rate": 1},
    "start_eval_at_iter": {"eval_interval": 3},
    "eval_interval": {"eval_iters": 0, "full_validation": True},
    "validation_set_names": {"multiple_validation_sets": True},
    "barrier_with_L1_time": {"timing_log_level": 1},
    "tensorboard_log_interval": {"wandb_project": "x"},
    "tensorboard_queue_size": {"tensorboard_dir": "x"},
    "wandb_exp_name": {"wandb_project": "x"},
    "straggler_*": {"log_straggler": True},
    "profile_ranks": {"profile": True},
    "inference_dynamic_batching_*": {"serves": True, "inference_dynamic_batching": True},
    "inference_*": {"serves": True},
    "profile_*": {"profile": True},
    "memory_snapshot_path": {"record_memory_history": True},
}
# What switches those off that are on by default.
OFF = {
    "on_bad_loss": {"check_for_nan_in_loss_and_grad": False},
    "bias_gelu_fusion": {"swiglu": True},
    "openai_gelu": {"squared_relu": True},
    "lm_head_bias": {"untie_embeddings_and_output_weights": True},
    "reset_position_ids": {"position_embedding_type": "rope"},
    "moe_aux_loss_coeff": {**EXPERTS, "moe_router_load_balancing_type": "none"},
    "moe_per_layer_logging": EXPERTS,
    "adam_*": {"optimizer": "sgd"},
    "min_lr": {"lr_decay_style": "constant"},
    "lr_decay_iters": {"lr_decay_style": "constant"},
    "null_tokenizer_eod_id": {"tokenizer_type": "ByteTokenizer"},
    "null_tokenizer_pad_id": {"tokenizer_type": "ByteTokenizer"},
    "exit_signal_handler_for_dataloader": {"num_workers": 0},
    "eval_interval": {"eval_iters": 0},
    "inference_dynamic_batching_*": {"serves": True},
}
# Flags that every run reads: it may still find nothing to do, as --rampup-batch-size in a run of one batch size.
ALWAYS = """
    tensor_model_parallel_size pipeline_model_parallel_size sequence_parallel context_parallel_size
    perform_initialization fp16 bf16 deterministic_mode tp_comm_overlap overlap_p2p_communication_warmup_flush
    delay_wgrad_compute defer_embedding_wgrad_compute wgrad_deferral_limit num_experts num_layers hidden_size
    num_attention_heads ffn_hidden_size kv_channels pipeline_model_parallel_layout normalization norm_epsilon
    apply_layernorm_1p apply_residual_connection_post_layernorm fp32_residual_connection add_bias_linear
    add_qkv_bias activation_func_clamp_value hidden_dropout attention_dropout qk_layernorm qk_l2_norm
    attention_output_gate softmax_type softmax_scale apply_query_key_layer_scaling window_size window_attn_skip_freq
    attention_backend init_method_std init_method_xavier_uniform embedding_init_method_std recompute_granularity
    recompute_method recompute_num_layers recompute_modules distribute_saved_activations mtp_num_layers
    calculate_per_token_loss multi_latent_attention encoder_num_layers decoder_num_layers max_position_embeddings
    position_embedding_type use_rope_scaling scaled_logits untie_embeddings_and_output_weights group_query_attention
    swiglu quick_geglu geglu relu enable_gpt_oss squared_relu transformer_impl spec bias_dropout_fusion
    gradient_accumulation_fusion recompute_activations fp16_lm_cross_entropy micro_batch_size global_batch_size
    rampup_batch_size step_batch_size_schedule decrease_batch_size_if_needed train_iters train_samples exit_interval
    exit_duration_in_mins exit_signal_handler phase_transition_iterations check_for_nan_in_loss_and_grad
    iterations_to_skip empty_unused_memory_level manual_gc seed data_parallel_random_init lr_decay_style
    lr_warmup_iters lr_warmup_samples lr_warmup_fraction weight_decay_incr_style start_weight_decay end_weight_decay
    data_path train_data_path valid_data_path test_data_path data_args_path per_split_data_args_path mock_data
    seq_length encoder_seq_length decoder_seq_length num_workers mask_prob short_seq_prob reset_attention_mask
    eod_mask_loss sft create_attention_mask_in_dataloader dataloader_inter_document_masking
    allow_ambiguous_pad_tokens dataloader_type fim_data bert_binary_head output_bert_embeddings eval_iters
    full_validation multiple_validation_sets skip_train log_interval log_throughput log_params_norm
    log_num_zeros_in_grad log_communication logging_level timing_log_level timing_log_option tensorboard_dir
    wandb_project profile save_tokens_per_expert_interval num_layers_per_virtual_pipeline_stage
    num_virtual_stages_per_pipeline_rank distributed_backend distributed_timeout_minutes
    distributed_timeout_seconds_after_init use_tp_pp_dp_mapping nccl_communicator_config_path
    high_priority_stream_groups optimizer lr decoupled_lr decoupled_min_lr weight_decay
    use_precision_aware_optimizer main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype
    optimizer_cpu_offload overlap_param_gather_with_optimizer_step clip_grad accumulate_allreduce_grads_in_fp32
    overlap_grad_reduce overlap_param_gather use_distributed_optimizer num_distributed_optimizer_instances
    check_for_large_grads ddp_pad_buckets_for_high_nccl_busbw ddp_average_in_collective
    ddp_reduce_scatter_with_fp32_accumulation ddp_param_name_patterns_for_fp32_local_accumulation
    gradient_reduce_div_fusion use_nccl_ub save load ckpt_step pretrained_checkpoint exit_on_missing_checkpoint
    use_checkpoint_args ckpt_format ckpt_convert_format non_persistent_ckpt_type tokenizer_type vocab_size
    padded_vocab_size make_vocab_size_divisible_by pad_vocab_size vocab_extra_ids retro_project_dir
    retro_add_retriever retro_cyclic_train_iters use_mup mlp_chunks_for_training output_logit_dtype freeze_all_layers
    fp8_format
    hang_report heartbeat_file log_straggler exit_signal_handler_for_training flight_recorder_dump_path
    flight_recorder_trace_buffer_size flight_recorder_dump_on_timeout flight_recorder_include_stack_trace
    flight_recorder_include_only_active flight_recorder_extra_dump_on_exec
    disable_bf16_reduced_precision_matmul check_weight_hash_across_dp_replicas_interval
    config_logger_dir record_memory_history dump_param_to_param_group_map log_memory_interval log_device_memory_used
    log_max_attention_logit log_energy save_params_interval save_activations_interval save_wgrads_interval
    save_dgrads_interval train_sync_interval use_torch_fsdp2 use_megatron_fsdp strict_fsdp_dtensor_load
    rerun_mode check_for_spiky_loss error_injection_rate fake_process_group
""".split()
FLAGS = {flag.dest: flag for config in CONFIGS for flag in flags_of(config)}
# (the row's first name, the name of a flag), by the row that tells it first.
EACH = [
    (names.split()[0], name)
    for row, (names, _, _) in enumerate(IDLE)
    for name in FLAGS
    if is_among(name, names) and not any(is_among(name, before) for before, _, _ in IDLE[:row])
]


@pytest.fixture(scope="module")
def run():
    """The derived arguments of a small run."""
    return validate_args(parse_args(SHAPE.split()), 1)


def told(run, name, values):
    """The lines that tell a flag that was typed in a run with these values."""
    flag = FLAGS[name]
    given = {name: not flag.default} if flag.is_switch else {}
    lines = idle(Namespace(**{**vars(run), **given, **values, "typed": [name]}), FLAGS.values())
    spelling = flag.negations[0] if flag.negations and flag.default is True else flag.spellings[0]
    assert all(line.startswith(f"{spelling}: no effect without ") for line in lines)
    return lines


@pytest.mark.parametrize("row, name", EACH, ids=[name for _, name in EACH])
def test_a_flag_of_something_switched_off_is_told(run, row, name):
    """--num-query-groups without --group-query-attention trained another model than its author thought. With the other
    flag nothing is said."""
    assert len(told(run, name, OFF.get(row, {}))) == 1
    assert told(run, name, ON[row]) == []


def test_half_of_a_longer_history_is_told(run):
    """The largest of one step is the last one, and the last of many as well."""
    fp8 = {"fp8_format": "hybrid"}
    assert len(told(run, "fp8_amax_compute_algo", {**fp8, "fp8_amax_compute_algo": "max"})) == 1
    assert len(told(run, "fp8_amax_history_len", {**fp8, "fp8_amax_history_len": 16})) == 1


def test_all_that_was_typed_for_one_thing_is_told_in_one_line_at_start_up(capsys):
    more = "--moe-router-topk 1 --moe-token-drop-policy position --moe-z-loss-coeff 1 --no-ckpt-fully-parallel-save"
    validate_args(parse_args(f"{SHAPE} {more}".split()), 1)
    lines = [line for line in capsys.readouterr().err.splitlines() if "no effect" in line]
    assert lines == [
        "WARNING: --moe-token-drop-policy: no effect without --moe-expert-capacity-factor X",
        "WARNING: --moe-router-topk --moe-z-loss-coeff: no effect without --num-experts N",
        "WARNING: --no-ckpt-fully-parallel-save: no effect without --save FOLDER",
    ]


def test_flags_of_a_device_that_is_not_there_are_told(run):
    """On a laptop, the settings of NCCL's communicators were read and did nothing."""
    names = [name for row, _, _ in IDLE_ON_DEVICE for name in row.split()]
    args = Namespace(**{**vars(run), "typed": names})
    assert idle_on_device(args, FLAGS.values(), "cuda", "nccl") == []
    assert idle_on_device(args, FLAGS.values(), "cpu", "gloo") == [
        "--empty-unused-memory-level --train-sync-interval: no effect without CUDA",
        "--nccl-communicator-config-path --high-priority-stream-groups: no effect without NCCL",
    ]


def test_every_row_is_about_flags_that_there_are():
    patterns = [(pattern, row) for row, _, _ in IDLE for pattern in row.split()]
    assert not [pattern for pattern, _ in patterns if not any(is_among(name, pattern) for name in FLAGS)]
    assert set(ON) == {row.split()[0] for row, _, _ in IDLE}


def test_a_new_flag_says_when_it_is_read():
    """Every flag is read by all runs, or has a row that says by which."""
    unknown = [name for name in FLAGS if name not in [*ALWAYS, *AS_IT_IS] and not any(rows_of(name))]
    assert not unknown, "give them a row of idle_flags.IDLE, or, where every run reads them, a place in ALWAYS"
    assert not [name for name in ALWAYS if name not in FLAGS or name in AS_IT_IS or any(rows_of(name))]
