"""The schedule beyond golden curves: purity, resume, groups, contradictions."""

from types import SimpleNamespace

import pytest

from megatron_lite.errors import CheckpointError, ConfigError
from megatron_lite.optimizer_param_scheduler import OptimizerParamScheduler


def _scheduler(groups=({},), **changes):
    arguments = dict(
        init_lr=0.0,
        max_lr=1.0,
        min_lr=0.1,
        lr_warmup_steps=20,
        lr_decay_steps=200,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=200,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
    )
    return OptimizerParamScheduler(
        SimpleNamespace(param_groups=[dict(group) for group in groups]), **{**arguments, **changes}
    )


def _values(scheduler):
    return [(group["lr"], group["weight_decay"]) for group in scheduler.optimizer.param_groups]


def test_C045_override_on_load_keeps_the_bounds_of_single_groups():
    saved = _scheduler([{"max_lr": 5.0, "min_lr": 0.5}, {}])
    saved.step(64)
    loaded = _scheduler([{"max_lr": 5.0, "min_lr": 0.5}, {}], override_opt_param_scheduler=True)
    loaded.load_state_dict(saved.state_dict())
    assert loaded.group_bounds == [[5.0, 0.5], [None, None]]
    assert _values(loaded) == _values(saved) and loaded.num_steps == 64
    loaded.step(1000)
    assert [lr for lr, _ in _values(loaded)] == [0.5, 0.1]


def test_the_checkpoints_bounds_of_single_groups_win_when_asked_for():
    saved = _scheduler([{"max_lr": 5.0, "min_lr": 0.5}, {}])
    loaded = _scheduler([{"max_lr": 7.0, "min_lr": 0.7}, {"max_lr": 2.0}], use_checkpoint_opt_param_scheduler=True)
    loaded.load_state_dict(saved.state_dict())
    assert loaded.group_bounds == saved.group_bounds
    loaded = _scheduler([{"max_lr": 7.0, "min_lr": 0.7}, {}])
    with pytest.raises(CheckpointError, match="--decoupled-lr"):
        loaded.load_state_dict(saved.state_dict())


def test_C046_the_decay_length_includes_the_warmup():
    curve = dict(lr_warmup_steps=22, max_lr=1.0, min_lr=0.0)
    whole = _scheduler(lr_decay_steps=220, **curve)
    assert whole.get_lr({}, 121) == pytest.approx(0.5, abs=1e-12)
    assert whole.get_lr({}, 198) == pytest.approx(0.0302, abs=5e-5)
    assert whole.get_lr({}, 219) > 0 and whole.get_lr({}, 220) == pytest.approx(0, abs=1e-12)
    short = _scheduler(lr_decay_steps=198, **curve)
    assert short.get_lr({}, 197) > 0
    assert [short.get_lr({}, n) for n in (198, 199, 220)] == pytest.approx([0, 0, 0], abs=1e-12)


def test_C047_the_value_set_before_an_update_is_the_one_of_the_samples_seen_before_it():
    """Megatron's convention: with a warm-up from 0 the first update runs at 0, and that is what the log shows."""
    scheduler = _scheduler(lr_warmup_steps=80, lr_decay_steps=800)
    assert _values(scheduler)[0][0] == 0.0
    scheduler.step(8)
    assert _values(scheduler)[0][0] == pytest.approx(0.1, abs=1e-12)


def test_C048_a_value_depends_on_the_position_alone():
    """Would show: a learning rate computed from the one that is already set."""
    scheduler = _scheduler([{"lr_mult": 0.5}])
    positions = [150, 3, 150, 0, 77, 3]
    values = [scheduler.get_lr({}, n) for n in positions]
    assert values[0] == values[2] and values[1] == values[5]
    scheduler.step(40)
    once = _values(scheduler)
    scheduler.step(0)
    assert _values(scheduler) == once
    scheduler.optimizer.param_groups[0]["lr"] = 123.0
    scheduler.step(0)
    assert _values(scheduler) == once


