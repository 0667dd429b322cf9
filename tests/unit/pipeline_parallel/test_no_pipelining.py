"""One stage: gradients over micro-batches equal one backward of the averaged loss."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn

from megatron_lite.model_parallel_config import ModelParallelConfig
from megatron_lite.pipeline_parallel import get_forward_backward_func
from megatron_lite.pipeline_parallel.actions import no_pipelining
from megatron_lite.process_groups_config import ProcessGroupCollection


class Model(nn.Module):
    """A linear regression that has a config, as the schedule wants it."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))

    def forward(self, x):
        return x @ self.weight


def batches(counts=(1, 3)):
    torch.manual_seed(0)
    return [(torch.randn(4, 3), (torch.arange(4) < n).float()) for n in counts]


def mean_loss(mask, output):
    """(loss, reports): mean over all positions."""
    loss = output.square().mean()
    return loss, {"loss": loss.detach()}


def masked_loss(mask, output):
    """(sum, tokens, reports)."""
    total, tokens = (output.square() * mask).sum(), mask.sum()
    return total, tokens, {"loss": (total.detach(), tokens)}


def step(loss_func, per_token=False, forward_only=False, **hooks):
    config = ModelParallelConfig(**hooks)
    config.calculate_per_token_loss = per_token
    model = Model(config)

    def forward_step(iterator, model):
        x, mask = next(iterator)
        return model(x), partial(loss_func, mask)

    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches()),
        model=model,
        num_microbatches=2,
        forward_only=forward_only,
        pg_collection=ProcessGroupCollection(),
    )
    return model, reports


def test_actions_alternate():
    """All forwards first would keep every micro-batch's activations alive."""
    assert [str(a) for a in no_pipelining(3)] == ["F0", "B0", "F1", "B1", "F2", "B2"]
    assert [str(a) for a in no_pipelining(2, forward_only=True)] == ["F0", "F1"]


def test_mean_losses_are_averaged_over_microbatches():
    """A missing 1 / M scales the learning rate of SGD and the clipping of all optimizers."""
    model, reports = step(mean_loss)
    reference = Model(ModelParallelConfig())
    torch.stack([reference(x).square().mean() for x, _ in batches()]).mean().backward()
    torch.testing.assert_close(model.weight.grad, reference.weight.grad)
    assert model.weight.grad.abs().sum() > 0 and len(reports) == 2


@pytest.mark.parametrize("per_token", [False, True])
def test_masked_sums_are_divided_as_the_flag_says(per_token):
    """Default: mean of means. Per token: plain sums, which the finaliser divides by the tokens of all micro-batches."""
    seen = {}
    model, _ = step(masked_loss, per_token, finalize_model_grads_func=lambda m, n, pg_collection: seen.update(n=n))
    reference = Model(ModelParallelConfig())
    losses = [(reference(x).square() * mask).sum() for x, mask in batches()]
    if per_token:
        (losses[0] + losses[1]).backward()
        assert seen["n"] == 4
    else:
        ((losses[0] / 1 + losses[1] / 3) / 2).backward()
        assert seen["n"] is None
    torch.testing.assert_close(model.weight.grad, reference.weight.grad)


def test_a_microbatch_without_tokens_gives_zero_and_not_nan():
    """0 / 0 would poison the whole step."""
    config = ModelParallelConfig()
    model = Model(config)
    get_forward_backward_func()(
        forward_step_func=lambda it, m: (m(next(it)), partial(masked_loss, torch.zeros(4))),
        data_iterator=iter([torch.randn(4, 3)]),
        model=model,
        num_microbatches=1,
    )
    assert torch.equal(model.weight.grad, torch.zeros(3))


def test_gradients_are_scaled_before_backward():
    """fp16 scales the loss; scaling afterwards would come too late for small gradients."""
    plain, _ = step(mean_loss)
    scaled, _ = step(mean_loss, grad_scale_func=lambda loss: loss * 8)
    torch.testing.assert_close(scaled.weight.grad, plain.weight.grad * 8)


def test_synchronisation_waits_for_the_last_backward():
    """Synchronising every micro-batch sends M times the bytes; never leaving no_sync sends none."""
    events = []

    @contextmanager
    def no_sync():
        events.append("hold")
        yield
        events.append("release")

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            events.append("backward")
            return grad

    def loss_func(mask, output):
        loss, reports = mean_loss(mask, Watched.apply(output))
        return loss, reports

    step(loss_func, no_sync_func=no_sync)
    assert events == ["hold", "backward", "release", "backward"]


def test_no_sync_is_left_when_a_forward_fails():
    """A context that stays entered would leave the next step without any synchronisation."""
    events = []

    @contextmanager
    def no_sync():
        try:
            yield
        finally:
            events.append("release")

    def broken(mask, output):
        raise ValueError("bad batch")

    with pytest.raises(ValueError, match="bad batch"):
        step(broken, no_sync_func=no_sync)
    assert events == ["release"]


def test_evaluation_builds_no_graph():
    """Keeping graphs of an evaluation keeps its activations."""
    model, reports = step(masked_loss, forward_only=True)
    assert model.weight.grad is None and len(reports) == 2
