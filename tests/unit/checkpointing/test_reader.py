"""A load reads the bytes that it needs: not those of other ranks, and of a large box not what lies beside."""

import io
import math
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from megatron_lite.checkpointing import reader, sharded
from megatron_lite.checkpointing.dcp_files import frame
from megatron_lite.sharding import Piece, ShardSpec, whole
from tests.unit.checkpointing.ranks import cut, emptied, flat, write_as_ranks


@pytest.fixture
def counted(monkeypatch):
    """Counts the bytes that are read from files of tensors."""
    total = [0]

    class Counting(io.FileIO):
        def read(self, size=-1):
            data = super().read(size)
            total[0] += len(data)
            return data

        def readinto(self, buffer):
            count = super().readinto(buffer)
            total[0] += count
            return count

    monkeypatch.setattr(
        reader,
        "open",
        lambda path, mode: Counting(path) if str(path).endswith("cp") else open(path, mode),  # noqa: SIM115
        raising=False,
    )
    return total


W = torch.arange(2.0**20).view(1024, 1024)  # 4 MiB
BYTES = W.nbytes


def _read(folder, part, counted):
    tensor, spec = emptied([part])[0]
    counted[0] = 0
    sharded.read(folder, {"w": (tensor, spec)})
    assert torch.equal(tensor, part[0])
    return counted[0]


@pytest.mark.parametrize("saving", [1, 2, 4, 3])
@pytest.mark.parametrize("loading", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["rows", "range"])
def test_a_rank_reads_its_share(tmp_path, counted, saving, loading, kind):
    """Column-parallel weights (rows here), and ranges of a distributed optimizer, under any two numbers of ranks."""
    bounds = [1024 * rank // saving for rank in range(saving + 1)]
    write_as_ranks(tmp_path / "c", [{"w": part} for part in cut("w", W, 0, bounds)])
    if kind == "rows":
        wanted = cut("w", W, 0, [1024 * rank // loading for rank in range(loading + 1)])
    else:
        wanted = flat("w", W, [W.numel() * rank // loading + 77 * (0 < rank < loading) for rank in range(loading + 1)])
    for part in wanted:
        share, box = part[0].nbytes, BYTES / saving
        # of a box of which more than half is wanted all is read: that is faster
        assert share <= _read(tmp_path / "c", part, counted) <= share + 2 * (box / 2 + 20_000)
    if loading > 2 * saving:
        assert sum(_read(tmp_path / "c", part, counted) for part in wanted) < BYTES * 1.05


def test_columns_of_a_row_parallel_weight(tmp_path, counted):
    """Runs of 128 KiB are read one by one; runs of 1 KiB with what lies between, since seeking takes longer."""
    wide = torch.arange(2.0**20).view(8, 2**17)
    write_as_ranks(tmp_path / "c", [{"w": (wide, whole("w", (8, 2**17)))}])
    piece = Piece((0, 2**15), (0, 0), (8, 2**15))
    part = wide[:, 2**15 : 2**16].clone(), ShardSpec("w", (8, 2**17), (piece,))
    assert _read(tmp_path / "c", part, counted) < part[0].nbytes + 20_000


def test_files_of_other_writers_are_read_whole(tmp_path, counted):
    """DCP's own writer puts checksums into its archives: the values are found by torch.load there."""
    write_as_ranks(tmp_path / "c", [{"w": (W, whole("w", (1024, 1024)))}])
    part = cut("w", W, 0, [0, 100, 1024])[0]
    assert _read(tmp_path / "c", part, counted) < part[0].nbytes + 20_000
    torch.distributed.checkpoint.save({"w": W}, checkpoint_id=tmp_path / "d", no_dist=True)
    assert _read(tmp_path / "d", part, counted) > BYTES


@settings(max_examples=200)
@given(st.data(), st.integers(1, 4), st.sampled_from([1, 16, 10**6]))
def test_a_part_of_a_box_is_its_slice(data, dims, small):
    shape = [data.draw(st.integers(1, 5)) for _ in range(dims)]
    begins = [data.draw(st.integers(0, size - 1)) for size in shape]
    lengths = [data.draw(st.integers(1, size - begin)) for size, begin in zip(shape, begins)]
    tensor = torch.arange(math.prod(shape), dtype=data.draw(st.sampled_from([torch.float32, torch.int16]))).view(shape)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "values"
        path.write_bytes(b"front" + tensor.numpy().tobytes())
        nowhere = MetadataIndex("w", torch.Size([0] * dims))
        item = ReadItem(
            LoadItemType.TENSOR, nowhere, torch.Size([0] * dims), nowhere, torch.Size(begins), torch.Size(lengths)
        )
        with pytest.MonkeyPatch.context() as patch, open(path, "rb") as file:
            patch.setattr(reader, "_SMALL", small)
            found = reader.read_part(file, 5, tensor.shape, tensor.dtype, item)
    assert torch.equal(found, tensor[tuple(slice(b, b + n) for b, n in zip(begins, lengths))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0, 4)])
def test_the_frame_is_what_torch_writes_around_values(dtype, shape):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        for fill in (0, 1):
            file, tensor = io.BytesIO(), torch.full(shape, fill, dtype=torch.float32).to(dtype)
            torch.save(tensor, file)
            head, tail = frame(torch.Size(shape), dtype)
            raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            assert file.getvalue() == head + raw + tail
    finally:
        torch.serialization.set_crc32_options(before)
