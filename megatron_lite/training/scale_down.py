"""A run made small: the same structure under the same kind of layout, for a few processes of one machine.

    model      few layers, narrow, short; kept are heads per group, groups to tensor-parallel ranks, MLP to hidden
    layout     every dimension stays, with 2 ranks (tensor parallel up to 4) where it had more
    training   a few steps on made-up samples, without dropout

Model, optimizer and data-parallel settings are the user's; all else (files, evaluation, logging) has its default.
"""

from __future__ import annotations

import math
from argparse import Namespace
from copy import deepcopy

from megatron_lite.config import flags_of
from megatron_lite.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron_lite.distributed.fully_sharded_config import FullyShardedConfig
from megatron_lite.errors import ConfigError
from megatron_lite.optimizer.optimizer_config import OptimizerConfig
from megatron_lite.training.arguments import parse_args
from megatron_lite.training.configs import ModelConfig
from megatron_lite.training.derived import has_decoder_behind
from megatron_lite.training.families import defaults_of, family_of
from megatron_lite.training.fully_sharded import is_full
from megatron_lite.training.layout_check import EPSILON
from megatron_lite.transformer.mla_config import LatentAttentionConfig
from megatron_lite.transformer.transformer_config import TransformerConfig

SEQ_LENGTH = 32
VOCABULARY = 256  # padded; a multiple of every scaled tensor-parallel size

_KEPT = (
    TransformerConfig,
    LatentAttentionConfig,
    ModelConfig,
    OptimizerConfig,
    DistributedDataParallelConfig,
    FullyShardedConfig,
)
_KEPT_TOO = ("grad_reduce_in_bf16", "use_tp_pp_dp_mapping")
# How the optimizer's memory is kept: its rounding would hide what is looked for.
_LEFT_OUT = (
    "use_precision_aware_optimizer",
    "main_grads_dtype",
    "main_params_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
    "pin_cpu_grads",
    "pin_cpu_params",
)
# What a layout is made of: size -> how many ranks of it a scaled layout has at most.
_SIZES = {
    "tensor_model_parallel_size": 4,
    "pipeline_model_parallel_size": 2,
    "context_parallel_size": 2,
    "data_parallel_size": 2,
}
_SHORT = dict(zip(_SIZES, ("tp", "pp", "cp", "dp")))


def scale_down(given: Namespace, data_parallel_size: int, steps: int, max_ranks: int) -> tuple[Namespace, list[str]]:
    """The arguments of the small run, not validated yet, and what was changed, a line each.

    Args:
        given: of `parse_args`, not validated; the model's shape must be there.
        data_parallel_size: of the real run.
        max_ranks: most processes that the small run may have.
    Returns: arguments with `world_size` and `data_parallel_size` set; changes of the layout come first.
    Raises: ConfigError when the layout cannot be made small enough.
    """
    if given.num_layers is None:
        given.num_layers = given.encoder_num_layers
    missing = [
        f"--{n.replace('_', '-')}" for n in ("num_layers", "hidden_size", "num_attention_heads") if not vars(given)[n]
    ]
    if missing:
        raise ConfigError(
            f"{' '.join(missing)}: not given", why="the model that is checked has the shape of yours", fix="add them"
        )
    small = parse_args([], args_defaults=defaults_of(family_of(given)))
    for config in _KEPT:
        for flag in flags_of(config):
            if flag.dest not in _LEFT_OUT:
                setattr(small, flag.dest, deepcopy(vars(given)[flag.dest]))
    for name in _KEPT_TOO:
        setattr(small, name, vars(given)[name])
    for name in vars(given).keys() - vars(small).keys():  # the script's own flags
        setattr(small, name, deepcopy(vars(given)[name]))
    changes = _layout(given, small, data_parallel_size, max_ranks)
    changes += _model(given, small)
    changes += _training(given, small, steps)
    if given.use_precision_aware_optimizer:
        changes.append("the optimizer's memory in fp32, on the device")
    return small, changes


def _layout(given: Namespace, small: Namespace, data_parallel_size: int, max_ranks: int) -> list[str]:
    real = {name: vars(given).get(name, 1) for name in _SIZES} | {"data_parallel_size": data_parallel_size}
    sizes = {name: _nearest(real[name], most) for name, most in _SIZES.items()}
    if is_full(given) and given.num_distributed_optimizer_instances > 1:  # two copies, each on two ranks
        sizes["data_parallel_size"] = _nearest(data_parallel_size, 4)
    levels = given.hierarchical_context_parallel_sizes
    if levels is not None:  # a ring across groups needs several of each
        levels = [_nearest(level, 2) for level in levels]
        sizes["context_parallel_size"] = math.prod(levels)

    def ranks() -> int:
        total = 1
        for size in sizes.values():
            total *= size
        return total

    if ranks() > max_ranks:
        sizes["tensor_model_parallel_size"] = _nearest(real["tensor_model_parallel_size"], 2)
    if ranks() > max_ranks:
        wanted = " x ".join(f"{_SHORT[name]} {size}" for name, size in sizes.items() if size > 1)
        raise ConfigError(
            f"this layout needs {ranks()} processes even when it is scaled down ({wanted}); the limit is {max_ranks}",
            why="every dimension of the layout needs at least two ranks, or nothing of it is checked",
            fix=f"--max-processes {ranks()}, or check fewer dimensions at once",
        )
    for name, size in sizes.items():
        setattr(small, name, size)
    small.world_size, small.hierarchical_context_parallel_sizes = ranks(), levels
    most = 2 if is_full(given) else small.data_parallel_size
    small.num_distributed_optimizer_instances = min(given.num_distributed_optimizer_instances, most)
    return [f"{_SHORT[name]} {size} instead of {real[name]}" for name, size in sizes.items() if size != real[name]]


