"""DDP for a distributed optimizer on real ranks: sums reach the shard's owner, new shards reach everybody, in order.

What an optimizer would write into its shard is written here by hand, so that nothing but data parallelism is tested.
"""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_lite import collectives, parallel_state
from megatron_lite.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron_lite.model_parallel_config import ModelParallelConfig
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.training.model_setup import params_norm

WIDTH, LAYERS = 30, 4


def _groups():
    return ProcessGroupCollection(dp=collectives.world(), dp_cp=collectives.world())


def _model(dtype=torch.float32):
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    return nn.Sequential(*layers).to(dtype)


def _wrap(module=None, pg_collection=None, **options):
    config = DistributedDataParallelConfig(**options)
    return DistributedDataParallel(
        ModelParallelConfig(), config, module or _model(), pg_collection=pg_collection or _groups()
    )


def _loss(ddp, step, rank=None):
    """Of this rank's own batch; batches differ by rank and step."""
    rank = dist.get_rank() if rank is None else rank
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
    return ddp(x.to(next(ddp.parameters()).dtype)).float().square().mean()


def _backward(ddp, step):
    ddp.zero_grad_buffer()
    _loss(ddp, step).backward()
    ddp.finish_grad_sync()


def _grads(ddp):
    """By name, as they lie in the buffer."""
    return {n: b.params[n].main_grad.clone() for b in ddp.grad_buffers for n in b.params}


def _shards_beside_the_whole(options, dtype, instances):
    """For each step: whether every shard is bit for bit a part of what plain DDP has on every rank."""
    pg = _groups()
    if instances > 1:
        pg = parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=instances)
    common = {k: options.pop(k) for k in ("average_in_collective", "gradient_reduce_div_fusion") if k in options}
    sharded = _wrap(
        _model(dtype),
        pg,
        use_distributed_optimizer=True,
        num_distributed_optimizer_instances=instances,
        **common,
        **options,
    )
    plain = _wrap(_model(dtype), **common)
    equal, owned = [], 0
    for step in range(3):
        _backward(sharded, step)
        _backward(plain, step)
        (buffer,), (whole,) = sharded.grad_buffers, plain.grad_buffers
        for bucket in buffer.buckets:
            for name in bucket.params:
                place, there = buffer.layout.ranges[name], whole.layout.ranges[name]
                own = place.overlap(bucket.shard)
                if own is not None:
                    a = buffer.grad_data[own.start : own.end]
                    b = whole.grad_data[own.start - place.start + there.start :][: own.size]
                    close = torch.allclose(a, b, rtol=1e-6, atol=1e-9)
                    equal.append((torch.equal(a, b), close, float(b.abs().sum()) > 0))
                    owned += own.size
    parallel_state.destroy_model_parallel()
    return equal, owned


@pytest.mark.parametrize("dp", [2, 3, 4])
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(average_in_collective=True),
        dict(gradient_reduce_div_fusion=False, overlap_grad_reduce=True, bucket_size=1),
        dict(overlap_grad_reduce=True, bucket_size=1500, pad_buckets_for_high_nccl_busbw=True),
    ],
    ids=["plain", "average", "a bucket each, divided first", "padded"],
)
def test_a_reduced_shard_is_bit_for_bit_a_part_of_the_all_reduced_gradient(world, dp, options):
    results = world(dp).run(_shards_beside_the_whole, options, torch.float32, 1)
    for equal, _ in results:
        assert all(same and not_zero for same, _, not_zero in equal)
    assert sum(owned for _, owned in results) == 3 * sum(p.numel() for p in _model().parameters())


@pytest.mark.parametrize("options", [dict(), dict(average_in_collective=True, overlap_grad_reduce=True, bucket_size=1)])
def test_two_optimizer_instances_own_the_sums_of_all_ranks_twice(world, options):
    """Sums of sums: rounding may differ from the sum over four."""
    results = world(4).run(_shards_beside_the_whole, options, torch.float32, 2)
    for equal, _ in results:
        assert all(close and not_zero for _, close, not_zero in equal)
    assert sum(owned for _, owned in results) == 2 * 3 * sum(p.numel() for p in _model().parameters())


