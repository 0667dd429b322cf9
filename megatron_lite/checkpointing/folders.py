"""Folders of checkpoints that a crash at any moment leaves usable. No torch, no other ranks: rank 0 calls this.

    SAVE/
      iter_0000010/                         complete, or it would not have this name
        __0_0.distcp ... .metadata          tensors of all ranks, states of random generators (sharded.py)
        common.pt  args.json                what all ranks share (checkpoint.py)
        metadata.json                       format, iteration, size and checksum of every file; written last
      .iter_0000020.tmp-3f2a9c1d/           a save at work, or what is left of a killed one
      latest_checkpointed_iteration.txt     "10": the tracker, which a load follows

Order of a save: `begin` a temporary folder, write and flush its files, then `publish`: metadata.json, rename, flush the
parent, and the tracker last. A crash before the rename leaves the old state and some rubbish, which the next save
removes; one after it leaves a complete checkpoint that the tracker does not name yet. A folder is never emptied under
its own name either: it is renamed first.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from megatron_lite.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "metadata.json"
FORMAT, FORMAT_VERSION = "megatron_lite", 1

Which = int | Literal["release"]  # an iteration, or a published model without training state

_LEFTOVER = re.compile(r"\.(iter_\d{7,}|release)\.(tmp|old|gone)-[0-9a-f]{8}")


def folder_name(which: Which) -> str:
    """`iter_0000010`, or `release`."""
    return "release" if which == "release" else f"iter_{which:07d}"


# -- errors of the file system -----------------------------------------------------------------------------------

_CAUSES: dict[int, tuple[str, str]] = {
    errno.ENOSPC: ("the disk is full", "free some space, or name another disk with --save"),
    errno.EDQUOT: ("the disk quota is used up", "remove old files, or name another disk with --save"),
    errno.EFBIG: ("the file would exceed the largest size allowed", "raise `ulimit -f`, or save to another disk"),
    errno.EROFS: ("the file system is mounted read-only", "--save PATH on a disk that can be written"),
    errno.EACCES: ("this user may not write there", "change the permissions of the folder, or --save PATH elsewhere"),
    errno.EPERM: ("this user may not write there", "change the permissions of the folder, or --save PATH elsewhere"),
    errno.ENOTDIR: ("a part of the path is a file, not a folder", "--save PATH of a folder"),
    errno.EEXIST: ("a file stands where the folder should be", "--save PATH of a folder, or move that file away"),
    errno.ENOENT: (
        "it vanished, or another machine cannot see it",
        "let every machine mount the same file system, and let one run alone write to a folder",
    ),
    errno.EIO: ("the disk or the network file system reports an error", "check the disk (dmesg)"),
}


def explain(error: OSError, action: str) -> CheckpointError:
    """The user's version of an operating-system error met while doing `action`."""
    cause, fix = _CAUSES.get(error.errno or 0, ("", ""))
    reason = error.strerror or str(error)
    where = f" ({error.filename})" if error.filename else ""
    return CheckpointError(f"cannot {action}: {reason}{where}", why=cause or "the operating system refused", fix=fix)


@contextmanager
def explained(action: str) -> Iterator[None]:
    """Turns an OSError inside into a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise explain(error, action) from error


# -- files that survive a power cut ------------------------------------------------------------------------------


def flush_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot flush a folder
            raise
    finally:
        os.close(handle)


def write_file(path: Path, data: bytes) -> None:
    """Write and flush a file that nobody reads yet."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _replace_file(path: Path, data: bytes) -> None:
    """Old content or new content, never a mixture, whatever happens."""
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        write_file(temporary, data)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    flush_folder(path.parent)


# -- saving ------------------------------------------------------------------------------------------------------


def check_save_folder(root: Path) -> None:
    """Make the folder and write a file to it, so that a bad `--save` ends a run at its start and not after an hour.

    Raises: CheckpointError.
    """
    with explained(f"use {root} for checkpoints (--save)"):
        root.mkdir(parents=True, exist_ok=True)
        probe = root / f".probe.tmp-{secrets.token_hex(4)}"
        try:
            write_file(probe, b"ok")
        finally:
            with suppress(FileNotFoundError):
                probe.unlink()


def begin(root: Path, which: Which) -> Path:
    """A new temporary folder for one save; what killed saves have left in `root` is removed.

    Raises: CheckpointError.
    """
    with explained(f"save to {root}"):
        root.mkdir(parents=True, exist_ok=True)
        tidy(root)
        temporary = _aside(root, which, "tmp")
        temporary.mkdir()
        return temporary


