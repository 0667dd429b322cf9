"""Lion, Muon, Adam with 16-bit moments and state on the host: against formulas, torch.optim and decompositions."""

import sys
import types

import pytest
import torch
from torch import nn

from megatron_lite.distributed.buffer_layout import Range
from megatron_lite.errors import ConfigError
from megatron_lite.fusions.adam import packaged_adam
from megatron_lite.model_parallel_config import ModelParallelConfig
from megatron_lite.optimizer import OptimizerConfig, inner
from megatron_lite.optimizer import builder as builder_module
from megatron_lite.optimizer.flat_shard import divide_for_host
from megatron_lite.optimizer.orthogonal import matmul_precision, orthogonalize, scale_of
from tests.unit.optimizer.models import SmallModel, rows_of, train_step, wrap

SHARDED = dict(use_distributed_optimizer=True)


def _matrix(rows, columns, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def test_lion_follows_its_formula():
    """Two steps of two micro-batches, clipped, against the two lines of the paper; large tensors go block by block."""
    ours, theirs = SmallModel(), SmallModel()
    theirs.big = ours.big = None
    for model in (ours, theirs):
        model.big = nn.Parameter(_matrix(700, 500))  # more than a block
    options = dict(optimizer="lion", lr=0.01, lion_beta1=0.9, lion_beta2=0.8, clip_grad=0.5)
    ddp, optimizer = wrap(ours, optimizer=options)
    momenta = {name: torch.zeros_like(p) for name, p in theirs.named_parameters()}

    def loss(model, rows):
        return model.loss(rows) + (model.big * _matrix(700, 500, seed=len(rows))).mean()

    for step in range(2):
        ddp.zero_grad_buffer()
        theirs.zero_grad()
        for rows in rows_of(step, 8).chunk(2):
            (loss(ours, rows) / 2).backward()
            (loss(theirs, rows) / 2).backward()
        optimizer.step()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        with torch.no_grad():
            for name, p in theirs.named_parameters():
                decay = 0.1 if p.dim() > 1 else 0.0
                m = momenta[name]
                p.sub_(0.01 * (torch.sign(0.9 * m + 0.1 * p.grad) + decay * p))
                m.mul_(0.8).add_(0.2 * p.grad)
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters()):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("shape", [(12, 12), (40, 7), (7, 40), (1, 9)])
@pytest.mark.parametrize("kind, steps, error", [("polar_express", 8, 1e-2), ("quintic", 5, 0.35), ("simple", 5, 0.4)])
def test_orthogonalize_moves_every_singular_value_to_about_one(shape, kind, steps, error):
    """Against U V^T of torch's decomposition."""
    u, _, v = torch.linalg.svd(_matrix(*shape), full_matrices=False)
    x = u @ torch.diag(torch.linspace(1.0, 0.05, len(v))) @ v
    result = orthogonalize(x * 37.0, steps=steps, coefficient_type=kind)
    assert torch.linalg.matrix_norm(result - u @ v, 2) < error
    with pytest.raises(ConfigError, match="muon-coefficient-type cubic"):
        orthogonalize(x, coefficient_type="cubic")


def test_products_on_a_cpu_stay_fp32_and_the_setting_is_put_back():
    """A CPU with AMX multiplies in bf16 when torch is told `medium`, which is Megatron's default here."""
    a = _matrix(256, 256)
    exact = (a.double() @ a.double()).float()
    before = torch.get_float32_matmul_precision()
    for name, on_gpu in (("low", "medium"), ("medium", "medium"), ("high", "high")):
        with matmul_precision(name, "cpu"):
            torch.testing.assert_close(a @ a, exact, rtol=1e-4, atol=1e-4)
        with matmul_precision(name, "cuda"):
            assert torch.get_float32_matmul_precision() == on_gpu
    assert torch.get_float32_matmul_precision() == before


def test_a_zero_gradient_moves_nothing():
    assert torch.equal(orthogonalize(torch.zeros(3, 5)), torch.zeros(3, 5))


