"""Schedules on real ranks: a stack of small layers over stages and chunks trains like the stack in one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_lite import collectives
from megatron_lite.errors import ConfigError, PeerLost
from megatron_lite.model_parallel_config import ModelParallelConfig
from megatron_lite.pipeline_parallel import get_forward_backward_func
from megatron_lite.pipeline_parallel.actions import make_schedule
from megatron_lite.pipeline_parallel.executor import Executor
from megatron_lite.pipeline_parallel.p2p_communication import Channel
from megatron_lite.pipeline_parallel.schedule_check import check_schedule
from megatron_lite.process_groups import make_process_groups
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.rank_grid import grids
from megatron_lite.tensor_parallel.layers import ColumnParallelLinear
from megatron_lite.training.local_world import World

HIDDEN, BATCH, LENGTH = 8, 2, 4


class Stack(nn.Module):
    """Some of the layers of a stack, with Megatron's interface of a stage."""

    def __init__(self, config, layers):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleDict()
        for layer in layers:
            torch.manual_seed(layer)
            self.layers[str(layer)] = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh())
        self.received = None

    def set_input_tensor(self, x):
        self.received = x

    def forward(self, x):
        several = isinstance(self.received, list)
        if self.received is not None:
            x = self.received[0] if several else self.received
        for layer in self.layers.values():
            x = x + layer(x)
        # An activation of a stage must not be a view, or its memory could not be given back.
        return [x, self.received[1] * 1.0] if several else x


def batch_of(microbatch, length=LENGTH):
    generator = torch.Generator().manual_seed(100 + microbatch)
    return torch.randn(length, BATCH, HIDDEN, generator=generator)


def squared(output):
    loss = output.square().mean()
    return loss, {"loss": loss.item()}


def make_config(**options):
    config = ModelParallelConfig(**options)
    config.hidden_size = HIDDEN
    return config


def lengths_of(microbatches, variable):
    return [LENGTH + (m % 3 if variable else 0) for m in range(microbatches)]


def train(stages, chunks, microbatches, group, options, forward_only=False, groups=None):
    """One step on this rank: reports, gradients by layer, and the peak of activations alive."""
    rank = dist.get_rank() if stages > 1 else 0
    variable = options.get("variable_seq_lengths", False)
    config = make_config(**options, microbatch_group_size_per_vp_stage=group)
    per_chunk = 12 // (stages * chunks)
    firsts = [chunk * stages * per_chunk + rank * per_chunk for chunk in range(chunks)]
    model = [Stack(config, range(first, first + per_chunk)) for first in firsts]

    def forward_step(iterator, model):
        return model(next(iterator)), squared

    peaks = []
    run = Executor.run

    def watched(self, actions):
        reports = run(self, actions)
        peaks.append(self.peak_in_flight)
        return reports

    Executor.run = watched
    try:
        data = [(batch_of(m, n) for m, n in enumerate(lengths_of(microbatches, variable))) for _ in model]
        reports = get_forward_backward_func(stages, chunks)(
            forward_step_func=forward_step,
            data_iterator=[iter(d) for d in data],
            model=model,
            num_microbatches=microbatches,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
            forward_only=forward_only,
            pg_collection=groups or ProcessGroupCollection(pp=collectives.world() if stages > 1 else None),
        )
    finally:
        Executor.run = run
    grads = {name: p.grad for part in model for name, p in part.named_parameters()}
    return [r["loss"] for r in reports], grads, peaks[0]


CASES = [
    (2, 1, 4, None, {}),
    (2, 1, 1, None, {"deallocate_pipeline_outputs": True}),
    (2, 2, 4, None, {"overlap_p2p_comm": True, "deallocate_pipeline_outputs": True}),
    (2, 3, 8, 3, {"overlap_p2p_comm": True}),
    (2, 2, 5, 3, {"variable_seq_lengths": True}),
    (4, 1, 6, None, {"overlap_p2p_comm": True, "deallocate_pipeline_outputs": True}),
    (4, 1, 3, None, {"variable_seq_lengths": True}),
    (4, 3, 8, 8, {"overlap_p2p_comm": True, "deallocate_pipeline_outputs": True}),
]


