"""What follows from the flags: sizes, lengths and numbers that nobody typed.

`derive` fills the namespace in, between the rules on what was typed and those on the outcome. It goes as far as the
flags make sense; what makes none is left for the rules to tell.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from megatron_lite.errors import ConfigError
from megatron_lite.num_microbatches_calculator import (
    NumMicroBatchesCalculator,
    build_num_microbatches_calculator,
    parse_step_batch_size_schedule,
)
from megatron_lite.pipeline_parallel.stage_layout import parse_layout
from megatron_lite.training.fully_sharded import derive_fully_sharded
from megatron_lite.transformer.moe.moe_config import derive_moe


def derive(args: Namespace) -> tuple[list[str], list[str]]:
    """Fills in what follows from the flags, as far as they make sense.

    Returns: lines to print, and warnings.
    """
    notices: list[str] = []
    warnings: list[str] = []
    _derive_recipe(args)
    _derive_layout(args, warnings)
    derive_fully_sharded(args, notices, warnings)
    _derive_shape(args)
    _derive_experts(args, warnings)
    _derive_batch(args, notices)
    _derive_evaluation_batch(args)
    _derive_length(args)
    _derive_numbers(args, notices, warnings)
    span = horizon(args)
    if span and args.lr_decay_style != "constant" and span[1] < (args.train_samples or args.train_iters):
        warnings.append(
            f"the learning rate is at its minimum from {span[1]} on, before the run of "
            f"{args.train_samples or args.train_iters} ends (the length of the decay includes the warm-up)"
        )
    if args.data_path is not None and args.split is None:
        args.split = "969, 30, 1"
        warnings.append(f"--split is not given: {args.split} is used (train, valid, test)")
    if args.dataloader_type is None:
        args.dataloader_type = "single"
    if args.skip_train and not args.no_load_optim:
        args.no_load_optim = True
        warnings.append("--skip-train: the optimizer's state is not read (--no-load-optim)")
    args.iteration = args.consumed_train_samples = args.consumed_valid_samples = args.skipped_train_samples = 0
    return notices, warnings


def _derive_layout(args: Namespace, warnings: list[str]) -> None:
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    args.model_parallel_ranks = tp * pp * cp
    args.data_parallel_size = max(1, args.world_size // max(1, args.model_parallel_ranks))
    if args.expert_tensor_parallel_size is None:
        args.expert_tensor_parallel_size = tp
    args.virtual_pipeline_model_parallel_size = _virtual_stages(args)
    if args.virtual_pipeline_model_parallel_size is None:  # there is nothing to overlap or to align
        args.overlap_p2p_comm = args.align_param_gather = False
    if args.sequence_parallel and tp == 1:
        args.sequence_parallel = False
        warnings.append("--sequence-parallel is switched off: there is one tensor-parallel rank")
    if args.tp_comm_overlap and tp == 1:
        args.tp_comm_overlap = False
        warnings.append("--tp-comm-overlap is switched off: there is one tensor-parallel rank")


def _virtual_stages(args: Namespace) -> int | None:
    """Chunks of each pipeline stage; None: one. Numbers that do not come out even are left to the rules."""
    stages = max(1, args.pipeline_model_parallel_size)
    chunks = args.num_virtual_stages_per_pipeline_rank or 1
    if args.num_layers_per_virtual_pipeline_stage:
        layers = all_layers(args)
        chunks = max(1, layers // stages // args.num_layers_per_virtual_pipeline_stage)
    elif args.pipeline_model_parallel_layout:
        try:
            chunks = max(1, len(parse_layout(args.pipeline_model_parallel_layout)) // stages)
        except ConfigError:
            chunks = 1
    return chunks if chunks > 1 else None


def all_layers(args: Namespace) -> int:
    """Layers of all stacks of the model."""
    encoder = args.num_layers or args.encoder_num_layers or 0
    return encoder + (args.decoder_num_layers or encoder) if has_decoder_behind(args) else encoder


def has_decoder_behind(args: Namespace) -> bool:
    """Whether the model is an encoder with a decoder behind it, whose parts are placed as one row of layers."""
    return getattr(args, "model_family", None) == "t5"


def is_gated(args: Namespace) -> bool:
    """Whether the MLP multiplies two of its inner halves."""
    return bool(args.swiglu or args.quick_geglu or args.geglu)


def tokens_per_sample(args: Namespace) -> int:
    """Of all its parts."""
    return int(args.seq_length + (args.decoder_seq_length or 0))


# What `--enable-gpt-oss` sets, where it is not typed (OpenAI 2025, "gpt-oss model card"; its config.json).
_GPT_OSS: dict[str, object] = {
    "position_embedding_type": "yarn",
    "rotary_base": 150000,
    "rotary_scaling_factor": 32.0,
    "yarn_original_max_position_embeddings": 4096,
    "yarn_correction_range_round_to_int": False,
    "softmax_type": "learnable",
    "window_size": (127, 0),
    "window_attn_skip_freq": 2,
    "normalization": "RMSNorm",
    "quick_geglu": True,
    "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 7.0,
}


def _derive_recipe(args: Namespace) -> None:
    if args.enable_gpt_oss:
        for name, value in _GPT_OSS.items():
            if name not in args.typed:
                setattr(args, name, value)


def _derive_shape(args: Namespace) -> None:
    args.num_layers = args.num_layers if args.num_layers is not None else args.encoder_num_layers
    args.encoder_num_layers = args.num_layers
    if has_decoder_behind(args) and args.decoder_num_layers is None:
        args.decoder_num_layers = args.num_layers
    args.seq_length = args.seq_length if args.seq_length is not None else args.encoder_seq_length
    args.encoder_seq_length = args.seq_length
    hidden, heads = args.hidden_size, args.num_attention_heads
    if hidden and args.ffn_hidden_size is None:
        args.ffn_hidden_size = 8 * hidden // 3 // 64 * 64 if args.swiglu else 4 * hidden
    if hidden and heads and args.kv_channels is None and hidden % heads == 0:
        args.kv_channels = hidden // heads
    if isinstance(args.window_size, list):  # as a checkpoint's JSON has it
        args.window_size = tuple(args.window_size)
    if args.recompute_activations:
        args.recompute_granularity = "selective"
    if args.apply_query_key_layer_scaling:
        args.attention_softmax_in_fp32 = True
    if args.position_embedding_type != "rope":
        args.apply_rope_fusion = False
    if args.add_bias_linear:
        args.add_qkv_bias = True
    else:
        args.bias_gelu_fusion = False


def _derive_experts(args: Namespace, warnings: list[str]) -> None:
    derive_moe(args)
    if not args.num_experts:
        return
    if args.moe_ffn_hidden_size is None:
        args.moe_ffn_hidden_size = args.ffn_hidden_size
        warnings.append(f"--moe-ffn-hidden-size is not given: an expert is {args.ffn_hidden_size} wide, as a dense MLP")
    if args.num_experts >= 32 and args.moe_router_dtype is None:
        warnings.append(
            f"a router over {args.num_experts} experts computes in the model's number format; "
            "--moe-router-dtype fp32 is steadier"
        )


def _derive_batch(args: Namespace, notices: list[str]) -> None:
    if args.global_batch_size is not None or not args.micro_batch_size:
        return
    if args.step_batch_size_schedule:
        try:
            args.global_batch_size = parse_step_batch_size_schedule(args.step_batch_size_schedule)[-1][1]
        except ConfigError:
            return  # told by a rule
    else:
        args.global_batch_size = args.micro_batch_size * args.data_parallel_size
    notices.append(f"setting global batch size to {args.global_batch_size}")


def _derive_evaluation_batch(args: Namespace) -> None:
    if args.eval_micro_batch_size is None:
        args.eval_micro_batch_size = args.micro_batch_size
    if args.eval_global_batch_size is None and args.global_batch_size and args.eval_micro_batch_size:
        args.eval_global_batch_size = args.global_batch_size
        if args.decrease_batch_size_if_needed:
            unit = args.eval_micro_batch_size * args.data_parallel_size
            args.eval_global_batch_size = max(args.global_batch_size // unit, 1) * unit


def _derive_length(args: Namespace) -> None:
    if args.weight_decay_incr_style == "constant":
        args.start_weight_decay = args.end_weight_decay = args.weight_decay
    if args.skip_train and args.train_iters is None and args.train_samples is None:
        args.train_iters = 0
    if args.train_samples and not args.train_iters and args.global_batch_size and not problem_of_batch(args):
        args.train_iters = _iterations(args)


def _iterations(args: Namespace) -> int:
    """Optimizer steps in `--train-samples`: walk the plan while it changes, then divide."""
    calculator = _calculator(args)
    full = args.global_batch_size
    iterations = consumed = 0
    while consumed < args.train_samples:
        calculator.update(consumed, consistency_check=False)
        size = calculator.get_current_running_global_batch_size()
        if size <= 0 or consumed + size > args.train_samples:
            break
        if calculator.get_current_global_batch_size() == full and _is_final(args, consumed):
            return iterations + (args.train_samples - consumed) // size
        consumed += size
        iterations += 1
    return iterations


def phase_transitions(args: Namespace) -> list[int]:
    """The iterations of `--phase-transition-iterations`.

    Raises: ConfigError if they are no rising iterations of the run.
    """
    text = args.phase_transition_iterations or ""
    words = text.replace(",", " ").split()
    numbers = [int(word) for word in words if word.isdecimal()]
    rising = all(a < b for a, b in zip([0, *numbers], numbers))
    if len(numbers) < len(words) or not rising or (numbers and args.train_iters and numbers[-1] >= args.train_iters):
        raise ConfigError(
            f"--phase-transition-iterations {text} in a run of {args.train_iters}",
            why="they are iterations of the run, each after the one before",
            fix="--phase-transition-iterations 1000,2000",
        )
    return numbers


def phase_of(args: Namespace, iteration: int) -> tuple[int, int]:
    """(first, end) of the samples of the phase that goes on after `iteration`, by the plan of the batch size."""
    borders = [0, *phase_transitions(args), args.train_iters]
    begin = max(border for border in borders if border <= iteration)
    end = min(border for border in borders if border > iteration)
    return _samples_until(args, begin), _samples_until(args, end)


def _samples_until(args: Namespace, iterations: int) -> int:
    calculator = _calculator(args)
    if args.rampup_batch_size is None and args.step_batch_size_schedule is None:
        return iterations * calculator.get_current_running_global_batch_size()
    consumed = 0
    for _ in range(iterations):
        calculator.update(consumed, consistency_check=False)
        consumed += calculator.get_current_running_global_batch_size()
    return consumed


def _is_final(args: Namespace, consumed: int) -> bool:
    """Whether the batch size changes no more: ramps and schedules grow to the full size and stay."""
    if args.step_batch_size_schedule:
        last = parse_step_batch_size_schedule(args.step_batch_size_schedule)[-1][0]
        return consumed >= last // args.seq_length
    return True


def _derive_numbers(args: Namespace, notices: list[str], warnings: list[str]) -> None:
    if args.optimizer == "dist_muon":
        args.optimizer, args.use_distributed_optimizer = "muon", True
        notices.append("--optimizer dist_muon is now --optimizer muon --use-distributed-optimizer")
    if args.bf16 and not args.grad_reduce_in_bf16 and not args.accumulate_allreduce_grads_in_fp32:
        args.accumulate_allreduce_grads_in_fp32 = True
        notices.append("accumulate and all-reduce gradients in fp32 for bfloat16 data type.")
    if args.ddp_reduce_scatter_with_fp32_accumulation and gradients_are_fp32(args):
        args.ddp_reduce_scatter_with_fp32_accumulation = False
        warnings.append("--ddp-reduce-scatter-with-fp32-accumulation is off: gradients are fp32 already")
    if args.fp16 and args.loss_scale is None and args.check_for_nan_in_loss_and_grad:
        args.check_for_nan_in_loss_and_grad = False
        warnings.append("dynamic loss scaling looks for Inf itself: the checks of loss and gradients for NaN are off")


def gradients_are_fp32(args: Namespace) -> bool:
    """Whether the gradient buffers are."""
    return args.accumulate_allreduce_grads_in_fp32 or not (args.fp16 or args.bf16)


def _calculator(args: Namespace) -> NumMicroBatchesCalculator:
    return build_num_microbatches_calculator(
        1,  # not rank 0: it stays silent
        args.rampup_batch_size,
        args.global_batch_size,
        args.micro_batch_size,
        args.data_parallel_size,
        args.decrease_batch_size_if_needed,
        step_batch_size_schedule=args.step_batch_size_schedule,
        seq_length=args.seq_length,
    )


def problem_of_batch(args: Namespace) -> ConfigError | None:
    """What the plan of the batch size says to these numbers; the rule for constant sizes has its own row."""
    if not (args.global_batch_size and args.micro_batch_size and args.micro_batch_size > 0):
        return None
    if args.rampup_batch_size is None and args.step_batch_size_schedule is None:
        return None
    try:
        _calculator(args)
        for size in _planned_sizes(args):
            unit = args.micro_batch_size * args.data_parallel_size
            if size % unit and not args.decrease_batch_size_if_needed:
                return ConfigError(
                    f"batch size {size} of the plan with --micro-batch-size {args.micro_batch_size} "
                    f"and data-parallel size {args.data_parallel_size}",
                    why=f"every size that is used is a multiple of micro-batch * dp = {unit}",
                    fix="other steps, or --decrease-batch-size-if-needed",
                )
    except ConfigError as error:
        return error
    return None


def _planned_sizes(args: Namespace) -> Iterator[int]:
    if args.step_batch_size_schedule:
        yield from (size for _, size in parse_step_batch_size_schedule(args.step_batch_size_schedule))
    elif args.rampup_batch_size:
        start, increment, _ = args.rampup_batch_size
        yield from range(start, args.global_batch_size + 1, increment)


def horizon(a: Namespace) -> tuple[float, float] | None:
    """(warm-up, decay) in the unit of the run; None where the length is not known."""
    length = a.train_samples or a.train_iters
    if not length:
        return None
    decay = (a.lr_decay_samples if a.train_samples else a.lr_decay_iters) or length
    warmup = a.lr_warmup_samples if a.train_samples else a.lr_warmup_iters
    if a.lr_warmup_fraction is not None:
        warmup = a.lr_warmup_fraction * decay
    return warmup, decay