def publish(
    temporary: Path,
    root: Path,
    which: Which,
    description: dict[str, Any],
    checksums: Mapping[str, str] | None = None,
) -> Path:
    """Give a completely written temporary folder its name, and point the tracker to it.

    Args:
        description: goes into metadata.json, beside the sizes and checksums of all files.
        checksums: of files that were summed while they were written; the others are read again.
    Raises: CheckpointError. Before the rename nothing has changed for readers.
    """
    with explained(f"save to {root}"):
        known = checksums or {}
        files = {
            name: {"size": path.stat().st_size, "crc32": known.get(name) or checksum(path)}
            for name, path in ((str(path.relative_to(temporary)), path) for path in sorted(temporary.rglob("*")))
            if path.is_file() and name != MANIFEST
        }
        manifest = {
            "sharded_backend": "torch_dist",  # Megatron's two keys, by which its tools know the kind of folder
            "sharded_backend_version": 1,
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "iteration": which,
            **description,
            "files": files,
        }
        write_file(temporary / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
        for folder in (temporary, *(path for path in temporary.iterdir() if path.is_dir())):
            flush_folder(folder)
        target = root / folder_name(which)
        if target.exists():  # the same iteration again, after a load of an older one
            old = _aside(root, which, "old")
            os.rename(target, old)
            try:
                os.rename(temporary, target)
            except OSError:
                os.rename(old, target)
                raise
            flush_folder(root)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(temporary, target)
            flush_folder(root)
        _replace_file(root / TRACKER, str(which).encode())
    return target


def abandon(temporary: Path) -> None:
    """Remove what a failed save has written."""
    shutil.rmtree(temporary, ignore_errors=True)


def tidy(root: Path) -> None:
    """Remove what killed saves and killed deletions have left. Only the run that saves to `root` may call this."""
    for path in sorted(root.iterdir()):
        match = _LEFTOVER.fullmatch(path.name)
        if match and match[2] == "old" and not (root / match[1]).exists():
            os.rename(path, root / match[1])  # killed between the two renames of `publish`: the old one is complete
        elif match:
            shutil.rmtree(path, ignore_errors=True)
        elif re.fullmatch(rf"\.({re.escape(TRACKER)}|probe)\.tmp-[0-9a-f]{{8}}", path.name):
            path.unlink()


def prune(root: Path, *, every: int | None = None, newest: int | None = None) -> tuple[list[int], list[int]]:
    """Delete checkpoints that are older than the tracked one, but for those that are to be kept.

    Args:
        every: keep those whose iteration is a multiple of it.
        newest: keep this many of the newest, the tracked one included.
    Returns: the iterations deleted, and those left alone because their folder is a symbolic link.
    Raises: CheckpointError when a folder cannot be deleted.
    """
    tracked = read_tracker(root)
    if not isinstance(tracked, int):
        return [], []
    superseded = [iteration for iteration in complete_iterations(root) if iteration < tracked]
    kept = set(superseded[max(0, len(superseded) - (newest or 1) + 1) :])
    kept |= {iteration for iteration in superseded if every and iteration % every == 0}
    deleted, links = [], []
    for iteration in superseded:
        if iteration in kept:
            continue
        folder = root / folder_name(iteration)
        if folder.is_symlink():
            links.append(iteration)
            continue
        with explained(f"delete {folder}"):
            gone = _aside(root, iteration, "gone")
            os.rename(folder, gone)
            shutil.rmtree(gone)
        deleted.append(iteration)
    return deleted, links


def _aside(root: Path, which: Which, state: str) -> Path:
    return root / f".{folder_name(which)}.{state}-{secrets.token_hex(4)}"


# -- integrity ---------------------------------------------------------------------------------------------------


def checksum(path: Path, advance: Callable[[int], object] = lambda count: None) -> str:
    """CRC-32 of a file in 8 hexadecimal digits: it finds damage by chance, not by intent. Raises: OSError.

    Args:
        advance: told the bytes that were read since the last call.
    """
    total = 0
    with open(path, "rb", buffering=0) as file:
        while block := file.read(8 << 20):
            total = zlib.crc32(block, total)
            advance(len(block))
    return f"{total:08x}"


def damaged_files(
    folder: Path,
    names: Iterable[str],
    manifest: Mapping[str, Any],
    advance: Callable[[int], object] = lambda count: None,
) -> list[str]:
    """Which of these files do not have the bytes that were saved, and how; files without a checksum pass."""
    damage = []
    for name in names:
        wanted = manifest["files"][name].get("crc32")
        if wanted is None:
            continue
        try:
            found = checksum(folder / name, advance)
        except OSError as error:
            damage.append(f"{name}: {error.strerror}")
            continue
        if found != wanted:
            damage.append(f"{name} has the checksum {found} instead of {wanted}")
    return damage


def damaged(folder: Path, damage: list[str]) -> CheckpointError:
    """The error for files that are not those that were saved."""
    return CheckpointError(
        f"{folder} is damaged: {'; '.join(damage[:5])}" + (f"; and {len(damage) - 5} more" if damage[5:] else ""),
        why="the files are not those that were saved: a torn copy, or a failing disk",
        fix=f"--ckpt-step with another one; in {folder.parent} there are: {_list(complete_iterations(folder.parent))}",
    )


# -- loading -----------------------------------------------------------------------------------------------------


def read_tracker(root: Path) -> Which | None:
    """What the tracker names; None when there is no tracker.

    Raises: CheckpointError when the file holds neither a number nor the word `release`.
    """
    path = root / TRACKER
    try:
        text = path.read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"cannot read {path}: {error}", fix="--ckpt-step N names the checkpoint itself"
        ) from error
    if text == "release":
        return "release"
    if not re.fullmatch(r"\d{1,18}", text):
        raise CheckpointError(
            f"{path} holds {text[:40]!r}",
            why="it must hold the iteration of the newest checkpoint, or the word release",
            fix=f"--ckpt-step N, or write N into the file; complete are: {_list(complete_iterations(root))}",
        )
    return int(text)


