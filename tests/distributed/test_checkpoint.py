"""Checkpoints of several real ranks: read under another number of ranks, and failing for all ranks or for none."""

import pytest
import torch
import torch.distributed as dist

from megatron_lite import collectives
from megatron_lite.checkpointing import dcp_files, folders, sharded
from megatron_lite.checkpointing.checkpoint import Content, read_tensors, write_checkpoint
from megatron_lite.errors import CheckpointError
from megatron_lite.sharding import split, whole
from tests.unit.checkpointing.ranks import flat

SHAPE = (12, 5)


def _truth(name):
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(SHAPE, generator=generator)


def _mine(size, rank, *, fill):
    """One tensor split over the ranks, one replicated, one a flat range, as a sharded optimizer has it."""
    rows = SHAPE[0] // size
    spec = split("rows", (rows, SHAPE[1]), 0, rank, size)
    bounds = [60 * r // size + (r % 2 if r < size else 0) for r in range(size + 1)]
    ranges = flat("range", _truth("range"), bounds)
    tensors = {
        "rows": (_truth("rows")[rank * rows : (rank + 1) * rows].clone(), spec),
        "same": (_truth("same"), whole("same", SHAPE)),
        "range": ranges[rank],
    }
    if fill:
        tensors = {key: (torch.zeros_like(tensor), spec) for key, (tensor, spec) in tensors.items()}
    return tensors


def _save(root, which=5):
    group, rank = collectives.world(), dist.get_rank()
    content = Content(
        tensors=_mine(dist.get_world_size(), rank, fill=False),
        objects={f"rng.{rank}": {"rank": rank}},
        common={"iteration": which},
    )
    write_checkpoint(root, which, content, group)
    return list(collectives.COUNTERS)


def _load(root, which=5):
    size, rank = dist.get_world_size(), dist.get_rank()
    want, got = _mine(size, rank, fill=False), _mine(size, rank, fill=True)
    read_tensors(folders.find(root, which), got, collectives.world())
    return all(torch.equal(want[key][0], got[key][0]) for key in want)


@pytest.mark.parametrize("saving, loading", [(2, 4), (4, 2), (4, 4)])
def test_another_number_of_ranks_reads_what_was_saved(world, tmp_path, saving, loading):
    world(saving).run(_save, tmp_path)
    assert all(world(loading).run(_load, tmp_path))
    folder = folders.find(tmp_path, 5)
    folders.read_manifest(folder)
    assert sharded.saved_objects(folder) == [f"rng.{rank}" for rank in range(saving)]
    assert len(list(folder.glob("*.distcp"))) == saving  # every rank wrote


def test_one_process_reads_what_four_ranks_saved_without_a_process_group(world, tmp_path):
    world(4).run(_save, tmp_path)
    got = _mine(1, 0, fill=True)
    read_tensors(folders.find(tmp_path, 5), got, None)
    for key, (tensor, _) in got.items():
        assert torch.equal(tensor.view(SHAPE), _truth(key))


def test_no_tensor_travels_between_ranks_in_a_save(world, tmp_path):
    """Every rank writes its own boxes; only plans and answers are exchanged."""
    for kinds in world(2).run(_save, tmp_path):
        assert {kind for _, kind, _ in kinds} <= {"broadcast_object", "all_gather_object"}


# -- one rank fails: all know, none waits ------------------------------------------------------------------------


def _failing_save(root, failing_rank, stage):
    group, rank = collectives.world(), dist.get_rank()
    real_begin, real_publish = folders.begin, folders.publish

    def refuse(*args):
        raise OSError(28, "No space left on device")

    def explained_refusal(*args):
        with folders.explained("save"):
            refuse()

    if rank == failing_rank:
        if stage == "begin":
            folders.begin = explained_refusal
        elif stage == "publish":
            folders.publish = explained_refusal
        elif stage == "bug":
            folders.publish = lambda *args: [][1]
        elif stage == "write":
            dcp_files.SummedFile.write, original = refuse, dcp_files.SummedFile.write
    try:
        content = Content(tensors=_mine(dist.get_world_size(), rank, fill=False))
        write_checkpoint(root, 6, content, group)
        return "saved"
    except CheckpointError as error:
        return str(error)
    except IndexError as error:
        return f"own bug: {error}"
    finally:
        folders.begin, folders.publish = real_begin, real_publish
        if rank == failing_rank and stage == "write":
            dcp_files.SummedFile.write = original


@pytest.mark.parametrize("rank, stage", [(0, "begin"), (0, "write"), (1, "write"), (0, "publish")])
def test_a_failure_of_one_rank_fails_the_save_on_every_rank(world, tmp_path, rank, stage):
    """A rank that believes in the save would prune old checkpoints, and one that waits would hang the job."""
    world(2).run(_save, tmp_path)
    answers = world(2).run(_failing_save, tmp_path, rank, stage)
    assert all("the disk is full" in answer for answer in answers), answers
    assert folders.read_tracker(tmp_path) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000005", folders.TRACKER]
    assert all(world(2).run(_load, tmp_path))


def test_a_bug_on_rank_0_does_not_leave_the_others_waiting(world, tmp_path):
    mine, other = world(2).run(_failing_save, tmp_path, 0, "bug")
    assert mine.startswith("own bug") and "IndexError" in other
    assert list(tmp_path.iterdir()) == []


def _load_with_an_extra(root, rank_with_extra):
    rank = dist.get_rank()
    tensors = _mine(2, rank, fill=True)
    if rank == rank_with_extra:
        tensors["extra"] = (torch.zeros(2), whole("extra", (2,)))
    try:
        read_tensors(folders.find(root, 5), tensors, collectives.world())
        return "loaded"
    except CheckpointError as error:
        return str(error)


def test_a_tensor_missing_for_one_rank_fails_the_load_on_every_rank(world, tmp_path):
    world(2).run(_save, tmp_path)
    answers = world(2).run(_load_with_an_extra, tmp_path, 1)
    assert all("1 missing in it: extra" in answer for answer in answers), answers


def _load_one_each(root):
    """Like two pipeline stages: each rank asks for other tensors."""
    key = ["rows", "same"][dist.get_rank()]
    tensors = {key: (torch.zeros(SHAPE), whole(key, SHAPE))}
    read_tensors(folders.find(root, 5), tensors, collectives.world(), expected=lambda name: name != "range")
    return torch.equal(tensors[key][0], _truth(key))


def test_a_tensor_that_another_rank_asks_for_is_not_unexpected(world, tmp_path):
    world(2).run(_save, tmp_path)
    assert all(world(2).run(_load_one_each, tmp_path))
