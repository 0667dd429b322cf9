"""Loss scaling for fp16: gradients below 6e-8 would become 0, so backward starts from loss * scale.

    clean step       growth tracker + 1; at `growth_interval`: scale * 2, hysteresis as at the start
    Inf or NaN       the step is skipped; growth tracker 0, hysteresis - 1; at 0 and below: scale / 2

Scales are powers of two times the initial one, so scaling and unscaling lose nothing (Micikevicius et al. 2018).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from megatron_lite.errors import ConfigError, RankFailure


class MegatronGradScaler(ABC):
    """What the loss is multiplied by, and how that changes."""

    def __init__(self, initial_scale: float):
        if not initial_scale > 0.0:
            raise ConfigError(f"loss scale {initial_scale}", why="the loss is multiplied by it", fix="a number above 0")
        self.scale = float(initial_scale)

    @property
    def inv_scale(self) -> float:
        """What gradients are multiplied by."""
        return 1.0 / self.scale

    @abstractmethod
    def update(self, found_inf: bool) -> None:
        """After a step: whether a gradient was Inf or NaN on any rank."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""


class ConstantGradScaler(MegatronGradScaler):
    """`--loss-scale`: one number. Inf or NaN still skips the step."""

    def update(self, found_inf: bool) -> None:
        return

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        return


class DynamicGradScaler(MegatronGradScaler):
    """As large as the gradients bear.

    Args:
        min_scale: the scale does not fall below.
        growth_factor, backoff_factor: above 1, and between 0 and 1.
        growth_interval: clean steps in a row before the scale grows.
        hysteresis: overflows before it falls; it is set back by growth, not by a fall.
        patience: overflows in a row at `min_scale` after which `update` gives up.
    """

    def __init__(
        self,
        initial_scale: float,
        min_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        hysteresis: int,
        patience: int = 50,
    ):
        super().__init__(initial_scale)
        if not 0.0 < min_scale <= initial_scale:
            raise ConfigError(
                f"--min-loss-scale {min_scale} with --initial-loss-scale {initial_scale}",
                why="the scale falls from the second, not below the first",
                fix="--min-loss-scale 1",
            )
        for name, value in (("--loss-scale-window", growth_interval), ("--hysteresis", hysteresis)):
            if value <= 0:
                raise ConfigError(f"{name} {value}", why="it counts steps", fix="a positive number")
        assert growth_factor > 1.0 > backoff_factor > 0.0, (growth_factor, backoff_factor)
        self.min_scale = min_scale
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.growth_interval, self.hysteresis, self.patience = growth_interval, hysteresis, patience
        self._growth_tracker = 0
        self._hysteresis_tracker = hysteresis
        self._overflows_at_min = 0

    def update(self, found_inf: bool) -> None:
        """After a step.

        Raises: RankFailure when `patience` steps in a row overflow at the smallest scale.
        """
        if found_inf:
            self._overflows_at_min = self._overflows_at_min + 1 if self.scale <= self.min_scale else 0
            if self._overflows_at_min >= self.patience:
                raise RankFailure(
                    f"gradients overflowed {self.patience} times in a row at the smallest loss scale {self.scale:g}",
                    why="the gradients themselves are Inf or NaN, so a smaller scale does not help",
                    fix="lower --lr or go back to an earlier checkpoint; --bf16 needs no loss scale",
                )
            self._growth_tracker = 0
            self._hysteresis_tracker -= 1
            if self._hysteresis_tracker <= 0:
                self.scale = max(self.scale * self.backoff_factor, self.min_scale)
            return
        self._overflows_at_min = 0
        self._growth_tracker += 1
        if self._growth_tracker == self.growth_interval:
            self._growth_tracker = 0
            self._hysteresis_tracker = self.hysteresis
            self.scale *= self.growth_factor

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "growth_tracker": self._growth_tracker,
            "hysteresis_tracker": self._hysteresis_tracker,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scale = float(state_dict["scale"])
        self._growth_tracker = int(state_dict["growth_tracker"])
        self._hysteresis_tracker = int(state_dict["hysteresis_tracker"])
