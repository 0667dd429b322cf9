"""How a model is laid out over ranks, and in which numbers it computes: what every parallel layer must know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_lite.config import flag
from megatron_lite.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(kw_only=True)
class ModelParallelConfig:
    """Parallel sizes, number formats and the hooks of the schedule. Field names are Megatron's.

    Fields without a flag are set by code: the schedule's hooks by the training loop, `params_dtype` by `fp16`/`bf16`.
    """

    # -- sizes
    tensor_model_parallel_size: int = flag(1, "Ranks that split each layer.")
    pipeline_model_parallel_size: int = flag(1, "Ranks that split the stack of layers.")
    virtual_pipeline_model_parallel_size: int | None = None
    sequence_parallel: bool = flag(False, "Split norms and dropouts along the sequence over the tensor-parallel ranks.")
    clone_scatter_output_in_embedding: bool = flag(
        True,
        "Under sequence parallelism, keep the whole embedding output alive instead of copying this rank's part of it.",
        off=("--no-clone-scatter-output-in-embedding", "--disable-clone-scatter-output-in-embedding"),
    )
    context_parallel_size: int = flag(1, "Ranks that split the sequence everywhere.")
    hierarchical_context_parallel_sizes: list[int] | None = flag(
        None, "Levels of context parallelism for --cp-comm-type a2a+p2p: heads are traded inside the first."
    )
    expert_model_parallel_size: int = flag(1, "Ranks over which the experts are spread.")
    expert_tensor_parallel_size: int | None = flag(
        None, "Ranks that split each expert. Default: the tensor-parallel size."
    )

    # -- initial values
    perform_initialization: bool = flag(
        True, "Leave the weights as allocated, because a checkpoint follows.", off="--no-initialization"
    )
    use_cpu_initialization: bool = flag(
        False, "Make the initial weights on the CPU. They are the same on every layout and device family either way."
    )

    # -- numbers
    fp16: bool = flag(False, "Compute in fp16, with loss scaling.")
    bf16: bool = flag(False, "Compute in bf16.")
    params_dtype: torch.dtype = None  # type: ignore[assignment]  # resolved below: fp32, or what fp16/bf16 say
    deterministic_mode: bool = flag(False, "Only deterministic operations: the same seed gives bit-equal runs.")
    enable_autocast: bool = False
    autocast_dtype: torch.dtype | None = None

    # -- kernels
    gradient_accumulation_fusion: bool = False  # on in a run, unless a flag says no: training/configs
    cross_entropy_loss_fusion: bool = flag(
        False,
        "Loss without a second copy of the logits, its sums over ranks in one message. It always is; same numbers.",
    )
    cross_entropy_fusion_impl: str = flag("native", "Whose fused cross entropy.", choices=("native", "te"))

    # -- communication of split layers beside their products (needs sequence parallelism)
    tp_comm_overlap: bool = flag(
        False, "Send and multiply in parts: while one part of the sequence travels, another is multiplied."
    )
    tp_comm_overlap_ag: bool = flag(
        True,
        "With --tp-comm-overlap: gather before multiplying.",
        off=("--no-tp-comm-overlap-ag", "--disable-tp-comm-overlap-ag"),
    )
    tp_comm_overlap_rs: bool = flag(
        True,
        "With --tp-comm-overlap: reduce after multiplying.",
        off=("--no-tp-comm-overlap-rs", "--disable-tp-comm-overlap-rs"),
    )
    tp_comm_overlap_rs_dgrad: bool = flag(
        False, "With --tp-comm-overlap: reduce input gradients in parts, not beside the weight gradient."
    )
    tp_comm_bulk_dgrad: bool = flag(
        True,
        "With --tp-comm-overlap: gather the input again before, not beside, the input gradient.",
        off=("--no-tp-comm-bulk-dgrad", "--disable-tp-comm-bulk-dgrad"),
    )
    tp_comm_bulk_wgrad: bool = flag(
        True,
        "With --tp-comm-overlap: reduce input gradients before, not beside, the weight gradient.",
        off=("--no-tp-comm-bulk-wgrad", "--disable-tp-comm-bulk-wgrad"),
    )

    # -- pipeline
    pipeline_dtype: torch.dtype | None = None
    variable_seq_lengths: bool = False
    overlap_p2p_comm: bool = False  # on in a run with virtual stages, unless a flag says no: training/configs
    overlap_p2p_comm_warmup_flush: bool = flag(
        False,
        "Also while the pipeline fills and drains, receive ahead of use.",
        name="--overlap-p2p-communication-warmup-flush",
    )
    deallocate_pipeline_outputs: bool = False
    delay_wgrad_compute: bool = flag(
        False, "Zero-bubble schedule: compute weight gradients while the pipeline's other stages are waited for."
    )
    num_microbatches_with_partial_activation_checkpoints: int | None = None  # the others recompute everything
    weight_grad_store: Any = None  # made by the zero-bubble schedule: where layers put products off
    defer_embedding_wgrad_compute: bool = flag(
        False,
        "Compute the output layer's weight gradients after the last stage's last backward pass, while earlier stages "
        "are still at theirs.",
    )
    wgrad_deferral_limit: int = flag(
        0, "With --defer-embedding-wgrad-compute: for so many micro-batches of a step, the first ones. 0: for all."
    )
    embedding_grad_store: Any = None  # made by the schedule of such a run: where the output layer puts them off
    microbatch_group_size_per_vp_stage: int | None = flag(
        None,
        "Micro-batches that go through one virtual stage before the next one's turn. Default: the pipeline's size.",
        name="--microbatch-group-size-per-virtual-pipeline-stage",
    )

    # -- hooks of the schedule, set by the training loop
    timers: Callable[..., Any] | None = None
    finalize_model_grads_func: Callable[..., Any] | None = None
    grad_scale_func: Callable[..., Any] | None = None
    no_sync_func: Callable[..., Any] | None = None
    grad_sync_func: Callable[..., Any] | None = None
    param_sync_func: Callable[..., Any] | None = None
    barrier_with_L1_time: bool = True

    config_logger_dir: str = flag("", "Folder of JSON files that say what models, DDP and optimizer were made with.")

    def __post_init__(self) -> None:
        import torch

        if self.fp16 and self.bf16:
            raise ConfigError(
                "--fp16 and --bf16 are both set", why="a model has one compute format", fix="leave one of them out"
            )
        if self.params_dtype is None:
            self.params_dtype = torch.float16 if self.fp16 else torch.bfloat16 if self.bf16 else torch.float32
        if self.expert_tensor_parallel_size is None:
            self.expert_tensor_parallel_size = self.tensor_model_parallel_size
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ConfigError(
                "sequence_parallel with tensor_model_parallel_size 1",
                why="sequence parallelism splits over the tensor-parallel ranks, and there is one",
                fix="sequence_parallel=False, or a tensor-parallel size above 1",
            )
        if self.tp_comm_overlap and not self.sequence_parallel:
            raise ConfigError(
                "tp_comm_overlap without sequence_parallel",
                why="it sends the parts of the sequence that sequence parallelism cuts",
                fix="sequence_parallel=True, or tp_comm_overlap=False",
            )
        if self.autocast_dtype is None:
            self.autocast_dtype = self.params_dtype
