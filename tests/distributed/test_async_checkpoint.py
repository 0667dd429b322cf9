"""Saves beside the training of several ranks: a checkpoint is named when all of them have written, or never."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

from megatron_lite import collectives
from megatron_lite.checkpointing import folders
from megatron_lite.checkpointing.async_save import AsyncSaver
from megatron_lite.checkpointing.checkpoint import Content, HowToWrite, on_rank_0, read_tensors
from megatron_lite.process_groups import side_group
from megatron_lite.sharding import split, whole
from tests.distributed.test_checkpoint import _mine
from tests.unit.checkpointing.test_async_save import _small_files


def _content():
    rank = dist.get_rank()
    tensors = _mine(dist.get_world_size(), rank, fill=False)
    tensors["large"] = (torch.zeros(2**18), split("large", (2**18,), 0, rank, dist.get_world_size()))
    return Content(tensors=tensors, objects={f"rng.{rank}": {"rank": rank}}, common={"iteration": 1})


def _pid(saver):
    return saver._process._process.pid


def _told(outcome):
    return None if outcome is None or outcome.error is None else str(outcome.error)


def _slow_and_failing_writers(root):
    """Rank 1's writer stops, then cannot write, then is well again. Returns: what this rank saw."""
    rank, side, seen = dist.get_rank(), side_group("checkpoints"), {}
    saver = AsyncSaver(collectives.world(), side, HowToWrite(plans={}), persistent=True)
    saver.start(root, 5, _content())
    seen["first"] = _told(saver.wait())

    if rank == 1:
        os.kill(_pid(saver), signal.SIGSTOP)
    saver.start(root, 6, _content())
    steps = torch.ones(1)
    for _ in range(20):  # the training's own collectives go on
        collectives.all_reduce(steps, collectives.world(), purpose="a step of the training")
    seen["steps"], seen["while stopped"] = steps.item(), saver.poll()
    seen["tracker while stopped"] = on_rank_0(lambda: folders.read_tracker(root), collectives.world())
    if rank == 1:
        os.kill(_pid(saver), signal.SIGCONT)
    seen["stopped"] = _told(saver.wait())

    saver._process.close()  # limits are inherited by a new process
    if rank == 1:
        with _small_files():
            saver.start(root, 7, _content())
            seen["failed"] = _told(saver.wait())
    else:
        saver.start(root, 7, _content())
        seen["failed"] = _told(saver.wait())
    seen["tracker after a failure"] = on_rank_0(lambda: folders.read_tracker(root), collectives.world())

    saver._process.close()
    saver.start(root, 8, _content())
    seen["closed"] = _told(saver.close())
    dist.destroy_process_group(side)
    return seen


def test_a_checkpoint_is_there_for_all_ranks_or_for_none(world, tmp_path):
    for seen in world(2).run(_slow_and_failing_writers, tmp_path):
        assert seen["first"] is None and seen["stopped"] is None and seen["closed"] is None
        assert (seen["steps"], seen["while stopped"], seen["tracker while stopped"]) == (2.0**20, None, 5)
        assert seen["failed"].startswith("rank 1: cannot save to") and "ulimit -f" in seen["failed"]
        assert seen["tracker after a failure"] == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(f"iter_000000{n}" for n in (5, 6, 8)),
        folders.TRACKER,
    ]


def _save_once(root, spread):
    side = side_group("checkpoints")
    saver = AsyncSaver(collectives.world(), side, HowToWrite(spread=spread))
    tensors = _mine(dist.get_world_size(), dist.get_rank(), fill=False)
    tensors |= {f"same.{n}": (torch.full((4096,), float(n)), whole(f"same.{n}", (4096,))) for n in range(8)}
    saver.start(root, 5, Content(tensors=tensors, common={"iteration": 5}))
    error = _told(saver.close())
    dist.destroy_process_group(side)
    return error


@pytest.mark.parametrize("spread", [True, False])
def test_what_several_ranks_hold_is_shared_among_them_or_written_by_the_first(world, tmp_path, spread):
    """--no-ckpt-fully-parallel-save; and another number of ranks reads it."""
    assert world(2).run(_save_once, tmp_path, spread) == [None, None]
    sizes = [(tmp_path / "iter_0000005" / f"__{rank}_0.distcp").stat().st_size for rank in range(2)]
    assert sizes[0] < 1.3 * sizes[1] if spread else sizes[0] > 10 * sizes[1]
    if spread:
        assert all(world(4).run(_load_subset, tmp_path))


def _load_subset(root):
    size, rank = dist.get_world_size(), dist.get_rank()
    want, got = _mine(size, rank, fill=False), _mine(size, rank, fill=True)
    read_tensors(folders.find(root, 5), got, collectives.world(), expected=lambda key: not key.startswith("same."))
    return all(torch.equal(want[key][0], got[key][0]) for key in want)