def _fp16_near_its_limit(sharded):
    """Four ranks with gradients of 40000: their sum leaves fp16, their mean does not."""
    ddp = _wrap(_model(torch.float16), use_distributed_optimizer=sharded)
    ddp.zero_grad_buffer()
    (buffer,) = ddp.grad_buffers
    buffer.grad_data.fill_(40000.0)
    ddp.finish_grad_sync()
    return [bucket.grad_shard.unique().tolist() for bucket in buffer.buckets]


@pytest.mark.parametrize("sharded", [False, True])
def test_fp16_gradients_are_divided_before_they_are_summed(world, sharded):
    assert world(4).run(_fp16_near_its_limit, sharded) == [[[40000.0]]] * 4


def _error_of_the_sum(options):
    """Largest error of the shard's gradients, against fp64 sums of what the ranks have, relative to the largest."""
    ddp = _wrap(_model(torch.bfloat16), use_distributed_optimizer=True, **options)
    ddp.zero_grad_buffer()
    (buffer,) = ddp.grad_buffers
    generators = [torch.Generator().manual_seed(rank) for rank in range(dist.get_world_size())]
    values = [torch.randn(buffer.layout.numel, generator=g).bfloat16() for g in generators]
    buffer.grad_data.copy_(values[dist.get_rank()])
    exact = torch.stack(values).double().mean(0)
    ddp.finish_grad_sync()
    errors = [
        (bucket.grad_shard.double() - exact[bucket.shard.start : bucket.shard.end]).abs().max().item()
        for bucket in buffer.buckets
    ]
    rounded_once = [
        torch.equal(bucket.grad_shard, exact[bucket.shard.start : bucket.shard.end].bfloat16())
        for bucket in buffer.buckets
    ]
    return max(errors), all(rounded_once)


def test_fp32_accumulation_rounds_bf16_sums_once(world):
    plain = world(4).run(_error_of_the_sum, dict())
    better = world(4).run(_error_of_the_sum, dict(reduce_scatter_with_fp32_accumulation=True))
    for (error, once), (less, exactly) in zip(plain, better):
        assert less < error and exactly and not once


def _accumulated_with_overlap():
    """The ranks' own gradients, gathered and added up in fp64, against the shards; several buckets in flight."""
    options = dict(use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=900)
    ddp = _wrap(_model(torch.bfloat16), reduce_scatter_with_fp32_accumulation=True, **options)
    alone = _wrap(_model(torch.bfloat16), **options)
    exact = True
    for step in range(3):
        _backward(ddp, step)
        alone.zero_grad_buffer()
        with alone.no_sync():
            _loss(alone, step).backward()
        own = alone.grad_buffers[0].grad_data
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        mean = torch.stack(parts).double().mean(0).float().bfloat16()
        for bucket in ddp.grad_buffers[0].buckets:
            exact &= torch.equal(bucket.grad_shard, mean[bucket.shard.start : bucket.shard.end])
    return exact, len(ddp.bucket_groups)


def test_fp32_accumulation_of_several_buckets_in_backward(world):
    assert world(4).run(_accumulated_with_overlap) == [(True, LAYERS)] * 4


def _full_gradients(ask):
    sharded = _wrap(use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=1500)
    plain = _wrap()
    same = []
    for step in range(2):
        sharded.zero_grad_buffer()
        if ask == "attribute":
            sharded.force_all_reduce = True
        _loss(sharded, step).backward()
        sharded.finish_grad_sync(force_all_reduce=ask == "argument" and step == 0)
        _backward(plain, step)
        grads = _grads(plain)
        same.append(all(torch.equal(g, grads[n]) for n, g in _grads(sharded).items()))
    return same


