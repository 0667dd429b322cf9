"""How far may a loss or a norm be above all before it? What checks for spikes remember."""

from __future__ import annotations

import math
from collections import deque
from typing import Any


class RunningMaximum:
    """Is a number far above all before it?

    Args:
        factor: times the largest so far.
        warm_up: numbers before the first verdict.
        window: only the last so many count, and they are the warm-up; None: all count.
    """

    def __init__(self, factor: float, warm_up: int, window: int | None = None):
        self.factor, self.warm_up = factor, window or warm_up
        self.seen, self.largest = 0, -math.inf
        self._recent: deque[float] | None = None if window is None else deque(maxlen=window)

    def exceeded_by(self, value: float) -> bool:
        return self.seen >= self.warm_up and value > self.factor * self.largest

    def add(self, value: float) -> None:
        if not math.isfinite(value):
            return
        self.seen += 1
        if self._recent is not None:
            self._recent.append(value)
            self.largest = max(self._recent)
        else:
            self.largest = max(self.largest, value)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "largest": self.largest, "recent": list(self._recent or ())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.largest = int(state["seen"]), float(state["largest"])
        if self._recent is not None:  # a window that was not kept before starts afresh
            self._recent.extend(state["recent"])
            self.seen, self.largest = len(self._recent), max(self._recent, default=-math.inf)
