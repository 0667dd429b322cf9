"""DDP on one process: flat memory, hooks, buckets, refusals. Several ranks: tests/distributed/test_ddp.py."""

import math

import pytest
import torch
from torch import nn

from megatron_lite import collectives
from megatron_lite.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron_lite.distributed.grad_checks import WARM_UP, LargeGradients
from megatron_lite.distributed.param_and_grad_buffer import reduced_grad
from megatron_lite.errors import ConfigError, RankFailure
from megatron_lite.model_parallel_config import ModelParallelConfig
from tests.unit.optimizer.models import SmallModel, rows_of


def _wrap(model=None, config=None, **ddp):
    return DistributedDataParallel(
        config or ModelParallelConfig(), DistributedDataParallelConfig(**ddp), model or SmallModel()
    )


def test_parameters_and_main_grads_are_views_of_flat_memory():
    ddp = _wrap()
    (buffer,) = ddp.grad_buffers
    reference = SmallModel()
    for (name, param), other in zip(ddp.module.named_parameters(), reference.parameters()):
        place = buffer.layout.ranges[name]
        assert torch.equal(param, other)
        assert param.data_ptr() == buffer.param_data[place.start :].data_ptr()
        assert param.main_grad.data_ptr() == buffer.grad_data[place.start :].data_ptr()
        assert param.main_grad.shape == param.shape
    assert buffer.param_data.numel() == sum(p.numel() for p in reference.parameters())


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("bucket_size", [1, 100, None])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_main_grads_equal_plain_autograd_over_several_steps(overlap, bucket_size, microbatches):
    ddp, reference = _wrap(overlap_grad_reduce=overlap, bucket_size=bucket_size), SmallModel()
    if overlap and bucket_size == 1:
        assert len(ddp.bucket_groups) == len(list(reference.parameters()))
    for step in range(3):
        ddp.zero_grad_buffer()
        reference.zero_grad()
        parts = rows_of(step, 8).chunk(microbatches)
        for part in parts[:-1]:
            with ddp.no_sync():
                ddp.module.loss(part).backward()
        ddp.module.loss(parts[-1]).backward()
        ddp.finish_grad_sync()
        for part in parts:
            reference.loss(part).backward()
        for param, other in zip(ddp.module.parameters(), reference.parameters()):
            assert param.grad is None
            torch.testing.assert_close(param.main_grad, other.grad, atol=1e-6, rtol=1e-6)
            assert other.grad.abs().sum() > 0


def test_buffers_are_made_per_dtype_with_gradients_in_fp32_when_asked_for():
    model = SmallModel().bfloat16()
    model.norm.float()
    ddp = _wrap(model, grad_reduce_in_fp32=True)
    kinds = {(b.param_dtype, b.grad_dtype): set(b.params) for b in ddp.grad_buffers}
    assert kinds[torch.float32, torch.float32] == {"norm.weight", "norm.bias"}
    assert len(kinds[torch.bfloat16, torch.float32]) == 5
    assert {b.grad_dtype for b in _wrap(SmallModel().bfloat16()).grad_buffers} == {torch.bfloat16}


def test_bf16_gradients_accumulate_in_fp32():
    """64 equal micro-batches: in bf16 the sum would stop growing."""
    ddp = _wrap(nn.Linear(1, 1, bias=False).bfloat16(), grad_reduce_in_fp32=True)
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    for _ in range(600):
        ddp(one).sum().backward()
    assert ddp.module.weight.main_grad.item() == 600


class _Fused(torch.autograd.Function):
    """y = x w, whose backward accumulates by itself. `stand_in`: returns one, as Megatron's layers do."""

    @staticmethod
    def forward(ctx, x, w, stand_in):
        ctx.save_for_backward(x, w)
        ctx.stand_in = stand_in
        return x @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        w.main_grad.addmm_(x.t(), g)
        if ctx.stand_in:
            w.grad_added_to_main_grad = True
            return g @ w.t(), torch.full_like(w, 77.0), None
        return g @ w.t(), None, None


class _FusedModel(nn.Module):
    def __init__(self, stand_in):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3))
        self.stand_in = stand_in

    def forward(self, x):
        return _Fused.apply(x, self.weight, self.stand_in)


