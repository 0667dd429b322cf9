"""The fields of TransformerConfig that concern experts, and what follows from them. What cannot be: `moe_rules`.

`TransformerConfig` inherits `MoEConfig`, so that users find Megatron's names in one place. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_lite.config import flag

BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing", "none")
SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")
DISPATCHERS = ("allgather", "alltoall", "flex")
DROP_POLICIES = ("probs", "position")


@dataclass(kw_only=True)
class MoEConfig:
    """Experts: how many, how wide, how tokens find them, how load is balanced."""

    # -- shape
    num_moe_experts: int | None = flag(
        None, "Experts in a layer of experts; unset or 0: a dense model.", name="--num-experts"
    )
    moe_layer_freq: int | list[int] = flag(
        1, "Which layers have experts: every N-th from the first on, or a list of 1 (experts) and 0 (dense)."
    )
    moe_ffn_hidden_size: int | None = flag(None, "Inner width of an expert. Default: --ffn-hidden-size.")
    moe_shared_expert_intermediate_size: int | None = flag(
        None, "Inner width of all shared experts together, which every token passes through."
    )
    moe_shared_expert_gate: bool = flag(False, "Scale the shared experts' output by a learned gate.")
    moe_shared_expert_overlap: bool = flag(
        False, "Shared experts beside the exchange of tokens. On one queue of work they come before it."
    )
    moe_grouped_gemm: bool = flag(
        False, "All experts of a rank in one grouped product where the device has it, else one after the other."
    )
    moe_latent_size: int | None = flag(
        None, "Routed experts work in a space of this size: a projection before the way to them, one behind it."
    )

    # -- router
    moe_router_topk: int = flag(2, "Experts that a token goes to.")
    moe_router_score_function: str = flag("softmax", "From logits to scores.", choices=SCORE_FUNCTIONS)
    moe_router_pre_softmax: bool = flag(
        False, "Softmax over all experts before the choice; otherwise over the chosen ones."
    )
    moe_router_topk_scaling_factor: float | None = flag(None, "Factor on the weights of the chosen experts.")
    moe_router_num_groups: int | None = flag(None, "Choose among the experts of the best of so many groups only.")
    moe_router_group_topk: int | None = flag(None, "How many of these groups a token may use.")
    moe_router_dtype: str | None = flag(
        None, "Number format of the router. Default: the model's.", choices=("fp32", "fp64")
    )
    moe_router_fusion: bool = False  # accepted: there is no fused kernel, the numbers are the same
    moe_input_jitter_eps: float | None = flag(
        None, "In training, multiply the router's input by random numbers in 1 - EPS to 1 + EPS."
    )
    moe_router_force_load_balancing: bool = flag(False, "Random logits, to measure speed under even load.")

    # -- balance
    moe_router_load_balancing_type: str | list[str] = flag(
        "aux_loss",
        "How load is balanced; several losses may be named, each with its --moe-aux-loss-coeff.",
        choices=BALANCING,
        nargs="+",
        kind="str list",
    )
    moe_aux_loss_coeff: float | list[float] = flag(
        0.0, "Weight of the balancing loss, or one for each.", kind="float list"
    )
    moe_z_loss_coeff: float | None = flag(None, "Weight of the loss that keeps the router's logits small.")
    moe_router_enable_expert_bias: bool = flag(
        False, "Balance without a loss: a bias on each expert's score, for the choice only, follows its load."
    )
    moe_router_bias_update_rate: float = flag(1e-3, "Step of that bias, once per global batch.")

    # -- capacity
    moe_expert_capacity_factor: float | None = flag(
        None, "An expert takes at most FACTOR times its even share of tokens; others are dropped."
    )
    moe_pad_expert_input_to_capacity: bool = flag(False, "Give every expert exactly that many rows.")
    moe_token_drop_policy: str = flag(
        "probs", "Which tokens go: those of lowest weight, or the last ones.", choices=DROP_POLICIES
    )

    # -- way to the experts
    moe_token_dispatcher_type: str = flag(
        "allgather", "How tokens get to the ranks of their experts.", choices=DISPATCHERS
    )
    moe_permute_fusion: bool = False  # accepted: tokens and weights are sorted in one pass with and without
    moe_apply_probs_on_input: bool = flag(False, "Scale an expert's input by the token's weight, not its output.")

    # -- log
    moe_per_layer_logging: bool = flag(False, "Balancing losses of every layer in the log.")

    def _derive_moe(self) -> None:
        derive_moe(self)
        if self.moe_ffn_hidden_size is None and self.num_moe_experts is not None:
            self.moe_ffn_hidden_size = self.ffn_hidden_size  # type: ignore[attr-defined]

    @property
    def balancing_types(self) -> list[str]:
        """`moe_router_load_balancing_type` as a list."""
        value = self.moe_router_load_balancing_type
        return list(value) if isinstance(value, list) else [value]

    def aux_loss_coefficient(self, kind: str) -> float:
        """Weight of one kind of balancing loss; 0 if it is not in use."""
        coefficients = self.moe_aux_loss_coeff
        for name, coefficient in zip(
            self.balancing_types, coefficients if isinstance(coefficients, list) else [coefficients]
        ):
            if name == kind:
                return coefficient
        return 0.0


def derive_moe(config: Any) -> None:
    """Lists of one element become that element; a negative capacity means none; no experts are None.

    Args:
        config: a MoEConfig, or arguments with its names; changed in place.
    """
    for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        value = getattr(config, name)
        if isinstance(value, list) and len(value) == 1:
            setattr(config, name, value[0])
    if config.moe_expert_capacity_factor is not None and config.moe_expert_capacity_factor < 0:
        config.moe_expert_capacity_factor = None
    for name in ("num_moe_experts", "num_experts"):
        if getattr(config, name, None) == 0:
            setattr(config, name, None)
