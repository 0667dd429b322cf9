"""`get_args()` and its kin, for the scripts of users: what a run holds one of.

Set once by start-up. Only `training/` and the entry scripts may read them; rooms below are handed what they need.
"""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from megatron_lite import num_microbatches_calculator as _batches
from megatron_lite.config import from_namespace
from megatron_lite.log import print_rank_0, print_rank_last
from megatron_lite.tokenizers.build_tokenizer import build_tokenizer as _build
from megatron_lite.tokenizers.build_tokenizer import unread_flags, vocab_size_with_padding
from megatron_lite.tokenizers.tokenizer_config import TokenizerConfig

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from megatron_lite.timers import Timers

__all__ = ["print_rank_0", "print_rank_last"]  # of the ground; users' scripts look for them here

_values: dict[str, Any] = {}

get_num_microbatches = _batches.get_num_microbatches
get_current_global_batch_size = _batches.get_current_global_batch_size
get_current_running_global_batch_size = _batches.get_current_running_global_batch_size
get_micro_batch_size = _batches.get_micro_batch_size
update_num_microbatches = _batches.update_num_microbatches


def _get(name: str) -> Any:
    assert name in _values, f"{name}: start-up has not set it yet"
    return _values[name]


def get_args() -> Namespace:
    """The run's validated arguments."""
    args: Namespace = _get("args")
    return args


def set_args(args: Namespace) -> None:
    """Called by start-up."""
    _values["args"] = args


def get_tokenizer() -> Any:
    """The run's tokenizer."""
    return _get("tokenizer")


def set_tokenizer(tokenizer: Any) -> None:
    """Called by start-up."""
    _values["tokenizer"] = tokenizer


def build_tokenizer(args: Namespace) -> Any:
    """The tokenizer of the command line; sets `args.padded_vocab_size`, the rows of the model's embedding."""
    config = from_namespace(TokenizerConfig, args)
    for flag in unread_flags(config):
        print_rank_0(f"{flag} has no effect here: {config.tokenizer_type} does not read it")
    tokenizer = _build(config)
    args.padded_vocab_size = vocab_size_with_padding(tokenizer, config, args.tensor_model_parallel_size)
    size = tokenizer.vocab_size
    print_rank_0(
        f" > padded vocab (size: {size}) with {args.padded_vocab_size - size} dummy tokens "
        f"(new size: {args.padded_vocab_size})"
    )
    alone = vocab_size_with_padding(tokenizer, config)
    if alone != args.padded_vocab_size:
        print_rank_0(
            f"NOTE: one rank would pad the vocabulary to {alone}. Padded rows take part in the softmax, so the loss "
            f"starts near ln {args.padded_vocab_size} instead of ln {alone}; --padded-vocab-size "
            f"{args.padded_vocab_size} makes both the same"
        )
    return tokenizer


def get_timers() -> Timers:
    """The run's timers."""
    timers: Timers = _get("timers")
    return timers


def set_timers(timers: Timers) -> None:
    """Called by start-up."""
    _values["timers"] = timers


def get_tensorboard_writer() -> SummaryWriter | None:
    """The writer of TensorBoard's events: on the last rank with `--tensorboard-dir`, else None."""
    return _values.get("tensorboard writer")


def set_tensorboard_writer(writer: SummaryWriter | None) -> None:
    """Called by start-up."""
    _values["tensorboard writer"] = writer


def get_wandb_writer() -> Any:
    """The module wandb with its run started, on the last rank with `--wandb-project`; else None."""
    return _values.get("wandb writer")


def set_wandb_writer(writer: Any) -> None:
    """Called by start-up."""
    _values["wandb writer"] = writer


def destroy_global_vars() -> None:
    """Forgets all of them: for tests and for scripts with several runs."""
    _values.clear()
