"""A run: arguments, start-up, the loop, its log, resuming. The only room that knows what a run is."""

from megatron_lite.faces import lazy_face

__getattr__, __dir__, __all__ = lazy_face(
    __name__,
    {
        "arguments": [
            "core_transformer_config_from_args",
            "ddp_config_from_args",
            "optimizer_config_from_args",
            "parse_args",
            "validate_args",
        ],
        "bert_parts": ["bert_builder", "bert_dataset_class", "bert_dataset_config"],
        "batch": [
            "Batch",
            "get_batch",
            "get_batch_on_this_cp_rank",
            "get_retro_batch",
            "holds_first_token",
            "read_batch",
            "sum_over_context",
        ],
        "checkpointing": ["load_checkpoint", "save_checkpoint"],
        "configs": [
            "DataConfig",
            "DistributedInitConfig",
            "PipelineConfig",
            "LoggingConfig",
            "ModelConfig",
            "RNGConfig",
            "SchedulerConfig",
            "TrainingConfig",
            "ValidationConfig",
        ],
        "data_loading": ["get_blend_and_blend_per_split", "is_dataset_built_on_rank"],
        "entry": ["pretrain"],
        "families": ["defaults_of"],
        "gpt_builder": ["gpt_builder"],
        "gpt_data": ["gpt_dataset_class", "gpt_dataset_config"],
        "t5_data": ["get_t5_batch"],
        "initialize": ["initialize_megatron", "set_random_seed"],
        "losses": ["language_model_loss"],
        "model_parts": ["build_datasets", "build_model"],
        "model_setup": ["get_model", "setup_model_and_optimizer"],
        "global_vars": [
            "get_args",
            "get_num_microbatches",
            "get_tensorboard_writer",
            "get_timers",
            "get_tokenizer",
            "get_wandb_writer",
            "print_rank_0",
            "print_rank_last",
        ],
    },
)
