"""What a resumed run changes: the arguments in the checkpoint beside those of the command line.

    there: args.json ----+                      effect of the field     another training     -> refused without --force
                         +--> fields that differ ------(EFFECTS)------> another way to do it -> one block of rank 0
    here: command line --+                                              how to resume        -> not worth a word

The command line holds in all of them, except the schedule, which has switches of its own. What `--use-checkpoint-args`
took from the checkpoint is equal by now. A flag that nobody has judged counts as another training: the careful side.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from megatron_lite.checkpointing.checkpoint_config import CheckpointConfig
from megatron_lite.checkpointing.plain_values import to_json
from megatron_lite.config import flags_of
from megatron_lite.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron_lite.distributed.fully_sharded_config import FullyShardedConfig
from megatron_lite.errors import CheckpointError
from megatron_lite.log import print_rank_0
from megatron_lite.training.arguments import CONFIGS
from megatron_lite.training.checkpoint_args import (
    MODEL_ARGUMENTS,
    OPTIONAL,
    TOKENIZER_FILES,
    TOKENS,
    VOCABULARY,
    grows_into_retro,
    has_vocabulary_of,
)
from megatron_lite.training.configs import (
    DiagnosticsConfig,
    DistributedInitConfig,
    ExpertsConfig,
    LoggingConfig,
    PipelineConfig,
    ProfileConfig,
    SchedulerConfig,
    ValidationConfig,
)
from megatron_lite.training.faults_config import FaultsConfig
from megatron_lite.training.inference_config import InferenceConfig


@dataclass(frozen=True)
class Effect:
    """What fields change in a run that goes on.

    Args:
        says: shown with the values.
        another_training: refused without `--force`.
        silent: such a difference is how one resumes, and is not shown.
    """

    says: str
    another_training: bool = False
    silent: bool = False


MODEL = Effect("the weights mean something else", another_training=True)
COMPUTES = Effect("the model computes something else", another_training=True)
WORDS = Effect("token numbers mean something else", another_training=True)
SAMPLES = Effect("other samples, or in another order", another_training=True)
BATCH = Effect("an update sees another number of samples", another_training=True)
LOSS = Effect("another loss is minimised", another_training=True)
UPDATES = Effect("weights are updated in another way", another_training=True)
FORMATS = Effect("numbers of another precision", another_training=True)
UNJUDGED = Effect("may change the training", another_training=True)
LENGTH = Effect("length of the run; where it takes more epochs of the data, these are shuffled together")
SCHEDULE = Effect("learning rate and weight decay, as --override-opt_param-scheduler or its opposite says")
LAYOUT = Effect("the same training on other ranks or in other parts")
SPEED = Effect("the same training at another speed")
CHECKS = Effect("what is watched, and what is done about it")
STOPS = Effect("when the run stops and what it keeps")
LOGGED = Effect("what is logged")
EVALUATED = Effect("what is evaluated, and when")
READING = Effect("how data are read")
STARTED = Effect("how the run was started", silent=True)
_OF_ANY_USE = (MODEL, COMPUTES, WORDS, FORMATS)  # what also evaluating and writing with the weights depend on

# Field -> effect; a class stands for all of its fields that no other row names.
EFFECTS: tuple[tuple[Effect, str, tuple[type, ...]], ...] = (
    (MODEL, " ".join(MODEL_ARGUMENTS), ()),
    (
        COMPUTES,
        "max_position_embeddings rotary_base rotary_seq_len_interpolation_factor use_rope_scaling rope_scaling_factor "
        "rope_type rotary_scaling_factor mscale mscale_all_dim yarn_original_max_position_embeddings yarn_beta_fast "
        "yarn_beta_slow yarn_correction_range_round_to_int no_rope_freq norm_epsilon glu_linear_offset "
        "activation_func_clamp_value softmax_type window_size window_attn_skip_freq hidden_dropout attention_dropout "
        "retro_encoder_hidden_dropout retro_encoder_attention_dropout retro_attention_gate retro_off "
        "retro_num_neighbors retro_num_retrieved_chunks retro_missing_chunks moe_router_dtype moe_input_jitter_eps "
        "moe_router_force_load_balancing moe_expert_capacity_factor moe_pad_expert_input_to_capacity "
        "moe_token_drop_policy moe_latent_size mtp_detach_heads spec "
        "bias_gelu_fusion",  # its kernels take the tanh form of GELU
        (),
    ),
    (WORDS, " ".join(sorted({*TOKENS, *VOCABULARY} - {"make_vocab_size_divisible_by"})), ()),
    (
        WORDS,
        "tokenizer_sentencepiece_legacy tokenizer_sentencepiece_ignore_extra_whitespaces tokenizer_hf_no_use_fast "
        "tokenizer_hf_no_include_special_tokens tiktoken_pattern tiktoken_num_special_tokens null_tokenizer_eod_id "
        "null_tokenizer_pad_id sft_tokenizer_prompt_format chat_template",
        (),
    ),
    (
        SAMPLES,
        "seed data_path train_data_path data_args_path per_split_data_args_path split mock_data seq_length "
        "decoder_seq_length mid_level_dataset_surplus mask_prob short_seq_prob reset_position_ids reset_attention_mask "
        "sft dataloader_inter_document_masking dataloader_type data_sharding allow_ambiguous_pad_tokens fim_data "
        "fim_rate fim_spm_rate fim_split_sample fim_fragment_rate fim_no_prefix fim_prefix_token fim_middle_token "
        "fim_suffix_token fim_pad_token fim_eod_token retro_project_dir retro_cyclic_train_iters",
        (),
    ),
    (BATCH, "global_batch_size rampup_batch_size step_batch_size_schedule", ()),
    (
        LOSS,
        "eod_mask_loss calculate_per_token_loss moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff "
        "moe_router_bias_update_rate mtp_loss_scaling_factor",
        (),
    ),
    (
        UPDATES,
        "optimizer clip_grad adam_beta1 adam_beta2 adam_eps sgd_momentum lion_beta1 lion_beta2 muon_momentum "
        "muon_nesterov muon_split_qkv muon_scale_mode muon_coefficient_type muon_num_ns_steps muon_tp_mode "
        "muon_extra_scale_factor muon_scalar_optimizer apply_wd_to_qk_layernorm loss_scale freeze_all_layers",
        (),
    ),
    (
        FORMATS,
        "fp16 bf16 fp32_residual_connection fp16_lm_cross_entropy attention_softmax_in_fp32 grad_reduce_in_bf16 "
        "accumulate_allreduce_grads_in_fp32 main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype "
        "muon_fp32_matmul_prec output_logit_dtype disable_bf16_reduced_precision_matmul "
        "megatron_fsdp_main_params_dtype megatron_fsdp_main_grads_dtype megatron_fsdp_grad_comm_dtype "
        "fp8_format fp8_recipe fp8_amax_history_len fp8_amax_compute_algo fp8_margin fp8_wgrad first_last_layers_bf16 "
        "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16",
        (),
    ),
    (LENGTH, "train_iters train_samples phase_transition_iterations", ()),
    (SCHEDULE, "lr min_lr decoupled_lr decoupled_min_lr weight_decay", (SchedulerConfig,)),
    (
        LAYOUT,
        "tensor_model_parallel_size pipeline_model_parallel_size sequence_parallel context_parallel_size "
        "hierarchical_context_parallel_sizes cp_comm_type expert_model_parallel_size expert_tensor_parallel_size "
        "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers account_for_embedding_in_pipeline_split "
        "account_for_loss_in_pipeline_split pipeline_model_parallel_layout pipeline_model_parallel_split_rank "
        "micro_batch_size decrease_batch_size_if_needed microbatch_group_size_per_virtual_pipeline_stage "
        "make_vocab_size_divisible_by pad_vocab_size use_distributed_optimizer num_distributed_optimizer_instances "
        "moe_token_dispatcher_type",
        (PipelineConfig, FullyShardedConfig),
    ),
    (
        SPEED,
        "clone_scatter_output_in_embedding deterministic_mode cross_entropy_loss_fusion cross_entropy_fusion_impl "
        "tp_comm_overlap tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_bulk_dgrad "
        "tp_comm_bulk_wgrad overlap_p2p_communication_warmup_flush delay_wgrad_compute defer_embedding_wgrad_compute "
        "wgrad_deferral_limit moe_shared_expert_overlap moe_grouped_gemm attention_backend recompute_granularity "
        "recompute_method recompute_num_layers recompute_modules distribute_saved_activations recompute_activations "
        "transformer_impl bias_swiglu_fusion bias_dropout_fusion gradient_accumulation_fusion "
        "empty_unused_memory_level manual_gc manual_gc_interval manual_gc_eval use_precision_aware_optimizer "
        "optimizer_cpu_offload optimizer_offload_fraction pin_cpu_grads pin_cpu_params "
        "overlap_param_gather_with_optimizer_step mlp_chunks_for_training",
        (DistributedDataParallelConfig, DistributedInitConfig),
    ),
    (
        READING,
        "data_cache_path num_workers num_dataset_builder_threads create_attention_mask_in_dataloader mmap_bin_files "
        "dataloader_fast_cache_load dataloader_defer_npy_index_mmap per_dataset_sequences_path "
        "retro_verify_neighbor_count",
        (),
    ),
    (
        CHECKS,
        "check_for_nan_in_loss_and_grad check_for_large_grads iterations_to_skip",
        (FaultsConfig,),
    ),
    (
        STOPS,
        "exit_interval exit_duration_in_mins exit_signal_handler exit_signal exit_signal_handler_for_dataloader "
        "exit_signal_handler_for_training",
        (CheckpointConfig,),
    ),
    (
        LOGGED,
        "moe_per_layer_logging config_logger_dir",
        (LoggingConfig, ProfileConfig, DiagnosticsConfig, ExpertsConfig),
    ),
    (EVALUATED, "valid_data_path test_data_path output_bert_embeddings", (ValidationConfig,)),
    (
        STARTED,
        # initial values are the checkpoint's, and a dynamic loss scale is too
        "perform_initialization use_cpu_initialization init_method_std init_method_xavier_uniform "
        "embedding_init_method_std data_parallel_random_init initial_loss_scale min_loss_scale loss_scale_window "
        "hysteresis encoder_num_layers encoder_seq_length enable_gpt_oss moe_use_upcycling moe_upcycling_granularity "
        "load save ckpt_step no_load_optim no_load_rng finetune pretrained_checkpoint exit_on_missing_checkpoint "
        "use_checkpoint_args use_mp_args_from_checkpoint_args use_tokenizer_model_from_checkpoint_args "
        "override_opt_param_scheduler use_checkpoint_opt_param_scheduler override_ckpt_iteration "
        "load_main_params_from_ckpt auto_detect_ckpt_format dist_ckpt_strictness ckpt_load_validate_sharding_integrity "
        "ckpt_fully_parallel_load verify_integrity force local_rank init_model_with_meta_device "
        "strict_fsdp_dtensor_load",
        (InferenceConfig,),
    ),
)


def effects() -> dict[str, Effect]:
    """Field -> what a difference in it does, for every flag of every config."""
    named: dict[str, Effect] = {}
    of_classes: dict[str, Effect] = {}
    for effect, names, classes in EFFECTS:
        named.update(dict.fromkeys(names.split(), effect))
        for config in classes:
            of_classes.update({flag.dest: effect for flag in flags_of(config)})
    flags = {flag.dest: UNJUDGED for config in CONFIGS for flag in flags_of(config)}
    return {**flags, **of_classes, **named}


@dataclass(frozen=True)
class Difference:
    """A field whose value in the checkpoint is not the run's."""

    name: str
    there: Any
    here: Any
    effect: Effect

    def __str__(self) -> str:
        return f"{self.name}: {self.there} there, {self.here} here"