@pytest.mark.parametrize("stand_in", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_layers_that_accumulate_by_themselves_are_counted_once(stand_in, overlap):
    """Would show: the stand-in added to the gradient, or a bucket that waits for a gradient that never comes."""
    ddp = _wrap(_FusedModel(stand_in), overlap_grad_reduce=overlap)
    x = torch.randn(5, 3, requires_grad=True)
    for _ in range(3):
        ddp.zero_grad_buffer()
        ddp(x).sum().backward()
        ddp.finish_grad_sync()
        expected = x.t() @ torch.ones(5, 3)
        torch.testing.assert_close(ddp.module.weight.main_grad, expected.detach(), atol=1e-6, rtol=1e-6)
        assert ddp.module.weight.grad is None


def test_a_second_unfused_use_of_a_fused_weight_is_added():
    """As in a tied embedding whose look-up is not fused."""
    ddp = _wrap(_FusedModel(False))
    x = torch.randn(5, 3)
    ddp.zero_grad_buffer()
    (ddp(x).sum() + (2 * ddp.module.weight).sum()).backward()
    expected = x.t() @ torch.ones(5, 3) + 2
    torch.testing.assert_close(ddp.module.weight.main_grad, expected, atol=1e-6, rtol=1e-6)


def test_zeros_that_stand_in_for_a_fused_gradient_carry_the_other_uses_along():
    """As Transformer Engine does for a tied weight: `zero_out_wgrad`."""
    ddp = _wrap(nn.Linear(1, 1, bias=False))
    weight = ddp.module.weight
    ddp.zero_grad_buffer()
    weight.main_grad.fill_(3.0)
    weight.grad_added_to_main_grad = True
    (2 * weight).sum().backward()
    assert weight.main_grad.item() == 3.0  # without the mark the gradient is a stand-in
    weight.zero_out_wgrad = True
    (2 * weight).sum().backward()
    assert weight.main_grad.item() == 5.0


def test_a_reduction_that_a_schedule_starts_is_not_started_again():
    """`grad_sync_func`: all chunks of all stages at once, after a backward under `no_sync`."""
    ddp = _wrap(overlap_grad_reduce=True, bucket_size=60)
    for step in range(3):
        ddp.zero_grad_buffer()
        with ddp.no_sync():
            ddp.module.loss(rows_of(step, 4)).backward()
        ddp.start_grad_sync()
        ddp.finish_grad_sync()
    with pytest.raises(RankFailure, match="came after its bucket had been sent"):
        ddp.zero_grad_buffer()
        ddp.start_grad_sync()
        ddp.module.loss(rows_of(0, 4)).backward()


def test_tied_weights_have_one_place_and_the_gradient_of_both_uses():
    """Would show: a parameter in two buckets, or a bucket that waits for a second gradient."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table, self.head = nn.Embedding(13, 7), nn.Linear(7, 13, bias=False)
            self.head.weight = self.table.weight

        def forward(self, rows):
            return self.head(self.table(rows))

    ddp, reference = _wrap(Tied(), overlap_grad_reduce=True, bucket_size=1), Tied()
    assert len(ddp.bucket_groups) == 1
    for step in range(3):
        ddp.zero_grad_buffer()
        reference.zero_grad()
        for model in (ddp, reference):
            model(rows_of(step, 4)).square().mean().backward()
        ddp.finish_grad_sync()
        torch.testing.assert_close(ddp.module.table.weight.main_grad, reference.table.weight.grad)


class _Partly(nn.Module):
    """Uses `sometimes` only when told to."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(3, 3), nn.Linear(3, 3)
        self.use = True

    def forward(self, x):
        return self.sometimes(self.always(x)) if self.use else self.always(x)


def _step(ddp, x):
    ddp.zero_grad_buffer()
    ddp(x).sum().backward()
    ddp.finish_grad_sync()


def test_C081_a_parameter_without_gradient_is_named_with_overlap_and_trains_without():
    ddp = _wrap(_Partly(), overlap_grad_reduce=True)
    ddp.module.use = False
    with pytest.raises(RankFailure, match=r"sometimes\.(weight|bias).*2 of 4 parameters"):
        _step(ddp, torch.ones(2, 3))
    plain = _wrap(_Partly())
    plain.module.use = False
    _step(plain, torch.ones(2, 3))
    assert plain.module.sometimes.weight.main_grad.abs().sum() == 0 < plain.module.always.weight.main_grad.abs().sum()


def test_a_gradient_that_stops_coming_is_named_in_the_step_where_it_does():
    ddp = _wrap(_Partly(), overlap_grad_reduce=True)
    for _ in range(2):
        _step(ddp, torch.ones(2, 3))
    ddp.module.use = False
    with pytest.raises(RankFailure, match=r"sometimes\.(weight|bias)"):
        _step(ddp, torch.ones(2, 3))


def test_a_gradient_that_comes_after_its_bucket_was_sent_is_named():
    ddp = _wrap(_Partly(), overlap_grad_reduce=True)
    _step(ddp, torch.ones(2, 3))
    ddp.zero_grad_buffer()
    ddp(torch.ones(2, 3)).sum().backward()
    with pytest.raises(RankFailure, match="came after its bucket had been sent"):
        ddp(torch.ones(2, 3)).sum().backward()


def test_C082_frozen_parameters_never_change_and_take_no_memory():
    model = SmallModel()
    for number, param in enumerate(model.parameters()):
        param.requires_grad_(number % 2 == 0)
    frozen = [p.detach().clone() for p in model.parameters() if not p.requires_grad]
    ddp = _wrap(model, overlap_grad_reduce=True, bucket_size=1)
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(ddp.grad_buffers[0].params) == names
    for step in range(3):
        ddp.zero_grad_buffer()
        model.loss(rows_of(step, 4)).backward()
        ddp.finish_grad_sync()
    after = [p for p in model.parameters() if not p.requires_grad]
    assert all(torch.equal(a, b) and a.grad is None for a, b in zip(frozen, after, strict=True))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_gradient_is_named_with_parameter_bucket_and_rank(overlap, bad):
    ddp = _wrap(check_for_nan_in_grad=True, overlap_grad_reduce=overlap, bucket_size=60)
    before = {n: p.detach().clone() for n, p in ddp.module.named_parameters()}
    ddp.zero_grad_buffer()
    ddp.module.norm.bias.register_hook(lambda g: g * bad)
    with pytest.raises(RankFailure, match=r"rank 0: NaN or Inf in the gradient of norm\.bias \(bucket [01],"):
        ddp.module.loss(rows_of(0, 4)).backward()
        ddp.finish_grad_sync()
    assert all(torch.equal(before[n], p) for n, p in ddp.module.named_parameters())


def test_large_finite_gradients_are_not_called_bad():
    ddp = _wrap(check_for_nan_in_grad=True)
    ddp.zero_grad_buffer()
    ddp.module.second.weight.main_grad.fill_(3e38)  # their sum is Inf
    ddp.finish_grad_sync()


def test_bucket_sizes_follow_the_options():
    count = sum(p.numel() for p in SmallModel().parameters())
    assert _wrap(overlap_grad_reduce=True).bucket_size == 40_000_000
    assert _wrap(overlap_grad_reduce=True, bucket_size=50).bucket_size == 50
    assert _wrap(overlap_grad_reduce=True, num_buckets=4).bucket_size == count // 4
    assert _wrap(bucket_size=50).bucket_size is None
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=50)
    one = DistributedDataParallel(ModelParallelConfig(), config, SmallModel(), disable_bucketing=True)
    assert one.bucket_size is None and len(one.bucket_groups) == 1


