"""Fully sharded models train as one process does, go on from others' checkpoints, and hold what the formula says."""

from __future__ import annotations

import pytest
import torch

from megatron_lite import collectives
from megatron_lite.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallelConfig, held_part
from megatron_lite.errors import ConfigError, RankFailure
from megatron_lite.model_parallel_config import ModelParallelConfig
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.training.layout_check import TOLERANCE, table
from megatron_lite.training.record import RankRecord, record_rank
from tests.distributed.layouts import Layout, Matrix, run
from tests.distributed.resume import folder_words, losses_of, saver, train

TORCH = ("--use-torch-fsdp2",)
MEGATRON = ("--use-megatron-fsdp",)
ZERO2 = (*MEGATRON, "--data-parallel-sharding-strategy", "optim_grads")
META = "--init-model-with-meta-device"


@pytest.fixture(scope="module")
def matrix(world) -> Matrix:
    """Rows on the session's worlds."""
    return Matrix(world)


def agrees(matrix: Matrix, layout: Layout) -> None:
    """The row's numbers are those of one process."""
    rows = matrix.check(layout)
    assert all(row.is_ok for row in rows), f"{layout}\n{table(rows)}"


ROWS = [
    Layout(dp=2, micro_batch_size=1, split=TORCH),
    Layout(dp=2, model="llama", micro_batch_size=1, split=(*TORCH, "--torch-fsdp2-no-reshard-after-forward")),
    Layout(dp=4, micro_batch_size=1, split=ZERO2),
    Layout(dp=4, model="llama", micro_batch_size=1, optimizer_instances=2, split=(*MEGATRON, META)),
    Layout(dp=4, micro_batch_size=1, average_in_collective=True, optimizer_instances=2, split=MEGATRON),
    Layout(dp=2, split=(*MEGATRON, "--data-parallel-sharding-strategy", "optim")),
    Layout(dp=2, split=(*MEGATRON, "--data-parallel-sharding-strategy", "no_shard")),
    Layout(model="llama", tp=2, sp=True, dp=2, split=MEGATRON),
    Layout(model="llama", cp=2, dp=2, recompute="full", split=TORCH),
    Layout(model="llama", dp=2, recompute="selective", split=(*ZERO2, META)),
    Layout(dp=2, per_token_loss=True, micro_batch_size=1, split=MEGATRON),
    Layout(dp=3, model="llama", micro_batch_size=1, flags=("--global-batch-size", "6"), split=(*TORCH, META)),
    Layout(dp=2, precision="bf16", split=TORCH),
    Layout(dp=2, precision="bf16", flags=("--grad-reduce-in-bf16",), model="llama", split=(*TORCH, META)),
    Layout(dp=2, precision="bf16", split=(*MEGATRON, "--megatron-fsdp-grad-comm-dtype", "bf16")),
    Layout(dp=2, split=(*TORCH, "--no-gradient-reduce-div-fusion")),
    Layout(dp=2, flags=("--optimizer", "sgd", "--decoupled-lr", "2e-3"), split=MEGATRON),
    Layout(dp=2, flags=("--optimizer", "lion"), split=TORCH),
    Layout(dp=2, split=(*MEGATRON, "--suggested-communication-unit-size", "30000")),
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ROWS, ids=str)
def test_fully_sharded_layouts_train_as_one_process(matrix, layout):
    """First weights, losses, gradients, norms, weights after five steps, with accumulation over micro-batches."""
    agrees(matrix, layout)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deepseek", "further", "latent-tied", "bert", "t5"])
def test_every_family_can_be_fully_sharded(matrix, model):
    """Tied words, further predictions, experts, encoders: nothing reads a weight that has not been gathered."""
    agrees(matrix, Layout(model=model, dp=2, split=MEGATRON))


# -- checkpoints -------------------------------------------------------------------------------------------------

STEPS = 3
FLAGS = ("--train-iters", str(2 * STEPS), "--global-batch-size", "12")
SAVED = {
    "dp2": Layout(dp=2, flags=FLAGS),
    "dp2-fsdp": Layout(dp=2, flags=FLAGS, split=TORCH),
    "dp3-fsdp": Layout(dp=3, flags=FLAGS, split=MEGATRON),
    "tp2-dp2-fsdp": Layout(tp=2, sp=True, dp=2, flags=FLAGS, split=MEGATRON),
    "hsdp": Layout(dp=4, micro_batch_size=1, optimizer_instances=2, flags=FLAGS, split=MEGATRON),
    "tp2-zero1": Layout(tp=2, dp=2, distributed_optimizer=True, flags=FLAGS),
    "dp2-bf16": Layout(dp=2, precision="bf16", flags=FLAGS),
    "dp2-bf16-fsdp": Layout(dp=2, precision="bf16", flags=FLAGS, split=TORCH),
    "dp3-bf16-zero1": Layout(dp=3, precision="bf16", distributed_optimizer=True, flags=FLAGS),
}
PAIRS = [
    ("dp2", "dp2-fsdp"),
    ("dp2-fsdp", "dp2-fsdp"),
    ("dp2-fsdp", "tp2-zero1"),
    ("tp2-dp2-fsdp", "dp3-fsdp"),
    ("dp3-fsdp", "dp2"),
    ("hsdp", "hsdp"),
    ("dp2-bf16", "dp2-bf16-fsdp"),
    ("dp2-bf16-fsdp", "dp2-bf16-fsdp"),
    ("dp2-bf16-fsdp", "dp3-bf16-zero1"),
]


