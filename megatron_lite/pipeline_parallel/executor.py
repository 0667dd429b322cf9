"""Runs a list of actions over this rank's model chunks: receive, forward, loss, backward, send, synchronise.

    forward_step_func(data_iterator, model) -> (output, loss_func)          the script's, Megatron's contract
    loss_func(output) -> (loss, reports)                                    loss: mean of the micro-batch
                      -> (loss, num_tokens, reports)                        loss: sum over num_tokens tokens

Only the last stage's last chunk calls loss_func; on the others `output` is the activation for the next stage, and the
model got its input by `set_input_tensor`. Both may be lists of tensors.

What backward starts from, for M micro-batches: with two values loss / M; with three loss / max(num_tokens, 1) / M,
or, with `calculate_per_token_loss`, the sum as it is: `finalize_model_grads` then divides by the tokens of all.
Losses that ride along (`aux_loss`) weigh the same.

Context-parallel ranks hold a part of each sequence: num_tokens is then the tokens of all parts, however unevenly a mask
leaves them, and the loss is multiplied by the number of ranks, because gradients are averaged over cp as over dp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_lite import collectives
from megatron_lite.aux_loss import AuxLossAutoScaler
from megatron_lite.collectives import group_size
from megatron_lite.model_parallel_config import ModelParallelConfig
from megatron_lite.pipeline_parallel.actions import (
    Action,
    Kind,
    Message,
    grad_sync_points,
    param_sync_points,
    receiver_of,
    sender_of,
)
from megatron_lite.pipeline_parallel.p2p_communication import StageLink, backward_from, free

ForwardStep = Callable[..., tuple[Any, Callable[..., Any]]]


@dataclass
class _Pass:
    """What lives of a micro-batch in a chunk between forward and backward."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    is_loss: bool


