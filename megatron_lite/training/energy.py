"""`--log-energy`: what the devices of a run draw.

    NVIDIA GPU    the driver's counter of the board (NVML, millijoules), of this rank's GPU
    CPU           the counters of the machine's processor packages (RAPL, microjoules), shared out among its ranks

Neither is a dependency: the driver's library is opened by name, RAPL is read from Linux' powercap files, which most
systems let only root read. Where a rank has no counter the run says so once and logs nothing.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from megatron_lite import collectives
from megatron_lite.log import print_rank_0, rank_and_world_size

POWERCAP = Path("/sys/class/powercap")


class Counter(Protocol):
    """Joules that only grow. `joules()` is since some fixed time."""

    def joules(self) -> float: ...


class Unavailable(Exception):
    """There is no counter, and why."""


class BoardCounter:
    """A GPU's own counter since the driver was loaded.

    Args:
        uuid: of the GPU, as the driver prints it.
    Raises: Unavailable.
    """

    def __init__(self, uuid: str, library: str = "libnvidia-ml.so.1"):
        try:
            self._nvml = ctypes.CDLL(library)
        except OSError as problem:
            raise Unavailable(f"the driver's library {library} cannot be opened") from problem
        self._device = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._device))
        self.joules()

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._nvml, name)(*arguments)
        if code != 0:
            raise Unavailable(f"{name} of the driver's library answers with code {code}")

    def joules(self) -> float:
        """Raises: Unavailable."""
        millijoules = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._device, ctypes.byref(millijoules))
        return millijoules.value / 1e3


class PackageCounter:
    """The processor packages of this machine; each counter starts again at 0 now and then.

    Args:
        shared_by: ranks on this machine, of which each counts an equal part.
        root: where Linux has the counters.
    Raises: Unavailable.
    """

    def __init__(self, shared_by: int = 1, root: Path = POWERCAP):
        self._share = 1.0 / shared_by
        self._zones = []  # folder, range of its counter
        self._last: dict[Path, int] = {}
        self._total = 0.0
        found = sorted(root.glob("intel-rapl:[0-9]*")) if root.is_dir() else []
        for zone in found:
            if zone.name.count(":") == 1:  # a package; intel-rapl:0:1 is a part of one
                try:
                    self._last[zone] = int((zone / "energy_uj").read_text())
                    self._zones.append((zone, int((zone / "max_energy_range_uj").read_text())))
                except (OSError, ValueError) as problem:
                    reason = problem.strerror if isinstance(problem, OSError) else str(problem)
                    raise Unavailable(f"{zone}/energy_uj cannot be read ({reason})") from problem
        if not self._zones:
            raise Unavailable(f"this machine has no counters below {root}")

    def joules(self) -> float:
        for zone, range_of_counter in self._zones:
            now = int((zone / "energy_uj").read_text())
            passed = now - self._last[zone]
            self._total += (passed if passed >= 0 else passed + range_of_counter) / 1e6
            self._last[zone] = now
        return self._total * self._share


def counter_of(device: torch.device) -> Counter:
    """The counter of this rank's device.

    Raises: Unavailable.
    """
    if device.type == "cuda":
        return BoardCounter(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    if device.type == "cpu":
        return PackageCounter(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    raise Unavailable(f"nobody here knows the counter of a {device.type}")


class EnergyMeter:
    """Joules of the training steps; what lies in a pause (evaluation, saves) does not count. Collective where made.

    Args:
        wanted: --log-energy. Off, nothing is opened and every number is None.
    """

    def __init__(self, wanted: bool, device: torch.device, counter: Callable[[torch.device], Counter] = counter_of):
        self._device = device
        self._counter: Counter | None = None
        self._joules = self._seconds = self._total = 0.0
        self._from: tuple[float, float] | None = None
        if not wanted:
            return
        mine: Counter | None = None
        reason = ""
        try:
            mine = counter(device)
        except (Unavailable, OSError, AttributeError) as problem:  # AttributeError: an old library lacks the call
            reason = str(problem)
        reasons = collectives.all_gather_object(reason, collectives.world(), purpose="energy counters")
        for rank, text in enumerate(reasons):
            if text:
                print_rank_0(f"--log-energy: unavailable, nothing is logged: rank {rank}: {text}")
                return
        self._counter = mine

    def start(self) -> None:
        """Training begins, or goes on after a pause."""
        if self._counter is not None:
            self._from = (self._counter.joules(), time.monotonic())

    def pause(self) -> None:
        """What follows does not count."""
        if self._counter is not None and self._from is not None:
            joules, seconds = self._from
            self._joules += self._counter.joules() - joules
            self._seconds += time.monotonic() - seconds
            self._from = None

    def read(self, reset: bool) -> tuple[float, float] | None:
        """(joules, watts) of a device since the last reset, means over ranks; None where unavailable. Collective."""
        if self._counter is None:
            return None
        self.pause()
        self.start()
        joules = self._mean(self._joules)
        seconds = self._seconds
        if reset:
            self._total += joules
            self._joules = self._seconds = 0.0
        return joules, joules / max(seconds, 1e-9)

    def report(self) -> None:
        """The energy of all training steps of all devices, said once at the end. Collective."""
        found = self.read(reset=True)
        if found is not None:
            total = self._total * rank_and_world_size()[1]
            print_rank_0(f"Total training energy ({'GPU' if self._device.type == 'cuda' else 'CPU'}): {total / 1e6} MJ")

    def _mean(self, value: float) -> float:
        table = torch.tensor([value], dtype=torch.float64, device=self._device)
        collectives.all_reduce(table, collectives.world(), purpose="energy")
        return float(table) / rank_and_world_size()[1]