@pytest.fixture(scope="module")
def saved(world, tmp_path_factory):
    """Layout -> (folder of its checkpoint at STEPS, its losses after that)."""
    return saver(world, tmp_path_factory, SAVED, train_and_save, STEPS)


def train_and_save(layout, words):
    return train(layout, words, 2 * STEPS, save_after=STEPS)


def go_on(layout, words):
    return train(layout, words, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("saving, loading", PAIRS)
def test_a_run_goes_on_from_and_to_whole_weights(world, saved, saving, loading):
    """Moments that do not follow their rows show in the second loss. The same layout: equal bit by bit. bf16: sums over
    ranks differ in their last bits."""
    root, expected = saved(saving)
    layout = SAVED[loading]
    ranks = world(layout.world_size).run(go_on, layout, folder_words(load=root))
    assert {seen.iteration for seen in ranks} == {STEPS}
    if saving == loading:
        assert losses_of(ranks) == expected
    assert losses_of(ranks) == pytest.approx(expected, rel=TOLERANCE[layout.precision].losses)


@pytest.mark.slow
def test_weights_alone_are_taken_up_without_an_optimizer_state(world, saved):
    """--finetune: the roundings that were read become the parts, in fp32."""
    root, _ = saved("dp2-bf16")
    words = [*folder_words(load=root), "--finetune"]
    sharded, whole = (losses_of(world(2).run(go_on, SAVED[name], words)) for name in ("dp2-bf16-fsdp", "dp2-bf16"))
    assert sharded == pytest.approx(whole, rel=1e-3)
    fresh = losses_of(world(2).run(go_on, SAVED["dp2-bf16-fsdp"], []))
    assert abs(sharded[0] - fresh[0]) > 1e-2  # it did load


# -- memory and traffic ------------------------------------------------------------------------------------------


def held_bytes(layout: Layout) -> tuple[int, int, int, int]:
    """(parameters of the whole model; bytes of weights, gradients, optimizer state on this rank)."""
    found: list[int] = []

    def look(model, optimizer) -> None:
        params = list(model[0].parameters())
        for param in params:  # a view of a larger storage would hide what is really kept
            part = held_part(param)
            assert part.untyped_storage().nbytes() <= (part.numel() + part[0].numel() + 1) * 4 + 256
        state = sum(t.nbytes for shard in optimizer.shards for t in shard.memory())
        grads = sum(buffer.grad_data.nbytes for buffer in model[0].grad_buffers)
        found.extend((sum(p.numel() for p in params), sum(held_part(p).nbytes for p in params), grads, state))

    run(layout, 1, _recorded(look))
    return tuple(found)


class _recorded:
    """`record_rank` with a look at model and optimizer before the first step."""

    def __init__(self, look):
        self.look = look

    def __call__(self, args, script, steps) -> RankRecord:
        return record_rank(args, script, steps, self.look)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_rank_holds_16_bytes_a_parameter_over_the_ranks(world, precision):
    """Weights, gradients and Adam's moments in fp32 are shared out by rows; each parameter's last row may be uneven."""
    ranks = world(4).run(held_bytes, Layout(dp=4, precision=precision, split=TORCH))
    numel = ranks[0][0]
    for place in (1, 2, 3):
        total = sum(rank[place] for rank in ranks)
        assert total == numel * (8 if place == 3 else 4)
        assert max(rank[place] for rank in ranks) <= total / 4 * 1.02


def traffic(layout: Layout) -> dict[tuple[str, str], tuple[int, int]]:
    """(kind, purpose) -> calls and bytes of the second step, of weights and gradients."""
    counts = run(layout, 2).traffic[1]
    return {
        (kind, purpose): value for (_, kind, purpose), value in counts.items() if purpose in ("parameters", "gradients")
    }


# Two layers and the root, over four micro-batches. The root stays whole between forward and backward.
@pytest.mark.parametrize(
    "words, gathers",
    [(MEGATRON, 4 * (2 + 2 + 1)), ((*TORCH, "--torch-fsdp2-no-reshard-after-forward"), 4 * 3), (ZERO2, 3)],
    ids=["ZeRO-3", "kept between passes", "ZeRO-2"],
)
def test_layers_are_gathered_for_each_pass_or_micro_batch_or_step(world, words, gathers):
    """Gradients are scattered in each micro-batch. Bytes are those of the weights, each padded to two equal parts."""
    seen = world(2).run(traffic, Layout(dp=2, micro_batch_size=1, split=words))[0]
    (scatters, scattered), (calls, gathered) = seen["reduce_scatter", "gradients"], seen["all_gather", "parameters"]
    assert (scatters, calls) == (4 * 3, gathers)
    if gathers == 3:
        assert scattered == 4 * gathered


def test_gradients_travel_in_the_format_that_is_asked_for(world):
    """--megatron-fsdp-grad-comm-dtype bf16 halves the bytes of an fp32 model's gradients, and of nothing else."""
    narrow, wide = (
        world(2).run(traffic, Layout(dp=2, split=(*MEGATRON, *words)))[0]
        for words in (("--megatron-fsdp-grad-comm-dtype", "bf16"), ())
    )
    scatter, gather = ("reduce_scatter", "gradients"), ("all_gather", "parameters")
    assert narrow[gather] == wide[gather] and narrow[scatter][0] == wide[scatter][0]
    assert 2 * narrow[scatter][1] == wide[scatter][1]


# -- what ends a run ---------------------------------------------------------------------------------------------


class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 6)
        self.last = torch.nn.Linear(6, 3, bias=False)
        torch.manual_seed(0)
        for param in self.parameters():
            torch.nn.init.normal_(param)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


