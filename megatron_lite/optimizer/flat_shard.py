"""The part of a gradient buffer that this rank's optimizer owns: one contiguous range, and its fp32 memory.

    buffer          |  p7 w  | p6 b |p5 b|   p4 w   | p3 b |      w: decayed weights, b: biases and norms
    shard           |================ one range ===========|      unsharded: all of the buffer
                                 |===== one range ====|           sharded: this rank's part of every bucket
    segments        |--------|-----------|----------|------|      runs of one parameter group: what torch updates

    main            fp32 values: the parameters' own memory if they are fp32, else a copy of the range
    main_grad       fp32 gradients: the buffer's own memory if that is fp32, else a copy of the range
    state           exp_avg, ...: one flat tensor each

Unsharded is the range that covers everything. A sharded optimizer owns a smaller range of every bucket, whose first and
last parameter may go on in another rank's; nothing else changes here.

Why segments, and not a flat copy sorted by group: gradients already lie in one buffer, in the order of backward, which
the buckets need. A sorted copy would cost a pass over all gradients in each step, while the fused kernel takes a list
of tensors and is only 1.1 times slower on 74 of them than on one. Norm, scaling and casts see the whole range at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from megatron_lite.distributed.buffer_layout import Range, param_ranges_of_shard
from megatron_lite.distributed.data_parallel_base import GradBuffer
from megatron_lite.sharding import ShardSpec, flat_range, whole


@dataclass(frozen=True)
class Part:
    """What lies of one parameter in the shard.

    place: in the shard; in_param: in the flattened parameter.
    """

    name: str
    param: nn.Parameter
    place: Range
    in_param: Range

    @property
    def is_whole(self) -> bool:
        """Whether no other rank owns elements of the parameter."""
        return self.in_param == Range(0, self.param.numel())

    def spec(self) -> ShardSpec:
        """Where the part lies in the global tensor."""
        spec: ShardSpec = getattr(self.param, "shard", None) or whole(self.name, tuple(self.param.shape))
        return spec if self.is_whole else flat_range(spec, self.in_param.start, self.in_param.end)


@dataclass(frozen=True)
class Run:
    """Parts side by side, with the padding between them."""

    place: Range
    parts: tuple[Part, ...]

    @property
    def numel(self) -> int:
        """Elements that belong to parameters."""
        return sum(part.place.size for part in self.parts)


@dataclass(frozen=True)
class Storage:
    """How the optimizer's memory is kept.

    main_grads: number format in which the optimizer reads gradients; another one than fp32 saves the fp32 copy of
    16-bit gradients; states: by name, fp32 where not named; on_host: main parameters, gradients and states lie in the
    memory of the CPU, and the update runs there; pin_params, pin_grads: in pinned memory, where there is a GPU.
    """

    main_grads: torch.dtype = torch.float32
    states: Mapping[str, torch.dtype] = field(default_factory=dict)
    on_host: bool = False
    pin_params: bool = True
    pin_grads: bool = True


class FlatShard:
    """One contiguous range of a buffer, as the optimizer sees it.

    Args:
        range: in the buffer.
        group_of: number of each parameter's group.
        counted: parameters that count in norms on this rank: not the second copies of one that another rank counts.
        apart: groups whose parameters are segments of their own: updates that need to know the matrix.
        storage: see `Storage`.
    """

    def __init__(
        self,
        buffer: GradBuffer,
        range: Range,
        group_of: Mapping[nn.Parameter, int],
        counted: AbstractSet[nn.Parameter],
        apart: AbstractSet[int] = frozenset(),
        storage: Storage = Storage(),
    ):
        self.buffer, self.range, self._storage = buffer, range, storage
        self.parts = parts_of(buffer, range)
        self._counted = [run for counts, run in _runs(self.parts, [p.param in counted for p in self.parts]) if counts]
        self.on_host = storage.on_host
        self._place_main()
        self._grad_copy: Tensor | None = None
        self._host_grad: Tensor | None = None
        self.state: dict[str, Tensor] = {}
        self._state_views: dict[str, list[tuple[Run, Tensor]]] = {}
        groups = [group_of[part.param] for part in self.parts]
        kinds = [(group, number if group in apart else -1) for number, group in enumerate(groups)]
        self.segments = [(group, run) for (group, _), run in _runs(self.parts, kinds)]  # (number of a group, where)
        self.segment_tensors = [(self._main_of(run), run.place) for _, run in self.segments]

    def _place_main(self) -> None:
        """Where the main parameters lie."""
        buffer: Any = self.buffer
        self.model_data: Tensor = buffer.param_data[self.range.start : self.range.end]  # what forward reads
        self.is_copy = self.buffer.param_dtype != torch.float32 or self.on_host
        self.main = self.model_data
        if self.is_copy:
            self.main = self._memory(torch.float32, self._storage.pin_params)
            self.copy_model_to_main()
        self.device = self.main.device

    def _main_of(self, run: Run) -> Tensor:
        return self.main[run.place.start : run.place.end]

    def _memory(self, dtype: torch.dtype, pin: bool) -> Tensor:
        if not self.on_host:
            return torch.zeros_like(self.model_data, dtype=dtype)
        return torch.zeros(self.range.size, dtype=dtype, device="cpu", pin_memory=pin and torch.cuda.is_available())

    def add_state(self, name: str, groups: AbstractSet[int]) -> dict[Tensor, Tensor]:
        """Zeros for a state of the optimizer that steps on `groups`.

        Returns: by segment of these groups its view of the state, whose flat memory is `state[name]`.
        """
        dtype = self._storage.states.get(name, torch.float32)
        mine = [(run, main) for (group, run), (main, _) in zip(self.segments, self.segment_tensors) if group in groups]
        sizes = [run.place.size for run, _ in mine]
        flat = torch.zeros(sum(sizes), dtype=dtype, device=self.device)
        views = list(flat.split(sizes)) if mine else []
        self.state[name] = flat
        self._state_views[name] = [(run, view) for (run, _), view in zip(mine, views)]
        return {main: view for (_, main), view in zip(mine, views)}

    def counted_runs(self, flat: Tensor) -> list[tuple[Tensor, int]]:
        """The parts of a flat tensor that count in norms: views, and how many elements in each are parameters'."""
        return [(flat[run.place.start : run.place.end], run.numel) for run in self._counted]

    def main_grad(self) -> Tensor:
        """The range's gradients, on the model's device: the buffer's memory where it has the number format that the
        optimizer reads, else a copy, reused by the next call."""
        grad = self.buffer.grad_data[self.range.start : self.range.end]
        if grad.dtype in (torch.float32, self._storage.main_grads):
            return grad
        if self._grad_copy is None:
            self._grad_copy = torch.empty_like(grad, dtype=self._storage.main_grads)
        return self._grad_copy.copy_(grad)

    def attach_grads(self, grad: Tensor) -> None:
        """Give each segment its gradients, beside its main parameters: `grad`, or `decoupled_grad` where torch would
        refuse the number format."""
        if self.on_host:
            if self._host_grad is None:
                self._host_grad = self._memory(grad.dtype, self._storage.pin_grads)
            grad = self._host_grad.copy_(grad)
        for tensor, place in self.segment_tensors:
            own = grad[place.start : place.end]
            if own.dtype == tensor.dtype:
                tensor.grad = own
            else:
                tensor.decoupled_grad = own  # type: ignore[attr-defined]

    def detach_grads(self) -> None:
        """After the update: the gradients are the buffer's alone again."""
        for tensor, _ in self.segment_tensors:
            tensor.grad = None
            tensor.decoupled_grad = None  # type: ignore[attr-defined]

    def copy_main_to_model(self) -> None:
        """After an update: round the main parameters into the model's."""
        if self.is_copy:
            self.model_data.copy_(self.main)

    def copy_model_to_main(self) -> None:
        """After the model was loaded without an optimizer state."""
        if self.is_copy:
            self.main.copy_(self.model_data)

    def memory(self) -> list[Tensor]:
        """The flat tensors that exist for this shard beside the buffer's: a step's lasting memory."""
        copies = [tensor for tensor in (self._grad_copy, self._host_grad) if tensor is not None]
        return ([self.main] if self.is_copy else []) + copies + list(self.state.values())

    def views(self) -> dict[str, dict[str, tuple[Tensor, ShardSpec]]]:
        """By kind (`param` where it is a copy, and each state) and global parameter name: a view and its place.

        A parameter that is the rank's alone is viewed in its shape, a part of one as a flat tensor.
        """
        main = self._main_views()
        kinds = ({"param": main} if main else {}) | self._state_views
        result: dict[str, dict[str, tuple[Tensor, ShardSpec]]] = {kind: {} for kind in kinds}
        for kind, runs in kinds.items():
            for run, flat in runs:
                for part in run.parts:
                    view = flat[part.place.start - run.place.start : part.place.end - run.place.start]
                    spec = part.spec()
                    result[kind][spec.name] = (view.view(part.param.shape) if part.is_whole else view, spec)
        return result

    def _main_views(self) -> list[tuple[Run, Tensor]]:
        """The main parameters, where the model's are others."""
        return [(Run(Range(0, self.range.size), tuple(self.parts)), self.main)] if self.is_copy else []


