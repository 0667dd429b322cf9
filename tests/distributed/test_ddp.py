"""DDP and the optimizer on real ranks, against one process with the same global batch."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_lite import collectives
from megatron_lite.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron_lite.errors import RankFailure
from megatron_lite.model_parallel_config import ModelParallelConfig
from megatron_lite.process_groups_config import ProcessGroupCollection
from tests.unit.optimizer.models import SmallModel, rows_of, train_step, wrap

SAMPLES = 16


def _groups():
    return ProcessGroupCollection(dp=collectives.world(), dp_cp=collectives.world())


def _my_rows(step, microbatches):
    """This rank's micro-batches of a step."""
    return list(rows_of(step, SAMPLES).chunk(dist.get_world_size())[dist.get_rank()].chunk(microbatches))


def _train(options, dtype, microbatches, steps=3):
    ddp, optimizer = wrap(SmallModel(), dtype, ddp=options, pg_collection=_groups())
    norms = [train_step(ddp, optimizer, _my_rows(step, microbatches))[1] for step in range(steps)]
    return norms, [p.detach().clone() for p in ddp.module.parameters()]


def _train_alone(dtype=torch.float32, steps=3):
    ddp, optimizer = wrap(SmallModel(), dtype, ddp=dict(grad_reduce_in_fp32=True))
    norms = [train_step(ddp, optimizer, [rows_of(step, SAMPLES)])[1] for step in range(steps)]
    return norms, [p.detach().clone() for p in ddp.module.parameters()]


@pytest.mark.parametrize("dp", [2, 4])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(average_in_collective=True),
        dict(overlap_grad_reduce=True, bucket_size=1),
        dict(overlap_grad_reduce=True, bucket_size=100),
        dict(overlap_grad_reduce=True, average_in_collective=True, check_for_nan_in_grad=True),
    ],
    ids=["plain", "average", "a bucket each", "bucketed", "one bucket, checked"],
)
def test_ranks_train_as_one_process(world, dp, microbatches, options):
    """Norms and weights after 3 AdamW steps; fp32, relative 1e-5. All ranks bit-equal."""
    norms, weights = _train_alone()
    results = world(dp).run(_train, options, torch.float32, microbatches)
    for their_norms, their_weights in results:
        assert their_norms == pytest.approx(norms, rel=1e-5)
        for a, b, first in zip(their_weights, weights, results[0][1]):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
            assert torch.equal(a, first)


@pytest.mark.parametrize("grads_in_fp32", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_bf16_ranks_train_as_one_process(world, grads_in_fp32, overlap):
    """Rounding of 16 bits: norms to 2 %."""
    norms, _ = _train_alone(torch.bfloat16)
    options = dict(grad_reduce_in_fp32=grads_in_fp32, overlap_grad_reduce=overlap, bucket_size=64)
    for their_norms, _ in world(2).run(_train, options, torch.bfloat16, 4):
        assert their_norms == pytest.approx(norms, rel=2e-2)


def _train_with_torch(microbatches):
    model = nn.parallel.DistributedDataParallel(SmallModel())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=0.01,
    )
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        parts = _my_rows(step, microbatches)
        for i, rows in enumerate(parts):
            model.require_backward_grad_sync = i + 1 == len(parts)
            (model(rows).float().square().sum(1).mean() / len(parts)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
    return norms, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("overlap", [True, False])
def test_training_equals_torchs_ddp(world, microbatches, overlap):
    """torch.nn.parallel.DistributedDataParallel with torch.optim.AdamW; relative 1e-5."""
    ours = world(2).run(_train, dict(overlap_grad_reduce=overlap, bucket_size=64), torch.float32, microbatches)
    theirs = world(2).run(_train_with_torch, microbatches)
    for (norms, weights), (their_norms, their_weights) in zip(ours, theirs):
        assert norms == pytest.approx(their_norms, rel=1e-5)
        for a, b in zip(weights, their_weights):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def _traffic(overlap):
    """Calls and bytes of gradients before and after `finish_grad_sync`, by step."""
    options = DistributedDataParallelConfig(overlap_grad_reduce=overlap, bucket_size=64)
    ddp = DistributedDataParallel(ModelParallelConfig(), options, SmallModel(), pg_collection=_groups())
    counts = []
    for step in range(3):
        ddp.zero_grad_buffer()
        collectives.COUNTERS.clear()
        rows = _my_rows(step, 4)
        for part in rows[:-1]:
            with ddp.no_sync():
                ddp.module.loss(part).backward()
        assert not collectives.COUNTERS  # nothing is sent before the last micro-batch
        ddp.module.loss(rows[-1]).backward()
        in_backward = sum(calls for calls, _ in collectives.COUNTERS.values())
        ddp.finish_grad_sync()
        ((key, (calls, bytes)),) = collectives.COUNTERS.items()
        assert key[1:] == ("all_reduce", "gradients")
        counts.append((in_backward, calls, bytes))
    return len(ddp.bucket_groups), ddp.grad_buffers[0].grad_data.numel() * 4, counts


def test_buckets_start_inside_backward_from_the_second_step_on(world):
    """One collective for each bucket and step, and the bytes of the buffer once."""
    for groups, size, counts in world(2).run(_traffic, True):
        assert groups >= 3
        assert counts == [(0, groups, size), (groups, groups, size), (groups, groups, size)]
    for groups, size, counts in world(2).run(_traffic, False):
        assert groups == 1 and counts == [(0, 1, size)] * 3


def _launch_order():
    """Numbers of buckets in the order in which their reductions start, second step."""
    options = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1)
    ddp = DistributedDataParallel(ModelParallelConfig(), options, SmallModel(), pg_collection=_groups())
    started = []
    for number, group in enumerate(ddp.bucket_groups):
        start = group.start_grad_sync
        group.start_grad_sync = lambda *_, number=number, start=start: (started.append(number), start())
    for step in range(2):
        started.clear()
        ddp.zero_grad_buffer()
        ddp.module.loss(_my_rows(step, 1)[0]).backward()
        ddp.finish_grad_sync()
    return started, [list(group.buckets[0].params) for group in ddp.bucket_groups]