@pytest.mark.parametrize(
    "options",
    [
        dict(delay_wgrad_compute=True),
        dict(fp8_param_gather=True),
        dict(outer_dp_sharding_strategy="optim"),
        dict(preserve_fp32_weights=False),
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_have_not_landed_stop_the_run(options):
    with pytest.raises(ConfigError, match=f"{next(iter(options))}=.*(?s:.)*not built here"):
        DistributedDataParallelConfig(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(overlap_param_gather=True, use_distributed_optimizer=True), "--overlap-grad-reduce"),
        (dict(pad_buckets_for_high_nccl_busbw=True), "--ddp-pad-buckets-for-high-nccl-busbw without"),
        (dict(reduce_scatter_with_fp32_accumulation=True), "--use-distributed-optimizer"),
        (dict(num_distributed_optimizer_instances=2), "--num-distributed-optimizer-instances 2 without"),
        (dict(num_distributed_optimizer_instances=0), "--num-distributed-optimizer-instances 0"),
        (
            dict(
                use_distributed_optimizer=True,
                num_distributed_optimizer_instances=2,
                reduce_scatter_with_fp32_accumulation=True,
            ),
            "one sum in fp32",
        ),
        (
            dict(
                use_distributed_optimizer=True, average_in_collective=True, reduce_scatter_with_fp32_accumulation=True
            ),
            "one sum in fp32",
        ),
        (
            dict(param_name_patterns_for_fp32_local_accumulation=["all"], grad_reduce_in_fp32=True),
            "--grad-reduce-in-bf16",
        ),
        (dict(bucket_size=3, num_buckets=2), "--ddp-bucket-size 3 and --ddp-num-buckets 2"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        DistributedDataParallelConfig(**options)


def test_every_field_of_the_config_has_megatrons_default():
    config = DistributedDataParallelConfig()
    on = {"gradient_reduce_div_fusion", "preserve_fp32_weights"}
    other = {
        "num_distributed_optimizer_instances": 1,
        "bucket_size": None,
        "num_buckets": None,
        "param_name_patterns_for_fp32_local_accumulation": [],
        "data_parallel_sharding_strategy": "no_shard",
        "outer_dp_sharding_strategy": "no_shard",
        "suggested_communication_unit_size": None,
        "on_bad_grads": None,  # not in Megatron
    }
    for name, value in vars(config).items():
        assert value == other.get(name, name in on), name
    assert len(vars(config)) >= 26


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_user_buffers_are_refused_where_nccl_does_not_run(settings, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    with pytest.raises(ConfigError, match="--use-nccl-ub on cpu with one rank"):
        _wrap(nccl_ub=True)


def test_instances_must_fit_the_groups():
    """Groups that were made for another number of instances would sum over the wrong ranks."""
    with pytest.raises(ConfigError, match="num_distributed_optimizer_instances=2: 1 ranks in intra_dp_cp, 1 in dp_cp"):
        _wrap(use_distributed_optimizer=True, num_distributed_optimizer_instances=2)


def test_where_bucketing_is_disabled_all_dense_and_all_expert_buckets_travel_together():
    """Two number formats are two buffers, and still one message group."""
    model = SmallModel().bfloat16()
    model.norm.float()
    model.second.weight.allreduce = False
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1)
    together = DistributedDataParallel(ModelParallelConfig(), config, model, disable_bucketing=True)
    names = [{n for b in group.buckets for n in b.params} for group in together.bucket_groups]
    assert [len(group.buckets) for group in together.bucket_groups] == [2, 1]
    assert names[1] == {"second.weight"} and "norm.bias" in names[0] and "embedding.weight" in names[0]


def test_a_shard_is_all_of_a_bucket_without_a_distributed_optimizer():
    for sharded in (False, True):
        ddp = _wrap(use_distributed_optimizer=sharded, overlap_grad_reduce=True, bucket_size=60)
        (buffer,) = ddp.grad_buffers
        assert [b.shard for b in buffer.buckets] == [b.range for b in buffer.buckets] == list(buffer.shards)
        for bucket in buffer.buckets:
            assert bucket.grad_shard.data_ptr() == buffer.grad_data[bucket.range.start :].data_ptr()
            assert bucket.param_shard.data_ptr() == buffer.param_data[bucket.range.start :].data_ptr()


@pytest.mark.parametrize("overlap", [False, True])
def test_patterns_choose_what_accumulates_in_fp32_beside_a_16_bit_buffer(overlap):
    """600 gradients of 1 in bf16 stop growing at 256; in fp32 they are 600, and what is reduced is rounded once."""
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    for patterns, expected in ((["*weight"], 600.0), (["all"], 600.0), (["bias*", "Weight"], 256.0)):
        ddp = _wrap(
            nn.Linear(1, 1, bias=False).bfloat16(),
            param_name_patterns_for_fp32_local_accumulation=patterns,
            overlap_grad_reduce=overlap,
        )
        for _ in range(2):
            ddp.zero_grad_buffer()
            with ddp.no_sync():
                for _ in range(599):
                    ddp(one).sum().backward()
            ddp(one).sum().backward()
            finalize_model_grads([ddp])
            (buffer,) = ddp.grad_buffers
            assert buffer.grad_data.dtype == torch.bfloat16
            assert buffer.grad_data.item() == reduced_grad(ddp.module.weight).item() == expected


def test_C065_a_gradient_far_above_the_largest_before_is_named_with_parameter_bucket_and_rank():
    ddp = _wrap(check_for_large_grads=True)
    (group,) = ddp.bucket_groups

    def step(factor, culprit=1.0):
        ddp.zero_grad_buffer()
        for param in ddp.module.parameters():
            param.main_grad.fill_(factor)
        ddp.module.norm.bias.main_grad.mul_(culprit)
        ddp.finish_grad_sync()

    step(1.0, 1e6)  # in the first steps everything is usual
    group._large[0].largest = 0.0
    for number in range(WARM_UP):
        step(1.0 + number % 3)
    step(29.0)  # less than ten times the largest
    before = [p.detach().clone() for p in ddp.module.parameters()]
    with pytest.raises(
        RankFailure, match=r"rank 0: the gradients of bucket 0 have norm .*most of it is in norm\.bias \("
    ):
        step(1.0, 1e6)
    assert all(torch.equal(a, b) for a, b in zip(before, ddp.module.parameters()))
    bucket = group.buckets[0]
    LargeGradients().check(bucket.grad_data, bucket.params, bucket.number)  # one that has seen nothing says nothing


@pytest.mark.parametrize("kind", ["nan", "large gradients"])
@pytest.mark.parametrize("rejected", [True, False])
def test_a_listener_decides_on_bad_gradients_and_a_rejected_bucket_is_nan(kind, rejected):
    """NaN travels in the sum: a rank that only said no would step alone, or not step alone."""
    heard = []

    def listen(kind, norm, failure):
        heard.append((kind, norm, failure.what))
        return rejected

    ddp = _wrap(check_for_nan_in_grad=True, check_for_large_grads=True)
    ddp.ddp_config.on_bad_grads = listen
    (group,) = ddp.bucket_groups
    group._large[0].warm_up = 1
    for factor in (1.0, 1e6 if kind == "large gradients" else math.nan):
        ddp.zero_grad_buffer()
        for param in ddp.module.parameters():
            param.main_grad.fill_(1.0)
        ddp.module.norm.bias.main_grad.mul_(factor)
        ddp.finish_grad_sync()
    ((told, norm, what),) = heard
    assert told == kind and "norm.bias" in what and (norm > 1e5 or math.isnan(norm))
    grads = ddp.grad_buffers[0].grad_data
    assert bool(grads.isnan().all()) == rejected and (kind == "nan" or rejected or grads.isfinite().all())


def test_averaging_in_the_collective_excludes_per_token_loss():
    config = ModelParallelConfig()
    config.calculate_per_token_loss = True
    with pytest.raises(ConfigError, match="--ddp-average-in-collective"):
        _wrap(config=config, average_in_collective=True)


def test_the_state_is_the_models_and_loads_into_flat_memory():
    ddp = _wrap()
    assert ddp.state_dict().keys() == SmallModel().state_dict().keys()
    ddp.load_state_dict(SmallModel(seed=3).state_dict())
    (buffer,) = ddp.grad_buffers
    for name, value in SmallModel(seed=3).state_dict().items():
        place = buffer.layout.ranges[name]
        assert torch.equal(buffer.param_data[place.start : place.end].view(value.shape), value)


def test_one_process_moves_nothing_between_ranks():
    collectives.COUNTERS.clear()
    ddp = _wrap(overlap_grad_reduce=True)
    for step in range(2):
        ddp.zero_grad_buffer()
        ddp.module.loss(rows_of(step, 4)).backward()
        finalize_model_grads([ddp])
    assert not collectives.COUNTERS


def test_per_token_gradients_are_divided_by_the_tokens():
    ddp = _wrap()
    ddp.zero_grad_buffer()
    ddp.module.loss(rows_of(0, 4)).backward()
    before = ddp.grad_buffers[0].grad_data.clone()
    finalize_model_grads([ddp], torch.tensor(8))
    torch.testing.assert_close(ddp.grad_buffers[0].grad_data, before / 8)
    finalize_model_grads([ddp], torch.tensor([0]))  # a batch whose tokens are all masked
    assert bool(torch.isfinite(ddp.grad_buffers[0].grad_data).all())


def test_modules_are_called_after_the_gradients_are_there():
    seen = []

    class Balanced(SmallModel):
        def after_grad_sync(self, pg_collection):
            seen.append(self.second.weight.main_grad.abs().sum().item() > 0)

    ddp = _wrap(Balanced())
    ddp.zero_grad_buffer()
    ddp.module.loss(rows_of(0, 4)).backward()
    finalize_model_grads([ddp])
    assert seen == [True]
