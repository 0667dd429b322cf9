"""The settings of a run that belong to no library room: batch, length, schedule, data, logging, evaluation, start-up.

Library rooms state their own (TransformerConfig, OptimizerConfig, ...). `training/arguments` turns all of them into one
command line; the names below are those of Megatron's arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config import flag
from megatron_lite.training.diagnostics_config import DiagnosticsConfig, ProfileConfig
from megatron_lite.training.faults_config import FaultsConfig
from megatron_lite.training.inference_config import InferenceConfig

POSITION_EMBEDDING_TYPES = ("learned_absolute", "rope", "yarn", "mrope", "relative", "none")


@dataclass(kw_only=True)
class ModelConfig:
    """What a model takes beside its TransformerConfig, and the switches that TransformerConfig's fields derive from."""

    encoder_num_layers: int | None = flag(None, "The same as --num-layers, for models with an encoder.")
    decoder_num_layers: int | None = flag(None, "T5: layers of the decoder. Default: as many as the encoder has.")

    # -- positions and vocabulary
    max_position_embeddings: int | None = flag(
        None, "Rows of the learned position table, and upper bound of the sequence length."
    )
    position_embedding_type: str = flag("learned_absolute", "Kind of positions.", choices=POSITION_EMBEDDING_TYPES)
    add_position_embedding: bool = flag(
        True, "No learned position table. Legal together with rope.", off="--no-position-embedding"
    )
    rotary_base: int = flag(10000, "Rotary positions: theta.")
    rotary_percent: float = flag(1.0, "Rotary positions: share of each head's channels that are rotated.")
    rotary_seq_len_interpolation_factor: int | None = flag(None, "Rotary positions: divide positions by this.")
    relative_attention_num_buckets: int = flag(32, "Relative positions (T5): buckets of distances.")
    relative_attention_max_distance: int = flag(
        128, "Relative positions (T5): from this distance on all are in the last bucket."
    )
    use_rope_scaling: bool = flag(False, "Rotary positions: the frequency-dependent rescale of Llama 3.")
    rope_scaling_factor: float = flag(8.0, "Factor of that rescale.")
    rotary_scaling_factor: float = flag(
        1.0, "YaRN: how many times longer the context is than the one before, also in multi-latent attention."
    )
    mscale: float = flag(1.0, "YaRN: how much more sharply the longer context is attended to.")
    mscale_all_dim: float = flag(0.0, "YaRN: the part of it that goes into the scale of the softmax.")
    lm_head_bias: bool = flag(
        True, "T5: no bias in an output layer that shares the embedding's weights.", off="--no-lm-head-bias"
    )
    scaled_logits: bool = flag(False, "T5: logits / sqrt(hidden), as the first T5 has them.")
    untie_embeddings_and_output_weights: bool = flag(
        False, "An output layer of its own, instead of the word embedding's weights."
    )

    # -- layers
    group_query_attention: bool = flag(False, "Several query heads share a key/value head.")
    num_query_groups: int = flag(1, "Number of key/value heads, with --group-query-attention.")
    swiglu: bool = flag(False, "Gated MLP with SiLU.")
    quick_geglu: bool = flag(False, "Gated MLP with the sigmoid form of GELU.")
    geglu: bool = flag(False, "Gated MLP with GELU; with --openai-gelu in its tanh form, as T5 1.1 has it.")
    relu: bool = flag(False, "MLP with ReLU, as the first T5 has it.")
    enable_gpt_oss: bool = flag(
        False, "Layers as GPT-OSS has them: YaRN, sinks, every other layer a window of 128, bounded quick GEGLU."
    )
    squared_relu: bool = flag(False, "MLP with max(x, 0)^2.")
    openai_gelu: bool = flag(False, "GELU in its tanh form, for old checkpoints.")
    attention_softmax_in_fp32: bool = flag(False, "Softmax of the attention in fp32.")
    transformer_impl: str = flag(
        "transformer_engine",
        "Whose layers. Without Transformer Engine ours are used.",
        choices=("local", "transformer_engine", "inference_optimized"),
    )
    spec: list[str] | None = flag(
        None,
        "Layers by a recipe of yours: path of a module and name of a function in it, or the word local.",
        nargs="*",
    )

    # -- the same numbers, faster
    bias_gelu_fusion: bool = flag(True, "Unfused bias and GELU.", off="--no-bias-gelu-fusion")
    bias_swiglu_fusion: bool = flag(True, "Unfused bias and SwiGLU.", off="--no-bias-swiglu-fusion")
    bias_dropout_fusion: bool = flag(True, "Unfused bias, dropout and residual.", off="--no-bias-dropout-fusion")
    gradient_accumulation_fusion: bool = flag(
        True,
        "Do not add weight gradients inside the backward of linear layers.",
        off="--no-gradient-accumulation-fusion",
    )
    recompute_activations: bool = flag(False, "Short for --recompute-granularity selective.")
    fp16_lm_cross_entropy: bool = flag(False, "Loss in fp16.")


