"""Folders of checkpoints: the tracker last, nothing half done under a final name, errors in the user's words."""

import errno
import json
import os
import threading
import zlib

import pytest

from megatron_lite.checkpointing import folders
from megatron_lite.errors import CheckpointError


def _save(root, which, content="x"):
    temporary = folders.begin(root, which)
    (temporary / "data").write_text(content)
    return folders.publish(temporary, root, which, {"note": "n"})


def _hidden(root):
    return sorted(path.name for path in root.iterdir() if path.name.startswith("."))


def test_a_saved_checkpoint_has_megatrons_names(tmp_path):
    folder = _save(tmp_path, 20)
    assert folder == tmp_path / "iter_0000020"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "20"
    manifest = json.loads((folder / "metadata.json").read_text())
    assert manifest["sharded_backend"] == "torch_dist" and manifest["iteration"] == 20 and manifest["note"] == "n"
    crc = zlib.crc32((folder / "data").read_bytes())
    assert manifest["files"] == {"data": {"size": 1, "crc32": f"{crc:08x}"}}
    assert _hidden(tmp_path) == []


@pytest.mark.parametrize("which, name", [(0, "iter_0000000"), (12345678, "iter_12345678"), ("release", "release")])
def test_names_of_small_large_and_released_checkpoints(tmp_path, which, name):
    assert _save(tmp_path, which).name == name
    assert folders.read_tracker(tmp_path) == which
    assert folders.find(tmp_path, which).name == name


def test_a_second_save_of_one_iteration_replaces_the_first(tmp_path):
    _save(tmp_path, 5, "old")
    folder = _save(tmp_path, 5, "newer")
    assert (folder / "data").read_text() == "newer"
    assert folders.read_manifest(folder)["files"]["data"]["size"] == 5
    assert _hidden(tmp_path) == []


def test_the_tracker_moves_after_the_rename_and_only_then(tmp_path, monkeypatch):
    """A tracker that names a folder that is not there yet loses the run in a crash."""
    _save(tmp_path, 1)
    order = []
    real_rename, real_replace = os.rename, os.replace
    monkeypatch.setattr(os, "rename", lambda a, b: (order.append(str(b)), real_rename(a, b)))
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append(str(b)), real_replace(a, b)))
    _save(tmp_path, 2)
    assert order == [str(tmp_path / "iter_0000002"), str(tmp_path / folders.TRACKER)]


def test_every_file_and_folder_is_flushed_before_the_name_that_shows_it(tmp_path, monkeypatch):
    """Without the flush a power cut may leave the name and not the bytes."""
    events = []
    real_fsync, real_rename, real_replace = os.fsync, os.rename, os.replace

    def fsync(handle):
        events.append(("flush", os.path.basename(os.readlink(f"/proc/self/fd/{handle}"))))
        real_fsync(handle)

    temporary = folders.begin(tmp_path, 3)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append(("rename", os.path.basename(b))), real_rename(a, b)))
    monkeypatch.setattr(
        os, "replace", lambda a, b: (events.append(("rename", os.path.basename(b))), real_replace(a, b))
    )
    folders.write_file(temporary / "data", b"1")
    folders.publish(temporary, tmp_path, 3, {})
    names = [(kind, name if not name.startswith(f".{folders.TRACKER}") else "tracker.tmp") for kind, name in events]
    assert names == [
        ("flush", "data"),
        ("flush", "metadata.json"),
        ("flush", temporary.name),
        ("rename", "iter_0000003"),
        ("flush", tmp_path.name),
        ("flush", "tracker.tmp"),
        ("rename", folders.TRACKER),
        ("flush", tmp_path.name),
    ]


# -- what crashes leave ------------------------------------------------------------------------------------------


def test_leftovers_of_killed_saves_go_with_the_next_save_and_the_users_files_stay(tmp_path):
    _save(tmp_path, 1)
    folders.begin(tmp_path, 2)
    (tmp_path / ".iter_0000001.gone-00000000").mkdir()
    (tmp_path / f".{folders.TRACKER}.tmp-0123abcd").write_text("2")
    keep = [".gitignore", "notes.txt", ".iter_0000002.tmp", "iter_2"]
    for name in keep:
        (tmp_path / name).write_text("mine")
    _save(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [*keep, "iter_0000001", "iter_0000003", folders.TRACKER]
    )


