"""`--log-max-attention-logit`: the largest score in any attention of a step, over all layers, micro-batches and ranks.

    before a step that is logged    every attention gets a `LargestScore`
    forward                         each computes its scores once more, in blocks, and notes the largest
    after it                        one maximum over layers and ranks

The extra products cost about half of an attention's forward. Other steps cost nothing: --tensorboard-log-interval and
--log-interval say which are logged.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence

import torch
from torch import nn

from megatron_lite import collectives
from megatron_lite.fusions.largest_score import LargestScore
from megatron_lite.log import once
from megatron_lite.transformer.dot_product_attention import DotProductAttention


class LogitProbe:
    """Measures in the steps that are logged.

    Args:
        model: this rank's chunks.
    """

    def __init__(self, args: Namespace, model: Sequence[nn.Module]):
        self._args, self._first = args, int(args.iteration) + 1
        self._attentions = [m for chunk in model for m in chunk.modules() if isinstance(m, DotProductAttention)]
        self._on = False

    def before_step(self, iteration: int) -> None:
        """Iteration `iteration` is about to run."""
        args = self._args
        scalars = bool(args.tensorboard_dir or args.wandb_project) and iteration % args.tensorboard_log_interval == 0
        line = iteration % args.log_interval == 0 or iteration in (self._first, args.train_iters)
        self._on = scalars or line
        self.start_over()

    def start_over(self) -> None:
        """The step is run again: what its former run gave does not count."""
        if self._on:
            for attention in self._attentions:
                attention.largest_score = LargestScore()

    def after_step(self) -> float | None:
        """The largest score of the step; collective in those that are logged, None in the others. Waits for the
        device."""
        if not self._on:
            return None
        largest = torch.full((), -math.inf, device=self._args.device)
        for attention in self._attentions:
            score, attention.largest_score = attention.largest_score, None
            if score is not None and score.value is not None:
                largest = torch.maximum(largest, score.value)
        collectives.all_reduce(largest, collectives.world(), op="max", purpose="largest attention score")
        if math.isinf(float(largest)) and float(largest) < 0:
            once("--log-max-attention-logit: no attention of this model tells its scores; nothing is logged")
            return None
        return float(largest)