def test_the_last_layers_bucket_starts_first(world):
    for started, names in world(2).run(_launch_order):
        order = [names[number][0].split(".")[0] for number in started]
        assert order == sorted(order, key=["second", "norm", "first", "embedding"].index)
        assert sorted(started) == list(range(len(names)))


def _no_sync_keeps_apart():
    ddp, _ = wrap(SmallModel(), ddp=dict(overlap_grad_reduce=True), pg_collection=_groups())
    ddp.zero_grad_buffer()
    with ddp.no_sync():
        ddp.module.loss(_my_rows(0, 1)[0]).backward()
    alone = ddp.grad_buffers[0].grad_data.clone()
    reference = SmallModel()
    reference.loss(_my_rows(0, 1)[0]).backward()
    return alone, torch.cat([p.grad.flatten() for p in reversed(list(reference.parameters()))])


def test_no_sync_leaves_other_ranks_gradients_out(world):
    results = world(2).run(_no_sync_keeps_apart)
    for alone, expected in results:
        torch.testing.assert_close(alone, expected, atol=1e-6, rtol=1e-6)
    assert not torch.allclose(results[0][0], results[1][0])


def _poisoned_rank(overlap, sharded):
    """Rank 1's own gradient is NaN. The other rank must not see a message of rank 1's: it stops before sending."""
    if dist.get_rank() == 0:
        return "rank 0 waits for nobody in this test"
    options = DistributedDataParallelConfig(
        check_for_nan_in_grad=True, overlap_grad_reduce=overlap, use_distributed_optimizer=sharded
    )
    ddp = DistributedDataParallel(ModelParallelConfig(), options, SmallModel(), pg_collection=_groups())
    before = [p.detach().clone() for p in ddp.module.parameters()]
    ddp.zero_grad_buffer()
    ddp.module.norm.weight.register_hook(lambda g: g * math.nan)
    try:
        ddp.module.loss(_my_rows(0, 1)[0]).backward()
        ddp.finish_grad_sync()
    except RankFailure as error:
        unchanged = all(torch.equal(a, b) for a, b in zip(before, ddp.module.parameters()))
        return str(error), unchanged, dict(collectives.COUNTERS)
    return "nothing was noticed"


@pytest.mark.parametrize(("overlap", "sharded"), [(True, False), (False, False), (True, True)])
def test_C065_the_rank_with_the_bad_gradient_is_named_before_anything_is_sent(world, overlap, sharded):
    message, unchanged, traffic = world(2).run(_poisoned_rank, overlap, sharded)[1]
    assert "norm.weight" in message and unchanged and not traffic
    assert message.startswith("rank 1: NaN or Inf in the gradient of norm.weight")


