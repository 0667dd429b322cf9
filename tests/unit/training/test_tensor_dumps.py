"""A dump that the disk does not take."""

from megatron_lite.training import tensor_dumps


def _full(value, path):
    path.write_bytes(b"half")
    raise OSError(28, "No space left on device")


def test_a_dump_that_the_disk_does_not_take_leaves_a_warning_and_no_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tensor_dumps.torch, "save", _full)
    tensor_dumps.write_dump(tmp_path, "params", 2, [])
    assert "params of iteration 2 not written" in capsys.readouterr().err
    assert list((tmp_path / "params").iterdir()) == []


def test_files_of_other_ranks_stay(tmp_path, monkeypatch):
    folder = tmp_path / "params" / "iter_0000002"
    folder.mkdir(parents=True)
    (folder / "rank_00001_of_00002.pt").touch()
    monkeypatch.setattr(tensor_dumps.torch, "save", _full)
    tensor_dumps.write_dump(tmp_path, "params", 2, [])
    assert [path.name for path in folder.iterdir()] == ["rank_00001_of_00002.pt"]
