"""The part of a gradient buffer that this rank's optimizer owns: one contiguous range, and its fp32 memory.

    buffer          |  p7 w  | p6 b |p5 b|   p4 w   | p3 b |      w: decayed weights, b: biases and norms
    shard           |================ one range ===========|      unsharded: all of the buffer
    segments        |--------|-----------|----------|------|      runs of one parameter group: what torch updates

    main            fp32 values: the parameters' own memory if they are fp32, else a copy of the range
    main_grad       fp32 gradients: the buffer's own memory if that is fp32, else a copy of the range
    state           exp_avg, ...: one flat tensor each

Unsharded is the range that covers everything. A sharded optimizer owns a smaller range of every bucket; nothing else
changes here.

Why segments, and not a flat copy sorted by group: gradients already lie in one buffer, in the order of backward, which
the buckets need. A sorted copy would cost a pass over all gradients in each step, while the fused kernel takes a list
of tensors and is only 1.1 times slower on 74 of them than on one. Norm, scaling and casts see the whole range at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_lite.distributed.buffer_layout import Range, param_ranges_of_shard
from megatron_lite.distributed.param_and_grad_buffer import ParamAndGradBuffer
from megatron_lite.sharding import ShardSpec, whole


@dataclass(frozen=True)
class Part:
    """What lies of one parameter in the shard.

    place: in the shard; in_param: in the flattened parameter.
    """

    name: str
    param: nn.Parameter
    place: Range
    in_param: Range


@dataclass(frozen=True)
class Run:
    """Parts side by side, with the padding between them. numel: elements that belong to parameters."""

    place: Range
    numel: int


class FlatShard:
    """One contiguous range of a buffer, as the optimizer sees it.

    Args:
        range: in the buffer.
        group_of: number of each parameter's group.
        counted: parameters that count in norms on this rank: not the second copies of one that another rank counts.
    """

    def __init__(
        self,
        buffer: ParamAndGradBuffer,
        range: Range,
        group_of: Mapping[nn.Parameter, int],
        counted: set[nn.Parameter],
    ):
        self.buffer, self.range = buffer, range
        self.parts: list[Part] = []
        for number, bucket in enumerate(buffer.layout.buckets):
            shard = bucket.range.overlap(range)
            if shard is None:
                continue
            for name, r in param_ranges_of_shard(buffer.layout, number, shard).items():
                place = r.gbuf_world.shifted(-range.start)
                self.parts.append(Part(name, buffer.params[name], place, r.param))
        self._counted = [run for counts, run in _runs(self.parts, [p.param in counted for p in self.parts]) if counts]
        self.model_data = buffer.param_data[range.start : range.end]  # what forward reads
        self.is_copy = buffer.param_dtype != torch.float32
        self.main = self.model_data.float() if self.is_copy else self.model_data
        self._grad_copy: Tensor | None = None
        self.state: dict[str, Tensor] = {}
        self.segments = _runs(self.parts, [group_of[part.param] for part in self.parts])  # (group, where)
        self.segment_tensors = [(self.main[run.place.start : run.place.end], run.place) for _, run in self.segments]

    def add_state(self, name: str) -> list[Tensor]:
        """Flat zeros for a moment of the optimizer; its views by segment."""
        flat = self.state[name] = torch.zeros_like(self.main)
        return [flat[run.place.start : run.place.end] for _, run in self.segments]

    def counted_runs(self, flat: Tensor) -> list[tuple[Tensor, int]]:
        """The parts of a flat tensor that count in norms: views, and how many elements in each are parameters'."""
        return [(flat[run.place.start : run.place.end], run.numel) for run in self._counted]

    def main_grad(self) -> Tensor:
        """The range's gradients in fp32: the buffer's memory where it is fp32, else a copy, reused by the next call."""
        grad = self.buffer.grad_data[self.range.start : self.range.end]
        if grad.dtype == torch.float32:
            return grad
        if self._grad_copy is None:
            self._grad_copy = torch.empty_like(self.main)
        return self._grad_copy.copy_(grad)

    def copy_main_to_model(self) -> None:
        """After an update: round the main parameters into the model's."""
        if self.is_copy:
            self.model_data.copy_(self.main)

    def copy_model_to_main(self) -> None:
        """After the model was loaded without an optimizer state."""
        if self.is_copy:
            self.main.copy_(self.model_data)

    def views(self) -> dict[str, dict[str, tuple[Tensor, ShardSpec]]]:
        """By kind (`param` where it is a copy, and each state) and global parameter name: a view and its place."""
        flats = ({"param": self.main} if self.is_copy else {}) | self.state
        result: dict[str, dict[str, tuple[Tensor, ShardSpec]]] = {kind: {} for kind in flats}
        for part in self.parts:
            assert part.in_param == Range(0, part.param.numel()), "parameters cut between ranks are not built yet"
            spec = getattr(part.param, "shard", None) or whole(part.name, tuple(part.param.shape))
            for kind, flat in flats.items():
                result[kind][spec.name] = (flat[part.place.start : part.place.end].view(part.param.shape), spec)
        return result


def _runs(parts: Sequence[Part], kinds: Sequence[int]) -> list[tuple[int, Run]]:
    """Neighbours of one kind joined. The padding between two of them is zero in values, gradients and moments, and
    every optimizer leaves such elements at zero."""
    runs: list[tuple[int, Run]] = []
    for part, kind in zip(parts, kinds):
        if runs and runs[-1][0] == kind:
            before = runs[-1][1]
            runs[-1] = (kind, Run(Range(before.place.start, part.place.end), before.numel + part.place.size))
        else:
            runs.append((kind, Run(part.place, part.place.size)))
    return runs