def test_full_gradients_come_to_every_rank_when_asked_for(world):
    """By attribute in every step; by argument where the reduction starts in `finish_grad_sync`, as in the first."""
    for attribute in world(2).run(_full_gradients, "attribute"):
        assert attribute == [True, True]
    for argument in world(2).run(_full_gradients, "argument"):
        assert argument == [True, False]


def _expert_and_dense(average):
    """Gradient 1, 2, 3, 4 on ranks 0 to 3 of a dense and of an expert weight; two expert-parallel ranks."""
    pg = parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(3)) for name in ("dense", "expert")})
    model["expert"].allreduce = False
    ddp = _wrap(model, pg, average_in_collective=average)
    ddp.zero_grad_buffer()
    for param in model.values():
        param.main_grad.fill_(dist.get_rank() + 1.0)
    finalize_model_grads([ddp], pg_collection=pg)
    parallel_state.destroy_model_parallel()
    return {name: param.main_grad[0].item() for name, param in model.items()}


@pytest.mark.parametrize("average", [False, True])
def test_expert_gradients_are_divided_by_all_data_parallel_ranks(world, average):
    """Ranks 0 and 2 hold one expert, 1 and 3 the other: (1 + 3) / 4 and (2 + 4) / 4; dense (1 + 2 + 3 + 4) / 4."""
    results = world(4).run(_expert_and_dense, average)
    assert results == [{"dense": 2.5, "expert": 1.0 + 0.5 * (rank % 2)} for rank in range(4)]


# -- parameters --------------------------------------------------------------------------------------------------


def _update(ddp, step):
    """Stands for an optimizer: every owner changes its shard by what only it knows."""
    with torch.no_grad():
        for buffer in ddp.grad_buffers:
            for bucket in buffer.buckets:
                bucket.param_shard.add_(bucket.grad_shard, alpha=-0.1 * (step + 1))
    ddp.params_updated()


def _weights(ddp):
    return {name: p.detach().clone() for name, p in ddp.module.named_parameters()}


def _train(options, dtype=torch.float32, steps=3):
    """Losses, weights read through `state_dict`, traffic of the parameters by step."""
    ddp = _wrap(_model(dtype), **options)
    losses, calls = [], []
    for step in range(steps):
        collectives.COUNTERS.clear()
        ddp.zero_grad_buffer()
        for microbatch in range(2):
            with ddp.no_sync() if microbatch == 0 else _nothing():
                loss = _loss(ddp, 2 * step + microbatch)
                loss.backward()
        losses.append(loss.item())
        finalize_model_grads([ddp], pg_collection=_groups())
        _update(ddp, step)
        calls.append({key[1:]: tuple(value) for key, value in collectives.COUNTERS.items()})
    weights = {name: value.clone() for name, value in ddp.state_dict().items()}
    assert all(torch.equal(weights[name], value) for name, value in _weights(ddp).items())
    sizes = [
        (b.layout.numel * b.grad_data.element_size(), b.layout.numel * b.param_data.element_size())
        for b in ddp.grad_buffers
    ]
    return losses, weights, calls, len(ddp.bucket_groups), sizes


class _nothing:
    def __enter__(self):
        return None

    def __exit__(self, *error):
        return None


OVERLAPPED = dict(use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True)


