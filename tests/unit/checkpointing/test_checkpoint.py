"""Whole checkpoints: a save that fails leaves everything as it was, and what is read is plain."""

import multiprocessing
import os
import pickle
import resource

import pytest
import torch

from megatron_lite.checkpointing import folders, mismatch, plain_values, sharded
from megatron_lite.checkpointing.checkpoint import COMMON, Content, merge, read_args, read_common, write_checkpoint
from megatron_lite.errors import CheckpointError
from megatron_lite.sharding import whole


def _content(size=8, value=1.0, **other):
    return Content(tensors={"w": (torch.full((size,), value), whole("w", (size,)))}, **other)


def _unchanged(root, iteration):
    assert folders.read_tracker(root) == iteration
    assert sorted(path.name for path in root.iterdir()) == [folders.folder_name(iteration), folders.TRACKER]
    folders.read_manifest(folders.find(root, iteration))


def test_common_values_and_arguments_come_back(tmp_path):
    common = {"lr": 0.1, "betas": (0.9, 0.95), "groups": [{"wd": 1e-300}], "scale": torch.tensor(2.0**32), "none": None}
    args = {"dtype": torch.bfloat16, "pair": (1, 2), "lr": 0.1, "inf": float("inf")}
    folder = write_checkpoint(tmp_path, 3, _content(common=common, args=args), None)
    assert read_common(folder) == common
    assert read_args(folder) == {"dtype": "torch.bfloat16", "pair": [1, 2], "lr": 0.1, "inf": float("inf")}


def test_a_disk_that_is_full_while_tensors_are_written_leaves_all_as_it_was(tmp_path, monkeypatch):
    """The kernel's own refusal: the data file is /dev/full."""
    write_checkpoint(tmp_path, 1, _content(), None)
    real = folders.begin

    def begin(root, which):
        temporary = real(root, which)
        (temporary / "__0_0.distcp").symlink_to("/dev/full")
        return temporary

    monkeypatch.setattr(folders, "begin", begin)
    for size in (8, 2**20):  # fails when the file is closed, and in the middle of a tensor
        with pytest.raises(CheckpointError) as caught:
            write_checkpoint(tmp_path, 2, _content(size), None)
        assert caught.value.why == "the disk is full" and str(tmp_path) in caught.value.what
        _unchanged(tmp_path, 1)


@pytest.mark.parametrize("name", [".metadata.tmp", "common.pt", "args.json", "metadata.json"])
def test_a_disk_that_is_full_at_any_later_file_leaves_all_as_it_was(tmp_path, monkeypatch, name):
    write_checkpoint(tmp_path, 1, _content(), None)
    real = folders.begin

    def begin(root, which):
        temporary = real(root, which)
        (temporary / name).symlink_to("/dev/full")
        return temporary

    monkeypatch.setattr(folders, "begin", begin)
    with pytest.raises(CheckpointError) as caught:
        write_checkpoint(tmp_path, 2, _content(), None)
    assert caught.value.why == "the disk is full"
    _unchanged(tmp_path, 1)


def _save_with_small_files(root, pipe):
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        write_checkpoint(root, 2, _content(2**20), None)
        pipe.send(None)
    except CheckpointError as error:
        pipe.send(error)


def test_a_file_size_limit_is_told_as_such(tmp_path):
    write_checkpoint(tmp_path, 1, _content(), None)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_save_with_small_files, args=(tmp_path, theirs))
    process.start()
    assert ours.poll(60)
    error = ours.recv()
    process.join()
    assert isinstance(error, CheckpointError) and "ulimit -f" in error.fix
    _unchanged(tmp_path, 1)