@dataclass(kw_only=True)
class TrainingConfig:
    """Batch, length of the run, reasons to stop, checks."""

    micro_batch_size: int | None = flag(None, "Samples a rank computes at once.", unit="samples")
    global_batch_size: int | None = flag(
        None, "Samples of an optimizer step over all ranks. Default: micro-batch * dp.", unit="samples"
    )
    rampup_batch_size: list[int] | None = flag(
        None, "Batch grows from START by INCREMENT until SAMPLES have been seen.", nargs=3
    )
    step_batch_size_schedule: str | None = flag(
        None, 'Batch by thresholds in tokens, "0:384 3B:768 12B:1536" (suffixes K, M, B, T).'
    )
    decrease_batch_size_if_needed: bool = flag(
        False, "Round the batch down to a multiple of micro-batch * dp, instead of stopping."
    )
    train_iters: int | None = flag(None, "Optimizer steps over all restarts.", unit="iterations")
    train_samples: int | None = flag(None, "Samples over all restarts, instead of --train-iters.", unit="samples")

    # -- reasons to stop
    exit_interval: int | None = flag(None, "Stop, after saving, at a multiple of this.", unit="iterations")
    exit_duration_in_mins: int | None = flag(None, "Stop, after saving, this long after the start.", unit="minutes")
    exit_signal_handler: bool = flag(False, "On the exit signal: finish the step, save, leave.")
    exit_signal: int = flag(15, "Which signal the handler waits for, number or name.", kind="signal")
    exit_signal_handler_for_training: bool = flag(
        False, "On SIGINT and SIGTERM: finish the step, leave in order, without a save."
    )
    exit_signal_handler_for_dataloader: bool = flag(
        False, "Processes that read data do not die of the exit signal. On with --exit-signal-handler."
    )
    phase_transition_iterations: str | None = flag(
        None,
        "Stop, after saving, at these iterations, N,N: the next start reads its data from their first sample.",
        unit="iterations",
    )

    freeze_all_layers: bool = flag(False, "Train nothing: losses are computed and told, and no weight moves.")

    # -- checks
    check_for_nan_in_loss_and_grad: bool = flag(
        True, "No checks of loss and gradients for NaN and Inf.", off="--no-check-for-nan-in-loss-and-grad"
    )
    iterations_to_skip: list[int] = flag(
        [], "Iterations, from 1, whose batch is read but not trained on.", unit="iterations", nargs="+"
    )

    # -- memory
    empty_unused_memory_level: int = flag(0, "How often CUDA's cache is emptied.", choices=(0, 1, 2))
    manual_gc: bool = flag(False, "Collect Python's garbage at set points only.")
    manual_gc_interval: int = flag(0, "Collect every N iterations; 0: around evaluation only.", unit="iterations")
    manual_gc_eval: bool = flag(
        True, "Do not collect around evaluation.", off=("--no-manual-gc-eval", "--disable-manual-gc-eval")
    )

    # -- gradients
    grad_reduce_in_bf16: bool = flag(False, "With --bf16, keep and reduce gradients in bf16.")

    # -- numbers
    disable_bf16_reduced_precision_matmul: bool = flag(
        False, "On a GPU, sums of bf16 products are not rounded to bf16 in between."
    )


