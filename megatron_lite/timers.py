"""Named stop-watches of a step, comparable between ranks.

    timers = Timers(log_level=1, log_option="minmax")
    timers("forward-backward", log_level=1).start(barrier=True) ... .stop()
    timers.log(["forward-backward"], normalizer=log_interval)

    (min, max) time across ranks (ms):
        forward-backward ...............................: (101.20, 103.45)

A timer above the chosen level is a dummy that does nothing. On a device that computes asynchronously a timer waits for
the device, so levels 1 and 2 cost speed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite import collectives
from megatron_lite.errors import ConfigError
from megatron_lite.log import print_rank_last, rank_and_world_size, say

# Megatron's list of printed timers has an old name that no timer bears; its tag is still written for old dashboards.
_OLD_TAGS = {"non-tensor-parallel-grads-all-reduce": "layernorm-grads-all-reduce"}


class Timer:
    """One stop-watch; seconds add up until `reset`."""

    def __init__(self, name: str, device: torch.device):
        self.name = name
        self._device = device
        self._barrier_group: ProcessGroup | None = None
        self._elapsed = 0.0
        self._active_time = 0.0
        self._start: float | None = None

    def set_barrier_group(self, barrier_group: ProcessGroup | None) -> None:
        """The ranks that `barrier=True` waits for; None: all."""
        self._barrier_group = barrier_group

    def _wait(self, barrier: bool) -> None:
        if barrier:
            collectives.barrier(self._barrier_group or collectives.world(), purpose=f"timer {self.name}")
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def start(self, barrier: bool = False) -> None:
        """Start; with `barrier`, together with the other ranks."""
        assert self._start is None, f"timer {self.name} is running"
        self._wait(barrier)
        self._start = time.perf_counter()

    def stop(self, barrier: bool = False) -> None:
        """Stop, and add what passed."""
        assert self._start is not None, f"timer {self.name} is not running"
        self._wait(barrier)
        passed = time.perf_counter() - self._start
        self._elapsed += passed
        self._active_time += passed
        self._start = None

    def reset(self) -> None:
        """Back to 0 and not running. `active_time` goes on."""
        self._elapsed = 0.0
        self._start = None

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Seconds since the last reset; a running timer goes on running."""
        running = self._start is not None
        if running:
            self.stop(barrier=barrier)
        seconds = self._elapsed
        if reset:
            self.reset()
        if running:
            self.start(barrier=barrier)
        return seconds

    def active_time(self) -> float:
        """Seconds since the timer was made, whatever was reset."""
        return self._active_time


class DummyTimer:
    """A timer above the chosen level."""

    def start(self, barrier: bool = False) -> None:
        return

    def stop(self, barrier: bool = False) -> None:
        return

    def reset(self) -> None:
        return

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        raise RuntimeError("this timer is above --timing-log-level and measures nothing")

    def active_time(self) -> float:
        """0: it never ran."""
        return 0.0