def test_a_crash_between_the_two_renames_of_a_replacement_loses_nothing(tmp_path):
    """For a moment the name is free: a reader finds the old folder, and the next save gives it its name back."""
    folder = _save(tmp_path, 5, "old")
    folder.rename(tmp_path / ".iter_0000005.old-0123abcd")
    assert (folders.find(tmp_path, 5) / "data").read_text() == "old"
    _save(tmp_path, 6)
    assert (tmp_path / "iter_0000005" / "data").read_text() == "old"
    assert folders.complete_iterations(tmp_path) == [5, 6] and _hidden(tmp_path) == []


def test_reading_never_changes_the_folder(tmp_path):
    """A sampler that reads a running job's checkpoints must not remove the save at work."""
    _save(tmp_path, 1)
    folders.begin(tmp_path, 2)
    before = sorted(tmp_path.rglob("*"))
    folders.read_tracker(tmp_path)
    folders.read_manifest(folders.find(tmp_path, 1))
    folders.complete_iterations(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


# -- pruning -----------------------------------------------------------------------------------------------------


def test_pruning_keeps_multiples_the_tracked_one_and_what_is_newer(tmp_path):
    for iteration in (10, 15, 20, 25, 30, 35):
        _save(tmp_path, iteration)
    (tmp_path / folders.TRACKER).write_text("25")  # the user went back and branched off: 30 and 35 are not superseded
    assert folders.prune(tmp_path, every=10) == ([15], [])
    assert folders.complete_iterations(tmp_path) == [10, 20, 25, 30, 35] and _hidden(tmp_path) == []


@pytest.mark.parametrize(
    "newest, every, left",
    [(1, None, [25, 30, 35]), (2, None, [20, 25, 30, 35]), (9, None, None), (2, 10, [10, 20, 25, 30, 35])],
)
def test_pruning_keeps_so_many_of_the_newest(tmp_path, newest, every, left):
    """The tracked one is the newest that counts: what came after it belongs to another branch of the run."""
    iterations = [10, 15, 20, 25, 30, 35]
    for iteration in iterations:
        _save(tmp_path, iteration)
    (tmp_path / folders.TRACKER).write_text("25")
    folders.prune(tmp_path, newest=newest, every=every)
    assert folders.complete_iterations(tmp_path) == (left or iterations)
    assert folders.prune(tmp_path, newest=newest, every=every) == ([], [])


def test_pruning_skips_symbolic_links(tmp_path):
    target = _save(tmp_path / "elsewhere", 5)
    _save(tmp_path, 7)
    (tmp_path / "iter_0000005").symlink_to(target)
    assert folders.prune(tmp_path, every=10) == ([], [5])
    assert (target / "data").exists()


def test_pruning_does_nothing_beside_a_release_or_without_a_tracker(tmp_path):
    _save(tmp_path, 5)
    (tmp_path / folders.TRACKER).unlink()
    assert folders.prune(tmp_path, every=10) == ([], [])
    _save(tmp_path, "release")
    assert folders.prune(tmp_path, every=10) == ([], [])
    assert folders.complete_iterations(tmp_path) == [5]


# -- the tracker -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, value", [("7", 7), ("0000120\n", 120), (" release \n", "release")])
def test_the_tracker_is_read_as_megatron_writes_it(tmp_path, text, value):
    (tmp_path / folders.TRACKER).write_text(text)
    assert folders.read_tracker(tmp_path) == value


@pytest.mark.parametrize("data", [b"", b"latest", b"-5", b"1e3", b"\xff\xfe\x00"])
def test_a_damaged_tracker_is_an_error_that_lists_what_is_complete(tmp_path, data):
    _save(tmp_path, 8)
    (tmp_path / folders.TRACKER).write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        folders.read_tracker(tmp_path)
    assert folders.TRACKER in str(caught.value) and "--ckpt-step" in str(caught.value)


def test_without_a_tracker_or_a_folder_there_is_nothing_to_follow(tmp_path):
    assert folders.read_tracker(tmp_path) is None
    assert folders.read_tracker(tmp_path / "missing") is None
    assert folders.complete_iterations(tmp_path / "missing") == []


def test_an_iteration_that_is_not_there_is_an_error_that_lists_those_that_are(tmp_path):
    for iteration in (5, 10):
        _save(tmp_path, iteration)
    with pytest.raises(CheckpointError, match="iter_0000007") as caught:
        folders.find(tmp_path, 7)
    assert "5, 10" in str(caught.value)


# -- damage ------------------------------------------------------------------------------------------------------


def test_a_file_of_another_size_or_a_missing_one_is_an_error_that_names_it(tmp_path):
    _save(tmp_path, 1)
    folder = _save(tmp_path, 2, "12345")
    (folder / "data").write_text("123")
    with pytest.raises(CheckpointError, match="data has 3 bytes instead of 5") as caught:
        folders.read_manifest(folder)
    assert "there are: 1, 2" in str(caught.value)
    (folder / "data").unlink()
    with pytest.raises(CheckpointError, match="data is missing"):
        folders.read_manifest(folder)


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "metadata.json is missing"),
        ("{", "metadata.json"),
        ("[]", "metadata.json"),
        ('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}', "was not written by megatron_lite"),
        ('{"format": "megatron_lite", "format_version": 99}', "format version 99"),
    ],
)
def test_a_folder_that_is_no_complete_checkpoint_of_ours_says_why(tmp_path, text, message):
    folder = _save(tmp_path, 2)
    (folder / "metadata.json").unlink() if text is None else (folder / "metadata.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        folders.read_manifest(folder)


# -- disks that refuse -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code, words",
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EROFS, "mounted read-only"),
        (errno.EACCES, "may not write there"),
        (errno.EDQUOT, "quota"),
        (errno.EIO, "reports an error"),
    ],
)
def test_a_refusal_of_the_disk_is_told_with_its_reason_and_a_fix(tmp_path, monkeypatch, code, words):
    _save(tmp_path, 1)
    temporary = folders.begin(tmp_path, 2)

    def refuse(handle):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(CheckpointError) as caught:
        folders.publish(temporary, tmp_path, 2, {})
    assert words in caught.value.why and caught.value.fix and str(tmp_path) in caught.value.what
    assert folders.read_tracker(tmp_path) == 1


