"""`--log-communication`: what a rank moved in its training steps, by group and purpose.

    communication of an iteration on rank 3, calls and MiB sent:
        tp, 2 ranks      all_reduce      column backward ...................    18.0    2.250

Counted are the calls of `collectives` inside training steps, not those of evaluation, checkpoints and signals. Sent is
what each rank of the group sends by the best algorithms (`collectives.sent_bytes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megatron_lite import collectives
from megatron_lite.collectives import Key

_MIB = 1024.0 * 1024.0


class CommunicationLog:
    """Sums over the steps of a log interval.

    Args:
        enabled: False: nothing is looked at, and nothing is printed.
    """

    def __init__(self, enabled: bool):
        self.enabled = enabled
        self._sums: dict[Key, tuple[int, int]] = {}
        self._steps = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """What is moved inside belongs to one training step."""
        if not self.enabled:
            yield
            return
        before = collectives.counts()
        yield
        for key, (calls, size) in collectives.difference(collectives.counts(), before).items():
            n, total = self._sums.get(key, (0, 0))
            self._sums[key] = n + calls, total + size
        self._steps += 1

    def rows(self) -> list[dict[str, Any]]:
        """Means over the steps since `start_over`: group, ranks, kind, purpose, calls, bytes, sent_bytes."""
        sizes = {"world": collectives.group_size(collectives.world()), **collectives.group_sizes()}
        rows = []
        for (group, kind, purpose), (calls, size) in sorted(self._sums.items()):
            rows.append(
                {
                    "group": group,
                    "ranks": sizes[group],
                    "kind": kind,
                    "purpose": purpose,
                    "calls": calls / self._steps,
                    "bytes": size / self._steps,
                    "sent_bytes": collectives.sent_bytes(kind, size, sizes[group]) / self._steps,
                }
            )
        return rows

    def start_over(self) -> None:
        """Begin the next interval."""
        self._sums.clear()
        self._steps = 0


def as_text(rows: list[Mapping[str, Any]] | list[dict[str, Any]], rank: int) -> str:
    """The rows for the log."""
    if not rows:
        return f"communication of an iteration on rank {rank}: none"
    lines = [f"communication of an iteration on rank {rank}, calls and MiB sent:"]
    for row in rows:
        group = f"{row['group']}, {row['ranks']} ranks"
        purpose = f"{row['purpose']} {'.' * (36 - len(row['purpose']))}"
        lines.append(
            f"    {group:<20} {row['kind']:<16} {purpose} {row['calls']:7.1f} {row['sent_bytes'] / _MIB:10.3f}"
        )
    total = sum(row["sent_bytes"] for row in rows)
    lines.append(f"    all together {'.' * 61} {sum(row['calls'] for row in rows):7.1f} {total / _MIB:10.3f}")
    return "\n".join(lines)