def check_args(
    args: Namespace,
    saved: dict[str, Any],
    folder: object,
    *,
    finetune: bool,
    trains: bool = False,
    new_phase: bool = False,
    same_tokenizer: Callable[[], bool] = lambda: False,
) -> None:
    """Refuse a checkpoint that another training left behind; tell what else differs.

    Args:
        saved: the arguments in the checkpoint.
        finetune: only the weights are taken: what they mean must agree, all else begins anew.
        trains: the run goes on with the training. Otherwise other samples or updates are nothing to refuse.
        new_phase: the run goes on at one of `--phase-transition-iterations`, from where data and batch may be others.
        same_tokenizer: whether the tokenizer's files, wherever they lie now, are those of the checkpoint.
    Raises: CheckpointError naming every argument that makes it another training, unless `--force` allows it.
    """
    found = list(_of_weights(args, saved, finetune))
    if not finetune:
        found += _of_training(args, saved, {difference.name for difference in found}, same_tokenizer)
    force = getattr(args, "force", None)
    forced = [name.lstrip("-").replace("-", "_") for name in force or ()]
    unknown = [name for name in forced if name not in vars(args) and name not in saved]
    if unknown:
        near = get_close_matches(unknown[0], vars(args), n=1)
        raise CheckpointError(
            f"--force {' '.join(unknown)}: no argument has this name",
            why="it names the arguments that may differ from the checkpoint's",
            fix=f"did you mean {near[0]}?" if near else "the names that the refusal without --force tells",
        )
    refused: list[Difference] = []
    told: list[Difference] = []
    for difference in found:
        effect = difference.effect
        if effect.silent or not (trains or effect in _OF_ANY_USE):
            continue
        meant = new_phase and effect in (SAMPLES, BATCH)
        stops = effect is MODEL or (effect.another_training and trains and not meant)
        allowed = force is not None and (not force or difference.name in forced)
        (refused if stops and not allowed else told).append(difference)
    if refused:
        raise _refusal(refused, saved, folder)
    if told:
        print_rank_0("\n".join(block(told)))