@pytest.mark.parametrize(("stages", "chunks", "microbatches", "group", "options"), CASES)
def test_c089_c090_stages_train_as_one_process(world, stages, chunks, microbatches, group, options):
    """C089, C090: two stages with one rank for both neighbours, lengths that vary: losses, gradients, peaks."""
    variable = {k: v for k, v in options.items() if k == "variable_seq_lengths"}
    losses, grads, _ = train(1, 1, microbatches, None, variable)
    results = world(stages).run(train, stages, chunks, microbatches, group, options)
    assert results[-1][0] == pytest.approx(losses, rel=1e-6)
    assert all(not reports for reports, _, _ in results[:-1])
    theirs = {name: grad for _, held, _ in results for name, grad in held.items()}
    assert theirs.keys() == grads.keys() and any(g.abs().sum() > 0 for g in grads.values())
    for name, grad in grads.items():
        torch.testing.assert_close(theirs[name], grad, rtol=1e-5, atol=1e-7)
    proof = check_schedule(make_schedule(stages, microbatches, chunks, group), chunks)
    assert [peak for _, _, peak in results] == proof.peaks


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), [(2, 1, 5), (2, 2, 3), (4, 3, 2)])
def test_evaluation(world, stages, chunks, microbatches):
    """Forward only, also with fewer micro-batches than an interleaved schedule takes in training; nothing is kept."""
    losses, _, _ = train(1, 1, microbatches, None, {}, forward_only=True)
    results = world(stages).run(train, stages, chunks, microbatches, None, {"overlap_p2p_comm": True}, True)
    assert results[-1][0] == pytest.approx(losses, rel=1e-6)
    assert all(g is None for _, grads, _ in results for g in grads.values())
    assert [peak for _, _, peak in results] == [0] * stages


def _without_tags(stages, chunks, microbatches, separate):
    """As on NCCL: messages of two ranks in one group come in the order of sending, whatever they are."""
    groups = make_process_groups(*grids(stages, pp=stages), separate_channels=separate)
    tag = Channel.tag
    Channel.tag = property(lambda channel: 7)
    try:
        losses, grads, _ = train(stages, chunks, microbatches, None, {"overlap_p2p_comm": True}, groups=groups)
    finally:
        Channel.tag = tag
    ranks = {key: dist.get_process_group_ranks(group) for key, group in (groups.pp_channels or {}).items()}
    return losses, grads, ranks, len(set((groups.pp_channels or {}).values()) | {groups.pp})


@pytest.mark.parametrize(("stages", "chunks", "number"), [(2, 2, 5), (4, 3, 3)])
def test_messages_without_tags_take_a_group_each(world, stages, chunks, number):
    """Of two stages each is the other's neighbour on both sides: forward and back, along and around. (In one group two
    stages with two chunks mix them up: another loss.)"""
    losses, grads, _ = train(1, 1, 4, None, {})
    results = world(stages).run(_without_tags, stages, chunks, 4, True)
    assert results[-1][0] == pytest.approx(losses, rel=1e-6)
    for _, held, ranks, groups in results:
        assert set(ranks) == {(forward, around) for forward in (True, False) for around in (True, False)}
        assert list(ranks.values()) == [list(range(stages))] * 4 and groups == number
        for name, grad in held.items():
            torch.testing.assert_close(grad, grads[name], rtol=1e-5, atol=1e-7)
    if stages == 2:
        mixed = world(stages).run(_without_tags, stages, chunks, 4, False)
        assert mixed[-1][0] != pytest.approx(losses, rel=1e-6) and not mixed[0][2]


class Head(Stack):
    """A last stage with an output layer whose weight gradients may wait."""

    def __init__(self, config, layers):
        super().__init__(config, layers)
        self.output = ColumnParallelLinear(
            HIDDEN, 6, config=config, init_method=lambda weight: weight, bias=False, tp_group=None
        )
        nn.init.constant_(self.output.weight, 0.5)
        self.output.weight.main_grad = torch.zeros(6, HIDDEN)
        self.output.defers_weight_grads = True

    def forward(self, x):
        return self.output(super().forward(x))[0]


def _late_products(deferred, limit, microbatches=(0, 1, 2, 3)):
    """The output layer's gradients before and after the drain; the second also without one."""
    config = make_config(
        defer_embedding_wgrad_compute=deferred, wgrad_deferral_limit=limit, gradient_accumulation_fusion=True
    )
    last = dist.get_rank() == 1
    model = (Head if last else Stack)(config, [dist.get_rank()])
    seen = []
    drain = Executor._late_weight_grads

    def watched(self):
        seen.append((model.output.weight.main_grad.clone(), not self._passes))
        drain(self)

    Executor._late_weight_grads = watched
    try:
        get_forward_backward_func(2)(
            forward_step_func=lambda iterator, model: (model(next(iterator)), squared),
            data_iterator=iter([batch_of(m) for m in microbatches]),
            model=model,
            num_microbatches=len(microbatches),
            seq_length=LENGTH,
            micro_batch_size=BATCH,
            pg_collection=ProcessGroupCollection(pp=collectives.world()),
        )
    finally:
        Executor._late_weight_grads = drain
    return (seen, model.output.weight.main_grad) if last else (seen, None)


