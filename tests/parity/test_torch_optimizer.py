"""Steps on flat memory against torch's own optimizers on the plain model."""

import pytest
import torch

from tests.unit.optimizer.models import SmallModel, rows_of, train_step, wrap


@pytest.mark.parametrize("kind", ["adam", "adam_l2", "sgd", "sgd_plain"])
def test_steps_equal_plain_torch(kind):
    """Five steps with clipping, two micro-batches, against torch.optim on the unwrapped model. Tolerance 1e-6."""
    options = {
        "adam": dict(optimizer="adam", adam_beta2=0.95),
        "adam_l2": dict(optimizer="adam", decoupled_weight_decay=False),
        "sgd": dict(optimizer="sgd"),
        "sgd_plain": dict(optimizer="sgd", sgd_momentum=0.0),
    }[kind]
    ours, theirs = SmallModel(), SmallModel()
    ddp, optimizer = wrap(ours, optimizer={**options, "clip_grad": 0.5})
    decayed = [p for n, p in theirs.named_parameters() if p.dim() > 1]
    others = [p for n, p in theirs.named_parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    if kind == "adam":
        reference = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    elif kind == "adam_l2":
        reference = torch.optim.Adam(groups, lr=0.01)
    else:
        reference = torch.optim.SGD(groups, lr=0.01, momentum=0.9 if kind == "sgd" else 0.0)
    clipped = 0
    for step in range(5):
        parts = list(rows_of(step, 8).chunk(2))
        succeeded, norm, zeros = train_step(ddp, optimizer, parts)
        reference.zero_grad()
        (sum(theirs.loss(part) for part in parts) / 2).backward()
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5).item()
        reference.step()
        assert succeeded and zeros is None and norm == pytest.approx(expected, rel=1e-6)
        clipped += norm > 0.5
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters()):
            torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    assert clipped


def test_adamw_of_one_number_is_the_worked_example():
    """p 1, g .5, lr .1, wd .1, first step: 1 * (1 - .01) - .1 * .5 / (.5 + 1e-8) = .89."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    ddp, optimizer = wrap(model, optimizer=dict(lr=0.1, clip_grad=0.0))
    model.weight.main_grad.fill_(0.5)
    assert optimizer.step() == (True, 0.5, None)
    assert model.weight.item() == pytest.approx(0.89, abs=1e-7)
