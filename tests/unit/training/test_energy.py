"""Energy: counters of processors that start again at 0, pauses that do not count, what is said without a counter."""

import shutil
import subprocess
import time

import pytest
import torch

from megatron_lite.training.energy import BoardCounter, EnergyMeter, PackageCounter, Unavailable

CPU = torch.device("cpu")


def zone(root, name, microjoules, most=1_000_000):
    folder = root / name
    folder.mkdir(exist_ok=True)
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    (folder / "max_energy_range_uj").write_text(f"{most}\n")


def test_packages_are_added_and_a_counter_that_starts_again_goes_on(tmp_path):
    """Without that a run's energy would jump down by its range every hour. What lies inside a package counts once."""
    zone(tmp_path, "intel-rapl:0", 900_000)
    zone(tmp_path, "intel-rapl:1", 100_000)
    zone(tmp_path, "intel-rapl:0:0", 5)
    counter = PackageCounter(shared_by=2, root=tmp_path)
    zone(tmp_path, "intel-rapl:0", 200_000)  # 0.3 J, over its range
    zone(tmp_path, "intel-rapl:1", 600_000)
    zone(tmp_path, "intel-rapl:0:0", 900_000)
    assert counter.joules() == pytest.approx(0.4)  # of two ranks
    assert counter.joules() == pytest.approx(0.4)


def test_a_machine_without_counters_says_why(tmp_path):
    with pytest.raises(Unavailable, match="no counters below"):
        PackageCounter(root=tmp_path / "missing")
    (tmp_path / "intel-rapl:0").mkdir()  # as where only root may read
    with pytest.raises(Unavailable, match="energy_uj cannot be read"):
        PackageCounter(root=tmp_path)
    with pytest.raises(Unavailable, match="cannot be opened"):
        BoardCounter("GPU-0", library="libno-such-driver.so.1")


class Fake:
    """A counter that a test sets."""

    def __init__(self):
        self.value = 100.0

    def joules(self):
        return self.value


def test_pauses_do_not_count_and_every_interval_begins_at_zero(capsys):
    """Evaluations and saves would be put down to the iterations."""
    fake = Fake()
    meter = EnergyMeter(True, CPU, lambda device: fake)
    meter.start()
    fake.value += 30.0
    meter.pause()
    fake.value += 1000.0  # an evaluation
    meter.start()
    fake.value += 20.0
    begin = time.monotonic()
    joules, watts = meter.read(reset=True)
    assert joules == pytest.approx(50.0) and watts > 50.0 / (time.monotonic() - begin + 60.0)
    fake.value += 5.0
    assert meter.read(reset=False)[0] == pytest.approx(5.0)
    fake.value += 2.0
    assert meter.read(reset=True)[0] == pytest.approx(7.0)
    meter.report()
    assert "Total training energy (CPU): 5.7e-05 MJ" in capsys.readouterr().out


def test_without_a_counter_one_line_says_so_and_nothing_is_logged(capsys):
    def none(device):
        raise Unavailable("this machine has none")

    meter = EnergyMeter(True, CPU, none)
    meter.start()
    meter.pause()
    assert meter.read(reset=True) is None
    meter.report()
    assert capsys.readouterr().out == "--log-energy: unavailable, nothing is logged: rank 0: this machine has none\n"


def test_energy_that_nobody_asked_for_is_not_looked_at():
    def fail(device):
        raise AssertionError("a counter was opened")

    assert EnergyMeter(False, CPU, fail).read(reset=True) is None


DRIVER = """
#include <string.h>
typedef void *nvmlDevice_t;
static int started, board;
int nvmlInit_v2(void) { started = 1; return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    if (!started || strcmp(uuid, "GPU-12")) return 6;
    *device = &board;
    return 0;
}
int nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *energy) {
    if (device != &board) return 2;
    *energy = 5000000000123ULL;
    return 0;
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler, for a library in the driver's place")
def test_the_drivers_counter_is_read_in_millijoules_and_its_refusals_are_told(tmp_path):
    """Through a library with the driver's functions: a 32-bit counter would have started again after an hour."""
    (tmp_path / "driver.c").write_text(DRIVER)
    library = tmp_path / "libdriver.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "driver.c"], check=True)
    assert BoardCounter("GPU-12", str(library)).joules() == 5000000000.123
    with pytest.raises(Unavailable, match="nvmlDeviceGetHandleByUUID of the driver's library answers with code 6"):
        BoardCounter("GPU-13", str(library))