def test_scales_of_a_step_follow_the_shape():
    assert [scale_of(16, 4, mode) for mode in ("spectral", "unit_rms_norm", "shape_scaling")] == [4.0, 2.0, 2.0]
    assert [scale_of(4, 16, mode) for mode in ("spectral", "unit_rms_norm", "shape_scaling")] == [4.0, 0.5, 1.0]


def _linear(rows, columns):
    model = nn.Linear(columns, rows, bias=False)
    with torch.no_grad():
        model.weight.copy_(_matrix(rows, columns))
    return model


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(12, 30), (30, 12)])
def test_muon_steps_like_torchs(nesterov, shape):
    """torch.optim.Muon computes in bf16: 4 % of a step."""
    ours, theirs = _linear(*shape), _linear(*shape)
    settings = dict(optimizer="muon", lr=0.1, muon_nesterov=nesterov, muon_momentum=0.8, clip_grad=0.0)
    settings |= dict(muon_coefficient_type="simple", muon_scale_mode="shape_scaling")
    _, optimizer = wrap(ours, optimizer=settings)
    reference = torch.optim.Muon([theirs.weight], lr=0.1, weight_decay=0.1, momentum=0.8, nesterov=nesterov)
    for step in range(3):
        grad = _matrix(*shape, seed=10 + step)
        ours.weight.main_grad.copy_(grad)
        theirs.weight.grad = grad.clone()
        optimizer.step()
        reference.step()
        assert (ours.weight - theirs.weight).abs().max() < 0.04 * 0.1 * (step + 1)
    assert (ours.weight - _matrix(*shape)).norm() > 0.1


def test_muon_leaves_tables_biases_and_norms_to_adam():
    model = SmallModel()
    model.embedding.weight.is_embedding_or_output_parameter = True
    ddp, optimizer = wrap(model, optimizer=dict(optimizer="muon"))
    train_step(ddp, optimizer, [rows_of(0, 8)])
    states = {
        key.split(".", 3)[2:][1]: key.split(".")[2] for key in optimizer.sharded_state() if "exp_avg_sq" not in key
    }
    assert states == {
        "embedding.weight": "exp_avg",
        "first.weight": "momentum_buffer",
        "first.bias": "exp_avg",
        "norm.weight": "exp_avg",
        "norm.bias": "exp_avg",
        "second.weight": "momentum_buffer",
        "second.bias": "exp_avg",
    }
    assert [group["is_matrix"] for group in optimizer.param_groups] == [False, False, True]
    memory = sum(t.numel() for shard in optimizer.shards for t in shard.state.values())
    matrices = model.first.weight.numel() + model.second.weight.numel()
    assert memory == matrices + 2 * (sum(p.numel() for p in model.parameters()) - matrices)


class _Attention(nn.Module):
    """Four heads of size 3, two query groups: rows q q k v, twice."""

    def __init__(self):
        super().__init__()
        self.linear_qkv = _linear(24, 8)


@pytest.mark.parametrize("split", [True, False])
def test_muon_takes_queries_keys_and_values_apart(split):
    config = ModelParallelConfig()
    config.num_attention_heads, config.num_query_groups, config.kv_channels = 4, 2, 3
    model = _Attention()
    settings = dict(optimizer="muon", lr=1.0, weight_decay=0.0, clip_grad=0.0, muon_momentum=0.0, muon_split_qkv=split)
    _, optimizer = wrap(model, config=config, optimizer=settings)
    grad = _matrix(24, 8, seed=3)
    model.linear_qkv.weight.main_grad.copy_(grad)
    optimizer.step()
    moved = _matrix(24, 8) - model.linear_qkv.weight
    rows = [[r for g in (0, 12) for r in range(g + a, g + b)] for a, b in ((0, 6), (6, 9), (9, 12))]
    for part in rows if split else [list(range(24))]:
        expected = orthogonalize(grad[part]) * scale_of(len(part), 8, "spectral")
        torch.testing.assert_close(moved[part], expected, atol=1e-5, rtol=1e-5)


