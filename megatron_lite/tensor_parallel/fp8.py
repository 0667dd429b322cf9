"""Scales of FP8 casts over ranks and steps: what a layer's `Casts` are made from.

    x, w of a call --largest number here--> largest over the ranks that hold parts of them --> scale     tensorwise
                   --recorded--> largest of the step over all ranks --> history --> scale                delayed

A tensor that is cut over ranks has one scale, so that layouts round alike. With delayed scaling the numbers of a whole
step are joined at its end, over tensor-, context- and data-parallel ranks, and make one entry of the history: a scale
stays the same through a step, so recomputed layers round alike, and does not depend on how samples fall into
micro-batches. In the first step, before there is a history, scales are those of the tensors themselves.

The history is a buffer, and so in every checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_lite import collectives
from megatron_lite.fusions.fp8 import Casts, Operand, Recipe, largest
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.tensor_parallel.layers import ColumnParallelLinear, DuplicatedLinear, RowParallelLinear

HISTORY = "amax_history"


class LayerCasts(nn.Module):
    """What a linear layer needs to cast its operands.

    Args:
        group: the ranks that hold parts of the layer's tensors; None: this rank alone.
        is_expert: the layer belongs to an expert.

    Attributes: amax_history: fp32 `[steps, 3]` (delayed scaling): largest input, weight and output gradient of each
        step, the newest first, 0 where there was none; amax: `[3]`, of this step so far.
    """

    amax_history: Tensor | None
    amax: Tensor | None

    def __init__(self, recipe: Recipe, group: ProcessGroup | None, is_expert: bool):
        super().__init__()
        self.recipe, self.group, self.is_expert = recipe, group, is_expert
        delayed = recipe.kind == "delayed"
        self.register_buffer(HISTORY, torch.zeros(recipe.history, 3) if delayed else None)
        self.register_buffer("amax", torch.zeros(3) if delayed else None, persistent=False)
        self._has_history: bool | None = None  # None: to be looked at, once, since it may come from a checkpoint

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """`.to(bf16)` moves the buffers, and leaves them in fp32."""
        kept = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            moved: Any = self._buffers[name]
            if moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self

    def begin(self, x: Tensor, weight: Tensor) -> Casts:
        """The casts of a call with this input and weight; collective over the group."""
        if self.recipe.by_blocks:
            return Casts(self.recipe)
        scales = torch.ones(3, device=x.device)
        scales[:2] = self._scales((Operand.INPUT, Operand.WEIGHT), (x, weight))
        return Casts(self.recipe, scales)

    def take_grad(self, casts: Casts, g: Tensor) -> None:
        """Backward begins: the scale of the output's gradient; collective over the group."""
        if casts.scales is not None:
            casts.scales[2:] = self._scales((Operand.GRAD,), (g,))

    def _scales(self, operands: Sequence[Operand], tensors: Sequence[Tensor]) -> Tensor:
        amax = torch.stack([largest(tensor) for tensor in tensors])
        if self.amax is not None and self.training:
            part = self.amax[operands[0] : operands[-1] + 1]
            torch.maximum(part, amax, out=part)
        if self.amax_history is None or not self._warm():
            collectives.all_reduce(amax, self.group, op="max", purpose="fp8 amax")
        if self.amax_history is not None:
            window = self.amax_history.amax(0) if self.recipe.largest_of_history else self.amax_history[0]
            before = window[operands[0] : operands[-1] + 1]
            amax = torch.where(before > 0, before, amax)
        return torch.stack([self.recipe.scale(operand, one) for operand, one in zip(operands, amax)])

    def _warm(self) -> bool:
        if self._has_history is None:
            self._has_history = bool(self.amax_history.any())  # type: ignore[union-attr]
        return self._has_history

    def snapshot(self) -> tuple[Tensor, Tensor, bool | None]:
        """What a step changes, for `restore`."""
        assert self.amax_history is not None and self.amax is not None
        return self.amax_history.clone(), self.amax.clone(), self._has_history

    def restore(self, before: tuple[Tensor, Tensor, bool | None]) -> None:
        """As it was at `snapshot`: the step will be repeated."""
        assert self.amax_history is not None and self.amax is not None
        self.amax_history.copy_(before[0])
        self.amax.copy_(before[1])
        self._has_history = before[2]

    def end_step(self, amax: Tensor) -> None:
        """A new entry of the history: `[3]`, the largest of a step over all ranks."""
        assert self.amax_history is not None and self.amax is not None
        self.amax_history.copy_(torch.cat([amax.unsqueeze(0), self.amax_history[:-1]]))
        self.amax.zero_()
        self._has_history = True


class DelayedScaling(nn.Module):
    """Ends the step of many layers' histories: one message for all of them, and one more for experts'."""

    def __init__(self, casts: Sequence[LayerCasts]):
        super().__init__()
        self._casts = list(casts)  # a list: they are modules of their layers already

    def snapshot(self) -> Any:
        """What a step changes, for `restore`."""
        return [each.snapshot() for each in self._casts]

    def restore(self, before: Any) -> None:
        """As it was at `snapshot`: the step will be repeated."""
        for each, state in zip(self._casts, before):
            each.restore(state)

    @torch.no_grad()
    def after_grad_sync(self, pg_collection: ProcessGroupCollection) -> None:
        """Once per global batch; see `finalize_model_grads`."""
        for is_expert in (False, True):
            casts = [each for each in self._casts if each.is_expert == is_expert]
            if not casts:
                continue
            amax = torch.stack([each.amax for each in casts if each.amax is not None])
            groups = (pg_collection.expt_tp, pg_collection.expt_dp) if is_expert else (pg_collection.tp_dp_cp,)
            for group in groups:
                collectives.all_reduce(amax, group, op="max", purpose="fp8 amax of the step")
            for each, row in zip(casts, amax):
                each.end_step(row)


def cast_products(
    modules: Sequence[nn.Module], recipes: Sequence[Recipe | None], pg_collection: ProcessGroupCollection
) -> DelayedScaling | None:
    """Makes the linear layers inside `modules` cast what they multiply, each module by its recipe (None: not at all).

    Returns: for delayed scaling, a module that ends steps. The caller keeps it, so that it is found.
    """
    delayed = []
    for module, recipe in zip(modules, recipes, strict=True):
        for layer in list(module.modules()) if recipe is not None else []:
            if isinstance(layer, (ColumnParallelLinear, RowParallelLinear, DuplicatedLinear)):
                assert recipe is not None
                is_expert = getattr(layer, "is_expert", False)
                casts = LayerCasts(recipe, layer.tp_group if is_expert else pg_collection.tp_cp, is_expert)
                layer.fp8 = casts
                if recipe.kind == "delayed":
                    delayed.append(casts)
    return DelayedScaling(delayed) if delayed else None