@pytest.mark.parametrize("dp", [2, 4])
@pytest.mark.parametrize(
    "options",
    [
        dict(use_distributed_optimizer=True),
        dict(OVERLAPPED, bucket_size=1),
        dict(OVERLAPPED, bucket_size=1500),
        dict(OVERLAPPED, bucket_size=1500, align_param_gather=True),
    ],
    ids=["in the step", "a bucket each", "bucketed", "aligned"],
)
def test_C077_forward_sees_the_weights_that_the_owners_wrote(world, dp, options):
    """Against plain DDP, where every rank updates everything: losses and weights bit-equal, on all ranks."""
    expected = world(dp).run(_train, dict())
    for (losses, weights, calls, groups, sizes), (their_losses, their_weights, *_) in zip(
        world(dp).run(_train, options), expected
    ):
        assert losses == their_losses
        assert all(torch.equal(weights[name], value) for name, value in their_weights.items())
        ((grads, params),) = sizes
        for step, traffic in enumerate(calls):
            assert traffic["reduce_scatter", "gradients"] == (groups, grads)
            if "overlap_param_gather" in options and step == 0:
                assert ("all_gather", "parameters") not in traffic
            else:  # with overlap, what the step before has changed: once, however many micro-batches there are
                assert traffic["all_gather", "parameters"] == (groups, params)


def _events():
    """Names of what began, in order, in the third step's forward and backward, from a torch.profiler trace."""
    ddp = _wrap(bucket_size=WIDTH * WIDTH, **OVERLAPPED)
    assert len(ddp.bucket_groups) == LAYERS
    for step in range(2):
        _backward(ddp, step)
        _update(ddp, step)

    def begin(name):
        with record_function(name):
            pass

    for number, layer in enumerate(ddp.module):
        layer.register_forward_hook(lambda *_, number=number: begin(f"forward {number} done"))
    ddp.zero_grad_buffer()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        loss = _loss(ddp, 2)
        loss.backward()
        begin("backward done")
        ddp.finish_grad_sync()
    events = sorted(trace.events(), key=lambda event: event.time_range.start)
    wanted = ("gather", "reduce", "forward", "backward")
    return [event.name for event in events if event.name.split()[0] in wanted]


def test_reduces_start_inside_backward_and_gathers_before_the_last_layer(world):
    """Bucket group 3 holds the first layer, 0 the last. While a layer computes, the next one's weights travel; the last
    layer's gradients travel while the others are still computed."""
    for events in world(2).run(_events):
        assert events == [
            "gather bucket group 3",
            "gather bucket group 2",
            "forward 0 done",
            "gather bucket group 1",
            "forward 1 done",
            "gather bucket group 0",
            "forward 2 done",
            "forward 3 done",
            "reduce bucket group 0",
            "reduce bucket group 1",
            "reduce bucket group 2",
            "reduce bucket group 3",
            "backward done",
        ]


def _read_between_steps(overlap):
    options = OVERLAPPED if overlap else dict(use_distributed_optimizer=True)
    ddp = _wrap(bucket_size=1500 if overlap else None, **options)
    _backward(ddp, 0)
    _update(ddp, 0)
    norm = params_norm([ddp], _groups())
    whole = torch.cat([p.detach().flatten() for p in ddp.module.parameters()])
    parts = [torch.empty_like(whole) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, whole)
    return norm, [float(part.double().norm()) for part in parts]


@pytest.mark.parametrize("overlap", [False, True])
def test_C138_the_norm_of_parameters_is_that_of_the_whole_new_ones(world, overlap):
    """Would show: a norm of fresh shards and stale rest, different on every rank."""
    results = world(2).run(_read_between_steps, overlap)
    assert results[0] == results[1]
    for norm, parts in results:
        assert parts == pytest.approx([norm, norm], rel=1e-6)
        assert norm != pytest.approx(math.sqrt(sum(float(p.detach().square().sum()) for p in _model().parameters())))


def _hooks_off_and_on():
    ddp = _wrap(bucket_size=1500, **OVERLAPPED)
    plain = _wrap()
    same = []
    for step in range(4):
        if step == 2:
            ddp.disable_forward_pre_hook()
        if step == 3:
            ddp.enable_forward_pre_hook()
        for each in (ddp, plain):
            _backward(each, step)
        if step == 1:
            with torch.no_grad():
                _loss(ddp, 77)  # an evaluation between the step and the next
        for each in (ddp, plain):
            _update(each, step)
        gathered = all(not group._params_are_old for group in ddp.bucket_groups)
        same.append((gathered, [torch.equal(_loss(ddp, 9), _loss(plain, 9))]))
    return same