class ApartShard(FlatShard):
    """A rank's part of a fully sharded model: gradients are flat, every parameter's part lies where torch gathers it
    from, in fp32, and is a segment of its own.

    Args:
        is_16_bit: forward computes with roundings of the parts: checkpoints hold both, as without sharding.
    """

    def __init__(
        self,
        buffer: GradBuffer,
        group_of: Mapping[nn.Parameter, int],
        counted: AbstractSet[nn.Parameter],
        is_16_bit: bool,
        storage: Storage = Storage(),
    ):
        self._is_16_bit = is_16_bit
        everything = Range(0, buffer.layout.numel)
        super().__init__(buffer, everything, group_of, counted, frozenset(group_of.values()), storage)

    def _place_main(self) -> None:
        assert not self.on_host, "the parts of a fully sharded model are stepped on where they are"
        self.is_copy, self.device = False, self.buffer.grad_data.device

    def _main_of(self, run: Run) -> Tensor:
        (part,) = run.parts
        held: Tensor = part.param.held_part  # type: ignore[attr-defined]
        return held.view(-1)

    def _main_views(self) -> list[tuple[Run, Tensor]]:
        places = zip(self.segments, self.segment_tensors)
        return [(run, tensor) for (_, run), (tensor, _) in places] if self._is_16_bit else []


