"""The rules across flags, as one table.

    GIVEN      hold for what was typed                       --train-iters or --train-samples, not both
    DERIVED    hold for the outcome of `derived.derive`      global batch a multiple of micro-batch * dp

A row tells when it is broken and, as templates over the arguments' names, what was found, why it cannot be, and what to
type instead. `broken` reports all rows at once. A rule over one config's fields sits in that config instead; rows here
that repeat one say it before anything is built.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from megatron_lite.errors import ConfigError
from megatron_lite.pipeline_parallel.stage_layout import stage_layout
from megatron_lite.rank_grid import nearest_multiples
from megatron_lite.tokenizers.build_tokenizer import missing_fields
from megatron_lite.tokenizers.tokenizer_config import NOT_FOR_TEXT
from megatron_lite.training.derived import gradients_are_fp32, horizon, phase_transitions, problem_of_batch


@dataclass(frozen=True)
class Rule:
    """A condition that breaks a run.

    Args:
        when: arguments -> broken or not; a dict means broken, and adds names to the templates.
        what, why, fix: templates, `{name}` being the argument's value.
    """

    when: Callable[[Namespace], bool | dict[str, Any]]
    what: str
    why: str
    fix: str

    def error(self, args: Namespace) -> ConfigError | None:
        found = self.when(args)
        if found is False:
            return None
        names = vars(args) | (found if isinstance(found, dict) else {})
        return ConfigError(self.what.format_map(names), why=self.why.format_map(names), fix=self.fix.format_map(names))


def broken(rules: tuple[Rule, ...], args: Namespace) -> list[ConfigError]:
    """An error for every rule that the arguments break, in the order of the table."""
    return [error for rule in rules if (error := rule.error(args))]


def _given(*names: str) -> Callable[[Namespace], int]:
    """How many of the arguments are there."""
    return lambda a: sum(bool(getattr(a, name)) for name in names)


def _both(first: str, second: str) -> Callable[[Namespace], bool]:
    return lambda a: bool(getattr(a, first)) and bool(getattr(a, second))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _exclusive(first: str, second: str, why: str) -> Rule:
    def when(a: Namespace) -> bool | dict[str, Any]:
        values = {name: getattr(a, name) for name in (first, second)}
        if any(value in (None, False) for value in values.values()):
            return False
        shown = [_flag(name) if value is True else f"{_flag(name)} {value}" for name, value in values.items()]
        return {"found": " and ".join(shown)}

    return Rule(when, "{found}", why, "leave one of them out")


def _positive(name: str, least: float = 1, why: str = "", fix: str = "") -> Rule:
    """The argument, where given, is at least `least`."""
    return Rule(
        lambda a: getattr(a, name) is not None and getattr(a, name) < least,
        f"{_flag(name)} {{{name}}}",
        why or f"it is at least {least}",
        fix or f"{_flag(name)} N, N >= {least}",
    )


# ------------------------------------------------------------------------------------------------------- the pipeline
def _misplaced(a: Namespace) -> bool | dict[str, Any]:
    """Layers that do not fall into the pipeline's stages."""
    if min(a.num_layers or 0, a.pipeline_model_parallel_size) < 1:
        return False
    chunks = a.virtual_pipeline_model_parallel_size or 1
    typed = a.num_layers_per_virtual_pipeline_stage
    per_stage = a.num_layers / a.pipeline_model_parallel_size
    if typed and chunks * typed != per_stage:
        return {
            "misplaced": f"--num-layers-per-virtual-pipeline-stage {typed} with {per_stage:g} layers on each of "
            f"{a.pipeline_model_parallel_size} stages",
            "rule": "the layers of a stage divide into its virtual stages",
            "way_out": "--num-virtual-stages-per-pipeline-rank, or a number that divides",
        }
    try:
        stage_layout(
            a.num_layers,
            a.pipeline_model_parallel_size,
            chunks,
            a.decoder_first_pipeline_num_layers,
            a.decoder_last_pipeline_num_layers,
            a.account_for_embedding_in_pipeline_split,
            a.account_for_loss_in_pipeline_split,
            a.pipeline_model_parallel_layout,
        )
    except ConfigError as error:
        return {"misplaced": error.what, "rule": error.why, "way_out": error.fix}
    return False


