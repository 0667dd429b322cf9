"""Which samples this data-parallel rank reads, micro-batch by micro-batch.

    b micro-batch size, R ranks, B = b * R:     item of the global order  0 .. b-1 | b .. 2b-1 | ...   (B at a time)
                                                read by rank                0      |    1      | ...

A sampler yields lists of sample ids, one list a micro-batch. `consumed_samples` is all it needs to go on where a run
stopped: the order is global, so another number of ranks continues with the same samples.

    training      MegatronPretrainingSampler         in order, once               --dataloader-type single
                  MegatronPretrainingRandomSampler   another order every epoch    --dataloader-type cyclic
    evaluation    RoundRobinSampler                  in order, round and round
                  WholeSetSampler                    every sample once            --full-validation
"""

from collections.abc import Iterator
from itertools import count
from typing import Any

import torch

from megatron_lite.errors import DataError


class MegatronPretrainingSampler:
    """The samples in order, once.

    Args:
        drop_last: leave out the last, incomplete group of b * R samples; else ranks may get a short or empty list.

    Raises: DataError when nothing is left to read.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        drop_last: bool = True,
    ):
        _check(total_samples, micro_batch_size, data_parallel_rank, data_parallel_size)
        if consumed_samples >= total_samples:
            raise DataError(
                f"no samples left to consume: {consumed_samples}, {total_samples}",
                why="the run has already read every sample of this dataset",
                fix="ask for more samples (--train-iters or --train-samples), or start from consumed samples 0",
            )
        self.total_samples, self.consumed_samples = total_samples, consumed_samples
        self.micro_batch_size, self.drop_last = micro_batch_size, drop_last
        self.data_parallel_rank, self.data_parallel_size = data_parallel_rank, data_parallel_size
        self.micro_batch_times_data_parallel_size = micro_batch_size * data_parallel_size

    def __len__(self) -> int:
        """Micro-batches of one pass, from where it starts."""
        left, group = self.total_samples - self.consumed_samples, self.micro_batch_times_data_parallel_size
        return left // group if self.drop_last else -(-left // group)

    def __iter__(self) -> Iterator[list[int]]:
        b, group = self.micro_batch_size, self.micro_batch_times_data_parallel_size
        for start in range(self.consumed_samples, self.total_samples, group):
            ids = list(range(start, min(start + group, self.total_samples)))
            if len(ids) == group or not self.drop_last:
                yield ids[self.data_parallel_rank * b : (self.data_parallel_rank + 1) * b]


class MegatronPretrainingRandomSampler:
    """The samples in a random order that changes with every pass (`--dataloader-type cyclic`).

    A pass is an epoch of the samples that fill whole groups of b * R; its number seeds the order and follows from
    `consumed_samples`, which grows with every micro-batch. Iterate again for the next epoch.

    Args:
        dataset: the dataset, kept for symmetry with Megatron; its own order is not touched.
        data_sharding: each rank shuffles its own contiguous part; else all share one shuffled order.

    Raises: DataError if the dataset is smaller than one group.
    """

    def __init__(
        self,
        dataset: Any,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        data_sharding: bool,
    ):
        _check(total_samples, micro_batch_size, data_parallel_rank, data_parallel_size)
        group = micro_batch_size * data_parallel_size
        if total_samples < group:
            raise DataError(
                f"{total_samples} samples are fewer than one micro-batch on every rank, {micro_batch_size} x "
                f"{data_parallel_size}",
                why="an epoch has only whole groups of these",
                fix="more data, a smaller --micro-batch-size, or fewer data-parallel ranks",
            )
        active = total_samples - total_samples % group
        if consumed_samples % active % group:
            raise DataError(
                f"{consumed_samples} consumed samples end inside a group of {group}",
                why=f"an epoch has {active} samples, read {micro_batch_size} x {data_parallel_size} at a time",
                fix="resume with the micro-batch size and data-parallel size of the first run",
            )
        self.dataset, self.total_samples, self.consumed_samples = dataset, total_samples, consumed_samples
        self.micro_batch_size, self.data_sharding = micro_batch_size, data_sharding
        self.data_parallel_rank, self.data_parallel_size = data_parallel_rank, data_parallel_size
        self.micro_batch_times_data_parallel_size = group
        self.active_samples = active

    def __len__(self) -> int:
        """Micro-batches left in the present epoch."""
        return (self.active_samples - self.consumed_samples % self.active_samples) // (
            self.micro_batch_times_data_parallel_size
        )

    def __iter__(self) -> Iterator[list[int]]:
        b, group = self.micro_batch_size, self.micro_batch_times_data_parallel_size
        rank, ranks = self.data_parallel_rank, self.data_parallel_size
        epoch, done = divmod(self.consumed_samples, self.active_samples)
        generator = torch.Generator().manual_seed(epoch)
        if self.data_sharding:
            bucket = self.total_samples // group * b
            ids = torch.randperm(bucket, generator=generator)[done // ranks :] + rank * bucket
        else:
            # Cut to whole groups: else some ranks would find a micro-batch more than others and wait for them.
            full = self.total_samples // b * b
            ids = torch.randperm(full, generator=generator)[: self.active_samples][done:][rank::ranks]
        order = ids.tolist()
        for start in range(0, len(order) - b + 1, b):
            self.consumed_samples += group
            yield order[start : start + b]


class RoundRobinSampler:
    """The samples in order, and the first again after the last: without end, so that an evaluation never lacks any.

    Item p of the global order is sample p modulo `total_samples`, also inside a micro-batch. The layout has no part in
    it.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
    ):
        _check(total_samples, micro_batch_size, data_parallel_rank, data_parallel_size)
        self.total_samples, self.consumed_samples = total_samples, consumed_samples
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank, self.data_parallel_size = data_parallel_rank, data_parallel_size

    def __iter__(self) -> Iterator[list[int]]:
        b = self.micro_batch_size
        for start in count(self.consumed_samples + self.data_parallel_rank * b, b * self.data_parallel_size):
            yield [item % self.total_samples for item in range(start, start + b)]


class WholeSetSampler:
    """Every sample once, in whole global batches. Where the last one lacks samples it is filled up with None, for which
    data sets give a sample without loss: no rank waits for another, and no sample is left out.

    Args:
        num_microbatches: micro-batches of a global batch on each rank.
    """

    def __init__(
        self,
        total_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        num_microbatches: int,
    ):
        _check(total_samples, micro_batch_size, data_parallel_rank, data_parallel_size)
        self.total_samples, self.micro_batch_size = total_samples, micro_batch_size
        self.data_parallel_rank, self.data_parallel_size = data_parallel_rank, data_parallel_size
        self.num_microbatches = num_microbatches

    @property
    def num_batches(self) -> int:
        """Global batches, the filled one among them."""
        return -(-self.total_samples // (self.micro_batch_size * self.data_parallel_size * self.num_microbatches))

    def __len__(self) -> int:
        """Micro-batches of each rank."""
        return self.num_batches * self.num_microbatches

    def __iter__(self) -> Iterator[list[int | None]]:
        b = self.micro_batch_size
        for group in range(len(self)):
            start = (group * self.data_parallel_size + self.data_parallel_rank) * b
            yield [item if item < self.total_samples else None for item in range(start, start + b)]


def _check(total_samples: int, micro_batch_size: int, data_parallel_rank: int, data_parallel_size: int) -> None:
    if total_samples <= 0:
        raise DataError(f"no sample to consume: {total_samples}", fix="check --data-path and --split")
    assert micro_batch_size > 0, micro_batch_size
    assert 0 <= data_parallel_rank < data_parallel_size, (data_parallel_rank, data_parallel_size)