def _nearest(size: int, most: int) -> int:
    """The largest size up to `most` that divides the real one; `most` if only 1 does."""
    if size <= most:
        return size
    return next((n for n in range(most, 1, -1) if size % n == 0), most)


def _model(given: Namespace, small: Namespace) -> list[str]:
    tp, real_tp = small.tensor_model_parallel_size, given.tensor_model_parallel_size
    stages = small.pipeline_model_parallel_size
    exchanges = list(dict.fromkeys(given.cp_comm_type))  # each kind, where layers differ
    small.num_layers = min(given.num_layers, -(-max(2, len(exchanges)) // stages) * stages)
    if len(given.cp_comm_type) > 1:
        small.cp_comm_type = [exchanges[i % len(exchanges)] for i in range(small.num_layers)]
    small.encoder_num_layers = None
    if has_decoder_behind(given):  # both stacks are placed as one row: as many of each as there are stages
        small.num_layers = small.decoder_num_layers = max(2, stages)
        small.decoder_seq_length = SEQ_LENGTH // 2
        small.vocab_extra_ids = min(given.vocab_extra_ids, 20)
        if small.pipeline_model_parallel_split_rank:
            small.pipeline_model_parallel_split_rank = 1

    heads, hidden = given.num_attention_heads, given.hidden_size
    if heads % real_tp:
        raise ConfigError(
            f"--num-attention-heads {heads} with --tensor-model-parallel-size {real_tp}",
            why="each tensor-parallel rank has whole heads, equally many",
            fix=f"a size that divides {heads}",
        )
    groups = given.num_query_groups if given.group_query_attention else heads
    small_groups = tp * min(groups // real_tp, 2) if groups >= real_tp else max(1, groups * tp // real_tp)
    per_group = min(heads // groups, 4) if heads % groups == 0 else heads // groups
    while (small_groups * per_group) % tp:  # fewer groups than ranks: heads must still divide
        per_group += 1
    small.num_attention_heads = small_groups * per_group
    if given.group_query_attention:
        small.num_query_groups = small_groups
    head = given.kv_channels or hidden // heads
    small_head = min(head, 8)
    small.kv_channels = small_head
    small.hidden_size = _multiple(hidden / (heads * head) * small.num_attention_heads * small_head, 8 * tp)
    if given.ffn_hidden_size is not None:
        small.ffn_hidden_size = _multiple(given.ffn_hidden_size / hidden * small.hidden_size, 8 * tp)
    _positions(given, small)
    experts = _experts(given, small)
    small.seq_length = SEQ_LENGTH
    small.encoder_seq_length = None
    small.max_position_embeddings = SEQ_LENGTH
    small.recompute_num_layers = None if given.recompute_num_layers is None else 1
    small.init_method_std = 0.1  # narrow layers need larger weights for gradients of a size
    small.perform_initialization = True
    small.padded_vocab_size = None
    small.make_vocab_size_divisible_by = VOCABULARY // tp
    small.vocab_size, small.tokenizer_type = VOCABULARY - 6, "NullTokenizer"
    return [
        f"{small.num_layers} layers of {small.hidden_size} with {small.num_attention_heads} heads in {small_groups} "
        f"groups, instead of {given.num_layers} of {hidden} with {heads} in {groups}",
        *experts,
        f"{SEQ_LENGTH} tokens of a vocabulary of {VOCABULARY}",
    ]


def _experts(given: Namespace, small: Namespace) -> list[str]:
    """A few experts, of which a token chooses as before, some of them on other ranks where the real ones are."""
    if not given.num_experts:
        return []
    tp = small.tensor_model_parallel_size
    small.expert_tensor_parallel_size = None
    if given.expert_tensor_parallel_size is not None:
        small.expert_tensor_parallel_size = _nearest(given.expert_tensor_parallel_size, tp)
    expert_tp = small.expert_tensor_parallel_size or tp
    ranks = small.world_size // small.pipeline_model_parallel_size // expert_tp
    small.expert_model_parallel_size = 2 if given.expert_model_parallel_size > 1 and ranks % 2 == 0 else 1
    small.num_experts = given.num_experts if given.num_experts <= 8 else 8
    small.moe_router_topk = min(given.moe_router_topk, max(2, small.num_experts // 2))
    if given.moe_router_num_groups:  # of two experts each
        small.moe_router_num_groups = small.num_experts // 2
        small.moe_router_group_topk = min(given.moe_router_group_topk, small.moe_router_topk, small.num_experts // 2)
        small.moe_router_topk = min(small.moe_router_topk, 2 * small.moe_router_group_topk)
    for name in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
        width = getattr(given, name)
        if width is not None:
            setattr(small, name, _multiple(width / given.hidden_size * small.hidden_size, 8 * tp))
    if isinstance(given.moe_layer_freq, list):
        small.moe_layer_freq = given.moe_layer_freq[: small.num_layers]
        if 1 not in small.moe_layer_freq:
            small.moe_layer_freq = [*small.moe_layer_freq[:-1], 1]
    before = (given.num_experts, given.moe_router_topk, given.expert_model_parallel_size)
    return [
        f"{small.num_experts} experts, {small.moe_router_topk} for a token, on {small.expert_model_parallel_size} "
        "rank(s), instead of {}, {} and {}".format(*before)
    ]


def _positions(given: Namespace, small: Namespace) -> None:
    """Sizes of latent attention, sections of channels and patterns over layers, so that they fit the small model."""
    for name, most in (("q_lora_rank", 16), ("kv_lora_rank", 16), ("qk_head_dim", 8), ("v_head_dim", 8)):
        size = getattr(given, name)
        setattr(small, name, None if size is None else min(size, most))
    small.qk_pos_emb_head_dim = min(given.qk_pos_emb_head_dim, 8)
    if given.mrope_section is not None:
        pairs = int(small.kv_channels * small.rotary_percent) // 2
        small.mrope_section = [pairs - pairs // 3 * 2, pairs // 3, pairs // 3]
    for name in ("no_rope_freq", "window_attn_skip_freq"):
        pattern = getattr(given, name)
        if isinstance(pattern, list):
            setattr(small, name, pattern[: small.num_layers])
    if isinstance(given.no_rope_freq, int) and small.num_layers % given.no_rope_freq:
        small.no_rope_freq = small.num_layers


def _multiple(value: float, of: int) -> int:
    return max(of, round(value / of) * of)


def _training(given: Namespace, small: Namespace, steps: int) -> list[str]:
    small.mock_data, small.num_workers, small.eval_iters = True, 0, 0
    small.train_iters = steps
    small.micro_batch_size = min(given.micro_batch_size or 1, 2)
    microbatches = 2 * small.pipeline_model_parallel_size
    small.global_batch_size = small.micro_batch_size * small.data_parallel_size * microbatches
    small.seed = given.seed
    small.lr, small.min_lr, small.adam_eps = 1e-3, 1e-4, EPSILON
    small.decoupled_lr = small.decoupled_min_lr = None
    small.hidden_dropout = small.attention_dropout = 0.0
    small.timing_log_level = 0
    if small.fp16 and small.loss_scale is None:
        small.loss_scale = 1024.0
    if small.ddp_num_buckets is None:
        small.ddp_bucket_size = 10_000  # several buckets, as in the real run
    changes = [f"{steps} steps, learning rate 1e-3, epsilon of Adam {EPSILON:g}, no dropout"]
    if small.fp8_format is not None:  # a difference in the last bit becomes one of a sixteenth
        small.fp8_format, small.first_last_layers_bf16 = None, False
        changes.append("no casts to FP8, under which no two orders of a sum are alike")
    return changes


def without_precision(args: Namespace) -> Namespace:
    """The same run in fp32."""
    plain = deepcopy(args)
    plain.fp16 = plain.bf16 = plain.grad_reduce_in_bf16 = plain.fp16_lm_cross_entropy = False
    plain.fp32_residual_connection, plain.output_logit_dtype = False, None
    plain.loss_scale = None
    for flag in flags_of(FullyShardedConfig):
        if flag.dest.startswith("megatron_fsdp") and flag.dest.endswith("dtype"):
            setattr(plain, flag.dest, flag.default)
    return plain


def alone(args: Namespace) -> Namespace:
    """The same training in one process: no layout, and nothing of what may only change speed and memory."""
    one = deepcopy(args)
    for name in _SIZES:
        setattr(one, name, 1)
    one.world_size, one.hierarchical_context_parallel_sizes = 1, None
    one.sequence_parallel = one.gradient_accumulation_fusion = one.recompute_activations = False
    one.expert_model_parallel_size, one.expert_tensor_parallel_size = 1, None
    one.recompute_granularity = one.recompute_method = one.recompute_num_layers = one.recompute_modules = None
    one.make_vocab_size_divisible_by = VOCABULARY
    keep = one.accumulate_allreduce_grads_in_fp32
    for flag in (*flags_of(DistributedDataParallelConfig), *flags_of(FullyShardedConfig)):
        setattr(one, flag.dest, deepcopy(flag.default))
    one.accumulate_allreduce_grads_in_fp32, one.overlap_param_gather_with_optimizer_step = keep, False
    return one
