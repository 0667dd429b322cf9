"""The names that Megatron's users import, at its paths, with its arguments: `megatron.core.x` is `megatron_lite.x`.

A script ports by replacing the package's name, so a name, a path or an argument that moves breaks somebody.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

import pytest

# path -> name -> arguments in Megatron's order (not all of them: what users write); "" where arguments are no matter
NAMES: dict[str, dict[str, str]] = {
    "mpu": {"get_data_parallel_rank": "", "get_tensor_model_parallel_world_size": ""},
    "parallel_state": {
        "initialize_model_parallel": (
            "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
            "context_parallel_size expert_model_parallel_size order"
        ),
        "model_parallel_is_initialized": "",
        "destroy_model_parallel": "",
        "get_tensor_model_parallel_group": "",
        "get_tensor_model_parallel_rank": "",
        "get_tensor_model_parallel_world_size": "",
        "get_pipeline_model_parallel_group": "",
        "get_pipeline_model_parallel_rank": "",
        "get_pipeline_model_parallel_world_size": "",
        "get_data_parallel_group": "with_context_parallel",
        "get_data_parallel_rank": "with_context_parallel",
        "get_data_parallel_world_size": "with_context_parallel",
        "get_context_parallel_group": "",
        "get_context_parallel_world_size": "",
        "get_expert_model_parallel_group": "",
        "is_pipeline_first_stage": "",
        "is_pipeline_last_stage": "",
    },
    "packed_seq_params": {
        "PackedSeqParams": "qkv_format cu_seqlens_q cu_seqlens_kv cu_seqlens_q_padded cu_seqlens_kv_padded max_seqlen_q"
    },
    "process_groups_config": {"ProcessGroupCollection": ""},
    "model_parallel_config": {
        "ModelParallelConfig": "tensor_model_parallel_size sequence_parallel bf16 pipeline_dtype"
    },
    "num_microbatches_calculator": {
        "init_num_microbatches_calculator": (
            "rank rampup_batch_size global_batch_size micro_batch_size data_parallel_size decrease_batch_size_if_needed"
        ),
        "reconfigure_num_microbatches_calculator": "rank rampup_batch_size global_batch_size micro_batch_size",
        "get_num_microbatches": "",
        "get_current_global_batch_size": "",
        "get_current_running_global_batch_size": "",
        "get_micro_batch_size": "",
        "update_num_microbatches": "consumed_samples consistency_check verbose",
    },
    "optimizer_param_scheduler": {
        "OptimizerParamScheduler": (
            "optimizer init_lr max_lr min_lr lr_warmup_steps lr_decay_steps lr_decay_style start_wd end_wd "
            "wd_incr_steps wd_incr_style use_checkpoint_opt_param_scheduler override_opt_param_scheduler "
            "wsd_decay_steps lr_wsd_decay_style"
        )
    },
    "timers": {"Timers": "log_level log_option"},
    "enums": {"ModelType": ""},
    "utils": {},
    "tensor_parallel": {
        "ColumnParallelLinear": (
            "input_size output_size config init_method bias gather_output stride skip_bias_add is_expert tp_group"
        ),
        "RowParallelLinear": "input_size output_size config init_method bias input_is_parallel skip_bias_add is_expert",
        "VocabParallelEmbedding": "num_embeddings embedding_dim init_method reduce_scatter_embeddings config",
        "vocab_parallel_cross_entropy": "vocab_parallel_logits target label_smoothing",
        "copy_to_tensor_model_parallel_region": "",
        "gather_from_tensor_model_parallel_region": "",
        "reduce_from_tensor_model_parallel_region": "",
        "scatter_to_tensor_model_parallel_region": "",
        "scatter_to_sequence_parallel_region": "",
        "gather_from_sequence_parallel_region": "",
        "reduce_scatter_to_sequence_parallel_region": "",
        "model_parallel_cuda_manual_seed": "seed",
        "checkpoint": "function distribute_saved_activations",
        "get_cuda_rng_tracker": "",
        "broadcast_data": "keys data datatype",
        "split_tensor_along_last_dim": "",
    },
    "tensor_parallel.random": {"model_parallel_cuda_manual_seed": "seed", "get_cuda_rng_tracker": "", "checkpoint": ""},
    "pipeline_parallel": {"get_forward_backward_func": ""},
    "pipeline_parallel.schedules": {"get_forward_backward_func": ""},
    "distributed": {
        "DistributedDataParallel": "config ddp_config module disable_bucketing pg_collection",
        "DistributedDataParallelConfig": (
            "grad_reduce_in_fp32 overlap_grad_reduce overlap_param_gather use_distributed_optimizer "
            "check_for_nan_in_grad bucket_size average_in_collective"
        ),
        "finalize_model_grads": "model num_tokens pg_collection",
        "TorchFullyShardedDataParallel": "config ddp_config module sub_modules_to_wrap process_group",
        "TorchFullyShardedDataParallelConfig": "reshard_after_forward",
        "FullyShardedDataParallel": "config ddp_config module fsdp_unit_modules disable_bucketing device pg_collection",
    },
    "distributed.torch_fully_sharded_data_parallel": {
        "TorchFullyShardedDataParallel": "config ddp_config module sub_modules_to_wrap process_group"
    },
    "distributed.finalize_model_grads": {"finalize_model_grads": "model num_tokens pg_collection"},
    "distributed.param_and_grad_buffer": {},
    "optimizer": {
        "OptimizerConfig": "optimizer lr min_lr weight_decay fp16 bf16 params_dtype adam_beta1 adam_eps clip_grad",
        "get_megatron_optimizer": (
            "config model_chunks no_weight_decay_cond scale_lr_cond lr_mult use_gloo_process_groups pg_collection"
        ),
        "MegatronOptimizer": "",
        "ChainedOptimizer": "chained_optimizers",
        "DistributedOptimizer": "",
    },
    "optimizer.optimizer": {"MegatronOptimizer": "", "ChainedOptimizer": "chained_optimizers"},
    "optimizer.distrib_optimizer": {"DistributedOptimizer": ""},
    "optimizer.clip_grads": {"get_grad_norm_fp32": "grads_for_norm norm_type grad_stats_parallel_group"},
    "transformer.transformer_config": {
        "TransformerConfig": (
            "num_layers hidden_size num_attention_heads ffn_hidden_size kv_channels num_query_groups normalization "
            "layernorm_epsilon add_bias_linear gated_linear_unit activation_func hidden_dropout attention_dropout "
            "attention_softmax_in_fp32 recompute_granularity recompute_method recompute_num_layers"
        ),
        "MLATransformerConfig": (
            "multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type "
            "rotary_base rotary_percent rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow "
            "mscale mscale_all_dim"
        ),
    },
    "transformer": {"TransformerConfig": "", "ModuleSpec": "", "build_module": "", "MegatronModule": "", "MLP": ""},
    "transformer.spec_utils": {
        "ModuleSpec": "module params submodules",
        "build_module": "spec_or_module",
        "import_module": "module_path",
    },
    "transformer.transformer_block": {
        "TransformerBlock": "config spec post_layer_norm pre_process post_process pg_collection vp_stage",
        "TransformerBlockSubmodules": "layer_specs layer_norm",
    },
    "transformer.transformer_layer": {
        "TransformerLayer": "config submodules layer_number hidden_dropout pg_collection",
        "TransformerLayerSubmodules": "input_layernorm self_attention self_attn_bda pre_mlp_layernorm mlp mlp_bda",
    },
    "transformer.attention": {
        "SelfAttention": "config submodules layer_number attn_mask_type pg_collection",
        "SelfAttentionSubmodules": "linear_qkv core_attention linear_proj q_layernorm k_layernorm",
        "CrossAttention": "config submodules layer_number attn_mask_type",
    },
    "transformer.multi_latent_attention": {
        "MultiLatentAttention": "config submodules layer_number attn_mask_type attention_type cp_comm_type",
        "MLASelfAttention": "config submodules layer_number attn_mask_type cp_comm_type pg_collection",
        "MLASelfAttentionSubmodules": (
            "linear_q_proj linear_q_down_proj linear_q_up_proj linear_kv_down_proj linear_kv_up_proj core_attention "
            "linear_proj q_layernorm kv_layernorm"
        ),
    },
    "transformer.multi_token_prediction": {
        "MultiTokenPredictionBlock": "config spec vp_stage pg_collection",
        "MultiTokenPredictionLayer": "config submodules layer_number vp_stage",
        "MultiTokenPredictionBlockSubmodules": "layer_specs",
        "MultiTokenPredictionLayerSubmodules": "enorm hnorm eh_proj transformer_layer layer_norm",
        "roll_tensor": "tensor shifts dims cp_group",
        "get_mtp_layer_spec": "transformer_layer_spec use_transformer_engine",
        "get_mtp_num_layers_to_build": "config vp_stage",
    },
    "transformer.mlp": {"MLP": "config submodules", "MLPSubmodules": "linear_fc1 linear_fc2"},
    "transformer.dot_product_attention": {
        "DotProductAttention": "config layer_number attn_mask_type attention_type attention_dropout softmax_scale"
    },
    "transformer.identity_op": {"IdentityOp": "", "IdentityFuncOp": ""},
    "transformer.module": {"MegatronModule": "config", "Float16Module": "config module"},
    "transformer.enums": {"AttnMaskType": "", "AttnBackend": "", "LayerType": "", "AttnType": ""},
    "transformer.torch_norm": {"WrappedTorchNorm": "config hidden_size eps"},
    "models.bert.bert_model": {
        "BertModel": (
            "config num_tokentypes transformer_layer_spec vocab_size max_sequence_length pre_process post_process "
            "fp16_lm_cross_entropy parallel_output share_embeddings_and_output_weights position_embedding_type "
            "rotary_percent seq_len_interpolation_factor add_binary_head return_embeddings vp_stage"
        )
    },
    "models.bert": {"BertModel": ""},
    "models.bert.bert_lm_head": {"BertLMHead": "hidden_size config"},
    "models.bert.pooler": {"Pooler": "hidden_size init_method config sequence_parallel"},
    "models.bert.bert_layer_specs": {"bert_layer_local_spec": "", "get_bert_layer_local_spec": ""},
    "models.gpt": {
        "GPTModel": (
            "config transformer_layer_spec vocab_size max_sequence_length pre_process post_process "
            "fp16_lm_cross_entropy parallel_output share_embeddings_and_output_weights position_embedding_type "
            "rotary_percent rotary_base rope_scaling rope_scaling_factor "
            "scatter_embedding_sequence_parallel seq_len_interpolation_factor pg_collection vp_stage"
        )
    },
    "transformer.moe.moe_layer": {
        "MoELayer": "config submodules layer_number pg_collection",
        "MoESubmodules": "experts",
    },
    "transformer.moe.experts": {
        "SequentialMLP": "num_local_experts config submodules pg_collection",
        "TEGroupedMLP": "num_local_experts config submodules pg_collection",
        "GroupedMLP": "num_local_experts config pg_collection",
    },
    "transformer.moe.shared_experts": {"SharedExpertMLP": "config submodules gate pg_collection"},
    "transformer.moe.token_dispatcher": {
        "MoEAllGatherTokenDispatcher": "num_local_experts local_expert_indices config pg_collection",
        "MoEAlltoAllTokenDispatcher": "num_local_experts local_expert_indices config pg_collection",
    },
    "transformer.moe.router": {"TopKRouter": "config"},
    "transformer.moe.moe_utils": {
        "MoEAuxLossAutoScaler": "",
        "topk_routing_with_score_function": (
            "logits topk use_pre_softmax num_groups group_topk scaling_factor score_function expert_bias"
        ),
        "switch_load_balancing_loss_func": "probs tokens_per_expert total_num_tokens topk num_experts",
        "z_loss_func": "logits z_loss_coeff",
        "sinkhorn": "cost tol",
    },
    "models.gpt.gpt_model": {"GPTModel": "config transformer_layer_spec vocab_size max_sequence_length"},
    "models.gpt.gpt_layer_specs": {
        "get_gpt_mtp_block_spec": "config spec use_transformer_engine vp_stage",
        "get_gpt_layer_local_spec": "num_experts moe_grouped_gemm qk_layernorm",
        "get_gpt_layer_with_transformer_engine_spec": "",
    },
    "models.T5": {
        "T5Model": (
            "config encoder_config transformer_encoder_layer_spec transformer_decoder_layer_spec vocab_size "
            "max_sequence_length pre_process post_process fp16_lm_cross_entropy parallel_output "
            "share_embeddings_and_output_weights position_embedding_type rotary_percent seq_len_interpolation_factor "
            "relative_attention_num_buckets relative_attention_max_distance add_encoder add_decoder pg_collection"
        )
    },
    "models.T5.t5_model": {"T5Model": "config encoder_config", "T5LMHead": "config parallel_output vocab_size"},
    "models.retro": {
        "RetroConfig": "retro_num_neighbors retro_num_retrieved_chunks retro_encoder_num_layers",
        "RetroModel": "config transformer_layer_spec vocab_size max_sequence_length",
        "get_retro_decoder_block_spec": "config use_transformer_engine",
    },
    "models.retro.decoder_spec": {"get_retro_decoder_block_spec": "config use_transformer_engine"},
    "models.retro.encoder_spec": {"get_retro_encoder_block_spec": "config use_transformer_engine"},
    "models.T5.t5_spec": {
        "get_t5_encoder_with_local_block_spec": "num_layers",
        "get_t5_decoder_with_local_block_spec": "num_layers",
        "get_t5_encoder_with_transformer_engine_block_spec": "",
        "get_t5_decoder_with_transformer_engine_block_spec": "",
        "encoder_model_with_local_spec": "",
        "decoder_model_with_local_spec": "",
    },
    "models.common.embeddings.relative_pos_embedding": {
        "RelativePositionEmbedding": (
            "bidirectional init_method num_attention_heads relative_attention_num_buckets "
            "relative_attention_max_distance"
        )
    },
    "models.common.language_module.language_module": {"LanguageModule": "config pg_collection"},
    "models.common.embeddings.language_model_embedding": {
        "LanguageModelEmbedding": "config vocab_size max_sequence_length position_embedding_type num_tokentypes"
    },
    "models.common.embeddings.rotary_pos_embedding": {
        "RotaryEmbedding": "kv_channels rotary_percent rotary_interleaved seq_len_interpolation_factor rotary_base"
    },
    "datasets.indexed_dataset": {
        "IndexedDataset": "path_prefix multimodal mmap",
        "IndexedDatasetBuilder": "bin_path dtype multimodal",
        "DType": "",
    },
    "datasets.gpt_dataset": {
        "GPTDataset": "indexed_dataset dataset_path indexed_indices num_samples index_split config",
        "GPTDatasetConfig": "random_seed sequence_length blend split path_to_cache tokenizer eod_mask_loss",
        "MockGPTDataset": "",
    },
    "datasets.masked_dataset": {
        "MaskedWordPieceDataset": "indexed_dataset dataset_path indexed_indices num_samples index_split config",
        "MaskedWordPieceDatasetConfig": (
            "masking_probability short_sequence_probability masking_max_ngram masking_do_full_word "
            "masking_do_permutation masking_use_longer_ngrams masking_use_geometric_distribution"
        ),
    },
    "datasets.t5_dataset": {
        "T5MaskedWordPieceDataset": "indexed_dataset dataset_path indexed_indices num_samples index_split config",
        "T5MaskedWordPieceDatasetConfig": "sequence_length_decoder",
    },
    "datasets.bert_dataset": {
        "BERTMaskedWordPieceDataset": "indexed_dataset dataset_path indexed_indices num_samples index_split config",
        "BERTMaskedWordPieceDatasetConfig": "random_seed sequence_length masking_probability classification_head",
    },
    "datasets.blended_dataset": {"BlendedDataset": "datasets weights size config"},
    "datasets.blended_megatron_dataset_builder": {"BlendedMegatronDatasetBuilder": "cls sizes is_built_on_rank config"},
    "datasets.blended_megatron_dataset_config": {
        "BlendedMegatronDatasetConfig": "random_seed sequence_length blend split"
    },
    "datasets.utils": {"Split": "", "get_blend_from_list": "blend", "compile_helpers": ""},
    "training": {
        "pretrain": (
            "train_valid_test_dataset_provider model_provider model_type forward_step_func process_non_loss_data_func "
            "extra_args_provider args_defaults"
        ),
        "get_args": "",
        "get_timers": "",
        "get_tokenizer": "",
        "get_tensorboard_writer": "",
        "get_num_microbatches": "",
        "print_rank_0": "",
        "print_rank_last": "",
    },
    "training.arguments": {
        "parse_args": "extra_args_provider ignore_unknown_args",
        "validate_args": "args",
        "core_transformer_config_from_args": "args",
    },
    "training.initialize": {"initialize_megatron": ""},
}

# Names that land with a later capability. The list only gets shorter: one that is there moves up.
LATER = [
    "extensions.transformer_engine.TEColumnParallelLinear",
]


def arguments(thing: Any) -> list[str]:
    """Names of the arguments; of a class those of its constructor."""
    if dataclasses.is_dataclass(thing):
        return [field.name for field in dataclasses.fields(thing) if field.init]
    return [name for name in inspect.signature(thing).parameters if name != "self"]


@pytest.mark.parametrize("path", NAMES)
def test_megatrons_names_are_at_megatrons_paths_with_its_arguments(path: str) -> None:
    module = (
        importlib.import_module(f"megatron_lite.{path}")
        if path != "mpu"
        else importlib.import_module("megatron_lite").mpu
    )
    for name, wanted in NAMES[path].items():
        thing = getattr(module, name)
        if not wanted:
            continue
        have = arguments(thing)
        missing = [argument for argument in wanted.split() if argument not in have]
        assert not missing, f"{path}.{name} lacks {missing}: it has {have}"
        if not dataclasses.is_dataclass(thing):  # fields are given by name, arguments also by place
            order = [argument for argument in have if argument in wanted.split()]
            assert order == wanted.split(), f"{path}.{name}: the order is Megatron's"


def test_the_registered_groups_are_found_as_megatrons_users_do() -> None:
    from megatron_lite.process_groups_config import ProcessGroupCollection

    collection = ProcessGroupCollection.use_mpu_process_groups()
    assert {"tp", "pp", "dp", "cp", "dp_cp", "mp"} <= set(dir(collection))


@pytest.mark.parametrize("name", LATER)
def test_names_that_come_later_are_listed(name: str) -> None:
    """When this fails, the name has landed: give it a line above."""
    path, _, last = name.rpartition(".")
    try:
        module = importlib.import_module(f"megatron_lite.{path}")
    except ModuleNotFoundError:
        return
    assert not hasattr(module, last), f"{name} is there: move it from LATER to NAMES"


def test_quickstart_of_megatron_core_builds_its_config() -> None:
    """The first lines of Megatron-Core's own tutorial, with the package's name replaced."""
    import torch
    import torch.nn.functional as F

    from megatron_lite.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2, hidden_size=12, num_attention_heads=4, use_cpu_initialization=True, pipeline_dtype=torch.float32
    )
    assert (config.ffn_hidden_size, config.kv_channels, config.num_query_groups) == (48, 3, 4)
    assert config.activation_func is F.gelu and config.params_dtype is torch.float32
