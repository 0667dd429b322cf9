"""Pretrain Retro: what is special about it. Everything else is `megatron_lite.training.pretrain`.

megatron-lite retro preprocess --retro-project-dir project ...
python pretrain_retro.py --retro-project-dir project --retro-add-retriever --num-layers 12 ...

Without --retro-add-retriever it trains the plain GPT on the same samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

# Rooms, not names: a room loads when a name of it is used, so that --help need not wait for torch.
from megatron_lite import training
from megatron_lite.enums import ModelType

if TYPE_CHECKING:
    from torch import Tensor, nn

ARGS_DEFAULTS = training.defaults_of("retro")
MODEL_TYPE = ModelType.retro_decoder


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> nn.Module:
    """The Retro of the command line, or the GPT beside it."""
    return training.build_model(training.get_args(), pre_process, post_process, vp_stage)


def loss_func(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Sum of the losses that count, their number, and both for the log.

    Args:
        loss_mask, losses: `[b, s]`.
    """
    return training.language_model_loss(loss_mask, losses)


def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
    """One micro-batch forward. Returns: losses `[b, s]`, and the loss function of this micro-batch."""
    args, timers = training.get_args(), training.get_timers()
    timers("batch-generator", log_level=2).start()
    batch, neighbors = training.get_retro_batch(data_iterator, args.device, args.padded_vocab_size)
    timers("batch-generator").stop()
    retrieved = {} if neighbors is None else {"context_input_ids": neighbors}
    losses = model(batch.tokens, batch.position_ids, batch.attention_mask, labels=batch.labels, **retrieved)
    return losses, partial(loss_func, batch.loss_mask)


def train_valid_test_datasets_provider(sizes: list[int | None]) -> tuple[Any, Any, Any]:
    """Data sets of the three splits."""
    return training.build_datasets(sizes)


if __name__ == "__main__":
    training.pretrain(
        train_valid_test_datasets_provider, model_provider, MODEL_TYPE, forward_step, args_defaults=ARGS_DEFAULTS
    )
