"""Rules that hold for what was typed, as one table: --train-iters or --train-samples, not both."""

from __future__ import annotations

from argparse import Namespace

from megatron_lite.errors import ConfigError
from megatron_lite.training.families import family_of
from megatron_lite.training.rule import Rule, both, count_given, exclusive, flag_of, missing, named, positive
from megatron_lite.training.rules_faults import FAULTS
from megatron_lite.training.rules_logging import LOGGING

_FILES = ("save", "load", "pretrained_checkpoint", "use_checkpoint_args", "ckpt_convert_save")

GIVEN: tuple[Rule, ...] = (
    Rule(
        lambda a: a.fake_process_group and named(given=" and ".join(flag_of(n) for n in _FILES if getattr(a, n))),
        "{given} with --fake-process-group",
        "one rank's part of a checkpoint is none, and its weights mean nothing",
        "leave it out",
    ),
    *FAULTS,
    # -- shape
    Rule(
        lambda a: (
            count_given(
                "num_layers_per_virtual_pipeline_stage",
                "num_virtual_stages_per_pipeline_rank",
                "pipeline_model_parallel_layout",
            )(a)
            > 1
        ),
        "more than one of --num-layers-per-virtual-pipeline-stage, --num-virtual-stages-per-pipeline-rank and "
        "--pipeline-model-parallel-layout",
        "each says how many virtual stages there are",
        "one of them",
    ),
    *(
        positive(name)
        for name in (
            "num_layers_per_virtual_pipeline_stage",
            "num_virtual_stages_per_pipeline_rank",
            "microbatch_group_size_per_virtual_pipeline_stage",
        )
    ),
    Rule(
        lambda a: a.num_layers is None and a.encoder_num_layers is None,
        "--num-layers is missing",
        "no run can do without it",
        "--num-layers N",
    ),
    missing("hidden_size"),
    missing("num_attention_heads"),
    missing("max_position_embeddings"),
    missing("micro_batch_size"),
    Rule(
        lambda a: a.seq_length is None and a.encoder_seq_length is None,
        "--seq-length is missing",
        "no run can do without it",
        "--seq-length N",
    ),
    exclusive("num_layers", "encoder_num_layers", "they say the same"),
    exclusive("seq_length", "encoder_seq_length", "they say the same"),
    *(
        positive(name)
        for name in (
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "ffn_hidden_size",
            "kv_channels",
            "num_query_groups",
            "max_position_embeddings",
            "seq_length",
            "micro_batch_size",
            "make_vocab_size_divisible_by",
            "log_interval",
            "tensorboard_log_interval",
            "eval_interval",
            "eval_global_batch_size",
            "eval_micro_batch_size",
            "num_dataset_builder_threads",
            "exit_interval",
            "exit_duration_in_mins",
            "train_samples",
            "rotary_seq_len_interpolation_factor",
            "ckpt_step",
            "seed",
            "distributed_timeout_minutes",
            "distributed_timeout_seconds_after_init",
            "straggler_minmax_count",
            "flight_recorder_trace_buffer_size",
        )
    ),
    Rule(
        lambda a: not 0 <= a.straggler_ctrlr_port < 2**16,
        "--straggler-ctrlr-port {straggler_ctrlr_port}",
        "ports have numbers up to 65535",
        "--straggler-ctrlr-port 65535; 0 takes a free one",
    ),
    positive("global_batch_size", why="a step trains on at least one sample"),
    *(
        positive(name, 0)
        for name in (
            "train_iters",
            "eval_iters",
            "start_eval_at_iter",
            "num_workers",
            "mid_level_dataset_surplus",
            "manual_gc_interval",
            "vocab_extra_ids",
        )
    ),
    Rule(
        lambda a: sum((a.swiglu, a.squared_relu, a.quick_geglu, a.relu, a.geglu or a.openai_gelu)) > 1,
        "more than one of --swiglu, --squared-relu, --quick-geglu, --relu and --geglu or --openai-gelu",
        "the MLP has one activation",
        "leave all but one out",
    ),
    Rule(
        lambda a: not a.add_position_embedding and a.position_embedding_type not in ("rope", "yarn", "mrope", "none"),
        "--no-position-embedding with --position-embedding-type {position_embedding_type}",
        "without its table a model has rotary positions, or none",
        "--position-embedding-type rope",
    ),
    # -- length of the run
    Rule(
        lambda a: not a.skip_train and count_given("train_iters", "train_samples")(a) == 0 and a.train_iters != 0,
        "neither --train-iters nor --train-samples",
        "a run ends somewhere",
        "--train-iters N",
    ),
    Rule(
        both("train_iters", "train_samples"),
        "--train-iters {train_iters} and --train-samples {train_samples}",
        "the length of a run is counted in one of them",
        "leave one of them out",
    ),
    Rule(
        lambda a: bool(a.train_iters) and (a.lr_decay_samples is not None or a.lr_warmup_samples != 0),
        "--train-iters {train_iters} with --lr-decay-samples {lr_decay_samples} "
        "--lr-warmup-samples {lr_warmup_samples}",
        "a run counted in iterations has its schedule in iterations",
        "--lr-decay-iters and --lr-warmup-iters, or --train-samples",
    ),
    Rule(
        lambda a: bool(a.train_samples) and (a.lr_decay_iters is not None or a.lr_warmup_iters != 0),
        "--train-samples {train_samples} with --lr-decay-iters {lr_decay_iters} --lr-warmup-iters {lr_warmup_iters}",
        "a run counted in samples has its schedule in samples",
        "--lr-decay-samples and --lr-warmup-samples, or --train-iters",
    ),
    Rule(
        lambda a: a.lr_warmup_fraction is not None and (a.lr_warmup_iters != 0 or a.lr_warmup_samples != 0),
        "--lr-warmup-fraction {lr_warmup_fraction} with --lr-warmup-iters {lr_warmup_iters} "
        "--lr-warmup-samples {lr_warmup_samples}",
        "they all say how long the warm-up is",
        "leave all but one out",
    ),
    # -- batch
    Rule(
        both("rampup_batch_size", "step_batch_size_schedule"),
        "--rampup-batch-size and --step-batch-size-schedule",
        "each of them is the whole plan of the batch size",
        "leave one of them out",
    ),
    Rule(
        both("step_batch_size_schedule", "decrease_batch_size_if_needed"),
        "--step-batch-size-schedule with --decrease-batch-size-if-needed",
        "a schedule says its sizes exactly",
        "leave --decrease-batch-size-if-needed out",
    ),
    # -- weight decay
    Rule(
        lambda a: (
            a.weight_decay_incr_style == "constant"
            and (a.start_weight_decay is not None or a.end_weight_decay is not None)
        ),
        "--start-weight-decay {start_weight_decay} --end-weight-decay {end_weight_decay} "
        "with --weight-decay-incr-style constant",
        "constant weight decay has no start and no end",
        "--weight-decay X, or --weight-decay-incr-style linear",
    ),
    Rule(
        lambda a: (
            a.weight_decay_incr_style != "constant" and (a.start_weight_decay is None or a.end_weight_decay is None)
        ),
        "--weight-decay-incr-style {weight_decay_incr_style} with --start-weight-decay {start_weight_decay} "
        "--end-weight-decay {end_weight_decay}",
        "weight decay goes from one to the other",
        "--start-weight-decay X --end-weight-decay Y",
    ),
    exclusive(
        "override_opt_param_scheduler",
        "use_checkpoint_opt_param_scheduler",
        "the schedule comes from the command line or from the checkpoint",
    ),
    # -- numbers
    exclusive("fp16", "bf16", "a model has one compute format"),
    Rule(
        lambda a: a.fp16_lm_cross_entropy and not a.fp16,
        "--fp16-lm-cross-entropy without --fp16",
        "the loss cannot be in another format than the model",
        "--fp16, or leave it out",
    ),
    Rule(
        lambda a: a.fp32_residual_connection and not (a.fp16 or a.bf16),
        "--fp32-residual-connection without --fp16 or --bf16",
        "everything is fp32 already",
        "--bf16, or leave it out",
    ),
    Rule(
        both("grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32"),
        "--grad-reduce-in-bf16 with --accumulate-allreduce-grads-in-fp32",
        "gradients are kept and reduced in one format",
        "leave one of them out",
    ),
    Rule(
        lambda a: a.cross_entropy_loss_fusion and a.cross_entropy_fusion_impl == "te",
        "--cross-entropy-loss-fusion with --cross-entropy-fusion-impl te",
        "Transformer Engine's cross entropy gives other gradients for masked tokens",
        "--cross-entropy-fusion-impl native",
    ),
    # -- data
    Rule(
        lambda a: len(_sources(a)) > 1 and {"found": " and ".join(_sources(a))},
        "{found}",
        "the data comes from one place",
        "leave all but one out",
    ),
    Rule(
        lambda a: bool(a.split) and bool(_problem_of_split(a.split)) and {"problem": _problem_of_split(a.split)},
        "--split {split}",
        "{problem}",
        "--split 969,30,1",
    ),
    # -- evaluation
    Rule(
        lambda a: a.multiple_validation_sets and not a.full_validation,
        "--multiple-validation-sets without --full-validation",
        "sets of different lengths are compared by their whole losses",
        "--full-validation",
    ),
    Rule(
        lambda a: a.full_validation and a.dataloader_type == "external",
        "--full-validation with --dataloader-type external",
        "only your loader knows where its data end",
        "--eval-iters N, or another --dataloader-type",
    ),
    Rule(
        lambda a: a.reset_attention_mask and not a.create_attention_mask_in_dataloader,
        "--reset-attention-mask with --no-create-attention-mask-in-dataloader",
        "without the mask of each sample, attention would cross documents",
        "leave one of them out, or --dataloader-inter-document-masking, which needs no mask in the loader",
    ),
    exclusive(
        "dataloader_inter_document_masking",
        "reset_attention_mask",
        "documents are told apart by the corpus or by their end tokens",
    ),
    exclusive(
        "dataloader_inter_document_masking", "fim_data", "rearranged documents have other lengths than the corpus says"
    ),
    *(
        Rule(
            lambda a, name=name: getattr(a, name) and not a.data_cache_path,  # type: ignore[misc]
            f"{flag_of(name)} without --data-cache-path",
            "it reads index caches that an earlier run has made",
            "--data-cache-path FOLDER",
        )
        for name in ("dataloader_fast_cache_load", "dataloader_defer_npy_index_mmap")
    ),
    Rule(
        lambda a: a.per_dataset_sequences_path is not None and a.mock_data,
        "--per-dataset-sequences-path {per_dataset_sequences_path} with --mock-data",
        "made-up samples come from no files",
        "leave one of them out",
    ),
    # -- conversations
    Rule(
        lambda a: a.sft and a.tokenizer_type != "SFTTokenizer",
        "--sft with --tokenizer-type {tokenizer_type}",
        "another tokenizer reads no conversations",
        "--tokenizer-type SFTTokenizer",
    ),
    *(
        exclusive("sft", name, "conversations are read from files of their own, and kept apart as it is")
        for name in ("mock_data", "fim_data", "reset_attention_mask", "reset_position_ids", "eod_mask_loss")
    ),
    # -- BERT
    Rule(
        lambda a: a.output_bert_embeddings,
        "--output-bert-embeddings in a training run",
        "vectors of texts have no loss",
        "megatron-lite generate --load FOLDER --output-bert-embeddings --prompt TEXT",
    ),
    Rule(
        lambda a: family_of(a) == "bert" and a.position_embedding_type not in ("learned_absolute", "rope"),
        "--position-embedding-type {position_embedding_type} with BERT",
        "a BERT has learned or rotary positions",
        "--position-embedding-type learned_absolute, or rope",
    ),
    Rule(lambda a: not 0 < a.mask_prob < 1, "--mask-prob {mask_prob}", "it is a share", "--mask-prob 0.15"),
    Rule(
        lambda a: not 0 <= a.short_seq_prob <= 1,
        "--short-seq-prob {short_seq_prob}",
        "it is a share",
        "--short-seq-prob 0.1",
    ),
    # -- fill in the middle
    exclusive("fim_data", "mock_data", "made-up samples are numbers, and parts of a text are rearranged"),
    Rule(
        lambda a: not a.fim_data and bool(_fim_flags(a)) and {"found": " and ".join(_fim_flags(a))},
        "{found} without --fim-data",
        "nothing is rearranged",
        "--fim-data, or leave the flag out",
    ),
    *(
        Rule(
            lambda a, name=name: getattr(a, name) is not None and not 0 <= getattr(a, name) <= 1,  # type: ignore[misc]
            f"{flag_of(name)} {{{name}}}",
            "it is a share",
            f"{flag_of(name)} 0.5",
        )
        for name in ("fim_rate", "fim_spm_rate", "fim_fragment_rate")
    ),
    Rule(
        lambda a: a.fim_split_sample is not None and a.fim_fragment_rate is None,
        "--fim-split-sample {fim_split_sample} without --fim-fragment-rate",
        "it cuts documents into fragments, and how many of these are rearranged is not said",
        "--fim-fragment-rate 0.5",
    ),
    # -- checkpoints
    Rule(
        lambda a: a.save is not None and not a.save_interval,
        "--save {save} with --save-interval {save_interval}",
        "a run that saves does so every N iterations",
        "--save-interval N, N > 0",
    ),
    Rule(
        lambda a: (
            a.save_retain_interval is not None
            and (a.save_retain_interval <= 0 or not a.save_interval or a.save_retain_interval % a.save_interval != 0)
        ),
        "--save-retain-interval {save_retain_interval} with --save-interval {save_interval}",
        "checkpoints at its multiples are kept, so it is a multiple of the interval",
        "a multiple of --save-interval",
    ),
    positive("dist_ckpt_workers"),
    positive("non_persistent_save_interval"),
    positive("override_ckpt_iteration", 0),
    Rule(
        lambda a: bool(a.non_persistent_save_interval) and a.non_persistent_ckpt_type is None,
        "--non-persistent-save-interval {non_persistent_save_interval} without --non-persistent-ckpt-type",
        "a rolling checkpoint of all ranks and one of each rank's own disk are loaded in other ways",
        "--non-persistent-ckpt-type global",
    ),
    Rule(
        lambda a: a.non_persistent_ckpt_type == "in_memory",
        "--non-persistent-ckpt-type in_memory",
        "the memory of a rank does not outlive it, and another rank's copy is not kept here",
        "--non-persistent-ckpt-type local, with a folder in memory such as /dev/shm",
    ),
    Rule(
        lambda a: a.non_persistent_ckpt_type == "local" and not a.non_persistent_local_ckpt_dir,
        "--non-persistent-ckpt-type local without --non-persistent-local-ckpt-dir",
        "each rank keeps its part on a disk of its machine, and which one is not said",
        "--non-persistent-local-ckpt-dir FOLDER",
    ),
    Rule(
        lambda a: a.ckpt_convert_format is not None and not (a.ckpt_convert_save and a.load),
        "--ckpt-convert-format {ckpt_convert_format} without --load and --ckpt-convert-save",
        "a checkpoint is loaded from one folder and saved to the other",
        "--load FOLDER --ckpt-convert-save FOLDER",
    ),
    Rule(
        lambda a: a.override_ckpt_iteration is not None and a.finetune,
        "--override-ckpt-iteration {override_ckpt_iteration} with --finetune",
        "fine-tuning starts at iteration 0",
        "leave one of them out",
    ),
    Rule(
        lambda a: a.override_ckpt_iteration is not None and bool(a.rampup_batch_size or a.step_batch_size_schedule),
        "--override-ckpt-iteration {override_ckpt_iteration} with a batch size that changes",
        "how many samples so many iterations used does not follow from their number",
        "a constant --global-batch-size",
    ),
    Rule(
        lambda a: a.load_main_params_from_ckpt and not a.no_load_optim,
        "--load-main-params-from-ckpt without --no-load-optim",
        "the optimizer's state comes with its fp32 weights",
        "--no-load-optim, or leave it out",
    ),
    Rule(
        lambda a: a.dist_ckpt_strictness.startswith("return_"),
        "--dist-ckpt-strictness {dist_ckpt_strictness}",
        "the names would go to a program that calls, and a command line has none",
        "--dist-ckpt-strictness log_all",
    ),
    positive("save_keep_last", why="the newest checkpoint always stays"),
    Rule(
        lambda a: not 0 <= a.async_ckpt_cpu_priority <= 19,
        "--async-ckpt-cpu-priority {async_ckpt_cpu_priority}",
        "it is a nice level, by which the writing process gives way",
        "0 to 19",
    ),
    Rule(
        lambda a: a.async_ckpt_io_priority not in (1, 2, 3),
        "--async-ckpt-io-priority {async_ckpt_io_priority}",
        "it is one of Linux' classes of I/O: 1 real time, 2 best effort, 3 idle",
        "--async-ckpt-io-priority 3",
    ),
    Rule(
        lambda a: a.use_checkpoint_args and a.load is None and a.pretrained_checkpoint is None,
        "--use-checkpoint-args without --load",
        "there is no checkpoint to take them from",
        "--load FOLDER",
    ),
    Rule(
        lambda a: not a.perform_initialization and a.load is None and a.pretrained_checkpoint is None,
        "--no-initialization without --load",
        "the weights would stay what they are when they are allocated, and no training starts from that",
        "--load FOLDER, or leave --no-initialization out",
    ),
    Rule(
        lambda a: a.ckpt_step is not None and a.load is None,
        "--ckpt-step {ckpt_step} without --load",
        "there is no checkpoint to take it from",
        "--load FOLDER",
    ),
    Rule(
        lambda a: a.exit_on_missing_checkpoint and a.load is None and a.pretrained_checkpoint is None,
        "--exit-on-missing-checkpoint without --load",
        "no checkpoint is asked for",
        "--load FOLDER",
    ),
    # A schedule of the checkpoint that is never read would leave the run at the start of its own.
    Rule(
        lambda a: a.use_checkpoint_opt_param_scheduler and (a.no_load_optim or a.finetune),
        "--use-checkpoint-opt_param-scheduler with --no-load-optim or --finetune",
        "the schedule is stored with the optimizer's state, which would not be read",
        "--override-opt_param-scheduler, or leave one of them out",
    ),
    *LOGGING,
    # -- buckets
    exclusive("ddp_bucket_size", "ddp_num_buckets", "the number of buckets is another way to say their size"),
    *(positive(name) for name in ("ddp_bucket_size", "ddp_num_buckets")),
    Rule(
        both("ddp_average_in_collective", "calculate_per_token_loss"),
        "--ddp-average-in-collective with --calculate-per-token-loss",
        "gradients are divided by the number of tokens, not of ranks",
        "leave one of them out",
    ),
    # -- recompute
    Rule(
        lambda a: a.recompute_activations and a.recompute_granularity == "full",
        "--recompute-activations with --recompute-granularity full",
        "the first is short for selective recompute",
        "leave one of them out",
    ),
    Rule(
        lambda a: a.recompute_granularity == "full" and not (a.recompute_method and a.recompute_num_layers),
        "--recompute-granularity full with --recompute-method {recompute_method} "
        "--recompute-num-layers {recompute_num_layers}",
        "full recompute goes by groups of layers",
        "--recompute-method uniform --recompute-num-layers 1",
    ),
    Rule(
        lambda a: a.recompute_granularity != "full" and bool(a.recompute_method or a.recompute_num_layers),
        "--recompute-method {recompute_method} --recompute-num-layers {recompute_num_layers} "
        "without --recompute-granularity full",
        "they say how full recompute groups layers",
        "--recompute-granularity full, or leave both out",
    ),
    Rule(
        lambda a: bool(a.recompute_modules) and a.recompute_granularity != "selective" and not a.recompute_activations,
        "--recompute-modules without --recompute-granularity selective",
        "modules are chosen in selective recompute only",
        "--recompute-granularity selective",
    ),
)


def _fim_flags(a: Namespace) -> list[str]:
    """The flags of fill-in-the-middle data that were given a value of their own."""
    shares = {"fim_rate": 0.5, "fim_spm_rate": 0.5, "fim_fragment_rate": None}
    others = ("fim_split_sample", "fim_no_prefix")
    given = [name for name, default in shares.items() if getattr(a, name) != default]
    return [flag_of(name) for name in given + [name for name in others if getattr(a, name) is not None]]


def _sources(a: Namespace) -> list[str]:
    """The flags that say where the data comes from."""
    per_split = [flag_of(name) for name in ("train_data_path", "valid_data_path", "test_data_path") if getattr(a, name)]
    single = [
        flag_of(name)
        for name in ("mock_data", "data_path", "data_args_path", "per_split_data_args_path")
        if getattr(a, name)
    ]
    return single + (["/".join(per_split)] if per_split else [])


def _problem_of_split(split: str) -> str:
    """In the words of the data sets' own reader, which is asked when there is a split to read."""
    from megatron_lite.datasets.blended_megatron_dataset_config import parse_and_normalize_split

    try:
        parse_and_normalize_split(split)
    except ConfigError as problem:
        return problem.why
    return ""