def _groups() -> ProcessGroupCollection:
    world = collectives.world()
    return ProcessGroupCollection(dp=world, dp_cp=world, intra_dp_cp=world, intra_dist_opt=world)


def against_torch(rank_of=None) -> dict[str, float]:
    """One backward of a tiny model, against plain torch on all ranks' inputs: largest difference by parameter,
    relative to its largest gradient."""
    from megatron_lite.distributed import TorchFullyShardedDataParallel

    options = TorchFullyShardedDataParallelConfig(check_for_nan_in_grad=True)
    model = TorchFullyShardedDataParallel(
        ModelParallelConfig(), options, Tiny(), sub_modules_to_wrap={torch.nn.Linear}, pg_collection=_groups()
    )
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    inputs = torch.randn(ranks, 5, 4, generator=torch.Generator().manual_seed(1))
    mine = inputs[rank].clone()
    if rank_of == rank:
        mine[0, 0] = float("nan")
    model.zero_grad_buffer()
    model(mine).square().mean().backward()
    model.finish_grad_sync()
    plain = Tiny()
    plain(inputs).square().mean().backward()
    found = {}
    for (name, param), reference in zip(model.module.named_parameters(), plain.parameters()):
        (piece,) = param.shard.pieces or (None,)
        expected = reference.grad[piece.global_slices()] if piece else reference.grad[:0]
        difference = float((param.main_grad - expected).abs().max()) if expected.numel() else 0.0
        found[name] = difference / float(reference.grad.abs().max())
    return found


def test_gradients_are_those_of_torch_on_all_inputs(world):
    """A bias of three rows on four ranks: the last one holds nothing of it. Tolerance 1e-6."""
    for differences in world(4).run(against_torch):
        assert set(differences) == {"first.weight", "first.bias", "last.weight"}
        assert max(differences.values()) < 1e-6


def test_a_nan_names_the_rank_and_the_module_where_it_arose(world):
    with pytest.raises(RankFailure, match=r"rank 1: NaN or Inf in the gradient of (first|last)"):
        world(2).run(against_torch, 1)


def one_rank() -> str:
    from megatron_lite.distributed import FullyShardedDataParallel, TorchFullyShardedDataParallel

    said = []
    alone, two = ProcessGroupCollection(), _groups()
    for make in (
        lambda: TorchFullyShardedDataParallel(
            ModelParallelConfig(), DistributedDataParallelConfig(), Tiny(), pg_collection=alone
        ),
        lambda: FullyShardedDataParallel(
            ModelParallelConfig(), DistributedDataParallelConfig(), Tiny(), pg_collection=two
        ),
        lambda: TorchFullyShardedDataParallel(
            ModelParallelConfig(),
            DistributedDataParallelConfig(),
            torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).double()),
            pg_collection=two,
        ),
    ):
        with pytest.raises(ConfigError) as error:
            make()
        said.append(str(error.value))
    return "\n".join(said)


def test_what_cannot_be_sharded_is_told(world):
    said = world(2).run(one_rank)[0]
    assert "over one rank" in said and 'strategy="no_shard"' in said and "one number format" in said