class _FusedAdam(torch.optim.Optimizer):
    """The interface of apex's FusedAdam: steps by group, states made at the first step unless they are there."""

    def __init__(self, params, lr, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=0.0))
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure=None, grads=None, output_params=None, scale=None, grad_norms=None, grad_scaler=None):
        assert grads is None and output_params is None and scale is None and grad_norms is None
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (b1, b2), n = group["betas"], group["step"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p).float(), torch.zeros_like(p).float()
                g = p.grad if self.adam_w_mode else p.grad + group["weight_decay"] * p
                m, v = state["exp_avg"].lerp_(g, 1 - b1), state["exp_avg_sq"].mul_(b2).addcmul_(g, g, value=1 - b2)
                update = (m / (1 - b1**n)) / ((v / (1 - b2**n)).sqrt() + group["eps"])
                p.sub_(group["lr"] * (update + (group["weight_decay"] * p if self.adam_w_mode else 0.0)))


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_packages_fused_adam_is_taken_on_a_gpu_and_steps_and_resumes_like_torchs(monkeypatch, decoupled):
    """Clipped, over a resume. (The kernels themselves need a GPU: the class here has apex's interface.)"""
    options = dict(decoupled_weight_decay=decoupled, clip_grad=0.5)
    ddp, optimizer = wrap(SmallModel(), optimizer=options)
    expected = [train_step(ddp, optimizer, [rows_of(step, 8)])[1] for step in range(4)]
    apex = types.ModuleType("apex.optimizers")
    apex.FusedAdam = _FusedAdam
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.optimizers", None)
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    monkeypatch.setitem(sys.modules, "apex.optimizers", apex)
    packaged_adam.cache_clear()
    try:
        assert packaged_adam("cpu") is None
        found = packaged_adam("cuda")
    finally:
        packaged_adam.cache_clear()
    assert issubclass(found, _FusedAdam)
    monkeypatch.setattr(inner, "packaged_adam", lambda device_type: found)
    other, packaged = wrap(SmallModel(), optimizer=options)
    norms = [train_step(other, packaged, [rows_of(step, 8)])[1] for step in range(2)]
    resumed_model, resumed = wrap(SmallModel(seed=3), optimizer=options)
    resumed_model.load_state_dict(other.state_dict())
    resumed.load_state_dict(packaged.state_dict())
    norms += [train_step(resumed_model, resumed, [rows_of(step, 8)])[1] for step in range(2, 4)]
    assert isinstance(resumed.optimizer, _FusedAdam) and norms == pytest.approx(expected, rel=1e-5)
    for p, q in zip(ddp.module.parameters(), resumed_model.module.parameters()):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-5)


# -- number formats and place --------------------------------------------------------------------------------------


def _reduced(**formats):
    return dict(use_precision_aware_optimizer=True, **formats)


def test_the_precision_aware_optimizer_in_fp32_is_adam():
    results = []
    for options in ({}, _reduced()):
        ddp, optimizer = wrap(SmallModel(), torch.bfloat16, ddp=SHARDED, optimizer=options)
        norms = [train_step(ddp, optimizer, [rows_of(step, 8)])[1] for step in range(4)]
        results.append((norms, [p.detach().clone() for p in ddp.module.parameters()]))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1]))