def block(differences: Iterable[Difference]) -> list[str]:
    """The lines that tell differences, those of one effect together."""
    by_effect: dict[Effect, list[Difference]] = {}
    for difference in differences:
        by_effect.setdefault(difference.effect, []).append(difference)
    lines = ["> other arguments than the checkpoint's; the command line's hold:"]
    for effect in sorted(by_effect, key=lambda effect: not effect.another_training):
        lines.append(f">   {'NOTE: ' if effect.another_training else ''}{effect.says}")
        lines += [f">     {difference}" for difference in by_effect[effect]]
    return lines


def _of_weights(args: Namespace, saved: dict[str, Any], finetune: bool) -> Iterator[Difference]:
    """Differences in what the weights mean. A value that one side leaves open is none."""
    names = [*MODEL_ARGUMENTS, *(() if finetune else VOCABULARY)]
    if not finetune and has_vocabulary_of(args, saved):  # the padding is cut anew
        names = [name for name in names if name not in ("padded_vocab_size", "make_vocab_size_divisible_by")]
    if getattr(args, "position_embedding_type", None) == "learned_absolute" and not finetune:
        names.append("max_position_embeddings")
    if finetune and grows_into_retro(args, saved):
        names = [name for name in names if name != "model_family" and not name.startswith("retro_")]
    if not getattr(args, "group_query_attention", True):
        names.remove("num_query_groups")
    for difference in _differing(args, saved, names):
        if difference.here is not None and difference.there is not None or difference.name in OPTIONAL:
            yield Difference(difference.name, difference.there, difference.here, MODEL)