@dataclass
class Executor:
    """One step's worth of passes.

    Args:
        chunks: this rank's model chunks (DDP or bare).
        data: one iterator per chunk.
        num_microbatches: what losses are averaged over.
        link: to the other stages; None: this is the only one.
        collect_non_loss_data: reports are `loss_func(output, non_loss_data=True)`; nothing is averaged.
        cp_group: ranks that hold the other parts of the sequences.
        recompute_window: with `num_microbatches_with_partial_activation_checkpoints` N, forward passes in flight: of so
            many in a row all but the first N recompute everything.
    """

    config: ModelParallelConfig
    chunks: Sequence[nn.Module]
    data: Sequence[Iterator[Any] | None]
    forward_step_func: ForwardStep
    num_microbatches: int
    link: StageLink | None = None
    forward_only: bool = False
    collect_non_loss_data: bool = False
    cp_group: ProcessGroup | None = None
    recompute_window: int = 1
    reports: list[Any] = field(default_factory=list)
    num_tokens: Tensor | None = None
    peak_in_flight: int = 0
    _passes: dict[tuple[int, int], _Pass] = field(default_factory=dict)

    def run(self, actions: Sequence[Action]) -> list[Any]:
        """Do the actions in order.

        Returns: what the loss function reported for each micro-batch, in order of its forward passes; empty on a stage
        without the loss.
        """
        self._backward_kind = next((a.kind for a in actions if a.kind.gives_input_grad), Kind.BACKWARD)
        grads, params = self._sync_points(actions)
        if not self.forward_only:
            AuxLossAutoScaler.set_loss_scale(self._aux_loss_scale())
        if params is not None:
            for chunk in range(min(2, len(self.chunks))):
                self._sync_params(chunk)
        with ExitStack() as waiting:  # gradients stay on this rank until a chunk's last backward
            training = {a.chunk for a in actions if a.kind is not Kind.FORWARD}
            held = {chunk: waiting.enter_context(_reentrant(self._no_sync(chunk))) for chunk in sorted(training)}
            steady, late = _steady(actions), self._late_chunk()
            for place, action in enumerate(actions):
                self._overlaps = place in steady or self.config.overlap_p2p_comm_warmup_flush
                if params and place in params:
                    self._sync_params(params[place])
                due = [chunk for chunk in grads.get(place, []) if chunk != late]
                hooked = action.chunk if action.kind is Kind.BACKWARD else None
                if hooked in due:
                    held[action.chunk].close()  # its hooks reduce buckets while this backward still runs
                self._do(action)
                for chunk in due:
                    if chunk != hooked:  # complete for a while and aligned with other stages, or by weight gradients
                        held[chunk].close()
                        self._sync_grads(chunk)
            if late is not None:
                self._late_weight_grads()
                held[late].close()
                self._sync_grads(late)
        if self.link is not None:
            self.link.finish()
        return self.reports

    def _sync_points(self, actions: Sequence[Action]) -> tuple[dict[int, list[int]], dict[int, int] | None]:
        """Where gradients are reduced and where parameters are gathered."""
        stages = 1 if self.link is None else self.link.stages
        rank = 0 if self.link is None else self.link.rank
        aligned = self.config.grad_sync_func is not None and stages > 1
        grads = {} if self.forward_only else grad_sync_points(actions, rank, aligned)
        if self.config.param_sync_func is None or self.forward_only or stages == 1:
            return grads, None
        return grads, param_sync_points(actions, rank, len(self.chunks))

    def _aux_loss_scale(self) -> Tensor:
        """What a loss weighs that a layer attaches: a mean as the main loss's mean, a sum as its sum."""
        param = next(self.chunks[0].parameters(), None)
        scale = torch.ones((), device=None if param is None else param.device)
        if self.config.grad_scale_func is not None:
            scale = self.config.grad_scale_func(scale)
        per_token = getattr(self.config, "calculate_per_token_loss", False)
        return scale if per_token else scale * (group_size(self.cp_group) / self.num_microbatches)

    def _late_chunk(self) -> int | None:
        """The chunk whose output layer puts weight gradients off until all passes are done; None: not on this stage."""
        if self.forward_only or self.link is None or self.config.embedding_grad_store is None:
            return None
        return self.link.chunks - 1 if self.link.rank == self.link.stages - 1 else None

    def _no_sync(self, chunk: int) -> AbstractContextManager[Any]:
        function = _of_chunk(self.config.no_sync_func, chunk)
        return nullcontext() if function is None else function()

    def _sync_grads(self, chunk: int) -> None:
        function = _of_chunk(self.config.grad_sync_func, chunk)
        if function is not None:
            function(self.chunks[chunk].parameters())

    def _sync_params(self, chunk: int) -> None:
        function = _of_chunk(self.config.param_sync_func, chunk)
        if function is not None:
            function(self.chunks[chunk].parameters())

    # -- one action

    def _do(self, action: Action) -> None:
        message = self._source(action)
        received: list[Tensor] = []
        if message is not None:
            assert self.link is not None
            with self._timer("forward-recv" if action.kind is Kind.FORWARD else "backward-recv"):
                received = self.link.receive(message)
        if self.link is not None and self._overlaps:
            self.link.post_ahead()
        if action.kind is Kind.FORWARD:
            sent = self._forward(action, received)
        elif action.kind is Kind.WEIGHT_GRAD:
            sent = self._weight_grads(action)
        else:
            sent = self._backward(action, received)
        if self.link is not None and receiver_of(action, self.link.rank, self.link.stages, self.link.chunks):
            with self._timer("forward-send" if action.kind is Kind.FORWARD else "backward-send"):
                self.link.send(action, sent)
            if action.kind is Kind.FORWARD and self.config.deallocate_pipeline_outputs and not self.forward_only:
                for tensor in sent:
                    free(tensor)

    def _source(self, action: Action) -> Message | None:
        if self.link is None:
            return None
        return sender_of(action, self.link.rank, self.link.stages, self.link.chunks, self._backward_kind)

    def _forward(self, action: Action, received: list[Tensor]) -> list[Tensor]:
        model = self.chunks[action.chunk]
        if received and not self.forward_only:
            for tensor in received:
                tensor.requires_grad_()
        if self.link is not None:
            _set_input(model, received if received else None)
        with self._timer("forward-compute"), torch.no_grad() if self.forward_only else nullcontext():
            arguments = (self.data[action.chunk], model)
            full = self._recomputes_all(action)
            output, loss_func = (
                self.forward_step_func(*arguments) if full is None else self.forward_step_func(*arguments, full)
            )
            is_loss = self._has_loss(action)
            if is_loss:
                output = self._loss(output, loss_func)
                self._add_reported(model)
        outputs = list(output) if isinstance(output, (list, tuple)) else [output]
        if not self.forward_only:
            self._passes[action.microbatch, action.chunk] = _Pass(received, outputs, is_loss)
            self.peak_in_flight = max(self.peak_in_flight, len(self._passes))
        return outputs

    def _has_loss(self, action: Action) -> bool:
        if self.link is None:
            return True
        return self.link.rank == self.link.stages - 1 and action.chunk == self.link.chunks - 1

    def _recomputes_all(self, action: Action) -> bool | None:
        """Whether this micro-batch recomputes everything; None: the configuration does not distinguish."""
        kept = self.config.num_microbatches_with_partial_activation_checkpoints
        return None if kept is None else action.microbatch % self.recompute_window >= kept

    def _loss(self, output: Tensor, loss_func: Callable[..., Any]) -> Tensor:
        if self.collect_non_loss_data:
            self.reports.append(loss_func(output, non_loss_data=True))
            return output
        result = loss_func(output)
        per_token, cp_size = getattr(self.config, "calculate_per_token_loss", False), group_size(self.cp_group)
        if len(result) == 3:
            loss, num_tokens, reports = result
            self.num_tokens = num_tokens.detach() if self.num_tokens is None else self.num_tokens + num_tokens.detach()
            if not per_token:
                tokens = num_tokens.detach().float().clone()  # reduced in place, and the report holds the own ones
                collectives.all_reduce(tokens, self.cp_group, purpose="tokens of a micro-batch")
                loss = loss * (cp_size / self.num_microbatches) / tokens.clamp(min=1)
        else:
            loss, reports = result
            loss = loss * (cp_size / self.num_microbatches)
        self.reports.append(reports)
        return loss

    def _add_reported(self, model: nn.Module) -> None:
        """Losses that the model computed beside its output (`reported_losses`, by key): into the report."""
        while not hasattr(model, "reported_losses") and hasattr(model, "module"):
            model = model.module  # type: ignore[assignment]
        further: Any = getattr(model, "reported_losses", None)
        if further and not self.collect_non_loss_data:
            self.reports[-1] = {**self.reports[-1], **further}  # a new one: the script may still look at its own
            model.reported_losses = {}  # type: ignore[assignment]

    def _backward(self, action: Action, received: list[Tensor]) -> list[Tensor]:
        """Gradients of this pass's inputs; the parameters' go into their buffers.

        INPUT_GRAD is the same call: linear layers with `delay_wgrad_compute` put their weight gradients off.
        """
        held = self._passes.pop((action.microbatch, action.chunk))
        with self._timer("backward-compute"):
            outputs, grads = held.outputs, list(received)
            if held.is_loss:
                if self.config.grad_scale_func is not None:
                    outputs = [self.config.grad_scale_func(outputs[0])]
                outputs[0].backward()
            else:
                wanted = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
                backward_from([o for o, _ in wanted], [g for _, g in wanted])
            if action.kind is Kind.INPUT_GRAD:
                self.config.weight_grad_store.end_pass()
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in held.inputs]

    def _weight_grads(self, action: Action) -> list[Tensor]:
        """The weight gradients that INPUT_GRAD put off."""
        with self._timer("backward-compute"):
            self.config.weight_grad_store.run_oldest()
        return []

    def _late_weight_grads(self) -> None:
        """The output layer's, in the time in which the stages before are at their last backward passes."""
        with self._timer("backward-compute"):
            self.config.embedding_grad_store.end_pass()
            self.config.embedding_grad_store.run_oldest()

    @contextmanager
    def _timer(self, name: str) -> Iterator[None]:
        timers = self.config.timers
        if timers is None:
            yield
            return
        timers(name, log_level=2).start()
        try:
            yield
        finally:
            timers(name).stop()


def _steady(actions: Sequence[Action]) -> range:
    """Places between the first backward and the last forward pass: the pipeline is full."""
    kinds = [action.kind for action in actions]
    if Kind.BACKWARD not in kinds and Kind.INPUT_GRAD not in kinds:
        return range(len(kinds))
    first = next(place for place, kind in enumerate(kinds) if kind is not Kind.FORWARD)
    return range(first, len(kinds) - kinds[::-1].index(Kind.FORWARD))


def _of_chunk(functions: Any, chunk: int) -> Callable[..., Any] | None:
    """A hook of the configuration: one for all chunks, or one each."""
    return functions[chunk] if isinstance(functions, (list, tuple)) else functions


def _set_input(model: nn.Module, received: list[Tensor] | None) -> None:
    """Hand a stage's model its input: one tensor, or a list of several; None on the first."""
    while not hasattr(model, "set_input_tensor"):
        model = model.module  # type: ignore[assignment]
    model.set_input_tensor(received[0] if received is not None and len(received) == 1 else received)  # type: ignore[operator]


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
