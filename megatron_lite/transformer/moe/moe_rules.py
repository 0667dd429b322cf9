"""Which layers have experts, and what cannot be.

The rules are functions of anything that has a TransformerConfig's names: the config asks them when it is made, the
command line (`training/rules_experts`) before anything is built. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isfinite
from typing import Any

from megatron_lite.errors import ConfigError
from megatron_lite.transformer.moe.moe_config import BALANCING, DISPATCHERS, DROP_POLICIES, SCORE_FUNCTIONS

AUX_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")


def moe_layers(num_layers: int, num_experts: int | None, frequency: int | list[int]) -> list[bool]:
    """Which of a model's layers have experts: every N-th from the first on, or as the list says.

    Raises: ConfigError if the list has another length, or other entries than 0 and 1.
    """
    if num_experts is None:
        return [False] * num_layers
    if isinstance(frequency, int):
        if frequency < 1:
            raise ConfigError(
                f"--moe-layer-freq {frequency}", why="every N-th layer has experts, N > 0", fix="--moe-layer-freq 1"
            )
        return [i % frequency == 0 for i in range(num_layers)]
    if len(frequency) != num_layers or not set(frequency) <= {0, 1}:
        raise ConfigError(
            f"--moe-layer-freq is a list of {len(frequency)} with --num-layers {num_layers}: {frequency}",
            why="a list says for each layer whether it has experts (1) or is dense (0)",
            fix=f"a list of {num_layers} zeros and ones, such as [0]+[1]*{num_layers - 1}, or one number",
        )
    return [bool(entry) for entry in frequency]


# -- rules ---------------------------------------------------------------------------------------------------------


def _no_experts(c: Any) -> Iterator[ConfigError]:
    if c.num_moe_experts is not None and c.num_moe_experts < 0:
        yield ConfigError(f"--num-experts {c.num_moe_experts}", why="a number of experts", fix="--num-experts 8")
    if c.num_moe_experts:
        return
    if c.expert_model_parallel_size > 1:
        yield ConfigError(
            f"--expert-model-parallel-size {c.expert_model_parallel_size} without --num-experts",
            why="there are no experts to spread",
            fix="--num-experts N, or leave it out",
        )
    for name in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
        if getattr(c, name) is not None:
            spelling = "--" + name.replace("_", "-")
            yield ConfigError(
                f"{spelling} {getattr(c, name)} without --num-experts",
                why="a dense model has no layer of experts",
                fix="--num-experts N, or leave it out",
            )


def _spread(c: Any) -> Iterator[ConfigError]:
    ep = c.expert_model_parallel_size
    if ep > 0 and c.num_moe_experts % ep:
        yield ConfigError(
            f"--num-experts {c.num_moe_experts} with --expert-model-parallel-size {ep}",
            why="every rank holds the same number of experts",
            fix=f"--num-experts {-(-c.num_moe_experts // ep) * ep}, or a size that divides it",
        )
    etp = c.expert_tensor_parallel_size or c.tensor_model_parallel_size
    width = c.moe_ffn_hidden_size or c.ffn_hidden_size or 0
    if etp > 0 and width % etp:
        yield ConfigError(
            f"--moe-ffn-hidden-size {width} with --expert-tensor-parallel-size {etp}",
            why="each rank takes an equal share of an expert",
            fix=f"--moe-ffn-hidden-size {-(-width // etp) * etp}",
        )
    if etp > 1 and c.add_bias_linear:
        yield ConfigError(
            f"biases in experts with --expert-tensor-parallel-size {etp}",
            why="an expert's ranks each give a part of its output, and the bias would be added by all of them",
            fix="--disable-bias-linear, or --expert-tensor-parallel-size 1",
        )


def _layers(c: Any) -> Iterator[ConfigError]:
    if not c.num_layers or c.num_layers < 1:
        return
    try:
        moe_layers(c.num_layers, c.num_moe_experts, c.moe_layer_freq)
    except ConfigError as error:
        yield error


def _choice(c: Any) -> Iterator[ConfigError]:
    topk, experts, balancing = c.moe_router_topk, c.num_moe_experts, _balancing(c)
    if not 1 <= topk <= experts:
        yield ConfigError(
            f"--moe-router-topk {topk} with --num-experts {experts}",
            why="a token goes to at least one expert and at most all of them",
            fix=f"--moe-router-topk N, 1 <= N <= {experts}",
        )
    if c.moe_router_score_function not in SCORE_FUNCTIONS:
        yield ConfigError(
            f"--moe-router-score-function {c.moe_router_score_function}",
            why="no such function",
            fix=f"one of {', '.join(SCORE_FUNCTIONS)}",
        )
    softmax = c.moe_router_score_function == "softmax"
    if topk == 1 and softmax and not c.moe_router_pre_softmax and "sinkhorn" not in balancing:
        yield ConfigError(
            "--moe-router-topk 1 with a softmax over the chosen expert",
            why="over one expert it is always 1, and the router would learn nothing",
            fix="--moe-router-pre-softmax",
        )
    if c.moe_router_enable_expert_bias and softmax:
        yield ConfigError(
            "--moe-router-enable-expert-bias with --moe-router-score-function softmax",
            why="the bias is added to scores that do not depend on each other",
            fix="--moe-router-score-function sigmoid",
        )
    if c.moe_input_jitter_eps is not None and not 0.0 <= c.moe_input_jitter_eps < 1.0:
        yield ConfigError(
            f"--moe-input-jitter-eps {c.moe_input_jitter_eps}", why="a share in [0, 1)", fix="for example 0.01"
        )
    if c.moe_router_dtype not in (None, "fp32", "fp64"):
        yield ConfigError(f"--moe-router-dtype {c.moe_router_dtype}", why="no such format", fix="fp32 or fp64")
    yield from _groups(c)


def _groups(c: Any) -> Iterator[ConfigError]:
    groups, kept = c.moe_router_num_groups, c.moe_router_group_topk
    if (groups is None) != (kept is None):
        yield ConfigError(
            f"--moe-router-num-groups {groups} with --moe-router-group-topk {kept}",
            why="one says how many groups there are, the other how many a token may use",
            fix="both or neither",
        )
        return
    if groups is None:
        return
    if groups < 1 or c.num_moe_experts % groups or not 1 <= kept <= groups:
        yield ConfigError(
            f"--moe-router-num-groups {groups} --moe-router-group-topk {kept} with --num-experts {c.num_moe_experts}",
            why="groups have equally many experts, and a token uses at least one of them and at most all",
            fix="a number of groups that divides the experts, and no more chosen than there are",
        )
    elif c.moe_router_topk // kept < 1 or c.moe_router_topk > kept * (c.num_moe_experts // groups):
        yield ConfigError(
            f"--moe-router-topk {c.moe_router_topk} from --moe-router-group-topk {kept} groups of "
            f"{c.num_moe_experts // groups} experts",
            why="a group counts by the sum of its best topk / groups scores, and the kept groups must have that many",
            fix=f"--moe-router-topk N, {kept} <= N <= {kept * (c.num_moe_experts // groups)}",
        )


def _balance(c: Any) -> Iterator[ConfigError]:
    kinds, coefficients = _balancing(c), c.moe_aux_loss_coeff
    unknown = sorted(set(kinds) - set(BALANCING))
    if unknown or not kinds or len(set(kinds)) < len(kinds):
        yield ConfigError(
            f"--moe-router-load-balancing-type {' '.join(kinds)}",
            why="each kind is named once",
            fix=f"some of {', '.join(BALANCING)}",
        )
    if "quantile_balancing" in kinds:
        yield ConfigError(
            "--moe-router-load-balancing-type quantile_balancing",
            why="it is an experiment that this package does not take part in",
            fix="aux_loss, or none with --moe-router-enable-expert-bias",
        )
    if "sinkhorn" in kinds and any(coefficients if isinstance(coefficients, list) else [coefficients]):
        yield ConfigError(
            f"--moe-router-load-balancing-type sinkhorn with --moe-aux-loss-coeff {coefficients}",
            why="the assignment itself is even; there is no loss to weigh",
            fix="leave the coefficient out",
        )
    if len(kinds) > 1 and set(kinds) - set(AUX_LOSSES):
        yield ConfigError(
            f"--moe-router-load-balancing-type {' '.join(kinds)}",
            why="several losses can be added up; the other kinds stand alone",
            fix=f"some of {', '.join(AUX_LOSSES)}, or one kind",
        )
    given = len(coefficients) if isinstance(coefficients, list) else 1
    if given != len(kinds):
        yield ConfigError(
            f"{len(kinds)} kinds of balancing with {given} --moe-aux-loss-coeff",
            why="each loss has its weight",
            fix="as many numbers as kinds",
        )
    weights = coefficients if isinstance(coefficients, list) else [coefficients]
    for name, values in (("--moe-aux-loss-coeff", weights), ("--moe-z-loss-coeff", [c.moe_z_loss_coeff or 0.0])):
        if any(value < 0 or not isfinite(value) for value in values):
            yield ConfigError(
                f"{name} {' '.join(map(str, values))}", why="a weight is 0 or more", fix=f"{name} 0.01, or leave it out"
            )


def _capacity(c: Any) -> Iterator[ConfigError]:
    factor = c.moe_expert_capacity_factor
    if c.moe_token_drop_policy not in DROP_POLICIES:
        yield ConfigError(
            f"--moe-token-drop-policy {c.moe_token_drop_policy}",
            why="no such policy",
            fix=f"one of {', '.join(DROP_POLICIES)}",
        )
    if factor is None or factor < 0:
        if c.moe_pad_expert_input_to_capacity:
            yield ConfigError(
                "--moe-pad-expert-input-to-capacity without --moe-expert-capacity-factor",
                why="there is no capacity to pad to",
                fix="--moe-expert-capacity-factor 1.0",
            )
        return
    if factor == 0:
        yield ConfigError("--moe-expert-capacity-factor 0.0", why="experts would take nothing", fix="for example 1.0")
    odd = sorted(set(_balancing(c)) - {*AUX_LOSSES, "none"})
    if odd:
        yield ConfigError(
            f"--moe-expert-capacity-factor {factor} with --moe-router-load-balancing-type {' '.join(odd)}",
            why="the assignment is balanced already",
            fix="aux_loss, seq_aux_loss, global_aux_loss or none; or no capacity",
        )


def _dispatch(c: Any) -> Iterator[ConfigError]:
    kind = c.moe_token_dispatcher_type
    if kind not in DISPATCHERS:
        yield ConfigError(
            f"--moe-token-dispatcher-type {kind}", why="no such dispatcher", fix=f"one of {', '.join(DISPATCHERS)}"
        )
    if kind == "flex":
        yield ConfigError(
            "--moe-token-dispatcher-type flex",
            why="it is made of vendor kernels (DeepEP, HybridEP) whose libraries are not installed",
            fix="--moe-token-dispatcher-type alltoall: the same numbers",
        )
    if kind == "allgather" and c.variable_seq_lengths:
        yield ConfigError(
            "--moe-token-dispatcher-type allgather with sequences of different lengths",
            why="it gathers equally many tokens from every rank",
            fix="--moe-token-dispatcher-type alltoall",
        )
    if c.moe_apply_probs_on_input and c.moe_router_topk != 1:
        yield ConfigError(
            f"--moe-apply-probs-on-input with --moe-router-topk {c.moe_router_topk}",
            why="a token's one weight can scale the input instead of the output; with several experts it cannot",
            fix="--moe-router-topk 1, or leave it out",
        )
    size = c.moe_shared_expert_intermediate_size
    if size is not None and size <= 0:
        yield ConfigError(f"--moe-shared-expert-intermediate-size {size}", why="a width", fix="N > 0, or leave it out")
    elif size is not None and c.tensor_model_parallel_size > 0 and size % c.tensor_model_parallel_size:
        yield ConfigError(
            f"--moe-shared-expert-intermediate-size {size} with --tensor-model-parallel-size "
            f"{c.tensor_model_parallel_size}",
            why="each rank takes an equal share",
            fix=f"a multiple of {c.tensor_model_parallel_size}",
        )
    for name in ("moe_shared_expert_gate", "moe_shared_expert_overlap"):
        if getattr(c, name) and size is None:
            yield ConfigError(
                f"--{name.replace('_', '-')} without --moe-shared-expert-intermediate-size",
                why="there are no shared experts",
                fix="--moe-shared-expert-intermediate-size N, or leave it out",
            )
    if c.moe_shared_expert_overlap and kind == "allgather":
        yield ConfigError(
            "--moe-shared-expert-overlap with --moe-token-dispatcher-type allgather",
            why="shared experts run between the steps of an exchange, and this dispatcher has none",
            fix="--moe-token-dispatcher-type alltoall",
        )
    if "moe_act" in (c.recompute_modules or ()) and not c.moe_grouped_gemm:
        yield ConfigError(
            "--recompute-modules moe_act without --moe-grouped-gemm",
            why="it forgets the activations of all experts together, which only grouped experts compute so",
            fix="--moe-grouped-gemm, or --recompute-modules moe",
        )
    if c.moe_shared_expert_overlap and "shared_experts" in (c.recompute_modules or ()):
        yield ConfigError(
            "--recompute-modules shared_experts with --moe-shared-expert-overlap",
            why="recomputed they run in one piece",
            fix="leave one of them out",
        )


def _balancing(c: Any) -> list[str]:
    value = c.moe_router_load_balancing_type
    return list(value) if isinstance(value, (list, tuple)) else [value]


RULES: tuple[Callable[[Any], Iterator[ConfigError]], ...] = (_spread, _layers, _choice, _balance, _capacity, _dispatch)


def moe_problems(config: Any) -> Iterator[ConfigError]:
    """Everything about experts that cannot be.

    Args:
        config: a TransformerConfig, or anything with its names.
    """
    yield from _no_experts(config)
    if config.num_moe_experts and config.num_moe_experts > 0:
        for rule in RULES:
            yield from rule(config)
        if config.moe_latent_size is not None and config.moe_latent_size < 1:
            yield ConfigError(
                f"--moe-latent-size {config.moe_latent_size}", why="a width", fix="N > 0, or leave it out"
            )