def test_a_replacement_that_fails_puts_the_old_one_back(tmp_path, monkeypatch):
    _save(tmp_path, 5, "old")
    temporary = folders.begin(tmp_path, 5)
    real = os.rename

    def rename(source, target):
        if ".tmp-" in str(source):
            raise OSError(errno.EIO, "broken")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(CheckpointError):
        folders.publish(temporary, tmp_path, 5, {})
    assert (tmp_path / "iter_0000005" / "data").read_text() == "old"


def test_a_save_folder_that_cannot_be_one_is_found_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match="--save"):
            folders.check_save_folder(root)
        with pytest.raises(CheckpointError, match="file"):
            folders.begin(root, 1)
    with pytest.raises(CheckpointError, match="/proc"):
        folders.check_save_folder(type(tmp_path)("/proc/runs"))
    folders.check_save_folder(tmp_path / "new" / "run")
    assert list((tmp_path / "new" / "run").iterdir()) == []


def test_a_folder_removed_under_a_save_is_an_error_and_not_a_crash(tmp_path):
    temporary = folders.begin(tmp_path, 1)
    folders.abandon(temporary)
    with pytest.raises(CheckpointError, match="vanished"):
        folders.publish(temporary, tmp_path, 1, {})


def test_a_reader_never_meets_a_tracker_without_its_checkpoint(tmp_path):
    """Reads as fast as it can while saves and pruning go on."""
    _save(tmp_path, 0)
    stop, problems, reads = threading.Event(), [], 0

    def read():
        nonlocal reads
        while not stop.is_set():
            which = folders.read_tracker(tmp_path)
            try:
                folders.read_manifest(folders.find(tmp_path, which))
                reads += 1
            except CheckpointError as error:
                if folders.read_tracker(tmp_path) == which:  # else it was superseded and pruned meanwhile
                    problems.append(error)
            except Exception as error:  # only what a user may read may come out
                problems.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for iteration in range(1, 40):
        _save(tmp_path, iteration)
        folders.prune(tmp_path, every=10)
    stop.set()
    reader.join()
    assert not problems and reads > 0