def _one_rank_overflows(dtype):
    """A step in which rank 1's gradient is Inf, between good ones. No check: skipping is on."""
    ddp, optimizer = wrap(SmallModel(), dtype, optimizer=dict(initial_loss_scale=64.0), pg_collection=_groups())
    train_step(ddp, optimizer, _my_rows(0, 1))
    before = {k: v.clone() for k, (v, _) in optimizer.sharded_state().items()}
    before |= {n: p.detach().clone() for n, p in ddp.module.named_parameters()}
    ddp.zero_grad_buffer()
    ddp.module.loss(_my_rows(1, 1)[0]).backward()
    if dist.get_rank() == 1:
        ddp.module.first.bias.main_grad[0] = math.inf
    ddp.finish_grad_sync()
    result = optimizer.step()
    after = {k: v for k, (v, _) in optimizer.sharded_state().items()} | dict(ddp.module.named_parameters())
    unchanged = all(torch.equal(before[k], after[k]) for k in before)
    succeeded, norm, _ = train_step(ddp, optimizer, _my_rows(2, 1))
    return result, unchanged, succeeded, norm, optimizer.common_state()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_C064_inf_on_one_rank_skips_the_step_on_all(world, dtype):
    """Weights and moments bit-equal to before; the next step is finite and the same on all ranks."""
    first, second = world(2).run(_one_rank_overflows, dtype)
    assert first == second
    result, unchanged, succeeded, norm, common = first
    assert result == (False, None, None) and unchanged and succeeded and 0 < norm < math.inf
    assert common["step"] == 2


def _unused_with_overlap(sharded):
    model = SmallModel()
    model.extra = nn.Linear(3, 3)
    shards = dict(use_distributed_optimizer=sharded, overlap_param_gather=sharded)
    options = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1, **shards)
    ddp = DistributedDataParallel(ModelParallelConfig(), options, model, pg_collection=_groups())
    ddp.zero_grad_buffer()
    model.loss(_my_rows(0, 1)[0]).backward()
    try:
        ddp.finish_grad_sync()
    except RankFailure as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize("sharded", [False, True])
def test_C081_an_unused_parameter_is_named_on_all_ranks_and_nothing_hangs(world, sharded):
    for message in world(2).run(_unused_with_overlap, sharded):
        assert "no gradient came for extra." in message


def _frozen_every_second(steps=3):
    model = SmallModel()
    for number, param in enumerate(model.parameters()):
        param.requires_grad_(number % 2 == 1)
    before = [p.detach().clone() for p in model.parameters()]
    ddp, optimizer = wrap(model, ddp=dict(overlap_grad_reduce=True, bucket_size=1), pg_collection=_groups())
    for step in range(steps):
        assert train_step(ddp, optimizer, _my_rows(step, 2))[0]
    return [torch.equal(a, b) for a, b in zip(before, model.parameters())], [
        p.requires_grad for p in model.parameters()
    ]


def test_C082_every_second_parameter_frozen_with_tiny_buckets(world):
    for unchanged, trains in world(2).run(_frozen_every_second):
        assert unchanged == [not t for t in trains] and any(trains) and not all(trains)


def _broadcast():
    model = SmallModel(seed=dist.get_rank())
    model.norm.requires_grad_(False)
    model.norm.weight.data.fill_(float(dist.get_rank() + 2))
    ddp, _ = wrap(model, pg_collection=_groups())
    ddp.broadcast_params()
    return [p.detach().clone() for p in model.parameters()]


def test_broadcast_gives_all_ranks_the_first_ones_weights(world):
    expected = SmallModel(seed=0)
    nn.init.constant_(expected.norm.weight, 2.0)
    for weights in world(2).run(_broadcast):
        assert all(torch.equal(a, b) for a, b in zip(weights, expected.parameters(), strict=True))


def _per_token():
    """Ranks with 3 and 5 tokens whose summed losses have gradients 6 and 2."""
    config = ModelParallelConfig()
    config.calculate_per_token_loss = True
    model = nn.Linear(1, 1, bias=False)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), model, pg_collection=_groups())
    ddp.zero_grad_buffer()
    ddp(torch.tensor([[6.0, 2.0][dist.get_rank()]])).sum().backward()
    finalize_model_grads([ddp], torch.tensor([3, 5][dist.get_rank()]), pg_collection=_groups())
    return model.weight.main_grad.item()


def test_per_token_gradients_are_sums_over_all_tokens(world):
    """(6 + 2) / 8 = 1; a mean of means would give 1.2."""
    assert world(2).run(_per_token) == [1.0, 1.0]


