"""Pretrain GPT: what is special about it. Everything else is `megatron_lite.training.pretrain`.

python pretrain_gpt.py --config configs/gpt_small.yaml
torchrun --nproc_per_node 2 pretrain_gpt.py --num-layers 2 --hidden-size 64 ...
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

# The room, not names: it loads when a name of it is used, so that --help need not wait for torch.
from megatron_lite import training
from megatron_lite.enums import ModelType

if TYPE_CHECKING:
    from torch import Tensor, nn

ARGS_DEFAULTS = training.defaults_of("gpt")


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> nn.Module:
    """The GPT of the command line, or this pipeline stage's part of it."""
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
    batch = training.get_batch(data_iterator, args.device, args.padded_vocab_size)
    timers("batch-generator").stop()
    losses = model(
        batch.tokens, batch.position_ids, batch.attention_mask, labels=batch.labels, loss_mask=batch.loss_mask
    )
    return losses, partial(loss_func, batch.loss_mask)


def train_valid_test_datasets_provider(sizes: list[int | None]) -> tuple[Any, Any, Any]:
    """GPT data sets of the three splits."""
    return training.build_datasets(sizes)


if __name__ == "__main__":
    training.pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults=ARGS_DEFAULTS,
    )
