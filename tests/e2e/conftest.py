"""Scripts that are started here have the machine for themselves: idle worlds wake a hundred times a second each."""

import pytest


@pytest.fixture(scope="package", autouse=True)
def no_worlds(world):
    """End the worlds of tests before; who asks for one later gets a new one."""
    world.close()