@dataclass(kw_only=True)
class RNGConfig:
    """Random numbers."""

    seed: int = flag(1234, "Seed of initial weights, dropout and data order.")
    data_parallel_random_init: bool = flag(
        False, "Seed each data-parallel rank on its own, then take the weights of the first."
    )


@dataclass(kw_only=True)
class SchedulerConfig:
    """Learning rate and weight decay as functions of the samples seen."""

    lr_decay_style: str = flag(
        "linear",
        "Shape of the learning rate after its warm-up.",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int | None = flag(
        None, "Length of the decay, warm-up included. Default: the run.", unit="iterations"
    )
    lr_decay_samples: int | None = flag(None, "The same in samples.", unit="samples")
    lr_warmup_iters: int = flag(0, "Length of the linear warm-up.", unit="iterations")
    lr_warmup_samples: int = flag(0, "The same in samples.", unit="samples")
    lr_warmup_fraction: float | None = flag(None, "The same as a share of the decay.")
    lr_warmup_init: float = flag(0.0, "Learning rate at the start of the warm-up.")
    lr_wsd_decay_style: str = flag(
        "exponential",
        "WSD: shape of the anneal at the end.",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    )
    lr_wsd_decay_iters: int | None = flag(None, "WSD: length of that anneal.", unit="iterations")
    lr_wsd_decay_samples: int | None = flag(None, "The same in samples.", unit="samples")
    weight_decay_incr_style: str = flag(
        "constant", "How weight decay changes over the run.", choices=("constant", "linear", "cosine")
    )
    start_weight_decay: float | None = flag(None, "Weight decay at the start, when it changes.")
    end_weight_decay: float | None = flag(None, "Weight decay at the end, when it changes.")
    override_opt_param_scheduler: bool = flag(
        False,
        "Take the schedule from the command line, not from the checkpoint.",
        name="--override-opt_param-scheduler",
        aliases=("--override-opt-param-scheduler",),
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        "Take the schedule from the checkpoint, not from the command line.",
        name="--use-checkpoint-opt_param-scheduler",
        aliases=("--use-checkpoint-opt-param-scheduler",),
    )


@dataclass(kw_only=True)
class DataConfig:
    """Which tokens, in which order, cut how."""

    data_path: list[str] | None = flag(None, "Prefixes of .bin/.idx pairs, or WEIGHT PREFIX pairs.", nargs="*")
    split: str | None = flag(None, 'Shares of train, valid and test, "969,30,1".')
    train_data_path: list[str] | None = flag(None, "Training data, when splits are separate.", nargs="*")
    valid_data_path: list[str] | None = flag(None, "Validation data, when splits are separate.", nargs="*")
    test_data_path: list[str] | None = flag(None, "Test data, when splits are separate.", nargs="*")
    data_args_path: str | None = flag(None, "File that holds the words of --data-path.")
    per_split_data_args_path: str | None = flag(None, "JSON file with lists train, valid and test.")
    data_cache_path: str | None = flag(None, "Folder of the index caches. Default: beside the data.")
    mock_data: bool = flag(False, "Made-up samples, no files.")
    seq_length: int | None = flag(None, "Length of a sample.", unit="tokens")
    encoder_seq_length: int | None = flag(None, "The same as --seq-length, for models with an encoder.", unit="tokens")
    decoder_seq_length: int | None = flag(None, "T5: length of the decoder's part of a sample.", unit="tokens")
    num_workers: int = flag(2, "Processes that read data, on each rank.")
    num_dataset_builder_threads: int = flag(1, "Threads that build the indices of a blend's members.")
    mid_level_dataset_surplus: float = flag(
        0.005, "Part of its share by which each member of a weighted blend is built larger."
    )
    mask_prob: float = flag(0.15, "BERT and T5: part of the tokens that is masked.")
    short_seq_prob: float = flag(0.1, "BERT and T5: part of the samples that are meant to be shorter.")
    reset_position_ids: bool = flag(False, "Restart positions after each end of document.")
    reset_attention_mask: bool = flag(False, "No attention across documents.")
    eod_mask_loss: bool = flag(False, "No loss on end-of-document tokens.")
    sft: bool = flag(False, "Fine-tune on conversations: data paths are files of JSON lines with messages.")
    create_attention_mask_in_dataloader: bool = flag(
        True,
        "Make no masks: attention hides the future by itself. Without --reset-attention-mask none is made anyway.",
        off="--no-create-attention-mask-in-dataloader",
    )
    dataloader_inter_document_masking: bool = flag(
        False, "Attention and positions stay inside the corpus' documents, whatever tokens they end with."
    )
    mmap_bin_files: bool = flag(True, "Read .bin with ordinary reads.", off="--no-mmap-bin-files")
    allow_ambiguous_pad_tokens: bool = flag(
        False, "Take the pad token as padding even where it is another special token as well."
    )
    dataloader_fast_cache_load: bool = flag(
        False, "Take the index caches as they are: no rank waits for another, nothing is compared."
    )
    dataloader_defer_npy_index_mmap: bool = flag(False, "Open the index caches at the first sample.")
    per_dataset_sequences_path: str | None = flag(
        None, "JSON file, prefix -> [sequences, document marks]: indices are not searched for damage."
    )
    data_sharding: bool = flag(
        True,
        "With --dataloader-type cyclic, shuffle all samples together, not each rank's share.",
        off="--no-data-sharding",
    )
    dataloader_type: str | None = flag(
        None,
        "One pass in order, shuffled epochs, or an iterator of yours. Default: single.",
        choices=("single", "cyclic", "external"),
    )


@dataclass(kw_only=True)
class FillInTheMiddleConfig:
    """Documents rearranged, so that a model learns to complete what lies between two texts."""

    fim_data: bool = flag(False, "Rearrange documents.")
    fim_rate: float = flag(0.5, "Share of the documents that are rearranged.")
    fim_spm_rate: float = flag(0.5, "Share of these whose suffix comes first.")
    fim_split_sample: str | None = flag(None, "A token that cuts documents into fragments.")
    fim_fragment_rate: float | None = flag(None, "Share of the fragments that are rearranged.")
    fim_no_prefix: str | None = flag(None, "A text that begins so stays as it is.")
    fim_prefix_token: str = flag("<fim_prefix>", "Token before the prefix.")
    fim_middle_token: str = flag("<fim_middle>", "Token before the middle.")
    fim_suffix_token: str = flag("<fim_suffix>", "Token before the suffix.")
    fim_pad_token: str = flag("<fim_pad>", "Token that fills samples that became shorter.")
    fim_eod_token: str = flag("<|endoftext|>", "Token at which samples are cut into documents.")


@dataclass(kw_only=True)
class ValidationConfig:
    """Evaluation during and after the run."""

    eval_iters: int = flag(100, "Batches of an evaluation.", unit="iterations")
    eval_interval: int | None = flag(None, "Evaluate every N iterations. Default: at the end only.", unit="iterations")
    eval_before_training: bool = flag(
        False, "Evaluate before the first step too: what the untrained model is worth. Not in Megatron."
    )
    start_eval_at_iter: int | None = flag(
        None, "No evaluation at an interval before this iteration.", unit="iterations"
    )
    eval_global_batch_size: int | None = flag(
        None, "Samples of an evaluation's batch over all ranks. Default: training's.", unit="samples"
    )
    eval_micro_batch_size: int | None = flag(
        None, "Samples a rank evaluates at once. Default: training's.", unit="samples"
    )
    full_validation: bool = flag(False, "An evaluation counts every sample of the validation data once.")
    multiple_validation_sets: bool = flag(
        False, "A loss for each of --valid-data-path, instead of one for their mixture. With --full-validation."
    )
    validation_set_names: list[str] | None = flag(
        None, "Names of these sets in the log. Default: the ends of their paths.", nargs="*"
    )
    skip_train: bool = flag(False, "Evaluate only.")


@dataclass(kw_only=True)
class LoggingConfig:
    """The log line, timers, TensorBoard, W&B."""

    log_interval: int = flag(100, "Print, and average over, this many iterations.", unit="iterations")
    log_throughput: bool = flag(False, "TFLOP/s of a device in the log line.")
    log_params_norm: bool = flag(False, "Norm of all parameters.")
    log_num_zeros_in_grad: bool = flag(False, "Number of gradient entries that are zero.")
    log_communication: bool = flag(
        False, "What a step moves between ranks, by group and purpose: calls and MiB. Not in Megatron."
    )
    heartbeat_file: str | None = flag(
        None, "File that says how far the run is, replaced once a second: `megatron-lite heartbeat`. Not in Megatron."
    )
    log_straggler: bool = flag(False, "At the log interval: which ranks compute fastest and slowest.")
    straggler_ctrlr_port: int = flag(65535, "Port of rank 0 where a GET of / switches --log-straggler on and off.")
    straggler_minmax_count: int = flag(1, "Ranks that are listed at both ends.", unit="ranks")
    disable_straggler_on_startup: bool = flag(False, "--log-straggler begins when its port is told to.")
    log_progress: bool = flag(False, "Append to progress.txt in the save folder.")
    logging_level: int | None = flag(None, "Level of Python's logging.")

    # -- timers
    timing_log_level: int = flag(0, "Which timers run.", choices=(0, 1, 2))
    timing_log_option: str = flag("minmax", "What is printed of the ranks' times.", choices=("max", "minmax", "all"))
    barrier_with_L1_time: bool = flag(
        True, "No barrier before timers of level 1.", off="--no-barrier-with-level-1-timing"
    )

    # -- tensorboard
    tensorboard_dir: str | None = flag(None, "Folder of TensorBoard's events.")
    tensorboard_log_interval: int = flag(1, "Write scalars every N iterations.", unit="iterations")
    tensorboard_queue_size: int = flag(1000, "Events that may wait before they are written.")
    log_timers_to_tensorboard: bool = flag(False, "Write timers as well.")
    log_loss_scale_to_tensorboard: bool = flag(
        True,
        "Do not write the loss scale.",
        off=("--no-log-loss-scale-to-tensorboard", "--disable-log-loss-scale-to-tensorboard"),
    )
    log_validation_ppl_to_tensorboard: bool = flag(False, "Write the perplexity of evaluations as well.")
    log_memory_to_tensorboard: bool = flag(False, "Write the device's memory as well.")
    log_world_size_to_tensorboard: bool = flag(False, "Write the number of ranks as well.")

    # -- weights and biases
    wandb_project: str | None = flag(None, "W&B: project. Without it W&B is off.")
    wandb_exp_name: str | None = flag(None, "W&B: name of the run.")
    wandb_save_dir: str | None = flag(None, "W&B: local folder. Default: wandb in the save folder.")
    wandb_entity: str | None = flag(None, "W&B: entity.")


@dataclass(kw_only=True)
class ExpertsConfig:
    """Experts in a run: a start from a dense model, records of the routing."""

    moe_use_upcycling: bool = flag(
        False, "Start experts from the dense model of --load: write it as one with experts, under --save."
    )
    moe_upcycling_granularity: int = flag(1, "Into how many experts the dense model's MLP is cut.")
    save_tokens_per_expert_interval: int | None = flag(
        None, "Write tokens of each expert to tokens_per_expert.jsonl in the save folder.", unit="iterations"
    )
    moe_routing_trace_path: str | None = flag(
        None, "Folder of traces of the routing: a file for each rank, a JSON object for each pass of a layer."
    )
    moe_routing_trace_max_training_iters: int | None = flag(
        None, "Trace the first so many iterations of a run. Default: all.", unit="iterations"
    )
    moe_routing_trace_capture_logits: bool = flag(False, "Logits in the trace as well.")
    moe_routing_trace_capture_hidden_states: bool = flag(False, "Inputs of the routers in the trace as well.")
    moe_routing_trace_dump_weights: bool = flag(False, "Weights of the routers beside the trace.")


@dataclass(kw_only=True)
class PipelineConfig:
    """How many parts of the model a pipeline stage holds, and what stages do at the same time."""

    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "Interleaved schedule: layers of each of the virtual stages into which a pipeline stage is cut."
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None, "Interleaved schedule: virtual stages on each pipeline stage."
    )
    overlap_p2p_comm: bool = flag(
        True, "Interleaved schedule: receive when a message is needed, not ahead.", off="--no-overlap-p2p-communication"
    )
    align_grad_reduce: bool = flag(
        True,
        "Let every pipeline stage reduce its gradients when they are complete, not all stages at once.",
        off=("--no-align-grad-reduce", "--disable-align-grad-reduce"),
    )
    pipeline_model_parallel_comm_backend: str | None = flag(
        None, "Library that moves messages between stages. Default: the run's.", choices=("nccl", "ucc")
    )
    align_param_gather: bool = flag(
        True, "Let every pipeline stage gather its parameters when it needs them.", off="--no-align-param-gather"
    )


