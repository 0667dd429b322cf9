"""W&B: what is sent, and the real package offline."""

import json
import struct
import sys
from argparse import Namespace
from types import ModuleType, SimpleNamespace

import pytest

from megatron_lite.checkpointing.folders import TRACKER
from megatron_lite.training.wandb_log import WandbLog


def arguments(save, iteration=0, **more):
    return Namespace(
        save=str(save),
        iteration=iteration,
        wandb_project="project",
        wandb_exp_name="name",
        wandb_entity=None,
        wandb_save_dir=None,
        lr=1e-3,
        bf16=True,
        device=object(),
        **more,
    )


@pytest.fixture
def stand_in(monkeypatch):
    """A module in the package's place, which notes its calls."""
    calls = []
    module = ModuleType("wandb")
    run = SimpleNamespace(id="abc", entity="me", project="project")
    run.log_artifact = lambda artifact, aliases: calls.append(("artifact", artifact.references, aliases))

    class Artifact:
        def __init__(self, name, type, metadata):
            self.references = []
            calls.append(("made", name, type, metadata))

        def add_reference(self, uri, checksum):
            self.references.append(uri)

    def init(**settings):
        calls.append(("init", settings))
        return run

    module.init, module.Artifact = init, Artifact
    module.log = lambda values, step: calls.append(("log", values, step))
    module.finish = lambda: calls.append(("finish",))
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


def test_a_run_is_named_as_the_flags_say_and_gets_the_plain_arguments(stand_in, tmp_path):
    WandbLog(arguments(tmp_path))
    settings = stand_in[0][1]
    assert (settings["project"], settings["name"], settings["dir"]) == ("project", "name", str(tmp_path / "wandb"))
    assert settings["config"]["lr"] == 1e-3 and "device" not in settings["config"]
    assert settings["id"] is None and settings["resume"] is None


def test_a_resumed_run_goes_on_in_its_run_of_wandb_and_a_new_one_does_not(stand_in, tmp_path):
    """Each resume would be a curve of its own; a new training in an old folder would be the old curve."""
    WandbLog(arguments(tmp_path))
    WandbLog(arguments(tmp_path, iteration=7))
    WandbLog(arguments(tmp_path))
    assert [(s["id"], s["resume"]) for _, s in stand_in] == [(None, None), ("abc", "allow"), (None, None)]


def test_scalars_are_logged_at_their_iteration(stand_in, tmp_path):
    WandbLog(arguments(tmp_path)).add_scalar("lm loss", 2.5, 3)
    assert stand_in[-1] == ("log", {"lm loss": 2.5}, 3)


def test_every_complete_checkpoint_is_registered_once(stand_in, tmp_path):
    """Not the one that the run was resumed from, and the last one at the end at the latest."""
    (tmp_path / TRACKER).write_text("4")
    log = WandbLog(arguments(tmp_path, iteration=4))
    log.register_checkpoint()
    (tmp_path / TRACKER).write_text("6")
    log.register_checkpoint()
    log.register_checkpoint()
    (tmp_path / TRACKER).write_text("8")
    log.finish()
    made = [call[3]["iteration"] for call in stand_in if call[0] == "made"]
    assert made == [6, 8]
    registered = [call for call in stand_in if call[0] == "artifact"]
    assert registered[0] == ("artifact", [f"file://{tmp_path / 'iter_0000006'}"], ["iter_0000006"])
    path = (tmp_path / "latest_wandb_artifact_path.txt").read_text().strip()
    assert path == "me/project/project-checkpoints:iter_0000008"
    assert stand_in[-1] == ("finish",)


def test_the_real_package_keeps_a_run_on_disk_and_goes_on_with_it(monkeypatch, tmp_path):
    """Read back from the package's own file."""
    pytest.importorskip("wandb", reason="the optional package wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for begin, end in ((0, 4), (3, 6)):  # killed after 4, resumed from 3
        log = WandbLog(arguments(tmp_path, iteration=begin))
        for step in range(begin + 1, end + 1):
            log.add_scalar("lm loss", 1.0 / step, step)
            log.add_scalar("grad-norm", 2.0, step)
        (tmp_path / TRACKER).write_text(str(end))
        (tmp_path / f"iter_{end:07d}").mkdir()
        (tmp_path / f"iter_{end:07d}" / "weights").write_text("x")
        log.finish()
    assert len({path.name.split("-")[3] for path in tmp_path.rglob("offline-run-*")}) == 1
    found = [row for path in sorted(tmp_path.rglob("run-*.wandb"), key=mtime) for row in history(path)]
    assert [(row["_step"], row["lm loss"], row["grad-norm"]) for row in found] == [
        *((step, 1.0 / step, 2.0) for step in range(1, 5)),
        *((step, 1.0 / step, 2.0) for step in range(4, 7)),
    ]
    path = (tmp_path / "latest_wandb_artifact_path.txt").read_text().strip()
    assert path.endswith("project/project-checkpoints:iter_0000006")


def history(path):
    """The rows of a file of the package."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows = []
    for data in records(path.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            rows.append(
                {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            )
            rows[-1]["_step"] = record.history.step.num
    return rows


def records(data):
    """The package writes LevelDB's log format: 7 bytes, then blocks of 32 KiB of (crc, length, kind, bytes)."""
    at, parts = 7, []
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        if kind == 0:
            return
        parts.append(data[at + 7 : at + 7 + length])
        if kind in (1, 4):  # whole, or the last part of several
            yield b"".join(parts)
            parts = []
        at += 7 + length


def mtime(path):
    return path.stat().st_mtime