def parts_of(buffer: GradBuffer, range: Range) -> list[Part]:
    """What lies of which parameter in a range of a buffer, in buffer order."""
    parts = []
    for number, bucket in enumerate(buffer.layout.buckets):
        shard = bucket.range.overlap(range)
        if shard is None:
            continue
        for name, r in param_ranges_of_shard(buffer.layout, number, shard).items():
            parts.append(Part(name, buffer.params[name], r.gbuf_world.shifted(-range.start), r.param))
    return parts


def divide_for_host(buffer: GradBuffer, range: Range, fraction: float) -> list[tuple[Range, bool]]:
    """A range in two, cut between parameters so that about `fraction` of it is kept in host memory.

    Returns: (range, whether it is the host's), without empty ones. What backward reaches first is the host's: its
        gradients are there first.
    """
    if fraction == 0.0:
        return [(range, False)]
    wanted = range.start + fraction * range.size
    borders = [range.start, range.end, *(part.place.start + range.start for part in parts_of(buffer, range))]
    cut = min(borders, key=lambda border: abs(border - wanted))
    halves = [(Range(range.start, cut), True), (Range(cut, range.end), False)]
    return [(half, on_host) for half, on_host in halves if half.size > 0]


Kind = TypeVar("Kind")


def _runs(parts: Sequence[Part], kinds: Sequence[Kind]) -> list[tuple[Kind, Run]]:
    """Neighbours of one kind joined. The padding between two of them is zero in values, gradients and moments, and
    every optimizer leaves such elements at zero."""
    runs: list[tuple[Kind, Run]] = []
    for part, kind in zip(parts, kinds):
        if runs and runs[-1][0] == kind:
            before = runs[-1][1]
            runs[-1] = (kind, Run(Range(before.place.start, part.place.end), (*before.parts, part)))
        else:
            runs.append((kind, Run(part.place, (part,))))
    return runs