@dataclass(kw_only=True)
class DistributedInitConfig:
    """How ranks find each other."""

    distributed_backend: str = flag(
        "nccl", "Library that moves data between ranks. Without CUDA gloo is used.", choices=("nccl", "gloo")
    )
    fake_process_group: bool = flag(
        False, "Run one rank of a world whose other ranks do not exist, to look at its memory."
    )
    distributed_timeout_minutes: int = flag(10, "How long a collective may take.", unit="minutes")
    distributed_timeout_seconds_after_init: int | None = flag(
        None, "How long a collective may take once the first iteration is done.", unit="seconds"
    )
    flight_recorder_dump_path: str | None = flag(None, "NCCL: folder of traces of its last collectives.")
    flight_recorder_trace_buffer_size: int = flag(2000, "NCCL: collectives that a trace holds.")
    flight_recorder_dump_on_timeout: bool = flag(
        True,
        "NCCL: write no trace when a collective times out.",
        off=("--no-flight-recorder-dump-on-timeout", "--disable-flight-recorder-dump-on-timeout"),
    )
    flight_recorder_include_stack_trace: bool = flag(False, "NCCL: stacks in the trace.")
    flight_recorder_include_only_active: bool = flag(
        True,
        "NCCL: collectives that are done as well in the trace.",
        off=("--no-flight-recorder-include-only-active", "--disable-flight-recorder-include-only-active"),
    )
    flight_recorder_extra_dump_on_exec: bool = flag(
        True,
        "NCCL: write no trace when a process group ends because of an error.",
        off=("--no-flight-recorder-extra-dump-on-exec", "--disable-flight-recorder-extra-dump-on-exec"),
    )
    hang_report: bool = flag(
        True,
        "When a collective waits long, do not say who is waited for and what each rank does. Not in Megatron.",
        off="--no-hang-report",
    )
    use_tp_pp_dp_mapping: bool = flag(
        False, "Make the stages of a pipeline neighbours: ranks vary along tp, cp, ep, pp, then dp, not dp before pp."
    )
    nccl_communicator_config_path: str | None = flag(
        None, "YAML file with settings of NCCL's communicators by group; without effect on gloo."
    )
    high_priority_stream_groups: list[str] = flag(
        [], "Groups whose NCCL communicators take streams of high priority; without effect on gloo.", nargs="*"
    )
    local_rank: int = flag(0, "Number of the process on its machine; the environment's LOCAL_RANK wins.")


@dataclass(kw_only=True)
class BertConfig:
    """What only BERT has."""

    bert_binary_head: bool = flag(
        True,
        "No second task: samples have one segment, and there is no head that tells the order of two.",
        off="--bert-no-binary-head",
    )
    output_bert_embeddings: bool = flag(
        False, "`megatron-lite generate` gives the vector of each text, instead of filling its masks."
    )


RUN_CONFIGS = (
    ModelConfig,
    TrainingConfig,
    FaultsConfig,
    RNGConfig,
    SchedulerConfig,
    DataConfig,
    FillInTheMiddleConfig,
    BertConfig,
    ValidationConfig,
    LoggingConfig,
    ProfileConfig,
    DiagnosticsConfig,
    ExpertsConfig,
    PipelineConfig,
    DistributedInitConfig,
    InferenceConfig,
)