def complete_iterations(root: Path) -> list[int]:
    """Iterations whose checkpoint in `root` is complete, ascending."""
    if not root.is_dir():
        return []
    found = []
    for path in root.iterdir():
        match = re.fullmatch(r"iter_(\d{7,})", path.name)
        if match and (path / MANIFEST).is_file():
            found.append(int(match[1]))
    return sorted(found)


def incomplete(root: Path) -> list[str]:
    """Names in `root` of saves that were killed or are at work, and of checkpoints without a description."""
    torn = [p.name for p in root.glob("iter_*") if p.is_dir() and not (p / MANIFEST).is_file()]
    return sorted([*torn, *(p.name for p in root.iterdir() if _LEFTOVER.fullmatch(p.name))])


def find(root: Path, which: Which) -> Path:
    """The folder of one checkpoint.

    Raises: CheckpointError that lists those that are there.
    """
    folder = root / folder_name(which)
    if folder.is_dir():
        return folder
    replaced = sorted(root.glob(f".{folder_name(which)}.old-*"))
    if replaced:  # killed between the two renames of `publish`
        return replaced[0]
    raise CheckpointError(
        f"there is no checkpoint {folder}",
        why=f"complete in {root} are: {_list(complete_iterations(root))}",
        fix="--ckpt-step with one of these, or another --load",
    )


def read_manifest(folder: Path) -> dict[str, Any]:
    """The description of a checkpoint, after a look whether every file is there with its full size.

    Raises: CheckpointError for a folder that is torn, of another program, or of a later version.
    """
    others = complete_iterations(folder.parent)
    fix = f"--ckpt-step with another one; in {folder.parent} there are: {_list(others)}"
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        if not isinstance(manifest, dict) or not isinstance(manifest.get("files", {}), dict):
            raise ValueError("not a table")
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: {MANIFEST} is missing", why="it is written last", fix=fix
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}", why="the file is damaged", fix=fix) from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder} was not written by megatron_lite",
            why=f"{MANIFEST} has no entry format={FORMAT}; its back end is {manifest.get('sharded_backend')!r}",
            fix="--auto-detect-ckpt-format and megatron-lite convert read Megatron-LM's torch_dist format; others are "
            "not read",
        )
    if manifest.get("format_version", 0) > FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} has format version {manifest['format_version']}",
            why=f"this megatron_lite reads up to version {FORMAT_VERSION}",
            fix="use a newer megatron_lite",
        )
    damage = []
    for name, facts in manifest.get("files", {}).items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:  # also when another process deletes the folder at this moment
            damage.append(f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{name}: {error.strerror}")
            continue
        if size != facts["size"]:
            damage.append(f"{name} has {size} bytes instead of {facts['size']}")
    if damage:
        raise damaged(folder, damage)
    return manifest


def _list(iterations: list[int]) -> str:
    if not iterations:
        return "none"
    shown = ", ".join(map(str, iterations[-8:]))
    return f"..., {shown}" if len(iterations) > 8 else shown
