"""Ranks of one start meet below a prefix that no former start has used, whoever comes first and whoever died before."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_lite.errors import RankFailure
from megatron_lite.training.rendezvous import fresh, launchers_store

SOON = timedelta(seconds=30)


@pytest.fixture
def server():
    """A store that outlives the starts, as torchrun's agent keeps one."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=SOON)


def client(server):
    return dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=SOON)


def start(server, ranks, size, timeout=SOON):
    """What each of `ranks` got: its part of the store, or the error."""
    found = {}

    def one(rank):
        try:
            store = client(server)
            store.set_timeout(timeout)
            found[rank] = fresh(store, rank, size, timeout)
        except RankFailure as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_a_restart_sees_nothing_of_the_start_before(server):
    first = start(server, [2, 1, 0], 3)
    first[1].set("address", "of a process that is dead now")
    second = start(server, [0, 1, 2], 3)
    assert not any(part.check(["address"]) for part in second.values())
    second[2].set("address", "new")
    assert second[0].get("address") == b"new" and second[1].get("address") == b"new"
    assert first[0].get("address") == b"of a process that is dead now"


def test_a_start_that_never_came_about_does_not_disturb_the_next(server):
    """Rank 0 was killed before it had answered, rank 1 between taking a number and writing its word on the ticket."""
    given_up = start(server, [1, 2], 3, timedelta(seconds=0.2))
    assert all("rank 0 did not come to the start" in text for text in given_up.values())
    client(server).add("megatron_lite/start/tickets", 1)
    parts = start(server, [0, 1, 2], 3)
    parts[0].set("key", "value")
    assert [parts[rank].get("key") for rank in (1, 2)] == [b"value"] * 2


def test_rank_0_names_those_that_did_not_come(server):
    found = start(server, [0, 2], 4, timedelta(seconds=0.5))
    assert "ranks [1, 3] did not come to the start" in found[0]


def test_the_launchers_store_is_used_where_the_launcher_says_so(server, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert launchers_store(SOON) is None
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    store = launchers_store(SOON)
    server.set("there", "yes")
    assert store is not None and store.get("there") == b"yes"
