"""Lines of several ranks in one pipe stay lines."""

import io
import sys

from megatron_lite import log


class Writes(io.RawIOBase):
    """Notes every write that reaches the system."""

    def __init__(self):
        self.seen = []

    def writable(self):
        return True

    def write(self, data):
        self.seen.append(bytes(data))
        return len(data)


def test_a_line_and_its_end_are_one_write(monkeypatch):
    """Launchers switch buffering off: `print` then writes the end by itself, and another rank may write before it."""
    writes = Writes()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(writes, write_through=True))
    log.print_rank_0("one")
    log.print_rank_last("two")
    log.say("three")
    assert [data for data in writes.seen if data] == [b"one\n", b"two\n", b"three\n"]
    print("four", flush=True)
    assert writes.seen[-2:] == [b"four", b"\n"], "plain print is not what this test takes it for"