def test_hooks_can_be_taken_off_and_put_back(world):
    """Without them the step itself gathers."""
    for same in world(2).run(_hooks_off_and_on):
        assert same == [(number == 2, [True]) for number in range(4)]


def _loaded_while_a_gather_waits():
    ddp = _wrap(bucket_size=1500, **OVERLAPPED)
    _backward(ddp, 0)
    _update(ddp, 0)
    ddp.start_param_sync()  # under way, not waited for
    ddp.load_state_dict(_model().state_dict())
    _loss(ddp, 1)
    return all(torch.equal(a, b) for a, b in zip(ddp.module.parameters(), _model().parameters()))


def test_what_is_loaded_is_not_overwritten_by_a_late_gather(world):
    assert world(2).run(_loaded_while_a_gather_waits) == [True, True]


def _frozen_and_tied():
    """Every second parameter frozen, the first and the last layer one weight, tiny buckets, everything overlapped."""
    model, reference = (_frozen_model() for _ in range(2))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    ddp = _wrap(model, bucket_size=1, **OVERLAPPED)
    plain = _wrap(reference)
    for step in range(3):
        for each in (ddp, plain):
            _backward(each, step)
            _update(each, step)
    after = {n: v.clone() for n, v in ddp.state_dict().items()}
    changed = {n for n, v in before.items() if not torch.equal(v, after[n])}
    same = all(torch.equal(after[n], p) for n, p in plain.module.named_parameters())
    return same, changed, {n for n, p in model.named_parameters() if p.requires_grad}


def _frozen_model():
    model = _model()
    model[3].weight = model[0].weight
    for number, param in enumerate(model.parameters()):
        param.requires_grad_(number % 2 == 0)
    return model


def test_C082_frozen_and_shared_parameters_with_sharded_tiny_buckets(world):
    for same, changed, trainable in world(2).run(_frozen_and_tied):
        assert same and changed == trainable and "0.weight" in trainable and "0.bias" not in trainable


def _conditional_embedder():
    """A parameter that every stage holds; gradients 1 and 3."""
    pg = ProcessGroupCollection(pp=collectives.world())
    config = ModelParallelConfig()
    config.has_cond_embedder = True
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(2)) for name in ("condition", "own")})
    model["condition"].pipeline_parallel = True
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), model, pg_collection=pg)
    ddp.zero_grad_buffer()
    for param in model.values():
        param.main_grad.fill_([1.0, 3.0][dist.get_rank()])
    finalize_model_grads([ddp], pg_collection=pg)
    return {name: param.main_grad[0].item() for name, param in model.items()}


def test_conditional_embedders_sum_their_gradients_over_the_stages(world):
    assert world(2).run(_conditional_embedder) == [{"condition": 4.0, "own": own} for own in (1.0, 3.0)]


def _positions():
    """Learned positions on two stages, and on one of them in bf16 with fp32 accumulation apart."""
    pg = ProcessGroupCollection(pp=collectives.world(), pos_embd=collectives.world())
    model = nn.Linear(2, 2, bias=False).bfloat16()
    model.weight.shared_position_embedding = True
    ddp = _wrap(model, pg, param_name_patterns_for_fp32_local_accumulation=["all"])
    ddp.zero_grad_buffer()
    model.weight.main_grad.fill_([1.0, 3.0][dist.get_rank()])
    finalize_model_grads([ddp], pg_collection=pg)
    return ddp.grad_buffers[0].grad_data.float().tolist()


def test_positions_that_two_stages_hold_get_the_sum(world):
    """Also where the gradient was accumulated beside the buffer: it is the buffer that the optimizer reads."""
    assert world(2).run(_positions) == [[4.0] * 4] * 2
