"""The settings of what looks at a run from outside: profiles, tensors written to files, memory, energy."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config import flag


@dataclass(kw_only=True)
class ProfileConfig:
    """A profile of some steps."""

    profile: bool = flag(False, "Profile a range of steps.")
    profile_step_start: int = flag(10, "First profiled step.", unit="iteration")
    profile_step_end: int = flag(12, "Step at which the profile ends.", unit="iteration")
    profile_ranks: list[int] = flag([], "Ranks that profile. Default: all.", nargs="+")
    use_pytorch_profiler: bool = flag(False, "A trace of torch.profiler, also on CUDA.")
    pytorch_profiler_collect_shapes: bool = flag(False, "Shapes of the operators' inputs in that trace.")
    pytorch_profiler_collect_callstack: bool = flag(False, "Where in the Python code each operator was called.")
    pytorch_profiler_collect_chakra: bool = flag(
        False, "The operators with their dependences as well (an execution trace, which Chakra reads)."
    )
    nvtx_ranges: bool = flag(False, "Name the iteration and the model's parts in the profile.")
    record_shapes: bool = flag(False, "Shapes of the operators' inputs in the profile, also in nsys' ranges.")
    record_memory_history: bool = flag(False, "Snapshots of CUDA's memory with the history of its allocations.")
    memory_snapshot_path: str = flag("snapshot.pickle", "File of the snapshot, written anew at each log interval.")


@dataclass(kw_only=True)
class DiagnosticsConfig:
    """Memory, energy, attention's scores, tensors of a step in files."""

    dump_param_to_param_group_map: str | None = flag(
        None, "Write the number of the optimizer's parameter group of each parameter to this JSON file."
    )
    train_sync_interval: int | None = flag(None, "Wait for the device every N iterations.", unit="iterations")
    log_memory_interval: int | None = flag(None, "Print memory every N iterations.", unit="iterations")
    log_device_memory_used: bool = flag(False, "In these lines also what all processes together use.")
    log_max_attention_logit: bool = flag(False, "The largest score in any attention of the step.")
    log_energy: bool = flag(False, "Joules of an iteration and watts, of a device.")

    # -- tensors in files
    save_params_interval: int | None = flag(
        None, "Write all parameters to files in the save folder every N iterations.", unit="iterations"
    )
    save_activations_interval: int | None = flag(
        None, "Write what embeddings, layers and their parts compute to files.", unit="iterations"
    )
    save_wgrads_interval: int | None = flag(
        None, "Write the gradients of the parameters that the optimizer steps on to files.", unit="iterations"
    )
    save_dgrads_interval: int | None = flag(
        None, "Write the gradients of these activations to files.", unit="iterations"
    )
