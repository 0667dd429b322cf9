"""Runs a list of actions over this rank's model chunks: forward, loss, backward, gradient synchronisation.

    forward_step_func(data_iterator, model) -> (output, loss_func)          the script's, Megatron's contract
    loss_func(output) -> (loss, reports)                                    loss: mean of the micro-batch
                      -> (loss, num_tokens, reports)                        loss: sum over num_tokens tokens

What backward starts from, for M micro-batches: with two values loss / M; with three loss / max(num_tokens, 1) / M,
or, with `calculate_per_token_loss`, the sum as it is: `finalize_model_grads` then divides by the tokens of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.model_parallel_config import ModelParallelConfig
from megatron_lite.pipeline_parallel.actions import Action, Kind

ForwardStep = Callable[..., tuple[Tensor, Callable[..., Any]]]


@dataclass
class Executor:
    """One step's worth of passes.

    Args:
        chunks: this rank's model chunks (DDP or bare).
        data: one iterator per chunk.
        num_microbatches: what losses are averaged over.
        collect_non_loss_data: reports are `loss_func(output, non_loss_data=True)`; nothing is averaged.
        context_parallel_size: a mean loss is multiplied by it, because gradients are averaged over cp as over dp.
    """

    config: ModelParallelConfig
    chunks: Sequence[nn.Module]
    data: Sequence[Iterator[Any] | None]
    forward_step_func: ForwardStep
    num_microbatches: int
    forward_only: bool = False
    collect_non_loss_data: bool = False
    context_parallel_size: int = 1
    reports: list[Any] = field(default_factory=list)
    num_tokens: Tensor | None = None
    _outputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def run(self, actions: Sequence[Action]) -> list[Any]:
        """Do the actions in order.

        Returns: what the loss function reported for each micro-batch, in order of its forward passes.
        """
        last = {a.chunk: i for i, a in enumerate(actions) if a.kind is Kind.BACKWARD}
        with ExitStack() as waiting:  # gradients stay on this rank until a chunk's last backward
            held = {chunk: waiting.enter_context(_reentrant(self._no_sync(chunk))) for chunk in last}
            for place, action in enumerate(actions):
                if action.kind is Kind.FORWARD:
                    self._forward(action)
                else:
                    if place == last[action.chunk]:
                        held[action.chunk].close()
                    self._backward(action)
        return self.reports

    def _no_sync(self, chunk: int) -> AbstractContextManager[Any]:
        functions = self.config.no_sync_func
        if functions is None:
            return nullcontext()
        return functions[chunk]() if isinstance(functions, (list, tuple)) else functions()

    def _forward(self, action: Action) -> None:
        timers = self.config.timers
        if timers is not None:
            timers("forward-compute", log_level=2).start()
        with torch.no_grad() if self.forward_only else nullcontext():
            output, loss_func = self.forward_step_func(self.data[action.chunk], self.chunks[action.chunk])
            loss = self._loss(output, loss_func)
        if not self.forward_only:
            self._outputs[action.microbatch, action.chunk] = loss
        if timers is not None:
            timers("forward-compute").stop()

    def _loss(self, output: Tensor, loss_func: Callable[..., Any]) -> Tensor:
        if self.collect_non_loss_data:
            self.reports.append(loss_func(output, non_loss_data=True))
            return output
        result = loss_func(output)
        per_token = getattr(self.config, "calculate_per_token_loss", False)
        if len(result) == 3:
            loss, num_tokens, reports = result
            self.num_tokens = num_tokens.detach() if self.num_tokens is None else self.num_tokens + num_tokens.detach()
            if not per_token:
                loss = loss * (self.context_parallel_size / self.num_microbatches) / num_tokens.clamp(min=1)
        else:
            loss, reports = result
            loss = loss * (self.context_parallel_size / self.num_microbatches)
        self.reports.append(reports)
        return loss

    def _backward(self, action: Action) -> None:
        timers = self.config.timers
        if timers is not None:
            timers("backward-compute", log_level=2).start()
        loss = self._outputs.pop((action.microbatch, action.chunk))
        if self.config.grad_scale_func is not None:
            loss = self.config.grad_scale_func(loss)
        loss.backward()
        if timers is not None:
            timers("backward-compute").stop()


class _reentrant(AbstractContextManager["_reentrant"]):
    """A context that may be left early, once."""

    def __init__(self, inner: AbstractContextManager[Any]):
        self._stack = ExitStack()
        self._inner = inner

    def __enter__(self) -> _reentrant:
        self._stack.enter_context(self._inner)
        return self

    def close(self) -> None:
        self._stack.close()

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
