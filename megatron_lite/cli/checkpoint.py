"""`megatron-lite checkpoint inspect|verify`: what a folder of checkpoints holds, and whether it is what was saved.

inspect   iterations, and of one: layout, sizes, arguments, tensors. Reads descriptions and the index, no tensors
verify    every file's size and checksum against the manifest, and that nothing but plain values is in them
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_lite.checkpointing import folders, sharded
from megatron_lite.checkpointing.checkpoint import read_args, read_common
from megatron_lite.checkpointing.folders import MANIFEST, TRACKER, Which
from megatron_lite.cli.progress import progress
from megatron_lite.errors import CheckpointError, ConfigError
from megatron_lite.training.checkpoint_args import MODEL_ARGUMENTS

_OPTIMIZER = "optimizer."


def inspect(root: Path, which: Which | None, *, tensors: bool, arguments: bool, as_json: bool) -> int:
    """Print what `root` holds, and more of one of its checkpoints. Raises: CheckpointError."""
    names = _checkpoints(root)
    tracked = folders.read_tracker(root)
    chosen = which if which is not None else tracked if tracked in names else names[-1]
    folder = folders.find(root, chosen)
    manifest = folders.read_manifest(folder)
    facts = sharded.saved_tensors(folder)
    common, args = read_common(folder), read_args(folder)
    model = {name: item for name, item in facts.items() if not name.startswith(_OPTIMIZER)}
    description = {
        "folder": str(folder),
        "iteration": manifest.get("iteration"),
        "layout": manifest.get("layout"),
        "world_size": manifest.get("world_size"),
        "consumed_train_samples": common.get("consumed_train_samples"),
        "files": len(manifest["files"]),
        "bytes": _size(manifest),
        "parameters": sum(math.prod(item.shape) for item in model.values()),
        "model_tensors": len(model),
        "optimizer_tensors": len(facts) - len(model),
        "objects": sharded.saved_objects(folder),
    }
    shown = args if arguments else {name: args[name] for name in MODEL_ARGUMENTS if name in args}
    if as_json:
        listed = {name: [list(item.shape), _name(item.dtype)] for name, item in facts.items()}
        whole = {"checkpoints": names, "tracker": tracked, **description, "arguments": shown}
        print(json.dumps({**whole, "tensors": listed} if tensors else whole, indent=1, default=str))
        return 0
    print(f"{root}: {len(names)} checkpoints, {TRACKER} names {'nothing' if tracked is None else tracked}")
    for name in names:
        print(
            f"  {folders.folder_name(name):<14} {_gb(_size(_manifest(root, name))):>10}  {_mark(name, tracked, chosen)}"
        )
    for left in folders.incomplete(root):
        print(f"  {left:<14} {'':>10}  not complete: what a killed save left, or a save at work")
    print(f"\n{folders.folder_name(chosen)}")
    for key, value in description.items():
        if key != "folder":
            print(f"  {key:<24} {_text(key, value)}")
    print("\narguments" + ("" if arguments else " of the model (--arguments shows all)"))
    for key, value in shown.items():
        print(f"  {key:<40} {value}")
    if tensors:
        print("\ntensors")
        for key, item in sorted(facts.items()):
            print(f"  {key:<72} {list(item.shape)!s:<20} {_name(item.dtype)}")
    return 0


def verify(root: Path, which: Which | None) -> int:
    """Check all checkpoints of `root`, or one, and print a line for each.

    Returns: 0 if all are what was saved, else 1.
    """
    names = _checkpoints(root) if which is None else [which]
    bad = 0
    for name in names:
        folder = folders.find(root, name)
        try:
            print(f"{folder}: {_verify_one(folder)}", flush=True)
        except CheckpointError as error:
            bad += 1
            print(f"{folder}: DAMAGED\n{error}", flush=True)
    for left in folders.incomplete(root):
        print(f"{root / left}: not complete, and never loaded: what a killed save left, or a save at work")
    tracked = folders.read_tracker(root)
    if tracked is not None and not (root / folders.folder_name(tracked) / MANIFEST).is_file():
        bad += 1
        print(f"{root / TRACKER} names {tracked}, which is not there")
    return 1 if bad else 0


def _verify_one(folder: Path) -> str:
    manifest = folders.read_manifest(folder)  # all files with their sizes
    files = manifest["files"]
    with progress("reading", _size(manifest) / 1e6, "MB") as advance:
        damage = folders.damaged_files(folder, files, manifest, lambda count: advance(count / 1e6))
    if damage:
        raise folders.damaged(folder, damage)
    read_common(folder)
    read_args(folder)
    tensors = sharded.saved_tensors(folder)
    missing = sorted(sharded.saved_files(folder) - files.keys())
    if missing:
        raise folders.damaged(folder, [f"{name} is named by the index and not by {MANIFEST}" for name in missing])
    unsummed = sum("crc32" not in facts for facts in files.values())
    note = f"; {unsummed} files have no checksum, only sizes were compared" if unsummed else ""
    return f"whole, {len(files)} files, {_gb(_size(manifest))}, {len(tensors)} tensors{note}"


def _checkpoints(root: Path) -> list[Which]:
    if (root / MANIFEST).is_file():
        raise ConfigError(
            f"{root} is one checkpoint", why="the verb takes the folder that --save named", fix=f"{root.parent}"
        )
    found: list[Which] = [*folders.complete_iterations(root)]
    if (root / "release" / MANIFEST).is_file():
        found.append("release")
    if not found:
        state = "does not exist" if not root.exists() else "holds no complete checkpoint"
        raise CheckpointError(f"{root} {state}", fix="the folder that --save named")
    return found


def _manifest(root: Path, which: Which) -> dict[str, Any]:
    try:
        return folders.read_manifest(folders.find(root, which))
    except CheckpointError:  # damaged: the list shows it all the same; verify says what it is
        return {"files": {}}


def _size(manifest: dict[str, Any]) -> int:
    return sum(facts["size"] for facts in manifest["files"].values())


def _mark(name: Which, tracked: Which | None, chosen: Which) -> str:
    return ", ".join(
        word for word, true in (("the tracker's", name == tracked), ("shown below", name == chosen)) if true
    )


def _text(name: str, value: Any) -> str:
    if name == "layout" and isinstance(value, dict):
        return " ".join(f"{key}={size}" for key, size in value.items())
    if name == "bytes":
        return f"{value:,} ({_gb(value)})"
    if isinstance(value, list):
        return ", ".join(map(str, value[:4])) + (f", and {len(value) - 4} more" if len(value) > 4 else "") or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _which(text: str) -> Which:
    return "release" if text == "release" else int(text)


def build_parser() -> argparse.ArgumentParser:
    """The verb's flags."""
    parser = argparse.ArgumentParser(
        "megatron-lite checkpoint", description="Look at checkpoints, or check them.", allow_abbrev=False
    )
    verbs = parser.add_subparsers(dest="action", required=True, metavar="inspect|verify")
    help_of_step = "this one (an iteration, or release)"
    look = verbs.add_parser("inspect", help="iterations, layout, sizes, arguments, tensors", allow_abbrev=False)
    look.add_argument("dir", type=Path, metavar="DIR", help="what --save was")
    look.add_argument("--ckpt-step", type=_which, metavar="N", help=help_of_step + "; default: the tracker's")
    look.add_argument("--tensors", action="store_true", help="every tensor with its global shape")
    look.add_argument("--arguments", action="store_true", help="every argument of the run")
    look.add_argument("--json", action="store_true", help="for programs")
    check = verbs.add_parser("verify", help="sizes and checksums of every file", allow_abbrev=False)
    check.add_argument("dir", type=Path, metavar="DIR", help="what --save was")
    check.add_argument("--ckpt-step", type=_which, metavar="N", help=help_of_step + "; default: all of them")
    return parser


def main(argv: Sequence[str]) -> int:
    """The verb."""
    args = build_parser().parse_args(list(argv))
    if args.action == "verify":
        return verify(args.dir, args.ckpt_step)
    return inspect(args.dir, args.ckpt_step, tensors=args.tensors, arguments=args.arguments, as_json=args.json)
