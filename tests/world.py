"""Worlds for tests: ranks that start once a session and then take one test's function after another."""

from __future__ import annotations

from megatron_lite.training.local_world import World


class Worlds:
    """One world per size, started when first asked for and replaced when a test has closed it."""

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}

    def __call__(self, size: int) -> World:
        if size not in self._worlds or self._worlds[size].closed:
            self._worlds[size] = World(size, timeout=180)  # a busy machine takes a minute for seconds of work
        return self._worlds[size]

    def close(self) -> None:
        """End all worlds."""
        for world in self._worlds.values():
            if not world.closed:
                world.close()
