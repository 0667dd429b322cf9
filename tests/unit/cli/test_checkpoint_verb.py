"""`megatron-lite checkpoint inspect|verify`: what is told, and which damage is found."""

import json
import pickle
from pathlib import Path

import pytest
import torch

from megatron_lite.checkpointing import folders
from megatron_lite.checkpointing.checkpoint import Content, write_checkpoint
from megatron_lite.cli import main
from megatron_lite.sharding import whole

LAYOUT = {"tp": 2, "pp": 1, "cp": 1, "dp": 3}


def _save(root, which, rows=6):
    tensors = {
        "layers.0.weight": (torch.arange(rows * 4.0).view(rows, 4), whole("layers.0.weight", (rows, 4))),
        "optimizer.exp_avg.layers.0.weight": (torch.ones(rows, 4), whole("layers.0.weight", (rows, 4))),
    }
    content = Content(
        tensors=tensors,
        objects={"rng_state.tp0": {"seed": 3}},
        common={"iteration": which, "consumed_train_samples": 1280},
        args={"num_layers": 2, "hidden_size": 64, "lr": 0.1},
        description={"layout": LAYOUT, "world_size": 6},
    )
    return write_checkpoint(root, which, content, None)


@pytest.fixture
def root(tmp_path):
    _save(tmp_path, 10)
    _save(tmp_path, 20)
    return tmp_path


def _run(*words):
    return main.main(["checkpoint", *map(str, words)])


def test_inspect_tells_iterations_layout_sizes_arguments_and_tensors(root, capsys):
    (root / ".iter_0000030.tmp-0123abcd").mkdir()
    assert _run("inspect", root, "--tensors") == 0
    out = capsys.readouterr().out
    for words in (
        "2 checkpoints, latest_checkpointed_iteration.txt names 20",
        "iter_0000010",
        ".iter_0000030.tmp-0123abcd",
        "tp=2 pp=1 cp=1 dp=3",
        "parameters               24\n",
        "consumed_train_samples   1,280",
        "rng_state.tp0",
        "hidden_size                              64",
    ):
        assert words in out, words
    assert "[6, 4]               float32" in out
    assert "  lr " not in out, "arguments of the model alone"
    assert _run("inspect", root, "--arguments") == 0
    assert "  lr " in capsys.readouterr().out


def test_inspect_speaks_json_and_takes_a_step(root, capsys):
    assert _run("inspect", root, "--json", "--ckpt-step", 10, "--tensors") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["iteration"] == 10 and told["checkpoints"] == [10, 20] and told["tracker"] == 20
    assert told["tensors"]["layers.0.weight"] == [[6, 4], "float32"] and told["layout"] == LAYOUT
    assert (
        told["bytes"]
        == sum(path.stat().st_size for path in (root / "iter_0000010").iterdir())
        - (root / "iter_0000010" / folders.MANIFEST).stat().st_size
    )


def test_verify_says_whole_of_what_was_saved(root, capsys):
    assert _run("verify", root) == 0
    out = capsys.readouterr().out
    assert out.count("whole, 4 files") == 2 and "no checksum" not in out


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "common.pt", "args.json"])
def test_verify_finds_one_turned_bit_in_any_file(root, capsys, name):
    path = root / "iter_0000010" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    assert _run("verify", root) == 1
    out = capsys.readouterr().out
    assert f"{name} has the checksum" in out and out.count("whole") == 1
    assert _run("verify", root, "--ckpt-step", 20) == 0


def test_verify_finds_torn_and_missing_files_and_a_tracker_that_names_nothing(root, capsys):
    (root / "iter_0000010" / "common.pt").unlink()
    data = root / "iter_0000020" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1])
    (root / folders.TRACKER).write_text("30")
    assert _run("verify", root) == 1
    out = capsys.readouterr().out
    assert "common.pt is missing" in out and "__0_0.distcp has" in out and "names 30, which is not there" in out
    assert out.count("DAMAGED") == 2


def test_verify_of_checkpoints_without_checksums_says_that_sizes_are_all_it_knows(root, capsys):
    path = root / "iter_0000010" / folders.MANIFEST
    manifest = json.loads(path.read_text())
    for facts in manifest["files"].values():
        del facts["crc32"]
    path.write_text(json.dumps(manifest))
    assert _run("verify", root, "--ckpt-step", 10) == 0
    assert "4 files have no checksum" in capsys.readouterr().out


class _Hostile:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return Path.mkdir, (self.target,)


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_a_hostile_file_with_a_true_checksum_runs_nothing(root, tmp_path, capsys, verb, name):
    """Who can write the file can write the manifest: safety is in how files are read."""
    path = root / "iter_0000020" / name
    if name == ".metadata":
        path.write_bytes(pickle.dumps(_Hostile(tmp_path / "owned")))
    else:
        torch.save(_Hostile(tmp_path / "owned"), path)
    manifest = json.loads((path.parent / folders.MANIFEST).read_text())
    manifest["files"][name] = {"size": path.stat().st_size, "crc32": folders.checksum(path)}
    (path.parent / folders.MANIFEST).write_text(json.dumps(manifest))
    assert _run(verb, root) == 1
    told = capsys.readouterr()
    assert f"cannot read {path}" in told.out + told.err
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    "place, words", [("nothing", "does not exist"), (".", "holds no complete"), ("run/iter_0000005", "one checkpoint")]
)
def test_a_folder_that_is_none_of_checkpoints_is_an_error_with_the_right_one(tmp_path, capsys, place, words):
    _save(tmp_path / "run", 5)
    assert _run("verify", tmp_path / place) != 0
    assert words in capsys.readouterr().err