def test_the_next_save_after_a_failed_one_works(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(folders, "publish", lambda *args: (_ for _ in ()).throw(CheckpointError("no")))
        with pytest.raises(CheckpointError):
            write_checkpoint(tmp_path, 1, _content(), None)
    assert list(tmp_path.iterdir()) == []
    write_checkpoint(tmp_path, 2, _content(), None)
    _unchanged(tmp_path, 2)


class _Ours:
    pass


@pytest.mark.parametrize("where", ["common", "objects"])
def test_objects_of_our_own_classes_are_never_written(tmp_path, where):
    """Reading one would have to run code; the save refuses it, and not the load."""
    with pytest.raises(CheckpointError, match="cannot be saved"):
        write_checkpoint(tmp_path, 1, _content(**{where: {"x": _Ours()}}), None)
    assert list(tmp_path.iterdir()) == []


class _Hostile:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("writer", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_hostile_common_file_runs_nothing(tmp_path, writer):
    folder = write_checkpoint(tmp_path / "run", 1, _content(), None)
    writer({"iteration": 1, "x": _Hostile(tmp_path / "owned")}, folder / COMMON)
    with pytest.raises(CheckpointError, match="common.pt"):
        read_common(folder)
    assert not (tmp_path / "owned").exists()


def test_damaged_plain_files_are_errors_that_name_them(tmp_path):
    folder = write_checkpoint(tmp_path, 1, _content(common={"a": 1}, args={"b": 2}), None)
    data = (folder / COMMON).read_bytes()
    for damaged in (b"", data[: len(data) // 2], plain_values.to_bytes([1], "x")):
        (folder / COMMON).write_bytes(damaged)
        with pytest.raises(CheckpointError, match="common.pt"):
            read_common(folder)
    for text in ("", "[1]", "{"):
        (folder / "args.json").write_text(text)
        with pytest.raises(CheckpointError, match="args.json"):
            read_args(folder)


def test_two_tensors_of_one_key_are_a_bug():
    part = _content().tensors
    with pytest.raises(AssertionError, match="the key w"):
        merge([part, part])


def test_a_released_checkpoint_is_a_folder_of_its_own(tmp_path):
    folder = write_checkpoint(tmp_path, "release", _content(value=3.0), None)
    read = torch.zeros(8)
    sharded.read(folder, {"w": (read, whole("w", (8,)))})
    assert folder.name == "release" and read.eq(3).all() and folders.read_tracker(tmp_path) == "release"


# -- the guessed cause -------------------------------------------------------------------------------------------

_LAYER = [
    f"decoder.layers.%d.{name}"
    for name in ("self_attention.linear_qkv.weight", "self_attention.linear_proj.weight", "mlp.linear_fc1.weight")
]


@pytest.mark.parametrize(
    "missing, unexpected, shapes, words",
    [
        ([name % 4 for name in _LAYER], [], {}, "fewer layers"),
        ([], [name % n for n in (2, 3) for name in _LAYER], {}, "more layers"),
        (
            ["decoder.layers.0.mlp.linear_fc1.bias", "decoder.layers.0.mlp.linear_fc2.bias"],
            [],
            {},
            "--disable-bias-linear",
        ),
        (["output_layer.weight"], [], {}, "--untie-embeddings-and-output-weights"),
        ([], ["embedding.position_embeddings.weight"], {}, "--position-embedding-type"),
        ([], ["decoder.layers.0.self_attention.q_layernorm.weight"], {}, "--qk-layernorm"),
        ([], [], {"embedding.word_embeddings.weight": ("[256, 8]", "[384, 8]")}, "--make-vocab-size-divisible-by"),
        ([], [], {"embedding.position_embeddings.weight": ("[32, 8]", "[64, 8]")}, "--max-position-embeddings"),
        (["optimizer.state.exp_avg.w"], [], {}, "--no-load-optim"),
        (["optimizer.state.exp_avg.w"], ["optimizer.state.momentum_buffer.w"], {}, "--optimizer"),
        (["a"], ["b"], {"c": ("[1]", "[2]")}, "--use-checkpoint-args"),
    ],
)
def test_the_error_names_the_flag_that_explains_the_difference(tmp_path, missing, unexpected, shapes, words):
    """The optimizer's state follows the weights and does not hide the cause."""
    if not any(name.startswith("optimizer.") for name in missing):
        missing = [*missing, *(f"optimizer.state.exp_avg.{name}" for name in missing)]
        unexpected = [*unexpected, *(f"optimizer.state.exp_avg.{name}" for name in unexpected)]
        shapes = shapes | {f"optimizer.state.exp_avg.{name}": pair for name, pair in shapes.items()}
    error = mismatch.describe_mismatch(tmp_path, missing, unexpected, shapes)
    assert words in f"{error.why} {error.fix}"


def test_a_long_list_of_names_is_cut(tmp_path):
    error = mismatch.describe_mismatch(tmp_path, [f"w{n}" for n in range(500)], [], {})
    assert "500 missing" in error.what and "and 494 more" in error.what and len(error.what) < 400
