"""CheckpointConfig: what is saved where and when, and what is loaded from where."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config import flag

CKPT_FORMATS = ("torch", "torch_dist", "torch_dcp", "fsdp_dtensor")


@dataclass(kw_only=True)
class CheckpointConfig:
    """Saving and loading. The names are those of Megatron's arguments."""

    save: str | None = flag(None, "Folder that receives checkpoints.")
    save_interval: int | None = flag(
        None, "Save every N iterations.", aliases=("--persistent-save-interval",), unit="iterations"
    )
    save_retain_interval: int | None = flag(
        None, "Keep only the checkpoints at multiples of N, and the newest.", unit="iterations"
    )
    save_keep_last: int | None = flag(
        None, "Keep the newest N checkpoints, and those that --save-retain-interval keeps.", unit="checkpoints"
    )
    no_save_optim: bool = flag(False, "Leave the optimizer's state out.")
    no_save_rng: bool = flag(False, "Leave the states of the random generators out.")
    load: str | None = flag(None, "Folder to resume from.")
    ckpt_step: int | None = flag(None, "Load this iteration instead of the latest.", unit="iteration")
    no_load_optim: bool = flag(False, "Do not read the optimizer's state.")
    no_load_rng: bool = flag(False, "Do not read the states of the random generators.")
    finetune: bool = flag(False, "Load the weights alone and start at iteration 0.")
    pretrained_checkpoint: str | None = flag(None, "Folder to fine-tune from when --load has no checkpoint.")
    exit_on_missing_checkpoint: bool = flag(False, "Stop instead of starting from random weights.")
    use_checkpoint_args: bool = flag(False, "Take the model's shape from the checkpoint.")
    verify_integrity: bool = flag(
        False, "Compare the checksums of a checkpoint's files before it is loaded. They are always saved."
    )
    ckpt_format: str = flag(
        "torch_dist", "Format on disk. torch_dist: sharded files, read under any layout.", choices=CKPT_FORMATS
    )
    dist_ckpt_workers: int = flag(1, "Files of a rank, written at the same time.", unit="files")
    ckpt_fully_parallel_save: bool = flag(
        True,
        "Ranks that hold the same share the writing of it; otherwise the first of them writes it.",
        pair=True,
    )
    ckpt_assume_constant_structure: bool = flag(
        False, "Agree on who writes what at the first save alone; a later save of other tensors is an error."
    )
    async_save: bool = flag(False, "Copy, and write beside the training; the checkpoint is complete some steps later.")
    use_persistent_ckpt_worker: bool = flag(False, "--async-save: keep the writing process between saves.")
    async_ckpt_cpu_priority: int = flag(10, "--async-save: nice level of the writing process.", unit="0 to 19")
    async_ckpt_io_priority: int = flag(
        3, "--async-save: I/O class of the writing process: 1 real time, 2 best effort, 3 idle (Linux)."
    )
