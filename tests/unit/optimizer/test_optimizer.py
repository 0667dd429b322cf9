"""The step on one process: precision, skipping, scaling, states and resume. Equality with torch: tests/parity."""

import math

import pytest
import torch

from megatron_lite.errors import CheckpointError
from megatron_lite.optimizer_param_scheduler import OptimizerParamScheduler
from tests.unit.optimizer.models import SmallModel, rows_of, train_step, wrap

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _snapshot(ddp, optimizer):
    """Everything that a step may change."""
    tensors = {name: p.detach().clone() for name, p in ddp.module.named_parameters()}
    return tensors | {key: view.clone() for key, (view, _) in optimizer.sharded_state().items()}


def _assert_equal(a, b):
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key], b[key]), key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grads_in_fp32", [True, False])
def test_mixed_precision_keeps_fp32_main_parameters(dtype, grads_in_fp32):
    """The model's weights are the rounded main ones after every step; main ones move by less than a 16-bit step."""
    ddp, optimizer = wrap(
        SmallModel(),
        dtype,
        ddp=dict(grad_reduce_in_fp32=grads_in_fp32),
        optimizer=dict(lr=1e-5, initial_loss_scale=64.0),
    )
    (buffer,) = ddp.grad_buffers
    assert buffer.grad_dtype == (torch.float32 if grads_in_fp32 else dtype) and buffer.param_dtype == dtype
    start = {n: p.detach().clone() for n, p in ddp.module.named_parameters()}
    for step in range(3):
        train_step(ddp, optimizer, [rows_of(step, 8)])
    mains = {
        k.removeprefix("optimizer.state.param."): v for k, (v, _) in optimizer.sharded_state().items() if ".param." in k
    }
    assert mains.keys() == start.keys()
    moved = 0
    for name, param in ddp.module.named_parameters():
        assert mains[name].dtype == torch.float32 and torch.equal(mains[name].to(dtype), param)
        moved += int((mains[name] != start[name].float()).sum())
    assert moved > 0