class Timers:
    """All timers of a process, by name.

    Args:
        log_level: 0, 1 or 2: timers of a higher level do nothing.
        log_option: what `log` prints: "max", "minmax" or "all".
        device: what timers wait for before they read the clock, and where times are gathered.
    """

    def __init__(self, log_level: int, log_option: str, device: torch.device | str = "cpu"):
        if log_level not in (0, 1, 2):
            raise ConfigError(f"--timing-log-level {log_level}", why="there are three levels", fix="0, 1 or 2")
        if log_option not in ("max", "minmax", "all"):
            raise ConfigError(f"--timing-log-option {log_option}", why="no such option", fix="max, minmax or all")
        self._log_level, self._log_option = log_level, log_option
        self._device = torch.device(device)
        self._timers: dict[str, Timer] = {}
        self._levels: dict[str, int] = {}
        self._dummy = DummyTimer()

    def __call__(self, name: str, log_level: int | None = None) -> Timer | DummyTimer:
        """The timer `name`, made when it is first asked for.

        Args:
            log_level: of the timer; may be left out after the first time, then 0.
        """
        if name in self._timers:
            assert log_level is None or log_level == self._levels[name], (
                f"timer {name} has level {self._levels[name]}, not {log_level}"
            )
            return self._timers[name]
        level = self._levels.setdefault(name, log_level or 0)
        assert level in (0, 1, 2), f"timer {name}: there is no level {level}"
        if level > self._log_level:
            return self._dummy
        self._timers[name] = Timer(name, self._device)
        return self._timers[name]

    # -- all ranks' times ----------------------------------------------------------------------------------------

    def _gather(self, names: Iterable[str] | None, reset: bool, barrier: bool) -> tuple[list[str], Tensor]:
        """Every rank's seconds, `[ranks, names]`; 0 where a rank has no such timer. Collective over all ranks."""
        group = collectives.world()
        if barrier:
            collectives.barrier(group, purpose="timers")
        if names is None:  # ranks may have different timers (pipeline stages have)
            known = collectives.all_gather_object(list(self._timers), group, purpose="timer names")
            names = dict.fromkeys(name for rank in known for name in rank)
        names = list(names)
        mine = [self._timers[name].elapsed(reset=reset) if name in self._timers else 0.0 for name in names]
        seconds = torch.tensor(mine, dtype=torch.float32, device=self._device)
        everyone = torch.zeros(collectives.group_size(group), len(names), dtype=torch.float32, device=self._device)
        if names:
            collectives.all_gather(everyone.view(-1), seconds, group, purpose="timers")
        return names, everyone.cpu()

    @staticmethod
    def _min_max(names: list[str], seconds: Tensor) -> dict[str, tuple[float, float]]:
        """Shortest and longest time over the ranks where the timer ran; timers that never ran are left out."""
        result = {}
        for column, name in enumerate(names):
            ran = [value for value in seconds[:, column].tolist() if value > 0.0]
            if ran:
                result[name] = (min(ran), max(ran))
        return result

    def get_all_timers_string(
        self, names: list[str] | None = None, normalizer: float = 1.0, reset: bool = True, barrier: bool = False
    ) -> str | None:
        """The lines that `log` prints, or None when no timer ran. Collective over all ranks.

        Args:
            names: in this order; None: all timers of all ranks.
            normalizer: times are divided by it (the number of iterations since the last reset).
        """
        assert normalizer > 0.0, f"times divided by {normalizer}"
        names, seconds = self._gather(names, reset, barrier)
        milliseconds = seconds * 1000.0 / normalizer
        lines = []
        if self._log_option == "all":
            head = "times across ranks (ms):"
            for column, name in enumerate(names):
                ran = [(rank, value) for rank, value in enumerate(milliseconds[:, column].tolist()) if value > 0.0]
                if ran:
                    lines += [f"    {name}:", *(f"        rank {rank:2d}: {value:.2f}" for rank, value in ran)]
        else:
            head = "(min, max) time across ranks (ms):"
            if self._log_option == "max":
                head = "max time across ranks (ms):"
            for name, (least, most) in self._min_max(names, milliseconds).items():
                value = f"{most:.2f}" if self._log_option == "max" else f"({least:.2f}, {most:.2f})"
                lines.append(f"    {(name + ' ').ljust(48, '.')}: {value}")
        return "\n".join([head, *lines]) if lines else None

    def log(
        self,
        names: list[str] | None,
        rank: int | None = None,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Print the times, on `rank` (None: the last one). Collective over all ranks."""
        text = self.get_all_timers_string(names, normalizer, reset, barrier)
        if text is None:
            return
        if rank is None:
            print_rank_last(text)
        elif rank_and_world_size()[0] == rank:
            say(text)

    def write(
        self,
        names: list[str] | None,
        writer: Any,
        iteration: int,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Scalars `NAME-time`, the longest time over the ranks in seconds. Collective over all ranks.

        Args:
            writer: a TensorBoard SummaryWriter on the rank that writes, None on the others.
        """
        assert normalizer > 0.0, f"times divided by {normalizer}"
        names, seconds = self._gather(names, reset, barrier)
        if writer is None:
            return
        for name, (_, longest) in self._min_max(names, seconds / normalizer).items():
            writer.add_scalar(f"{name}-time", longest, iteration)
            if name in _OLD_TAGS:
                writer.add_scalar(f"{_OLD_TAGS[name]}-time", longest, iteration)
