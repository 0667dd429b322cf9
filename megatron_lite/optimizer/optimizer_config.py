"""OptimizerConfig: which optimizer, its numbers, clipping and loss scaling."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from megatron_lite.config import flag
from megatron_lite.errors import ConfigError

if TYPE_CHECKING:
    import torch

_MOMENT_FORMATS = ("fp32", "fp16", "bf16", "fp8")
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

    # -- adam, sgd, lion
    adam_beta1: float = flag(0.9, "Adam: decay of the first moment.")
    adam_beta2: float = flag(0.999, "Adam: decay of the second moment.")
    adam_eps: float = flag(1e-8, "Adam: epsilon.")
    decoupled_weight_decay: bool = True
    sgd_momentum: float = flag(0.9, "SGD: momentum.")
    lion_beta1: float = flag(0.95, "Lion: share of the momentum in the direction of a step.")
    lion_beta2: float = flag(0.98, "Lion: decay of the momentum.")

    # -- muon
    muon_momentum: float = flag(0.9, "Muon: decay of the momentum.")
    muon_nesterov: bool = flag(False, "Muon: look ahead along the momentum.")
    muon_split_qkv: bool = flag(
        True, "Muon: queries, keys and values as one matrix instead of three.", off="--muon-no-split-qkv"
    )
    muon_scale_mode: str = flag(
        "spectral",
        "Muon: how the size of a step follows the matrix's shape.",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
    )
    muon_fp32_matmul_prec: str = flag(
        "medium", "Muon: precision of fp32 products on a GPU: bf16, bf16, tf32.", choices=("low", "medium", "high")
    )
    muon_coefficient_type: str = flag(
        "quintic", "Muon: the polynomial of the iteration.", choices=("simple", "quintic", "polar_express")
    )
    muon_num_ns_steps: int = flag(5, "Muon: steps of the polynomial iteration.")
    muon_tp_mode: str = flag(
        "duplicated",
        "Muon: matrices cut by tensor parallelism are gathered, or stay cut in products that are summed, or each "
        "block is taken for a matrix.",
        choices=("blockwise", "duplicated", "distributed"),
    )
    muon_extra_scale_factor: float = flag(1.0, "Muon: a factor of every step.")
    muon_scalar_optimizer: str = flag("adam", "Muon: what steps on tables, biases and norms.", choices=("adam", "lion"))

    # -- number formats and place of the optimizer's memory
    use_precision_aware_optimizer: bool = flag(False, "Take the number formats below for the optimizer's memory.")
    main_grads_dtype: Any = flag("fp32", "Gradients as the optimizer reads them.", choices=("fp32", "bf16"), kind="str")
    main_params_dtype: Any = flag("fp32", "Main parameters.", choices=("fp32", "fp16"), kind="str")
    exp_avg_dtype: Any = flag("fp32", "First moment.", choices=_MOMENT_FORMATS, kind="str")
    exp_avg_sq_dtype: Any = flag("fp32", "Second moment.", choices=_MOMENT_FORMATS, kind="str")
    optimizer_cpu_offload: bool = flag(False, "Keep main parameters and moments in host memory and step there.")
    optimizer_offload_fraction: float = flag(1.0, "Share of them that is kept there, by whole parameters.")
    pin_cpu_grads: bool = flag(True, "Gradients for the host in memory that is not pinned.", off="--no-pin-cpu-grads")
    pin_cpu_params: bool = flag(True, "Main parameters on the host not pinned.", off="--no-pin-cpu-params")

    # -- sharing and hooks
    use_distributed_optimizer: bool = False
    overlap_param_gather: bool = False
    overlap_param_gather_with_optimizer_step: bool = flag(
        False, "Gather the first model chunk's parameters while the other chunks are updated (interleaved pipeline)."
    )
    clip_grad: float = flag(1.0, "Ceiling of the global gradient norm; 0: no clipping.")
    grad_norm_skip_threshold: float = math.inf
    log_num_zeros_in_grad: bool = False
    embedding_init_method_std: float | None = None
    barrier_with_L1_time: bool = False
    timers: Callable[..., Any] | None = None
    config_logger_dir: str = ""

    def __post_init__(self) -> None:
        import torch

        if self.params_dtype is None:
            self.params_dtype = torch.float16 if self.fp16 else torch.bfloat16 if self.bf16 else torch.float32
        for item in fields(self):
            choices, value = item.metadata.get("choices"), getattr(self, item.name)
            if choices and not item.name.endswith("_dtype") and value not in choices:
                raise ConfigError(
                    f"--{item.name.replace('_', '-')} {value}", why="no such choice", fix=f"one of {', '.join(choices)}"
                )
        for name in ("weight_decay", "clip_grad", "adam_eps"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"--{name.replace('_', '-')} {value}", why="it is negative", fix="a number >= 0")
        for name in ("adam_beta1", "adam_beta2", "sgd_momentum", "lion_beta1", "lion_beta2", "muon_momentum"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise ConfigError(f"--{name.replace('_', '-')} {value}", why="a share in [0, 1)", fix="for example 0.9")
        if not 0.0 <= self.optimizer_offload_fraction <= 1.0:
            raise ConfigError(
                f"--optimizer-offload-fraction {self.optimizer_offload_fraction}", why="a share in [0, 1]", fix="1.0"
            )
        if self.muon_num_ns_steps < 1:
            raise ConfigError(
                f"--muon-num-ns-steps {self.muon_num_ns_steps}",
                why="without a step nothing becomes orthogonal",
                fix="5",
            )
        if self.overlap_param_gather_with_optimizer_step and not self.overlap_param_gather:
            raise ConfigError(
                "--overlap-param-gather-with-optimizer-step without --overlap-param-gather",
                why="it starts the first of the gathers that this flag overlaps",
                fix="--overlap-param-gather, or leave it out",
            )
        self._number_formats()

    def _number_formats(self) -> None:
        """From words to torch's formats. Raises ConfigError for those that cannot be had."""
        import torch

        formats = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
        for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            value = formats.get(getattr(self, name), getattr(self, name))
            setattr(self, name, value)
            spelling = f"--{name.replace('_', '-')} {str(value).removeprefix('torch.')}"
            if value == torch.float32:
                continue
            if not self.use_precision_aware_optimizer or self.optimizer != "adam" or not self.use_distributed_optimizer:
                raise ConfigError(
                    f"{spelling} without --use-precision-aware-optimizer --use-distributed-optimizer --optimizer adam",
                    why="only this optimizer has number formats to choose",
                    fix="add these flags, or leave the format out",
                )
            if value != torch.bfloat16 or name == "main_params_dtype":
                raise ConfigError(
                    spelling,
                    why="numbers of 1e-6 and their squares leave the range of fp16 and fp8 (a scale for each tensor "
                    "would be needed), and weights move by less than a step of 16 bits",
                    fix=f"--{name.replace('_', '-')} fp32" + ("" if "main" in name else " or bf16"),
                )
        if self.use_precision_aware_optimizer and not (self.use_distributed_optimizer and self.optimizer == "adam"):
            raise ConfigError(
                "--use-precision-aware-optimizer without --use-distributed-optimizer and --optimizer adam",
                why="it is a variant of the sharded Adam",
                fix="add them, or leave it out",
            )
        if self.optimizer_cpu_offload and not self.use_precision_aware_optimizer:
            raise ConfigError(
                "--optimizer-cpu-offload without --use-precision-aware-optimizer",
                why="Megatron couples them, and runs should mean the same there and here",
                fix="--use-precision-aware-optimizer (with its fp32 defaults nothing else changes)",
            )
