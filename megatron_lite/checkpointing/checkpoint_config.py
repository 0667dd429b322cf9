"""CheckpointConfig: what is saved where and when, and what is loaded from where."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config import flag

CKPT_FORMATS = ("torch", "torch_dist", "torch_dcp", "fsdp_dtensor")
STRICTNESS = (
    "assume_ok_unexpected",
    "log_unexpected",
    "log_all",
    "raise_unexpected",
    "raise_all",
    "return_unexpected",
    "return_all",
    "ignore_all",
)


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
    force: list[str] | None = flag(
        None,
        "Resume though arguments differ from the checkpoint's so that it becomes another training; with names, though "
        "these differ. Not in Megatron.",
        nargs="*",
    )
    exit_on_missing_checkpoint: bool = flag(False, "Stop instead of starting from random weights.")
    use_checkpoint_args: bool = flag(False, "Take the model's shape from the checkpoint.")
    use_mp_args_from_checkpoint_args: bool = flag(
        False, "--use-checkpoint-args: take the sizes of tensor, pipeline, context and expert parallelism too."
    )
    use_tokenizer_model_from_checkpoint_args: bool = flag(
        True, "--use-checkpoint-args: leave the tokenizer's files as the command line has them."
    )
    override_ckpt_iteration: int | None = flag(
        None, "Count the loaded checkpoint as that of iteration N, its samples likewise.", unit="iteration"
    )
    load_main_params_from_ckpt: bool = flag(
        False, "--no-load-optim: take the optimizer's fp32 weights from the checkpoint, not from the model's weights."
    )
    auto_detect_ckpt_format: bool = flag(False, "Load Megatron-LM's own torch_dist checkpoints too.")
    dist_ckpt_strictness: str = flag(
        "assume_ok_unexpected",
        "Tensors that only the run or only the checkpoint has. assume_ok_unexpected, raise_all: an error. "
        "raise_unexpected: an error where the run's are missing. log_unexpected, log_all, ignore_all: they are left, "
        "and the run's, all or none are said.",
        choices=STRICTNESS,
    )
    ckpt_load_validate_sharding_integrity: bool = flag(
        True, "Do not compare what all ranks want with what there is of each tensor."
    )
    ckpt_fully_parallel_load: bool = flag(
        False, "Data-parallel ranks read a part each of what all of them want, and send it to the others."
    )
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
    ckpt_convert_format: str | None = flag(
        None, "Load, save to --ckpt-convert-save in this format, and leave.", choices=("torch", "torch_dist")
    )
    ckpt_convert_save: str | None = flag(None, "Folder for --ckpt-convert-format.")
    save_tokenizer_assets: bool = flag(True, "Do not copy the tokenizer's files into the checkpoint.")
    non_persistent_save_interval: int | None = flag(
        None, "Save a rolling checkpoint every N iterations; it replaces the one before.", unit="iterations"
    )
    non_persistent_ckpt_type: str | None = flag(
        None,
        "Rolling checkpoints. global: like others, in a folder of their own. local: each rank keeps its own part on a "
        "disk of its machine, and the same layout goes on from it. A load takes them where they are the newest.",
        choices=("global", "local", "in_memory"),
    )
    non_persistent_global_ckpt_dir: str | None = flag(None, "Their folder. Default: non_persistent below --save.")
    non_persistent_local_ckpt_dir: str | None = flag(None, "Their folder on every machine.")
    async_save: bool = flag(False, "Copy, and write beside the training; the checkpoint is complete some steps later.")
    use_persistent_ckpt_worker: bool = flag(False, "--async-save: keep the writing process between saves.")
    async_ckpt_cpu_priority: int = flag(10, "--async-save: nice level of the writing process.", unit="0 to 19")
    async_ckpt_io_priority: int = flag(
        3, "--async-save: I/O class of the writing process: 1 real time, 2 best effort, 3 idle (Linux)."
    )
