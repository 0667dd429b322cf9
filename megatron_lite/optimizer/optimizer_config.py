"""OptimizerConfig: which optimizer, its numbers, clipping and loss scaling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_lite.config import flag
from megatron_lite.errors import ConfigError

if TYPE_CHECKING:
    import torch

OPTIMIZERS = ("adam", "sgd", "muon", "dist_muon", "lion", "soap", "adaptive_muon")


@dataclass(kw_only=True)
class OptimizerConfig:
    """What `get_megatron_optimizer` builds by. Field names and defaults are Megatron's.

    Fields without a flag here are flags of another config (fp16, bf16, use_distributed_optimizer, ...) or set by code.
    """

    optimizer: str = flag("adam", "Which optimizer; adam is AdamW.", choices=OPTIMIZERS)
    lr: float | None = flag(None, "Peak learning rate.")
    min_lr: float | None = flag(0.0, "Learning rate after the decay.")
    decoupled_lr: float | None = flag(None, "Own peak learning rate of the embedding and the output layer.")
    decoupled_min_lr: float | None = flag(None, "Where that learning rate ends.")
    weight_decay: float = flag(0.01, "Decoupled weight decay; biases and other 1-d parameters have none.")
    apply_wd_to_qk_layernorm: bool = flag(False, "Weight decay on the norms of queries and keys as well.")

    # -- numbers
    fp16: bool = False
    bf16: bool = False
    params_dtype: torch.dtype = None  # type: ignore[assignment]  # resolved below: fp32, or what fp16/bf16 say

    # -- loss scaling
    loss_scale: float | None = flag(None, "Fixed loss scale. Default: dynamic with --fp16, else none.")
    initial_loss_scale: float = flag(2.0**32, "Start of the dynamic loss scale.")
    min_loss_scale: float = flag(1.0, "Lower bound of the dynamic loss scale.")
    loss_scale_window: float = flag(1000, "Clean steps before the dynamic loss scale doubles.")
    hysteresis: int = flag(2, "Overflows before the dynamic loss scale halves.")

    # -- adam and sgd
    adam_beta1: float = flag(0.9, "Adam: decay of the first moment.")
    adam_beta2: float = flag(0.999, "Adam: decay of the second moment.")
    adam_eps: float = flag(1e-8, "Adam: epsilon.")
    decoupled_weight_decay: bool = True
    sgd_momentum: float = flag(0.9, "SGD: momentum.")

    # -- sharing and hooks
    use_distributed_optimizer: bool = False
    overlap_param_gather: bool = False
    clip_grad: float = flag(1.0, "Ceiling of the global gradient norm; 0: no clipping.")
    log_num_zeros_in_grad: bool = False
    embedding_init_method_std: float | None = None
    barrier_with_L1_time: bool = False
    timers: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        import torch

        if self.params_dtype is None:
            self.params_dtype = torch.float16 if self.fp16 else torch.bfloat16 if self.bf16 else torch.float32
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(f"--optimizer {self.optimizer}", why="no such optimizer", fix="adam or sgd")
        for name in ("weight_decay", "clip_grad", "adam_eps"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"--{name.replace('_', '-')} {value}", why="it is negative", fix="a number >= 0")
        for name in ("adam_beta1", "adam_beta2", "sgd_momentum"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise ConfigError(f"--{name.replace('_', '-')} {value}", why="a share in [0, 1)", fix="for example 0.9")
