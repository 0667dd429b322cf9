"""Pretrain BERT: what is special about it. Everything else is `megatron_lite.training.pretrain`.

python pretrain_bert.py --config configs/bert_small.yaml --data-path ... --vocab-file ...
torchrun --nproc_per_node 2 pretrain_bert.py --num-layers 2 --hidden-size 64 ...

The data are sentences: `megatron-lite preprocess --split-sentences`.
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

ARGS_DEFAULTS = training.defaults_of("bert")
BATCH = ("text", "types", "labels", "is_random", "loss_mask", "padding_mask")
SPREAD = ("text", "types", "labels", "loss_mask")  # what context-parallel ranks have a part of
LOWEST_IDS = {"text": 0, "labels": -1}  # nothing is asked where the label is -1


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> nn.Module:
    """The BERT of the command line, or this pipeline stage's part of it."""
    return training.build_model(training.get_args(), pre_process, post_process, vp_stage)


def loss_func(loss_mask: Tensor, is_random: Tensor, output: tuple[Tensor, Tensor | None]) -> tuple[Any, ...]:
    """The mean loss of what is masked, plus that of the order of segments; both for the log.

    A micro-batch in which nothing is masked (short samples) has the first loss 0. With --calculate-per-token-loss the
    sum over what is masked comes with its number, and the second loss weighs as much as in the means.

    Args:
        loss_mask: `[b, s]`, 1 where something is masked.
        is_random: `[b]`, 1 where the segments were exchanged, -1 for a filler.
        output: losses `[b, s]`, and binary logits `[b, 2]` or None.
    """
    from torch.nn.functional import cross_entropy

    losses, binary_logits = output
    mask = loss_mask.reshape(-1).float()
    lm_sum, masked = (losses.reshape(-1).float() * mask).sum(), mask.sum()
    # Context-parallel ranks each return their share of one mean; the first token and its loss are on the first rank.
    all_masked = training.sum_over_context(masked)
    loss = lm_sum / all_masked.clamp(min=1)
    reports = {"lm loss": (lm_sum.detach(), masked.detach())}
    if binary_logits is not None:
        sop_sum = cross_entropy(binary_logits.float(), is_random, ignore_index=-1, reduction="sum")
        samples = (is_random >= 0).sum().float()
        if not training.holds_first_token():
            sop_sum, samples = 0.0 * sop_sum, 0.0 * samples
        loss = loss + sop_sum / samples.clamp(min=1)
        reports["sop loss"] = (sop_sum.detach(), samples)
    if training.get_args().calculate_per_token_loss:
        return loss * all_masked.clamp(min=1), masked, reports
    return loss, reports


def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Any, Any]:
    """One micro-batch forward. Returns: what the model gives, and the loss function of this micro-batch."""
    args, timers = training.get_args(), training.get_timers()
    timers("batch-generator", log_level=2).start()
    batch = training.read_batch(data_iterator, BATCH, LOWEST_IDS, args.device, args.padded_vocab_size)
    timers("batch-generator").stop()
    batch |= training.get_batch_on_this_cp_rank({name: batch[name] for name in SPREAD})
    types = batch["types"] if args.bert_binary_head else None
    output = model(batch["text"], batch["padding_mask"], tokentype_ids=types, lm_labels=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"], batch["is_random"])


def train_valid_test_datasets_provider(sizes: list[int | None]) -> tuple[Any, Any, Any]:
    """BERT data sets of the three splits."""
    return training.build_datasets(sizes)


if __name__ == "__main__":
    training.pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults=ARGS_DEFAULTS,
    )
