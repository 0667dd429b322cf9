"""Freed memory is kept for the next step."""

import os
import subprocess
import sys

import pytest

# Prints the page faults of 50 rounds of a tensor of 8 MiB, before and after.
_PROGRAM = """
import resource, torch
from megatron_lite.host_memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        first, second = torch.ones(2**20), torch.ones(2**20)
        del first, second
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(faults(), int(keep_freed_memory()), faults())
"""


def _run(environment: dict[str, str]) -> tuple[int, bool, int]:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    before, kept, after = done.stdout.split()
    return int(before), kept == "1", int(after)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Ours, without what sets the allocator up."""
    return {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_pages_are_paid_for_once(environment: dict[str, str]) -> None:
    before, kept, after = _run(environment)
    if not kept:
        pytest.skip("this C library is not glibc")
    assert after < 5000 or after < before / 4, f"{after} page faults in 50 rounds, {before} without"


def test_what_the_user_has_set_stays(environment: dict[str, str]) -> None:
    assert not _run({**environment, "MALLOC_ARENA_MAX": "2"})[1]