def test_fp16_with_a_loss_scale_takes_the_step_of_fp32():
    """Gradients of a scaled loss are unscaled before norm, clipping and update: same norm, same weights to 2e-3."""
    half, optimizer = wrap(
        SmallModel(), torch.float16, ddp=dict(grad_reduce_in_fp32=True), optimizer=dict(loss_scale=1024.0)
    )
    full, reference = wrap(SmallModel().half().float())
    for step in range(3):
        _, norm, _ = train_step(half, optimizer, [rows_of(step, 8)])
        _, expected, _ = train_step(full, reference, [rows_of(step, 8)])
        assert norm == pytest.approx(expected, rel=1e-2)
    for p, q in zip(half.module.parameters(), full.module.parameters()):
        torch.testing.assert_close(p.float(), q, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_bad_gradient_changes_nothing_and_the_next_step_is_fine(dtype, bad):
    """Also without a loss scale: weights and moments bit-equal, the schedule's clock stands."""
    ddp, optimizer = wrap(SmallModel(), dtype, optimizer=dict(initial_loss_scale=64.0))
    schedule = OptimizerParamScheduler(optimizer, 0.0, 0.01, 0.001, 8, 100, "linear", 0.1, 0.1, 100, "constant")
    for step in range(2):
        train_step(ddp, optimizer, [rows_of(step, 8)])
        schedule.step(8)
    before, scale = _snapshot(ddp, optimizer), optimizer.get_loss_scale()
    for _ in range(2):  # fp16: two overflows halve the scale
        ddp.zero_grad_buffer()
        ddp.module.norm.bias.main_grad[3] = bad
        assert optimizer.step() == (False, None, None)
    _assert_equal(_snapshot(ddp, optimizer), before)
    assert optimizer.common_state()["step"] == 2 and schedule.num_steps == 16
    assert optimizer.get_loss_scale() == (scale / 2 if dtype == torch.float16 else scale)
    succeeded, norm, _ = train_step(ddp, optimizer, [rows_of(2, 8)])
    assert succeeded and 0 < norm < math.inf


def test_gradients_whose_squares_overflow_do_not_skip():
    ddp, optimizer = wrap(SmallModel(), optimizer=dict(clip_grad=1.0))
    ddp.zero_grad_buffer()
    ddp.module.norm.bias.main_grad.fill_(1e25)
    succeeded, norm, _ = optimizer.step()
    assert succeeded and norm == pytest.approx(1e25 * math.sqrt(11), rel=1e-6)


def test_zeros_are_counted_over_parameters_only():
    ddp, optimizer = wrap(SmallModel(), optimizer=dict(log_num_zeros_in_grad=True))
    rows = torch.tensor([[1, 2, 3, 3, 2, 1]])  # 10 of the 13 rows of the table get no gradient
    _, _, zeros = train_step(ddp, optimizer, [rows])
    ddp.zero_grad_buffer()
    ddp.module.loss(rows).backward()
    assert zeros == sum(int((p.main_grad == 0).sum()) for p in ddp.module.parameters()) >= 70


def test_c071_a_shared_copy_counts_in_no_norm_and_among_no_zeros():
    """C071: a tied table is on the first and on the last stage; twice in the norm, clipping was too strong."""
    rows, counting = torch.tensor([[1, 2, 3, 3, 2, 1]]), dict(log_num_zeros_in_grad=True)
    _, norm, zeros = train_step(*wrap(SmallModel(), optimizer=counting), [rows])
    model = SmallModel()
    model.embedding.weight.shared = True
    _, norm_without, zeros_without = train_step(*wrap(model, optimizer=counting), [rows])
    model = SmallModel()
    model.loss(rows).backward()
    table = model.embedding.weight.grad
    assert norm**2 - norm_without**2 == pytest.approx(table.square().sum().item(), rel=1e-4)
    assert zeros - zeros_without == table.eq(0).sum() >= 70


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_a_resume_continues_bit_for_bit(dtype, kind):
    """State taken after 3 steps and written into a fresh model and optimizer, then 3 steps on both."""
    settings = dict(optimizer=kind, initial_loss_scale=256.0)
    ddp, optimizer = wrap(SmallModel(), dtype, optimizer=settings)
    for step in range(3):
        train_step(ddp, optimizer, [rows_of(step, 8)])
    weights = {k: v.clone() for k, v in ddp.state_dict().items()}
    tensors = {key: view.clone() for key, (view, _) in optimizer.sharded_state().items()}
    common = optimizer.common_state()
    fresh, resumed = wrap(SmallModel(seed=9), dtype, optimizer=settings)
    fresh.load_state_dict(weights)
    for key, (view, spec) in resumed.sharded_state().items():
        assert spec.name == key and spec.global_shape == tuple(view.shape)
        view.copy_(tensors[key])
    resumed.load_common_state(common)
    for step in range(3, 6):
        assert train_step(fresh, resumed, [rows_of(step, 8)]) == train_step(ddp, optimizer, [rows_of(step, 8)])
    _assert_equal(_snapshot(fresh, resumed), _snapshot(ddp, optimizer))
    assert resumed.common_state() == optimizer.common_state() and resumed.common_state()["step"] in (0, 6)


def test_state_names_say_kind_and_parameter():
    kinds = {
        "adam": {"exp_avg", "exp_avg_sq"},
        "sgd": {"momentum_buffer"},
    }
    for kind, expected in kinds.items():
        for dtype in (torch.float32, torch.bfloat16):
            ddp, optimizer = wrap(SmallModel(), dtype, optimizer=dict(optimizer=kind))
            names = {name for name, _ in ddp.module.named_parameters()}
            wanted = expected | ({"param"} if dtype == torch.bfloat16 else set())
            assert set(optimizer.sharded_state()) == {f"optimizer.state.{k}.{n}" for k in wanted for n in names}


def test_state_dict_goes_round():
    ddp, optimizer = wrap(SmallModel())
    train_step(ddp, optimizer, [rows_of(0, 8)])
    _, other = wrap(SmallModel())
    other.load_state_dict(optimizer.state_dict())
    for key, (view, _) in other.sharded_state().items():
        assert torch.equal(view, optimizer.sharded_state()[key][0]) and view.abs().sum() > 0
    assert other.common_state() == optimizer.common_state()


def test_another_division_into_groups_is_refused_on_load():
    _, optimizer = wrap(SmallModel())
    _, other = wrap(SmallModel(), scale_lr_cond=lambda name, _: "first" in name, lr_mult=0.5)
    with pytest.raises(CheckpointError, match=r"(?s)parameter groups.*--no-load-optim"):
        other.load_common_state(optimizer.common_state())


def test_main_parameters_follow_weights_loaded_without_an_optimizer_state():
    ddp, optimizer = wrap(SmallModel(), torch.bfloat16)
    ddp.load_state_dict(SmallModel(seed=5).bfloat16().state_dict())
    optimizer.reload_model_params()
    ddp.zero_grad_buffer()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for p, q in zip(ddp.module.parameters(), SmallModel(seed=5).bfloat16().parameters()):
        assert torch.equal(p, q)


def test_memory_is_what_the_formula_says():
    """Bytes per parameter with Adam: 16 in fp32; 18 in bf16 with fp32 gradients, between steps."""
    for dtype, expected in ((torch.float32, 16), (torch.bfloat16, 18)):
        ddp, optimizer = wrap(SmallModel(), dtype, ddp=dict(grad_reduce_in_fp32=True))
        train_step(ddp, optimizer, [rows_of(0, 8)])
        storages = {}
        for buffer in ddp.grad_buffers:
            for tensor in (buffer.param_data, buffer.grad_data):
                storages[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        for shard in optimizer.shards:
            for tensor in shard.memory():
                storages[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        count = sum(p.numel() for p in ddp.module.parameters())
        assert sum(storages.values()) == expected * count
        assert all(p.untyped_storage().data_ptr() in storages for p in ddp.module.parameters())
        assert all(p.grad is None for p in ddp.module.parameters())
