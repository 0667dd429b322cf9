"""Ranks on this machine: processes joined by gloo on the CPU that take one function after another.

    run(function, arguments) --> rank 0 | rank 1 | ... --> [result of each], in rank order

`megatron-lite verify` and the tests of several ranks stand on it. A function is sent by name, so it stands at the top
level of a module; arguments and results are pickled. torch and this package are imported once for all ranks (in the
fork server), so a world of 8 starts in about a second.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing import connection, get_context
from typing import Any

import torch
import torch.distributed as dist

from megatron_lite import collectives, log, process_groups_config
from megatron_lite.errors import RankFailure


class World:
    """`size` processes, joined by gloo, that live until `close` (or the end of this process).

    Each has the environment that a launcher would give it (RANK, WORLD_SIZE, ...) and sees no CUDA device.

    Args:
        timeout: seconds without an answer of any rank after which `run` gives the world up.
    """

    def __init__(self, size: int, timeout: float = 60):
        self.size, self.timeout = size, timeout
        self.closed = False
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        self._folder = tempfile.mkdtemp(prefix="world")  # a file store: no port that could be in use
        context = get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "megatron_lite.training.record"])
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, self._folder + "/store", theirs), daemon=True)
            process.start()
            theirs.close()  # else the pipe of a dead rank would look alive
            self.pipes.append(ours)
            self.processes.append(process)
        for pipe in self.pipes:
            pipe.recv()  # "up": starting is no part of a call's time limit

    def run(self, function: Callable, *args: Any) -> list[Any]:
        """`function(*args)` on every rank; the results in rank order.

        Raises: RankFailure with the failing rank's own traceback, or naming the ranks that do not answer. The world
            is closed then, because the other ranks may wait for the failed one for ever.
        """
        work = pickle.dumps((function, args))
        for pipe in self.pipes:
            pipe.send((sys.path, work))
        results: dict[int, Any] = {}
        waiting = set(self.pipes)
        while waiting:
            ready = connection.wait(waiting, self.timeout)
            silent = sorted(map(self.pipes.index, waiting))
            error = None if ready else f"ranks {silent} silent for {self.timeout} s: a collective hangs?"
            for rank in sorted(map(self.pipes.index, ready)):
                try:
                    failure, results[rank] = self.pipes[rank].recv()
                except EOFError:
                    failure = "the process died (killed, or out of memory?)"
                error = error or (f"rank {rank}: {failure}" if failure else None)
            if error:
                self.close()
                raise RankFailure(error)
            waiting -= set(ready)
        return [results[rank] for rank in range(self.size)]

    def close(self) -> None:
        """End every process. The world cannot be used again."""
        self.closed = True
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def _serve(rank: int, size: int, store: str, pipe: Any) -> None:
    """A rank's life: join the world, then answer calls until the pipe is closed."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",  # nobody calls it: ranks meet in a file
        CUDA_VISIBLE_DEVICES="",
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=120))
    log.set_rank(rank, size)
    pipe.send("up")
    with suppress(EOFError):
        while True:
            path, work = pipe.recv()
            sys.path[:] = path  # the caller's own folder may be new
            collectives.COUNTERS.clear()
            process_groups_config.register_process_groups(None)  # nothing is left of the call before
            _destroy_groups()
            try:
                function, args = pickle.loads(work)
                pipe.send((None, function(*args)))
            except BaseException:
                pipe.send((traceback.format_exc(), None))


def _destroy_groups() -> None:
    """End all groups but that of all ranks: each has a thread that wakes 100 times a second as long as it lives."""
    collectives.forget_groups()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
