"""A step can be run again: from the same data, with the same random numbers, as if it had not been run before.

    begin()     note the generators, the loss scale, the counts of modules; forget the micro-batches of the step before
    a step      every micro-batch that it reads is kept
    rewind()    all of that is as it was at `begin`, and the kept micro-batches come again

Weights and moments need no copy: a step that is repeated has not updated them. Gradients start from zero in every run.
Micro-batches know which samples they are (`SampleDict`), because a loader's workers run ahead of the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from megatron_lite.optimizer import MegatronOptimizer
from megatron_lite.training.expert_log import routers_of
from megatron_lite.training.rng_state import RngSnapshot
from megatron_lite.training.stage_data import NotNeeded


class SampleDict(dict[str, Any]):
    """A micro-batch that knows its `sample_ids`, by which its `dataset` gives the samples again."""

    sample_ids: list[int]
    dataset: Any

    def origins(self) -> list[str]:
        """Where each sample comes from, as its data set tells (`origin(id)`), else its number alone."""
        tell = getattr(self.dataset, "origin", None)
        return [f"sample {number}" + (f": {tell(number)}" if tell else "") for number in self.sample_ids]


class NotedSampler:
    """A batch sampler, and the ids that it has given out, in order: whoever gets the micro-batches takes theirs."""

    def __init__(self, sampler: Any):
        self.sampler = sampler
        self.given: deque[list[int]] = deque()

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        for ids in self.sampler:
            self.given.append(ids)
            yield ids


class SamplesNamed:
    """An iterator of micro-batches that say which samples they are.

    Args:
        dataset: what the ids belong to.
    """

    def __init__(self, iterator: Iterator[Any], sampler: NotedSampler, dataset: Any):
        self.iterator, self.sampler, self.dataset = iterator, sampler, dataset

    def __iter__(self) -> SamplesNamed:
        return self

    def __next__(self) -> Any:
        batch = next(self.iterator)
        ids = self.sampler.given.popleft()
        if not isinstance(batch, dict):
            return batch
        named = SampleDict(batch)
        named.sample_ids, named.dataset = ids, self.dataset
        return named


class Recorded:
    """An iterator that can give the items since `begin` again."""

    def __init__(self, iterator: Iterator[Any]):
        self.iterator = iterator
        self.items: list[Any] = []
        self._next = 0

    def begin(self) -> None:
        self.items, self._next = [], 0

    def rewind(self) -> None:
        self._next = 0

    def __iter__(self) -> Recorded:
        return self

    def __next__(self) -> Any:
        if self._next == len(self.items):
            self.items.append(next(self.iterator))
        self._next += 1
        return self.items[self._next - 1]


class Replay:
    """Everything that a run of a step changes, apart from weights, moments and gradients.

    Args:
        data: as the step takes it, one iterator or one for each chunk.
    Attributes:
        data: the same, as the step is to take it.
    """

    def __init__(
        self, data: Iterator[Any] | list[Iterator[Any]], model: Sequence[nn.Module], optimizer: MegatronOptimizer
    ):
        iterators = data if isinstance(data, list) else [data]
        watched = [one if isinstance(one, NotNeeded) else Recorded(one) for one in iterators]
        self.data: Any = watched if isinstance(data, list) else watched[0]
        self._recorded = [one for one in watched if isinstance(one, Recorded)]
        self._scaler = optimizer.grad_scaler
        self._routers = routers_of(model)
        counting = [module for chunk in model for module in chunk.modules_after_grad_sync]  # type: ignore[union-attr]
        self._buffers = [buffer for module in counting for buffer in module.buffers(recurse=False)]
        self._others: list[Any] = [module for module in counting if hasattr(module, "snapshot")]  # FP8's histories

    def begin(self) -> None:
        """The next step starts here."""
        self.forget()
        self._rng = RngSnapshot()
        self._scale = None if self._scaler is None else self._scaler.state_dict()
        self._counts = [buffer.clone() for buffer in self._buffers]
        self._states = [module.snapshot() for module in self._others]

    def forget(self) -> None:
        """The step is over: what is read next is new."""
        for recorded in self._recorded:
            recorded.begin()

    @torch.no_grad()
    def rewind(self) -> None:
        """Back to `begin`."""
        for recorded in self._recorded:
            recorded.rewind()
        self._rng.restore()
        if self._scaler is not None and self._scale:
            self._scaler.load_state_dict(self._scale)
        for buffer, before in zip(self._buffers, self._counts):
            buffer.copy_(before)
        for module, state in zip(self._others, self._states):
            module.restore(state)
        for router in self._routers:
            router.reset_statistics()

    def samples(self, microbatch: int | None = None) -> list[list[int]]:
        """Which samples each micro-batch of the step holds, or one of them does; empty where that is not known, or
        where another rank of the tensor-parallel group reads."""
        return [item.sample_ids for item in self._named(microbatch)]

    def origins(self, microbatch: int | None) -> list[str]:
        """Where these samples come from, a line each."""
        return [line for item in self._named(microbatch) for line in item.origins()]

    def _named(self, microbatch: int | None) -> list[SampleDict]:
        for recorded in self._recorded:
            named = [item for item in recorded.items if isinstance(item, SampleDict)]
            if named:
                return named if microbatch is None else named[microbatch : microbatch + 1]
        return []