@pytest.mark.parametrize("first, second", [("bf16", "fp32"), ("fp32", "bf16"), ("bf16", "bf16")])
def test_16_bit_moments_are_rounded_fp32_ones(first, second):
    """One AdamW step from the same moments: the update is computed in fp32 and each moment then rounded."""
    ddp, optimizer = wrap(SmallModel(), ddp=SHARDED, optimizer=_reduced(exp_avg_dtype=first, exp_avg_sq_dtype=second))
    theirs = SmallModel()
    reference = torch.optim.AdamW(
        [
            {"params": [p for p in theirs.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in theirs.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=0.01,
    )
    train_step(ddp, optimizer, [rows_of(0, 8)])
    theirs.loss(rows_of(0, 8)).backward()
    nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    reference.step()
    state = optimizer.sharded_state()
    formats = {"bf16": torch.bfloat16, "fp32": torch.float32}
    for (name, p), q in zip(ddp.module.named_parameters(), theirs.parameters()):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-6)
        for key, chosen in (("exp_avg", first), ("exp_avg_sq", second)):
            view = state[f"optimizer.state.{key}.{name}"][0]
            assert view.dtype == formats[chosen]
            torch.testing.assert_close(view, reference.state[q][key].to(view.dtype), atol=1e-12, rtol=1e-2)


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(exp_avg_dtype="bf16"), "exp-avg-dtype bfloat16 without --use-precision-aware-optimizer"),
        (_reduced(exp_avg_sq_dtype="fp16", **SHARDED), "leave the range of fp16"),
        (_reduced(exp_avg_dtype="fp8", **SHARDED), "leave the range of fp16"),
        (_reduced(main_params_dtype="fp16", **SHARDED), "main-params-dtype"),
        (_reduced(), "--use-precision-aware-optimizer without"),
        (dict(optimizer_cpu_offload=True), "--optimizer-cpu-offload without"),
        (dict(optimizer_offload_fraction=2.0), "--optimizer-offload-fraction 2.0"),
        (dict(muon_coefficient_type="cubic"), "--muon-coefficient-type cubic"),
        (dict(optimizer="adagrad"), "--optimizer adagrad"),
        (dict(overlap_param_gather_with_optimizer_step=True), "without --overlap-param-gather"),
        (dict(muon_num_ns_steps=0), "--muon-num-ns-steps 0"),
        (dict(lion_beta1=1.0), "--lion-beta1 1.0"),
    ],
)
def test_settings_that_cannot_be_had_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        OptimizerConfig(lr=1.0, **settings)


@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_on_the_host_steps_like_state_on_the_device(monkeypatch, fraction, dtype):
    """The copies to the host and back are made on a CPU as well, when the builder is told that this is a GPU."""
    ddp, optimizer = wrap(SmallModel(), dtype, ddp=SHARDED, optimizer=dict(clip_grad=0.0))
    expected = [train_step(ddp, optimizer, [rows_of(step, 8)])[1] for step in range(3)]
    monkeypatch.setattr(builder_module, "_offloaded", lambda config, device: config.optimizer_offload_fraction)
    options = _reduced(optimizer_cpu_offload=True, optimizer_offload_fraction=fraction, clip_grad=0.0)
    other, offloaded = wrap(SmallModel(), dtype, ddp=SHARDED, optimizer=options)
    norms = [train_step(other, offloaded, [rows_of(step, 8)])[1] for step in range(3)]
    assert norms == pytest.approx(expected, rel=1e-6)
    for p, q in zip(ddp.module.parameters(), other.module.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-7)
    on_host = [shard.on_host for shard in offloaded.shards]
    assert on_host == {0.0: [False], 0.3: [True, False], 1.0: [True]}[fraction]
    first, second = optimizer.sharded_state(), offloaded.sharded_state()
    for key, (view, _) in first.items():
        torch.testing.assert_close(view, second[key][0], rtol=1e-5, atol=1e-12)


def test_the_share_on_the_host_is_cut_between_parameters():
    ddp, _ = wrap(SmallModel())
    (buffer,) = ddp.grad_buffers
    borders = {r.start for r in buffer.layout.ranges.values()} | {buffer.layout.numel}
    for fraction in (0.0, 0.1, 0.5, 0.9, 1.0):
        parts = divide_for_host(buffer, Range(0, buffer.layout.numel), fraction)
        assert sum(r.size for r, _ in parts) == buffer.layout.numel
        assert {r.start for r, _ in parts} | {r.end for r, _ in parts} <= borders
        largest = max(r.size for r in buffer.layout.ranges.values())
        assert abs(sum(r.size for r, host in parts if host) - fraction * buffer.layout.numel) <= largest / 2 + 1