@pytest.mark.parametrize(
    "changes",
    [
        dict(lr_warmup_steps=100),
        dict(lr_decay_style="WSD", wsd_decay_steps=100, lr_wsd_decay_style="minus_sqrt"),
        dict(lr_decay_style="inverse-square-root"),
    ],
    ids=["warmup running", "WSD", "inverse-square-root"],
)
@pytest.mark.parametrize("switch", ["neither", "use_checkpoint", "override"])
def test_C049_the_learning_rate_after_a_resume_is_the_uninterrupted_one(changes, switch):
    switches = dict(
        use_checkpoint_opt_param_scheduler=switch == "use_checkpoint", override_opt_param_scheduler=switch == "override"
    )
    straight = _scheduler(**changes)
    straight.step(48)
    saved = straight.state_dict()
    resumed = _scheduler(**changes, **switches)
    resumed.load_state_dict(saved)
    for _ in range(10):
        straight.step(8)
        resumed.step(8)
        assert _values(resumed) == _values(straight)
    resumed.load_state_dict(saved)  # twice is once
    assert resumed.num_steps == 48


def test_C050_the_position_comes_from_the_checkpoint_without_any_optimizer_state():
    """The scheduler's state stands alone: `--no-load-optim` does not restart the schedule."""
    saved = _scheduler(max_lr=1.0)
    saved.step(100)
    loaded = _scheduler(max_lr=2.0, use_checkpoint_opt_param_scheduler=True)
    loaded.load_state_dict(saved.state_dict())
    assert loaded.num_steps == 100 and _values(loaded) == _values(saved)


def test_C051_rising_weight_decay_goes_on_where_it_was():
    rise = dict(start_wd=0.01, end_wd=0.1, wd_incr_style="linear")
    straight, resumed = _scheduler(**rise), _scheduler(**rise)
    straight.step(96)
    resumed.load_state_dict(straight.state_dict())
    straight.step(8)
    resumed.step(8)
    assert _values(resumed) == _values(straight)
    assert _values(resumed)[0][1] == pytest.approx(0.01 + 0.09 * 104 / 200, abs=1e-12)


def test_C052_the_number_of_microbatches_does_not_move_the_learning_rate():
    """The clock counts the samples of a step: 1 or 8 micro-batches of the same global batch are one `step`."""
    batch = 16
    one, eight = _scheduler(lr_decay_steps=100 * batch), _scheduler(lr_decay_steps=100 * batch)
    for _ in range(30):
        one.step(16 * 1)
        eight.step(2 * 8)
    assert _values(one) == _values(eight) and one.get_lr({}) == one.get_lr({}, 30 * batch)


def test_lr_and_wd_multipliers_scale_the_result_of_their_group_only():
    scheduler = _scheduler([{}, {"lr_mult": 0.1}, {"wd_mult": 0.0}])
    scheduler.step(50)
    (lr, wd), (small, _), (_, none) = _values(scheduler)
    assert small == pytest.approx(0.1 * lr, abs=1e-12) and none == 0.0 and wd == 0.1


def test_a_changed_flag_is_named_on_load_unless_a_switch_decides():
    saved = _scheduler(max_lr=1.0, min_lr=0.1)
    saved.step(64)
    with pytest.raises(CheckpointError, match=r"(?s)--lr: 1.0 saved, 3.0 now; --min-lr: .*--override-opt_param"):
        _scheduler(max_lr=3.0, min_lr=0.3).load_state_dict(saved.state_dict())
    ours = _scheduler(max_lr=3.0, min_lr=0.3, override_opt_param_scheduler=True)
    ours.load_state_dict(saved.state_dict())
    assert (ours.max_lr, ours.num_steps) == (3.0, 64)
    theirs = _scheduler(max_lr=3.0, min_lr=0.3, use_checkpoint_opt_param_scheduler=True)
    theirs.load_state_dict(saved.state_dict())
    assert _values(theirs) == _values(saved)


@pytest.mark.parametrize(
    "changes, flag",
    [
        (dict(min_lr=-0.1), "--min-lr"),
        (dict(min_lr=2.0), "--min-lr"),
        (dict(init_lr=2.0), "--lr-warmup-init"),
        (dict(lr_warmup_steps=200), "warm-up over 200"),
        (dict(lr_decay_style="square"), "--lr-decay-style"),
        (dict(lr_decay_style="WSD"), "--lr-wsd-decay-iters"),
        (dict(lr_decay_style="WSD", wsd_decay_steps=10, lr_wsd_decay_style="x"), "--lr-wsd-decay-style"),
        (dict(end_wd=0.2), "--weight-decay-incr-style"),
        (dict(start_wd=0.3, wd_incr_style="linear"), "--start-weight-decay"),
        (dict(wd_incr_style="square"), "--weight-decay-incr-style"),
    ],
)
def test_contradictions_are_named_with_their_flag(changes, flag):
    with pytest.raises(ConfigError, match=flag):
        _scheduler(**changes)