def test_weight_gradients_of_the_output_layer_wait_for_the_drain(world):
    """All of them, or the first ones up to the limit; after the last backward pass, and only on the last stage."""
    run = world(2).run
    (_, _), (nothing, whole) = run(_late_products, False, 0)
    _, (_, last) = run(_late_products, False, 0, (3,))
    assert not nothing and last.abs().min() > 0
    for limit, at_once in ((0, 0 * last), (3, last / 4), (9, 0 * last)):
        (first, _), ([(before, all_passed)], after) = run(_late_products, True, limit)
        assert not first and all_passed
        torch.testing.assert_close(before, at_once)
        torch.testing.assert_close(after, whole)


def _over_nccl():
    """Stands for a GPU: all that is asked of the backend is its name."""
    backend = dist.get_backend
    dist.get_backend = lambda group=None: "nccl"
    try:
        train(2, 1, 2, None, {})
    except ConfigError as error:
        return str(error)
    finally:
        dist.get_backend = backend


def test_one_group_for_all_messages_is_refused_where_they_would_wait_for_each_other(world):
    assert all("pp_channels" in told for told in world(2).run(_over_nccl))


def _two_tensors():
    """A side tensor travels from the first stage, through the second, and its gradient comes back."""
    rank = dist.get_rank()
    config = make_config(variable_seq_lengths=True)
    model = Stack(config, [rank])
    side = torch.full((3,), 2.0, requires_grad=True)

    def forward_step(iterator, model):
        x = next(iterator)
        if rank == 0:
            return [model(x), side * 1.0], None
        out = model(x)
        return (out[0], out[1]), lambda out: ((out[0].sum() + out[1].square().sum()), {"loss": 0.0})

    get_forward_backward_func(2)(
        forward_step_func=forward_step,
        data_iterator=iter([batch_of(m) for m in range(2)]),
        model=model,
        num_microbatches=2,
        seq_length=LENGTH,
        micro_batch_size=BATCH,
        pg_collection=ProcessGroupCollection(pp=collectives.world()),
    )
    return side.grad


def test_several_tensors_between_stages(world):
    """What an encoder and a decoder need: d/dx of x^2 at 2, mean over two micro-batches."""
    side, _ = world(2).run(_two_tensors)
    torch.testing.assert_close(side, torch.full((3,), 4.0))


def _wrong_length():
    config = make_config()
    model = Stack(config, [dist.get_rank()])
    get_forward_backward_func(2)(
        forward_step_func=lambda iterator, model: (model(next(iterator)), squared),
        data_iterator=iter([batch_of(0, LENGTH + 1)]),
        model=model,
        num_microbatches=1,
        seq_length=LENGTH,
        micro_batch_size=BATCH,
        pg_collection=ProcessGroupCollection(pp=collectives.world()),
    )


def test_another_length_than_promised(world):
    """An activation that the next stage does not expect is told with both shapes and the flag, not sent."""
    with pytest.raises(Exception, match="variable-seq-lengths"):
        world(2).run(_wrong_length)


def _told_to_recompute():
    config = make_config(num_microbatches_with_partial_activation_checkpoints=1)
    model, told = Stack(config, [dist.get_rank()]), []

    def forward_step(iterator, model, checkpoint_activations_microbatch):
        told.append(checkpoint_activations_microbatch)
        return model(next(iterator)), squared

    get_forward_backward_func(2)(
        forward_step_func=forward_step,
        data_iterator=iter([batch_of(m) for m in range(4)]),
        model=model,
        num_microbatches=4,
        seq_length=LENGTH,
        micro_batch_size=BATCH,
        pg_collection=ProcessGroupCollection(pp=collectives.world()),
    )
    return told


def test_some_microbatches_recompute_everything(world):
    """Of the micro-batches in flight on a stage (two on the first, one on the last) all but one."""
    assert world(2).run(_told_to_recompute) == [[False, True, False, True], [False] * 4]


class Gone(Exception):
    """Stands for the end of a process."""


def _leaves():
    """Rank 1 leaves its groups before the backward of its second micro-batch. Returns: what rank 0 is told."""
    seen = 0

    def leaving(output):
        nonlocal seen
        seen += 1
        if seen == 2:
            collectives.forget_groups()  # as `finish` does: a group that is referred to keeps its connections
            dist.destroy_process_group()
            raise Gone
        return squared(output)

    config = make_config()
    try:
        get_forward_backward_func(2)(
            forward_step_func=lambda iterator, model: (model(next(iterator)), leaving),
            data_iterator=iter([batch_of(m) for m in range(3)]),
            model=Stack(config, [dist.get_rank()]),
            num_microbatches=3,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
            pg_collection=ProcessGroupCollection(pp=collectives.world()),
        )
    except (PeerLost, Gone) as error:
        return str(error)


def test_a_lost_peer_is_named_with_the_pass():
    """Which stage, which micro-batch, which action: without them a hang of 16 stages is a riddle."""
    with World(2) as world:
        told, _ = world.run(_leaves)
    assert "pipeline stage 0, receiving gradients of activations of B1 from stage 1" in told