def _of_training(
    args: Namespace, saved: dict[str, Any], known: set[str], same_tokenizer: Callable[[], bool]
) -> Iterator[Difference]:
    """Differences in all other flags, and in those of the script's own that were typed."""
    of = effects()
    names = [name for name, effect in of.items() if effect is not MODEL and name not in known | {*VOCABULARY}]
    own = [name for name in getattr(args, "typed", ()) if name not in of]
    moved: bool | None = None
    for difference in _differing(args, saved, [*names, *own]):
        if difference.name in TOKENIZER_FILES:
            moved = same_tokenizer() if moved is None else moved
            effect = READING if moved else WORDS
        else:
            effect = of.get(difference.name, LOGGED if difference.name in own else UNJUDGED)
        yield Difference(difference.name, difference.there, difference.here, effect)


def _differing(args: Namespace, saved: dict[str, Any], names: Iterable[str]) -> Iterator[Difference]:
    """Those of the names that both sides have, with other values."""
    for name in names:
        if hasattr(args, name) and name in saved:
            here, there = to_json(getattr(args, name)), saved[name]
            if here != there and not _is_same_place(name, here, there):
                yield Difference(name, there, here, UNJUDGED)


def _is_same_place(name: str, here: Any, there: Any) -> bool:
    """Whether paths are the same but for the folder that they start from: `x/data` and `/home/me/x/data`."""
    if not name.endswith(("_path", "_dir")):
        return False
    ours, theirs = (value if isinstance(value, list) else [value] for value in (here, there))
    return len(ours) == len(theirs) and all(
        one == other or bool(one and other) and (str(one).endswith(f"/{other}") or str(other).endswith(f"/{one}"))
        for one, other in zip(ours, theirs)
    )


def _refusal(refused: list[Difference], saved: dict[str, Any], folder: object) -> CheckpointError:
    lines = [f"{difference}" for difference in refused]
    effects_of = dict.fromkeys(difference.effect for difference in refused)
    names = " ".join(difference.name for difference in refused)
    if list(effects_of) == [MODEL]:
        why = "its weights would mean something else in this model"
        fix = "the same flags as then, or --use-checkpoint-args, which takes them from the checkpoint"
        if len(refused) == 1 and refused[0].name == "padded_vocab_size":  # the padding depends on tp
            fix = f"--padded-vocab-size {saved['padded_vocab_size']}"
    else:
        lines = [f"{difference} ({difference.effect.says})" for difference in refused]
        why = "what goes on would be another training than the one that the checkpoint is from"
        fix = (
            f"the values of then; or --force {names}, where the change is meant; or --finetune, which starts another "
            "training from its weights"
        )
    return CheckpointError(f"{folder} was trained with other arguments:\n    " + "\n    ".join(lines), why=why, fix=fix)