def _ungrouped(a: Namespace) -> bool | dict[str, Any]:
    """Micro-batches that do not fall into the groups of an interleaved schedule."""
    if a.virtual_pipeline_model_parallel_size is None or not a.global_batch_size or not a.micro_batch_size:
        return False
    microbatches = a.global_batch_size // (a.micro_batch_size * a.data_parallel_size)
    stages = a.pipeline_model_parallel_size
    group = a.microbatch_group_size_per_virtual_pipeline_stage or stages
    last = microbatches % group
    if stages <= group <= microbatches and (last == 0 or last >= stages):
        return False
    return {"group": group, "microbatches": microbatches, "last": last, "rounded": max(1, -(-microbatches // group))}


# --------------------------------------------------------------------------------------------- rules on what was typed
def _without_package(a: Namespace) -> bool | dict[str, Any]:
    """A flag that was given, and the optional package that it needs and this environment lacks."""
    for name, package in (("tensorboard_dir", "tensorboard"), ("wandb_project", "wandb")):
        try:
            if getattr(a, name) and find_spec(package) is None:
                return {"flag": f"{_flag(name)} {getattr(a, name)}", "package": package}
        except ModuleNotFoundError:
            return {"flag": f"{_flag(name)} {getattr(a, name)}", "package": package}
    return False


def _missing(name: str) -> Rule:
    return Rule(
        lambda a: getattr(a, name) is None,
        f"{_flag(name)} is missing",
        "no run can do without it",
        f"{_flag(name)} N",
    )


def _named(**names: str) -> bool | dict[str, Any]:
    """Broken where there is something to name."""
    return names if all(names.values()) else False


def _formats(a: Namespace, is_meant: Callable[[str], bool]) -> str:
    """The flags of the optimizer's number formats whose values are meant, as typed."""
    names = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    return " ".join(f"{_flag(name)} {getattr(a, name)}" for name in names if is_meant(getattr(a, name)))


GIVEN: tuple[Rule, ...] = (
    # -- shape
    Rule(
        lambda a: (
            _given(
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
        _positive(name)
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
    _missing("hidden_size"),
    _missing("num_attention_heads"),
    _missing("max_position_embeddings"),
    _missing("micro_batch_size"),
    Rule(
        lambda a: a.seq_length is None and a.encoder_seq_length is None,
        "--seq-length is missing",
        "no run can do without it",
        "--seq-length N",
    ),
    _exclusive("num_layers", "encoder_num_layers", "they say the same"),
    _exclusive("seq_length", "encoder_seq_length", "they say the same"),
    *(
        _positive(name)
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
        )
    ),
    _positive("global_batch_size", why="a step trains on at least one sample"),
    *(
        _positive(name, 0)
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
        lambda a: sum((a.swiglu, a.squared_relu, a.quick_geglu, a.openai_gelu)) > 1,
        "more than one of --swiglu, --squared-relu, --quick-geglu and --openai-gelu",
        "the MLP has one activation",
        "leave all but one out",
    ),
    Rule(
        lambda a: not a.add_position_embedding and a.position_embedding_type not in ("rope", "none"),
        "--no-position-embedding with --position-embedding-type {position_embedding_type}",
        "without its table a model has rotary positions, or none",
        "--position-embedding-type rope",
    ),
    # -- length of the run
    Rule(
        lambda a: not a.skip_train and _given("train_iters", "train_samples")(a) == 0 and a.train_iters != 0,
        "neither --train-iters nor --train-samples",
        "a run ends somewhere",
        "--train-iters N",
    ),
    Rule(
        _both("train_iters", "train_samples"),
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
        _both("rampup_batch_size", "step_batch_size_schedule"),
        "--rampup-batch-size and --step-batch-size-schedule",
        "each of them is the whole plan of the batch size",
        "leave one of them out",
    ),
    Rule(
        _both("step_batch_size_schedule", "decrease_batch_size_if_needed"),
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
    _exclusive(
        "override_opt_param_scheduler",
        "use_checkpoint_opt_param_scheduler",
        "the schedule comes from the command line or from the checkpoint",
    ),
    # -- numbers
    _exclusive("fp16", "bf16", "a model has one compute format"),
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
        _both("grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32"),
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
    _exclusive(
        "dataloader_inter_document_masking",
        "reset_attention_mask",
        "documents are told apart by the corpus or by their end tokens",
    ),
    _exclusive(
        "dataloader_inter_document_masking", "fim_data", "rearranged documents have other lengths than the corpus says"
    ),
    *(
        Rule(
            lambda a, name=name: getattr(a, name) and not a.data_cache_path,  # type: ignore[misc]
            f"{_flag(name)} without --data-cache-path",
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
        _exclusive("sft", name, "conversations are read from files of their own, and kept apart as it is")
        for name in ("mock_data", "fim_data", "reset_attention_mask", "reset_position_ids", "eod_mask_loss")
    ),
    # -- fill in the middle
    _exclusive("fim_data", "mock_data", "made-up samples are numbers, and parts of a text are rearranged"),
    Rule(
        lambda a: not a.fim_data and bool(_fim_flags(a)) and {"found": " and ".join(_fim_flags(a))},
        "{found} without --fim-data",
        "nothing is rearranged",
        "--fim-data, or leave the flag out",
    ),
    *(
        Rule(
            lambda a, name=name: getattr(a, name) is not None and not 0 <= getattr(a, name) <= 1,  # type: ignore[misc]
            f"{_flag(name)} {{{name}}}",
            "it is a share",
            f"{_flag(name)} 0.5",
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
    # -- logging
    Rule(
        lambda a: bool(a.wandb_project) and not a.wandb_exp_name,
        "--wandb-project {wandb_project} without --wandb-exp-name",
        "a run of W&B has a name",
        "--wandb-exp-name NAME",
    ),
    Rule(
        lambda a: _without_package(a),
        "{flag} needs the package {package}, which is not installed",
        "the run is logged by it",
        "pip install {package}, or leave the flag out",
    ),
    Rule(
        lambda a: a.profile and a.profile_step_end <= a.profile_step_start,
        "--profile-step-start {profile_step_start} --profile-step-end {profile_step_end}",
        "the profile ends before it starts",
        "a larger --profile-step-end",
    ),
    # -- buckets
    _exclusive("ddp_bucket_size", "ddp_num_buckets", "the number of buckets is another way to say their size"),
    *(_positive(name) for name in ("ddp_bucket_size", "ddp_num_buckets")),
    Rule(
        _both("ddp_average_in_collective", "calculate_per_token_loss"),
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
    return [_flag(name) for name in given + [name for name in others if getattr(a, name) is not None]]


def _sources(a: Namespace) -> list[str]:
    """The flags that say where the data comes from."""
    per_split = [_flag(name) for name in ("train_data_path", "valid_data_path", "test_data_path") if getattr(a, name)]
    single = [
        _flag(name)
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


# -------------------------------------------------------------------------------------------- rules on the outcome
def _problem_of_phases(a: Namespace) -> ConfigError | None:
    try:
        phase_transitions(a)
    except ConfigError as problem:
        return problem
    return None


def _below(name: str, bound: str) -> Rule:
    return Rule(
        lambda a: (
            getattr(a, name) is not None and getattr(a, bound) is not None and getattr(a, name) > getattr(a, bound)
        ),
        f"{_flag(name)} {{{name}}} with {_flag(bound)} {{{bound}}}",
        f"{_flag(bound)} is the highest learning rate",
        f"a smaller {_flag(name)}",
    )


DERIVED: tuple[Rule, ...] = (
    # -- buckets
    *(
        Rule(
            lambda a, name=name: getattr(a, name) and not a.use_distributed_optimizer,  # type: ignore[misc]
            f"{_flag(name)} without --use-distributed-optimizer",
            "only buckets of a sharded optimizer are padded, and scattered as they are reduced",
            "--use-distributed-optimizer, or leave it out",
        )
        for name in ("ddp_pad_buckets_for_high_nccl_busbw", "ddp_reduce_scatter_with_fp32_accumulation")
    ),
    Rule(
        lambda a: (
            a.ddp_reduce_scatter_with_fp32_accumulation
            and (a.num_distributed_optimizer_instances > 1 or a.ddp_average_in_collective)
        ),
        "--ddp-reduce-scatter-with-fp32-accumulation with several optimizer instances or --ddp-average-in-collective",
        "it is one sum in fp32 over all ranks",
        "leave one of them out",
    ),
    Rule(
        lambda a: bool(a.ddp_param_name_patterns_for_fp32_local_accumulation) and gradients_are_fp32(a),
        "--ddp-param-name-patterns-for-fp32-local-accumulation with gradients that are fp32",
        "all of them accumulate in fp32 already",
        "--bf16 --grad-reduce-in-bf16, or leave the patterns out",
    ),
    # -- optimizer
    Rule(
        lambda a: a.overlap_param_gather and not (a.use_distributed_optimizer and a.overlap_grad_reduce),
        "--overlap-param-gather without --use-distributed-optimizer and --overlap-grad-reduce",
        "only a sharded optimizer has parameters to gather, bucket by bucket of the overlap",
        "--use-distributed-optimizer --overlap-grad-reduce",
    ),
    Rule(
        lambda a: (
            a.overlap_param_gather_with_optimizer_step
            and not (a.overlap_param_gather and a.virtual_pipeline_model_parallel_size)
        ),
        "--overlap-param-gather-with-optimizer-step without --overlap-param-gather and virtual pipeline stages",
        "it gathers one model chunk's parameters while other chunks are updated",
        "--num-virtual-stages-per-pipeline-rank N --overlap-param-gather, or leave it out",
    ),
    _positive("num_distributed_optimizer_instances"),
    Rule(
        lambda a: a.num_distributed_optimizer_instances > 1 and not a.use_distributed_optimizer,
        "--num-distributed-optimizer-instances {num_distributed_optimizer_instances} without "
        "--use-distributed-optimizer",
        "there is no optimizer state that is shared by ranks",
        "--use-distributed-optimizer, or leave it out",
    ),
    Rule(
        lambda a: (
            a.num_distributed_optimizer_instances > 0
            and (a.data_parallel_size * a.context_parallel_size) % a.num_distributed_optimizer_instances > 0
            and {"ranks": a.data_parallel_size * a.context_parallel_size}
        ),
        "--num-distributed-optimizer-instances {num_distributed_optimizer_instances} on {ranks} data-parallel ranks",
        "every instance is shared by equally many ranks",
        "a number that divides {ranks}",
    ),
    Rule(
        lambda a: a.use_precision_aware_optimizer and not (a.use_distributed_optimizer and a.optimizer == "adam"),
        "--use-precision-aware-optimizer without --use-distributed-optimizer and --optimizer adam",
        "it is a variant of the sharded Adam",
        "add them, or leave it out",
    ),
    Rule(
        lambda a: not a.use_precision_aware_optimizer and _named(given=_formats(a, lambda value: value != "fp32")),
        "{given} without --use-precision-aware-optimizer",
        "only that optimizer has number formats to choose",
        "--use-precision-aware-optimizer, or leave the format out",
    ),
    Rule(
        lambda a: a.use_precision_aware_optimizer and _named(given=_formats(a, lambda value: value in ("fp16", "fp8"))),
        "{given}",
        "numbers of 1e-6 and their squares leave the range of fp16 and fp8, and weights move by less than a step of "
        "fp16",
        "bf16 for moments, fp32 for main parameters",
    ),
    Rule(
        lambda a: a.main_grads_dtype == "bf16" and a.accumulate_allreduce_grads_in_fp32,
        "--main-grads-dtype bf16 with gradients that are accumulated in fp32",
        "the optimizer reads the buffer in which they are",
        "--grad-reduce-in-bf16, or leave it out",
    ),
    Rule(
        lambda a: a.optimizer_cpu_offload and not a.use_precision_aware_optimizer,
        "--optimizer-cpu-offload without --use-precision-aware-optimizer",
        "Megatron couples them, and a command line should mean the same there and here",
        "--use-precision-aware-optimizer (with its fp32 defaults nothing else changes)",
    ),
    Rule(
        lambda a: not 0.0 <= a.optimizer_offload_fraction <= 1.0,
        "--optimizer-offload-fraction {optimizer_offload_fraction}",
        "it is a share of the optimizer's state",
        "a number from 0 to 1",
    ),
    Rule(
        lambda a: (
            a.optimizer == "muon"
            and a.tensor_model_parallel_size > (a.num_query_groups or 1)
            and a.group_query_attention
        ),
        "--optimizer muon with --num-query-groups {num_query_groups} on {tensor_model_parallel_size} tensor-parallel "
        "ranks",
        "ranks then hold copies of keys and values, and the matrix is no longer made of the ranks' blocks",
        "--tensor-model-parallel-size {num_query_groups}, or another optimizer",
    ),
    # -- ranks
    *(
        _positive(name)
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
        )
    ),
    Rule(
        lambda a: (
            a.model_parallel_ranks > 0
            and a.world_size % a.model_parallel_ranks != 0
            and {"near": nearest_multiples(a.world_size, a.model_parallel_ranks)}
        ),
        "world size {world_size} with --tensor-model-parallel-size {tensor_model_parallel_size} "
        "--pipeline-model-parallel-size {pipeline_model_parallel_size} --context-parallel-size {context_parallel_size}",
        "a copy of the model takes their product, {model_parallel_ranks} ranks, and the world is a number of copies",
        "start {near} processes, or choose other sizes",
    ),
    # -- the pipeline
    Rule(_misplaced, "{misplaced}", "{rule}", "{way_out}"),
    Rule(
        lambda a: a.virtual_pipeline_model_parallel_size is not None and a.pipeline_model_parallel_size == 1,
        "virtual pipeline stages with --pipeline-model-parallel-size 1",
        "they shorten the time in which pipeline stages wait for each other",
        "--pipeline-model-parallel-size 2 or more, or leave them out",
    ),
    Rule(
        _ungrouped,
        "{microbatches} micro-batches (--global-batch-size {global_batch_size} / --micro-batch-size {micro_batch_size} "
        "/ data-parallel size {data_parallel_size}) with virtual pipeline stages in groups of {group}",
        "a group is at least --pipeline-model-parallel-size {pipeline_model_parallel_size} and at most the number of "
        "micro-batches, and {microbatches} modulo {group} = {last} must be 0 or at least that size",
        "--global-batch-size {rounded} * {group} * {micro_batch_size} * {data_parallel_size}, or no virtual stages",
    ),
    Rule(
        lambda a: (
            a.delay_wgrad_compute
            and (
                a.pipeline_model_parallel_size == 1
                or a.virtual_pipeline_model_parallel_size is not None
                or not a.gradient_accumulation_fusion
            )
        ),
        "--delay-wgrad-compute with --pipeline-model-parallel-size {pipeline_model_parallel_size}, virtual stages "
        "{virtual_pipeline_model_parallel_size}, fusion of weight gradients {gradient_accumulation_fusion}",
        "it fills the waiting times of 1F1B over several stages, and adds weight gradients into their buffer itself",
        "--pipeline-model-parallel-size 2 or more, without virtual stages and --no-gradient-accumulation-fusion",
    ),
    Rule(
        lambda a: (
            a.defer_embedding_wgrad_compute
            and (a.pipeline_model_parallel_size == 1 or not a.gradient_accumulation_fusion)
        ),
        "--defer-embedding-wgrad-compute with --pipeline-model-parallel-size {pipeline_model_parallel_size}, fusion of "
        "weight gradients {gradient_accumulation_fusion}",
        "it moves products to where the last of several stages would wait, and adds them into the gradient buffer",
        "--pipeline-model-parallel-size 2 or more, without --no-gradient-accumulation-fusion",
    ),
    _exclusive(
        "defer_embedding_wgrad_compute",
        "delay_wgrad_compute",
        "the zero-bubble schedule has a place of its own for every weight gradient",
    ),
    Rule(
        lambda a: a.wgrad_deferral_limit != 0 and not a.defer_embedding_wgrad_compute,
        "--wgrad-deferral-limit {wgrad_deferral_limit} without --defer-embedding-wgrad-compute",
        "nothing is deferred that it could limit",
        "both, or neither",
    ),
    _positive("wgrad_deferral_limit", 0),
    Rule(
        lambda a: (
            not a.align_grad_reduce
            and a.overlap_grad_reduce
            and (a.delay_wgrad_compute or a.defer_embedding_wgrad_compute)
        ),
        "--no-align-grad-reduce with weight gradients that are put off (--delay-wgrad-compute, "
        "--defer-embedding-wgrad-compute)",
        "then the schedule starts their reduction, at the same time on all stages, not the last backward pass",
        "leave out --no-align-grad-reduce",
    ),
    Rule(
        lambda a: a.pipeline_model_parallel_comm_backend == "ucc",
        "--pipeline-model-parallel-comm-backend ucc",
        "UCC is in no build of torch that can be installed ready-made, and stages need no more than sends and receives",
        "leave it out: messages go the way of the run's other communication",
    ),
    Rule(
        lambda a: a.overlap_p2p_communication_warmup_flush and not a.overlap_p2p_comm,
        "--overlap-p2p-communication-warmup-flush without overlapped messages",
        "it extends the overlap of an interleaved schedule to its beginning and end",
        "virtual pipeline stages, without --no-overlap-p2p-communication",
    ),
    # -- shares of the tensor-parallel ranks
    *(
        Rule(
            lambda a, name=name: (
                bool(getattr(a, name))  # type: ignore[misc]
                and a.tensor_model_parallel_size > 0
                and getattr(a, name) % a.tensor_model_parallel_size != 0
                and {"near": nearest_multiples(getattr(a, name), a.tensor_model_parallel_size)}
            ),
            f"{_flag(name)} {{{name}}} with --tensor-model-parallel-size {{tensor_model_parallel_size}}",
            "each rank takes an equal share",
            f"{_flag(name)} {{near}}, or another --tensor-model-parallel-size",
        )
        for name in ("num_attention_heads", "ffn_hidden_size")
    ),
    Rule(
        lambda a: (
            a.group_query_attention
            and a.num_query_groups > 0
            and a.tensor_model_parallel_size > 0
            and a.num_query_groups % a.tensor_model_parallel_size != 0
            and a.tensor_model_parallel_size % a.num_query_groups != 0
        ),
        "--num-query-groups {num_query_groups} with --tensor-model-parallel-size {tensor_model_parallel_size}",
        "a rank holds whole key/value heads, or a whole number of ranks shares one",
        "a number of groups that divides the tensor-parallel size or is a multiple of it",
    ),
    Rule(
        lambda a: (
            a.sequence_parallel
            and bool(a.seq_length)
            and a.seq_length % a.tensor_model_parallel_size != 0
            and {"near": nearest_multiples(a.seq_length, a.tensor_model_parallel_size)}
        ),
        "--seq-length {seq_length} with --sequence-parallel and --tensor-model-parallel-size "
        "{tensor_model_parallel_size}",
        "each rank takes an equal share of the sequence",
        "--seq-length {near}, or without --sequence-parallel",
    ),
    Rule(
        lambda a: a.tp_comm_overlap and not a.sequence_parallel,
        "--tp-comm-overlap without --sequence-parallel",
        "it sends the parts of the sequence that sequence parallelism cuts",
        "--sequence-parallel, or leave it out",
    ),
    Rule(
        lambda a: (
            a.distribute_saved_activations
            and (a.recompute_granularity != "full" or a.tensor_model_parallel_size == 1 or a.sequence_parallel)
        ),
        "--distribute-saved-activations without --recompute-granularity full and --tensor-model-parallel-size > 1, "
        "or with --sequence-parallel",
        "it cuts the inputs that full recompute saves over ranks that all hold them alike",
        "leave it out",
    ),
    # -- batch
    Rule(
        lambda a: (
            bool(a.global_batch_size)
            and bool(a.micro_batch_size)
            and a.rampup_batch_size is None
            and a.step_batch_size_schedule is None
            and not a.decrease_batch_size_if_needed
            and a.global_batch_size % (a.micro_batch_size * a.data_parallel_size) != 0
            and {
                "unit": a.micro_batch_size * a.data_parallel_size,
                "near": -(-a.global_batch_size // (a.micro_batch_size * a.data_parallel_size))
                * (a.micro_batch_size * a.data_parallel_size),
            }
        ),
        "--global-batch-size {global_batch_size} with --micro-batch-size {micro_batch_size} "
        "and data-parallel size {data_parallel_size}",
        "every rank computes the same number of micro-batches, so micro-batch * dp = {unit} divides the global batch",
        "--global-batch-size {near}, or --decrease-batch-size-if-needed",
    ),
    Rule(
        lambda a: (
            bool(a.global_batch_size)
            and bool(a.micro_batch_size)
            and a.decrease_batch_size_if_needed
            and a.global_batch_size < a.micro_batch_size * a.data_parallel_size
            and {"unit": a.micro_batch_size * a.data_parallel_size}
        ),
        "--global-batch-size {global_batch_size} with --micro-batch-size {micro_batch_size} "
        "and data-parallel size {data_parallel_size}",
        "rounded down to a multiple of {unit} nothing is left",
        "--global-batch-size {unit}",
    ),
    Rule(
        lambda a: (
            (problem := problem_of_batch(a)) is not None
            and {"what_": problem.what, "why_": problem.why, "fix_": problem.fix}
        ),
        "{what_}",
        "{why_}",
        "{fix_}",
    ),
    Rule(
        lambda a: (
            bool(a.eval_global_batch_size)
            and bool(a.eval_micro_batch_size)
            # The training sizes have a rule of their own.
            and (a.eval_global_batch_size, a.eval_micro_batch_size) != (a.global_batch_size, a.micro_batch_size)
            and a.eval_global_batch_size % (a.eval_micro_batch_size * a.data_parallel_size) != 0
            and {"unit": a.eval_micro_batch_size * a.data_parallel_size}
        ),
        "--eval-global-batch-size {eval_global_batch_size} with --eval-micro-batch-size {eval_micro_batch_size} "
        "and data-parallel size {data_parallel_size}",
        "every rank evaluates the same number of micro-batches, so micro-batch * dp = {unit} divides the batch",
        "--eval-global-batch-size {unit}, or another multiple",
    ),
    Rule(
        lambda a: (
            (problem := _problem_of_phases(a)) is not None
            and {"what_": problem.what, "why_": problem.why, "fix_": problem.fix}
        ),
        "{what_}",
        "{why_}",
        "{fix_}",
    ),
    # -- shape
    Rule(
        lambda a: (
            bool(a.hidden_size)
            and bool(a.num_attention_heads)
            and a.kv_channels is None
            and a.hidden_size % a.num_attention_heads != 0
        ),
        "--hidden-size {hidden_size} with --num-attention-heads {num_attention_heads}",
        "without --kv-channels a head gets hidden / heads channels, and that is no whole number",
        "a multiple of the heads, or --kv-channels N",
    ),
    Rule(
        lambda a: (
            a.group_query_attention
            and bool(a.num_attention_heads)
            and a.num_query_groups > 0
            and a.num_attention_heads % a.num_query_groups != 0
        ),
        "--num-attention-heads {num_attention_heads} with --num-query-groups {num_query_groups}",
        "every key/value head serves the same number of query heads",
        "a number of groups that divides the heads",
    ),
    Rule(
        lambda a: (
            a.seq_length is not None
            and a.max_position_embeddings is not None
            and a.max_position_embeddings < a.seq_length
        ),
        "--seq-length {seq_length} with --max-position-embeddings {max_position_embeddings}",
        "positions beyond the table do not exist",
        "--max-position-embeddings {seq_length}",
    ),
    Rule(
        lambda a: not 0.0 < a.rotary_percent <= 1.0,
        "--rotary-percent {rotary_percent}",
        "a share of the channels, above 0 and at most 1",
        "--rotary-percent 1.0",
    ),
    *(
        Rule(
            lambda a, name=name: not 0.0 <= getattr(a, name) < 1.0,  # type: ignore[misc]
            f"{_flag(name)} {{{name}}}",
            "a share of the activations, at least 0 and below 1",
            f"{_flag(name)} 0.1",
        )
        for name in ("hidden_dropout", "attention_dropout")
    ),
    *(
        Rule(
            lambda a, name=name: (
                isinstance(getattr(a, name), list)  # type: ignore[misc]
                and a.num_layers is not None
                and len(getattr(a, name)) != a.num_layers
                and {"count": len(getattr(a, name))}
            ),
            f"{_flag(name)} has {{count}} entries with --num-layers {{num_layers}}",
            "a list says it for every layer",
            "a list of {num_layers} entries, or one number",
        )
        for name in ("no_rope_freq", "window_attn_skip_freq")
    ),
    Rule(
        lambda a: (
            isinstance(a.no_rope_freq, int)
            and bool(a.num_layers)
            and (a.no_rope_freq < 1 or a.num_layers % a.no_rope_freq != 0)
        ),
        "--no-rope-freq {no_rope_freq} with --num-layers {num_layers}",
        "every N-th layer does without rotary positions, and N divides the layers",
        "another number, or a list of {num_layers} entries",
    ),
    Rule(
        lambda a: a.window_attn_skip_freq is not None and a.window_size is None,
        "--window-attn-skip-freq without --window-size",
        "there is no window that a layer could do without",
        "--window-size LEFT,RIGHT",
    ),
    Rule(
        lambda a: a.use_rope_scaling and a.position_embedding_type != "rope",
        "--use-rope-scaling with --position-embedding-type {position_embedding_type}",
        "it rescales rotary positions",
        "--position-embedding-type rope",
    ),
    # -- learning rate
    Rule(
        lambda a: a.lr is None and not a.skip_train,
        "--lr is missing",
        "no training can do without it",
        "--lr 3e-4",
    ),
    *(_positive(name, 0) for name in ("lr", "min_lr", "lr_warmup_init", "lr_warmup_iters", "lr_warmup_samples")),
    _below("min_lr", "lr"),
    _below("lr_warmup_init", "lr"),
    _below("decoupled_min_lr", "decoupled_lr"),
    Rule(
        lambda a: a.decoupled_min_lr is not None and a.decoupled_lr is None,
        "--decoupled-min-lr {decoupled_min_lr} without --decoupled-lr",
        "it is where that learning rate ends",
        "--decoupled-lr X",
    ),
    Rule(
        lambda a: (span := horizon(a)) is not None and span[0] >= span[1] and {"warmup": span[0], "decay": span[1]},
        "a warm-up of {warmup} in a schedule of {decay}",
        "the learning rate decays after its warm-up, which is counted in",
        "a shorter --lr-warmup-fraction, --lr-warmup-iters or --lr-warmup-samples",
    ),
    Rule(
        lambda a: (
            a.lr_decay_style == "WSD" and (a.lr_wsd_decay_samples if a.train_samples else a.lr_wsd_decay_iters) is None
        ),
        "--lr-decay-style WSD without the length of its anneal",
        "the last part of the run anneals",
        "--lr-wsd-decay-iters N, or --lr-wsd-decay-samples N for a run counted in samples",
    ),
    Rule(
        lambda a: (
            a.start_weight_decay is not None
            and a.end_weight_decay is not None
            and not 0.0 <= a.start_weight_decay <= a.end_weight_decay
        ),
        "--start-weight-decay {start_weight_decay} --end-weight-decay {end_weight_decay}",
        "weight decay grows from the first to the second, from 0 on",
        "a larger --end-weight-decay",
    ),
    # -- tokenizer
    Rule(
        lambda a: bool(missing_fields(a)) and {"missing": " and ".join(map(_flag, missing_fields(a)))},
        "--tokenizer-type {tokenizer_type} without {missing}",
        "the tokenizer is made from it",
        "{missing}, or another --tokenizer-type",
    ),
    Rule(
        lambda a: a.tokenizer_type in NOT_FOR_TEXT and dict(zip(("reason", "instead"), NOT_FOR_TEXT[a.tokenizer_type])),
        "--tokenizer-type {tokenizer_type} is not supported",
        "{reason}",
        "--tokenizer-type {instead}",
    ),
)
