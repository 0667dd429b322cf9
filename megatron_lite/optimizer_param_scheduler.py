"""Learning rate and weight decay as pure functions of the number of samples seen.

    lr    init --warm-up--> max --decay style--> min            (both ends included in `lr_decay_steps`)
                 linear            over the rest
    WSD   init --warm-up--> max ------ max ------ --anneal--> min
                                                   the last `wsd_decay_steps` of `lr_decay_steps`

The clock counts samples ("steps" in the names, as Megatron has it) and is advanced by the batch of every successful
update; a skipped update leaves it. A group's values for its first update are those of 0 samples, so with a warm-up
from 0 the first update changes nothing and the log shows 0 for it: Megatron's convention, kept.
"""

from __future__ import annotations

import math
from typing import Any

from megatron_lite.errors import CheckpointError, ConfigError

DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")
WD_STYLES = ("constant", "linear", "cosine")

# What a checkpoint and a command line may disagree about -> the flag to name
_SAVED = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "lr_warmup_steps": "--lr-warmup-iters/-samples/-fraction",
    "lr_decay_steps": "--lr-decay-iters/-samples",
    "lr_decay_style": "--lr-decay-style",
    "start_wd": "--start-weight-decay",
    "end_wd": "--end-weight-decay",
    "wd_incr_steps": "the length of the run",
    "wd_incr_style": "--weight-decay-incr-style",
    "init_lr": "--lr-warmup-init",
    "wsd_decay_steps": "--lr-wsd-decay-iters/-samples",
    "lr_wsd_decay_style": "--lr-wsd-decay-style",
    "group_bounds": "--decoupled-lr and other bounds of single groups",
}