def _tensor_parallel_norm():
    """A column-split weight [3] and [4], a replicated bias [12]; rank 1 counts only what is split."""
    tp = ProcessGroupCollection(tp=collectives.world(), mp=collectives.world())
    model = nn.Linear(1, 1)
    model.weight.tensor_model_parallel = True
    ddp, optimizer = wrap(model, optimizer=dict(log_num_zeros_in_grad=True, clip_grad=1.0, lr=0.0), pg_collection=tp)
    ddp.zero_grad_buffer()
    model.weight.main_grad.fill_([3.0, 4.0][dist.get_rank()])
    model.bias.main_grad.fill_(12.0)
    _, norm, zeros = optimizer.step()
    model.bias.main_grad.fill_(0.0)
    return norm, zeros, optimizer.step()[2], model.weight.main_grad.item()


def test_the_norm_counts_a_replicated_parameter_once(world):
    """sqrt(9 + 16 + 144) = 13, not 17.7; clipped by 1 / 13; one zero, not two."""
    for rank, (norm, zeros, with_zero_bias, clipped) in enumerate(world(2).run(_tensor_parallel_norm)):
        assert norm == pytest.approx(13.0, rel=1e-6) and (zeros, with_zero_bias) == (0, 1)
        assert clipped == pytest.approx([3.0, 4.0][rank] / 13.000001, rel=1e-6)


def _groups_of_stages():
    """Rank 1's stage has biases only."""
    model = SmallModel()
    if dist.get_rank() == 1:
        for name, param in model.named_parameters():
            param.requires_grad_(name.endswith("bias"))
    stage = ProcessGroupCollection(pp=collectives.world(), mp=collectives.world())
    ddp, optimizer = wrap(model, pg_collection=stage)
    ddp.zero_grad_buffer()
    model.loss(rows_of(0, 4)).backward()
    return [(g["wd_mult"], len(g["params"]) > 0) for g in optimizer.param_groups], optimizer.step()[:2]


def test_stages_with_other_parameters_have_the_same_groups_and_norm(world):
    (first, step), (second, other) = world(2).run(_groups_of_stages)
    assert first == [(1.0, True), (0.0, True)] and second == [(1.0, False), (0.0, True)]
    assert step == other and step[0]


def _tensor_parallel_sums():
    """Gradients 1 and 3 of a norm under sequence parallelism, of one that is averaged, and of an ordinary parameter."""
    tp = ProcessGroupCollection(tp=collectives.world())
    config = ModelParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
    model = nn.ParameterDict(
        {name: nn.Parameter(torch.ones(2)) for name in ("norm", "averaged", "plain", "q_layernorm")}
    )
    model["norm"].sequence_parallel = True
    model["averaged"].average_gradients_across_tp_domain = True
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), model, pg_collection=tp)
    ddp.zero_grad_buffer()
    for param in model.values():
        param.main_grad.fill_([1.0, 3.0][dist.get_rank()])
    finalize_model_grads([ddp], pg_collection=tp)
    return {name: param.main_grad[0].item() for name, param in model.items()}, dict(collectives.COUNTERS)


def test_gradients_that_tensor_parallel_ranks_share_are_summed_or_averaged(world):
    for rank, (grads, traffic) in enumerate(world(2).run(_tensor_parallel_sums)):
        assert grads == {"norm": 4.0, "q_layernorm": 4.0, "averaged": 2.0, "plain": [1.0, 3.0][rank]}
        assert [calls for calls, _ in traffic.values()] == [2]  # one for the sums, one for the mean


def _tied_embedding():
    """First and last stage hold a copy each."""
    stages = ProcessGroupCollection(pp=collectives.world(), embd=collectives.world(), mp=collectives.world())
    model = nn.Linear(2, 2, bias=False)
    model.weight.shared_embedding = True
    model.weight.shared = dist.get_rank() == 1
    ddp, optimizer = wrap(model, pg_collection=stages)
    ddp.zero_grad_buffer()
    model.weight.main_grad.fill_([1.0, 3.0][dist.get_rank()])
    finalize_model_grads([ddp], pg_collection=stages)
    return model.weight.main_grad.clone(), optimizer.step()[1]


def test_copies_of_a_tied_embedding_get_the_sum_and_count_once(world):
    for grad, norm in world(2).run(_tied_embedding):
        assert norm == pytest.approx(math.sqrt(4 * 16)) and grad.std() == 0
