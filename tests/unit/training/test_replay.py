"""A step is run again from the same samples with the same random numbers."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from megatron_lite.datasets.samplers import MegatronPretrainingRandomSampler, MegatronPretrainingSampler
from megatron_lite.training.replay import NotedSampler, Replay, SampleDict, SamplesNamed
from megatron_lite.training.stage_data import NotNeeded


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, idx):
        return {"tokens": torch.tensor([100 + idx])}

    def origin(self, idx):
        return f"number {100 + idx}"


class Optimizer:
    grad_scaler = None


class Chunk(nn.Module):
    """With one module that counts during forward, as routers do."""

    def __init__(self):
        super().__init__()
        self.counter = nn.Module()
        self.counter.register_buffer("count", torch.zeros(2))
        self.modules_after_grad_sync = [self.counter]


def _named(sampler, workers=0):
    noted = NotedSampler(sampler)
    return SamplesNamed(iter(DataLoader(Numbers(), batch_sampler=noted, num_workers=workers)), noted, Numbers())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_a_micro_batch_knows_its_samples_also_while_workers_run_ahead(workers, kind):
    """The sampler is several batches ahead of the loader then: its newest list would name the wrong samples."""
    if kind == "single":
        sampler = MegatronPretrainingSampler(12, 0, 2, 0, 1)
    else:
        sampler = MegatronPretrainingRandomSampler(None, 12, 0, 2, 0, 1, True)
    batches = list(_named(sampler, workers))
    assert len(batches) == 6
    for batch in batches:
        assert batch["tokens"].flatten().tolist() == [100 + number for number in batch.sample_ids]


def test_a_rewound_step_reads_the_same_and_draws_the_same():
    chunk = Chunk()
    replay = Replay(_named(MegatronPretrainingSampler(12, 0, 2, 0, 1)), [chunk], Optimizer())

    def step():
        chunk.counter.count += 1
        read = [next(replay.data)["tokens"].tolist() for _ in range(2)]
        return read, random.random(), np.random.rand(), torch.rand(3).tolist()

    replay.begin()
    first = step()
    assert replay.samples() == [[0, 1], [2, 3]] and replay.samples(1) == [[2, 3]]
    assert replay.origins(1) == ["sample 2: number 102", "sample 3: number 103"]
    for _ in range(2):
        replay.rewind()
        assert step() == first
    assert chunk.counter.count.tolist() == [1, 1]
    replay.begin()
    assert step()[0] == [[[104], [105]], [[106], [107]]]  # the next step goes on behind it


def test_what_was_rewound_and_forgotten_is_not_read_again():
    """A step that is given up has read its batch: what comes next is another one."""
    replay = Replay(_named(MegatronPretrainingSampler(12, 0, 2, 0, 1)), [Chunk()], Optimizer())
    replay.begin()
    next(replay.data)
    replay.rewind()
    replay.forget()
    assert next(replay.data)["tokens"].flatten().tolist() == [102, 103]


def test_chunks_are_recorded_apart_and_those_without_data_stay_what_they_are():
    """Code elsewhere asks whether a chunk's iterator is `NotNeeded`."""
    data = [iter([{"tokens": torch.tensor([1])}]), NotNeeded()]
    replay = Replay(data, [Chunk()], Optimizer())
    assert isinstance(replay.data[1], NotNeeded)
    replay.begin()
    one = next(replay.data[0])
    replay.rewind()
    assert next(replay.data[0]) is one and not isinstance(one, SampleDict) and replay.samples() == []