class OptimizerParamScheduler:
    """Sets `lr` and `weight_decay` of every parameter group of an optimizer.

    Args:
        optimizer: anything with `param_groups`. A group may bring `max_lr` and `min_lr` (they replace the common ones)
            and `lr_mult` and `wd_mult` (factors on the result).
        init_lr: where the warm-up starts, for all groups.
        max_lr, min_lr: the peak, and the value after the decay.
        lr_warmup_steps, lr_decay_steps: samples; the decay includes the warm-up.
        lr_decay_style: one of DECAY_STYLES.
        start_wd, end_wd, wd_incr_steps, wd_incr_style: weight decay, likewise; styles in WD_STYLES.
        use_checkpoint_opt_param_scheduler: on load, the checkpoint's values win.
        override_opt_param_scheduler: on load, this object's values win. Without either they must be equal. The position
            always comes from the checkpoint.
        wsd_decay_steps, lr_wsd_decay_style: length (samples) and shape of WSD's anneal.
    Raises: ConfigError for values that contradict each other.
    """

    def __init__(
        self,
        optimizer: Any,
        init_lr: float,
        max_lr: float,
        min_lr: float,
        lr_warmup_steps: int,
        lr_decay_steps: int,
        lr_decay_style: str,
        start_wd: float,
        end_wd: float,
        wd_incr_steps: int,
        wd_incr_style: str,
        use_checkpoint_opt_param_scheduler: bool | None = True,
        override_opt_param_scheduler: bool | None = False,
        wsd_decay_steps: int | None = None,
        lr_wsd_decay_style: str | None = None,
    ):
        self.optimizer = optimizer
        self.init_lr, self.max_lr, self.min_lr = init_lr, float(max_lr), min_lr
        self.lr_warmup_steps, self.lr_decay_steps, self.lr_decay_style = lr_warmup_steps, lr_decay_steps, lr_decay_style
        self.wsd_decay_steps, self.lr_wsd_decay_style = wsd_decay_steps, lr_wsd_decay_style
        self.start_wd, self.end_wd = start_wd, end_wd
        self.wd_incr_steps, self.wd_incr_style = wd_incr_steps, wd_incr_style
        self.override_opt_param_scheduler = bool(override_opt_param_scheduler)
        # Overriding is the stronger wish; use_checkpoint is True by default.
        self.use_checkpoint_opt_param_scheduler = (
            bool(use_checkpoint_opt_param_scheduler) and not self.override_opt_param_scheduler
        )
        self.num_steps = 0
        self._check()
        self.step(0)

    def _check(self) -> None:
        """Raises ConfigError at the first contradiction."""
        rules = [
            (self.min_lr >= 0.0, f"--min-lr {self.min_lr}", "a learning rate is not negative", "--min-lr 0"),
            (
                self.max_lr >= self.min_lr,
                f"--lr {self.max_lr} is below --min-lr {self.min_lr}",
                "the learning rate decays from the first to the second",
                f"--min-lr {self.max_lr / 10}",
            ),
            (
                self.init_lr <= self.max_lr,
                f"--lr-warmup-init {self.init_lr} is above --lr {self.max_lr}",
                "the warm-up rises from the first to the second",
                "--lr-warmup-init 0",
            ),
            (
                self.lr_decay_steps > 0,
                f"the learning rate decays over {self.lr_decay_steps} samples",
                "the decay has a length",
                "--lr-decay-iters or --lr-decay-samples above 0",
            ),
            (
                0 <= self.lr_warmup_steps < self.lr_decay_steps,
                f"warm-up over {self.lr_warmup_steps} samples, decay over {self.lr_decay_steps}",
                "the decay includes the warm-up and must be longer",
                "a shorter --lr-warmup-iters/-samples/-fraction or a longer --lr-decay-iters/-samples",
            ),
            (
                self.lr_decay_style in DECAY_STYLES,
                f"--lr-decay-style {self.lr_decay_style}",
                "no such style",
                f"one of {', '.join(DECAY_STYLES)}",
            ),
            (
                self.lr_decay_style != "WSD" or (self.wsd_decay_steps is not None and self.wsd_decay_steps > 0),
                f"--lr-decay-style WSD with an anneal of {self.wsd_decay_steps} samples",
                "WSD needs to know how long its last part is",
                "--lr-wsd-decay-iters or --lr-wsd-decay-samples",
            ),
            (
                self.lr_decay_style != "WSD" or self.lr_wsd_decay_style in WSD_STYLES,
                f"--lr-wsd-decay-style {self.lr_wsd_decay_style}",
                "no such style",
                f"one of {', '.join(WSD_STYLES)}",
            ),
            (
                0.0 <= self.start_wd <= self.end_wd,
                f"weight decay goes from {self.start_wd} to {self.end_wd}",
                "it is not negative and does not fall",
                "--start-weight-decay and --end-weight-decay in rising order",
            ),
            (
                self.wd_incr_style in WD_STYLES,
                f"--weight-decay-incr-style {self.wd_incr_style}",
                "no such style",
                f"one of {', '.join(WD_STYLES)}",
            ),
            (
                self.wd_incr_style != "constant" or self.start_wd == self.end_wd,
                f"--weight-decay-incr-style constant from {self.start_wd} to {self.end_wd}",
                "constant weight decay has one value",
                "--weight-decay-incr-style linear, or --weight-decay alone",
            ),
        ]
        for holds, what, why, fix in rules:
            if not holds:
                raise ConfigError(what, why=why, fix=fix)

    # -- the curves ----------------------------------------------------------------------------------------------

    def get_lr(self, param_group: dict[str, Any], num_steps: int | None = None) -> float:
        """A group's learning rate after `num_steps` samples (None: now), before its `lr_mult`."""
        n = self.num_steps if num_steps is None else num_steps
        max_lr, min_lr = self._bounds(param_group)
        if self.lr_warmup_steps > 0 and n <= self.lr_warmup_steps:
            return self.init_lr + (max_lr - self.init_lr) * n / self.lr_warmup_steps
        if self.lr_decay_style == "constant":
            return max_lr
        if n > self.lr_decay_steps:
            return min_lr
        if self.lr_decay_style == "inverse-square-root":
            return max(min_lr, max_lr * math.sqrt(max(self.lr_warmup_steps, 1)) / math.sqrt(max(n, 1)))
        return min_lr + self._decay_coefficient(n) * (max_lr - min_lr)

    def _decay_coefficient(self, n: int) -> float:
        """From 1 at the end of the warm-up to 0 at the end of the decay."""
        if self.lr_decay_style == "WSD":
            assert self.wsd_decay_steps is not None
            anneal_start = self.lr_decay_steps - self.wsd_decay_steps
            if n <= anneal_start:
                return 1.0
            y = (n - anneal_start) / self.wsd_decay_steps
            shapes = {
                "linear": lambda: 1.0 - y,
                "cosine": lambda: 0.5 * (math.cos(math.pi * y) + 1.0),
                "exponential": lambda: 2.0 * 0.5**y - 1.0,
                "minus_sqrt": lambda: 1.0 - math.sqrt(y),
            }
            return shapes[str(self.lr_wsd_decay_style)]()
        x = (n - self.lr_warmup_steps) / (self.lr_decay_steps - self.lr_warmup_steps)
        return 1.0 - x if self.lr_decay_style == "linear" else 0.5 * (math.cos(math.pi * x) + 1.0)

    def get_wd(self, param_group: dict[str, Any] | None = None, num_steps: int | None = None) -> float:
        """Weight decay after `num_steps` samples (None: now), before a group's `wd_mult`.

        Args:
            param_group: accepted for scripts written for Megatron; weight decay has no bounds of single groups.
        """
        n = self.num_steps if num_steps is None else num_steps
        if self.wd_incr_style == "constant" or n > self.wd_incr_steps or self.wd_incr_steps == 0:
            return self.end_wd
        u = n / self.wd_incr_steps
        share = u if self.wd_incr_style == "linear" else 0.5 * (math.cos(math.pi * (1.0 - u)) + 1.0)
        return self.start_wd + share * (self.end_wd - self.start_wd)

    def _bounds(self, param_group: dict[str, Any]) -> tuple[float, float]:
        max_lr, min_lr = param_group.get("max_lr"), param_group.get("min_lr")
        return self.max_lr if max_lr is None else max_lr, self.min_lr if min_lr is None else min_lr

    # -- the clock -----------------------------------------------------------------------------------------------

    def step(self, increment: int) -> None:
        """Count `increment` more samples and set every group's `lr` and `weight_decay` for the next update."""
        self.num_steps += increment
        weight_decay = self.get_wd()
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr(group) * group.get("lr_mult", 1.0)
            group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    @property
    def group_bounds(self) -> list[list[float | None]]:
        """Each group's own `[max_lr, min_lr]`, None where the common value holds.

        Groups of experts, which some layouts have beside others of the same kind, are left out.
        """
        return [[group.get("max_lr"), group.get("min_lr")] for group in self._dense_groups]

    @property
    def _dense_groups(self) -> list[dict[str, Any]]:
        return [group for group in self.optimizer.param_groups if not group.get("is_expert_parallel")]

    def state_dict(self) -> dict[str, Any]:
        """The position and everything that shapes the curves, as plain values."""
        return {"num_steps": self.num_steps, **{name: getattr(self, name) for name in _SAVED}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the position from the checkpoint, and the curves from the side that the two switches name.

        Keys that an older file lacks keep this object's values.

        Raises: CheckpointError with all values that differ, when neither switch is set.
        """
        if not self.override_opt_param_scheduler:
            differing = {
                name: (state_dict[name], getattr(self, name))
                for name in _SAVED
                if name in state_dict and not _equal(state_dict[name], getattr(self, name))
            }
            if differing and not self.use_checkpoint_opt_param_scheduler:
                raise CheckpointError(
                    "the schedule on the command line is not the checkpoint's: "
                    + "; ".join(f"{_SAVED[n]}: {theirs} saved, {ours} now" for n, (theirs, ours) in differing.items()),
                    why="a resumed run follows one curve",
                    fix="--use-checkpoint-opt_param-scheduler to keep the saved one, "
                    "--override-opt_param-scheduler to take the new one",
                )
            self._take({name: theirs for name, (theirs, _) in differing.items()})
        self.num_steps = int(state_dict["num_steps"])
        self.step(0)

    def _take(self, values: dict[str, Any]) -> None:
        """Adopt the checkpoint's values."""
        bounds = values.pop("group_bounds", None)
        if bounds is not None:
            if len(bounds) != len(self._dense_groups):
                raise CheckpointError(
                    f"the checkpoint's schedule has {len(bounds)} parameter groups, this run {len(self._dense_groups)}",
                    why="bounds of single groups cannot be matched",
                    fix="--override-opt_param-scheduler",
                )
            for group, (max_lr, min_lr) in zip(self._dense_groups, bounds):
                for key, value in (("max_lr", max_lr), ("min_lr", min_lr)):
                    if value is None:
                        group.pop(key, None)
                    else:
                        group[key] = value
        for name, value in values.items():
            setattr(self, name, value)


def _equal(a: Any, b: Any) -> bool:
    """Equal values; lists and tuples alike, since files do not keep the difference."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return a == b
