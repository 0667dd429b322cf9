"""Boxes under global names: what any layout saves, any other layout reads."""

import os
import pickle
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.checkpointing import reader, sharded
from megatron_lite.errors import CheckpointError
from megatron_lite.sharding import Piece, ShardSpec, flat_range, split, whole
from tests.unit.checkpointing.ranks import cut, emptied, flat, replicated, write_as_ranks

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def _values(shape, dtype):
    return (torch.arange(torch.Size(shape).numel()) % 251).reshape(shape).to(dtype)


@st.composite
def _layout(draw, shape):
    """A way in which 1 to 4 ranks share a tensor."""
    size = draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["replicated", "flat", "cut"] if shape else ["replicated"]))
    if kind == "replicated":
        return lambda tensor: replicated("w", tensor, size)
    dim = draw(st.integers(0, len(shape) - 1)) if kind == "cut" else None
    length = shape[dim] if dim is not None else torch.Size(shape).numel()
    inner = sorted(draw(st.lists(st.integers(0, length), min_size=size - 1, max_size=size - 1)))
    bounds = [0, *inner, length]
    if kind == "flat":
        return lambda tensor: flat("w", tensor, bounds)
    return lambda tensor: cut("w", tensor, dim, bounds)


@settings(max_examples=60)
@given(st.data())
def test_any_layout_reads_what_any_layout_saved(data):
    """A box at a wrong offset, a forgotten piece or a swapped dimension shows here."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=3)))
    dtype = data.draw(st.sampled_from(DTYPES))
    saving, loading = data.draw(_layout(shape)), data.draw(_layout(shape))
    tensor = _values(shape, dtype)
    with tempfile.TemporaryDirectory() as folder:
        write_as_ranks(Path(folder), [{"w": part} for part in saving(tensor)])
        wanted = loading(tensor)
        for (want, _), given_part in zip(wanted, emptied(wanted)):
            sharded.read(Path(folder), {"w": given_part})
            assert torch.equal(given_part[0], want)
            assert given_part[0].dtype == dtype


def test_the_stacked_halves_of_a_gated_mlp_stay_apart(tmp_path):
    """[gate; up] is cut in each half: two boxes a rank. Read as one block, tp 2 would mix gate and up rows."""
    tensor = torch.randn(8, 3)
    saved = []
    for rank in range(2):
        spec = split("fc1", (4, 3), 0, rank, 2, stride=2)
        local = torch.empty(4, 3)
        for piece in spec.pieces:
            local[piece.local_slices()] = tensor[piece.global_slices()]
        saved.append({"fc1": (local, spec)})
    write_as_ranks(tmp_path / "c", saved)
    one = torch.empty(8, 3)
    sharded.read(tmp_path / "c", {"fc1": (one, whole("fc1", (8, 3)))})
    assert torch.equal(one, tensor)
    four = [split("fc1", (2, 3), 0, rank, 4, stride=2) for rank in range(4)]
    for spec in four:
        local = torch.empty(2, 3)
        sharded.read(tmp_path / "c", {"fc1": (local, spec)})
        assert torch.equal(local, torch.cat([tensor[p.global_slices()] for p in spec.pieces]))


def test_replicas_are_written_once_and_by_all_ranks_in_turn(tmp_path):
    """Rank 0 writing everything would make data parallelism useless for saving."""
    tensors = {f"w{i}": torch.randn(16, 16) for i in range(8)}
    ranks = [{key: (value, whole(key, (16, 16))) for key, value in tensors.items()} for _ in range(4)]
    wrote = write_as_ranks(tmp_path / "c", ranks)
    assert Counter(key for keys in wrote for key in keys) == Counter(dict.fromkeys(tensors, 1))
    assert [len(keys) for keys in wrote] == [2, 2, 2, 2]
    stored = sum(path.stat().st_size for path in (tmp_path / "c").glob("*.distcp"))
    assert stored < 8 * (16 * 16 * 4 + 2000)


def test_views_and_strides_do_not_change_what_is_saved(tmp_path):
    """A buffer's slice is stored without the buffer; a transposed or expanded view as its values."""
    buffer = torch.arange(4096.0)
    given_tensors = {
        "slice": buffer[100:160].view(6, 10),
        "transposed": torch.randn(5, 7).t(),
        "strided": torch.randn(8, 8)[::2, 1::3],
        "expanded": torch.tensor([[3.0]]).expand(4, 2),
        "scalar": torch.tensor(5, dtype=torch.int64),
        "empty": torch.zeros(0, 4),
        "grad": torch.nn.Parameter(torch.randn(3)),
    }
    tensors = {key: (value, whole(key, tuple(value.shape))) for key, value in given_tensors.items()}
    sharded.write(_new(tmp_path / "c"), tensors, {}, None)
    assert sum(path.stat().st_size for path in (tmp_path / "c").glob("*.distcp")) < 16000  # the buffer alone has 16384
    for key, value in given_tensors.items():
        read = torch.full(value.shape, 9, dtype=value.dtype)
        sharded.read(tmp_path / "c", {key: (read, whole(key, tuple(value.shape)))}, expected=lambda _: False)
        assert torch.equal(read, value), key


def test_a_load_writes_into_the_very_memory_it_was_given(tmp_path):
    """Parameters are views of a flat buffer; a load that rebinds them leaves the buffer, and the optimizer, behind."""
    saved = torch.randn(4, 3)
    sharded.write(_new(tmp_path / "c"), {"w": (saved, whole("w", (4, 3)))}, {}, None)
    buffer = torch.zeros(20)
    parameter = torch.nn.Parameter(buffer[5:17].view(4, 3))
    address = parameter.data_ptr()
    sharded.read(tmp_path / "c", {"w": (parameter, whole("w", (4, 3)))})
    assert parameter.data_ptr() == address
    assert torch.equal(buffer[5:17], saved.flatten()) and buffer[:5].eq(0).all() and buffer[17:].eq(0).all()


def test_values_are_cast_to_the_runs_number_format(tmp_path):
    """A bf16 run continues from fp32 weights, and the other way round; integers never become floats."""
    sharded.write(_new(tmp_path / "c"), {"w": (torch.tensor([1.5, 1 / 3]), whole("w", (2,)))}, {}, None)
    half = torch.zeros(2, dtype=torch.bfloat16)
    sharded.read(tmp_path / "c", {"w": (half, whole("w", (2,)))})
    assert torch.equal(half, torch.tensor([1.5, 1 / 3]).bfloat16())
    with pytest.raises(CheckpointError, match="torch.float32 there, torch.int64 here"):
        sharded.read(tmp_path / "c", {"w": (torch.zeros(2, dtype=torch.int64), whole("w", (2,)))})


def test_one_error_names_all_tensors_that_do_not_fit_and_nothing_is_changed(tmp_path):
    tensors = {key: (torch.randn(3, 4), whole(key, (3, 4))) for key in ("same", "gone", "reshaped")}
    sharded.write(_new(tmp_path / "c"), tensors, {}, None)
    wanted = {
        "same": (torch.zeros(3, 4), whole("same", (3, 4))),
        "reshaped": (torch.zeros(6, 4), whole("reshaped", (6, 4))),
        "new": (torch.zeros(2), whole("new", (2,))),
    }
    with pytest.raises(CheckpointError) as caught:
        sharded.read(tmp_path / "c", wanted)
    text = str(caught.value)
    assert "1 missing in it: new" in text and "1 unknown to this run: gone" in text
    assert "reshaped [3, 4] there, [6, 4] here" in text and "fix:" in text
    assert wanted["same"][0].eq(0).all()


def test_without_strict_both_sides_extras_are_returned_and_the_rest_is_read(tmp_path):
    tensors = {key: (torch.ones(2), whole(key, (2,))) for key in ("both", "saved_only")}
    sharded.write(_new(tmp_path / "c"), tensors, {}, None)
    wanted = {key: (torch.zeros(2), whole(key, (2,))) for key in ("both", "run_only")}
    assert sharded.read(tmp_path / "c", wanted, allow_missing=True, allow_unexpected=True) == (
        ["run_only"],
        ["saved_only"],
    )
    assert wanted["both"][0].eq(1).all() and wanted["run_only"][0].eq(0).all()


def test_objects_come_back_as_they_were(tmp_path):
    state = {"words": [1, 2**63 - 1], "gauss": None, "state": torch.arange(5, dtype=torch.uint8), "x": 0.1}
    sharded.write(_new(tmp_path / "c"), {}, {"rng.0": state, "rng.1": {"a": 1}}, None)
    assert sharded.saved_objects(tmp_path / "c") == ["rng.0", "rng.1"]
    back = sharded.read_object(tmp_path / "c", "rng.0")
    assert back.keys() == state.keys() and torch.equal(back.pop("state"), state.pop("state")) and back == state


def test_the_index_tells_shapes_and_dtypes_without_reading_tensors(tmp_path):
    write_as_ranks(tmp_path / "c", [{"w": part} for part in cut("w", torch.zeros(6, 2).half(), 0, [0, 1, 6])])
    for path in (tmp_path / "c").glob("*.distcp"):
        path.unlink()
    assert sharded.saved_tensors(tmp_path / "c") == {"w": sharded.SavedTensor((6, 2), torch.float16)}


def test_two_tensors_under_one_name_are_a_bug_that_stops_the_save(tmp_path):
    """Two stages that call different parameters alike would overwrite each other in silence."""
    one, two = (torch.zeros(2), whole("w", (2,))), (torch.zeros(3), whole("w", (3,)))
    with pytest.raises(AssertionError, match="under one name"):
        write_as_ranks(tmp_path / "c", [{"w": one}, {"w": two}])


def test_boxes_that_leave_a_hole_are_a_bug_that_stops_the_save(tmp_path):
    part = cut("w", torch.zeros(6, 2), 0, [0, 3, 6])[0]
    with pytest.raises(AssertionError, match="boxes cover 6"):
        sharded.write(_new(tmp_path / "c"), {"w": part}, {}, None)


def test_a_piece_outside_its_tensor_is_a_bug():
    spec = ShardSpec("w", (4,), (Piece((0,), (0, 0), (4,)),))
    with pytest.raises(AssertionError):
        sharded.view_of_piece(torch.zeros(4), spec.pieces[0])


# -- damage and malice -------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    tensors = {"w": (torch.randn(64, 8), whole("w", (64, 8)))}
    sharded.write(_new(tmp_path / "c"), tensors, {"o": {"a": 1}}, None)
    return tmp_path / "c"


def _read_w(folder):
    sharded.read(folder, {"w": (torch.zeros(64, 8), whole("w", (64, 8)))})


@pytest.mark.parametrize("left", [0, 1, 100, 1500])
def test_a_data_file_cut_short_is_an_error_that_names_it(saved, left):
    path = next(saved.glob("*.distcp"))
    os.truncate(path, left)
    with pytest.raises(CheckpointError, match="__0_0.distcp"):
        _read_w(saved)


def test_a_missing_data_file_is_an_error_that_names_it(saved):
    next(saved.glob("*.distcp")).unlink()
    with pytest.raises(CheckpointError, match="__0_0.distcp"):
        _read_w(saved)


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x80\x04N.", pickle.dumps({"a": 1})])
def test_a_damaged_index_is_an_error_that_names_it(saved, content):
    (saved / reader.INDEX).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        _read_w(saved)


class _Hostile:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_hostile_index_runs_nothing(saved, tmp_path):
    (saved / reader.INDEX).write_bytes(pickle.dumps(_Hostile(tmp_path / "owned")))
    with pytest.raises(CheckpointError, match="posix.mkdir"):
        _read_w(saved)
    assert not (tmp_path / "owned").exists()


def test_hostile_data_runs_nothing(saved, tmp_path):
    """The bytes where a tensor or an object should lie hold a pickle that makes a folder."""
    path = next(saved.glob("*.distcp"))
    index = sharded.Reader(saved).read_metadata()
    evil = tmp_path / "evil.pt"
    torch.save(_Hostile(tmp_path / "owned"), evil)
    path.write_bytes(evil.read_bytes())
    for place in index.storage_data.values():
        place.offset, place.length = 0, evil.stat().st_size
    (saved / reader.INDEX).write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match="__0_0.distcp"):
        _read_w(saved)
    with pytest.raises(CheckpointError, match="__0_0.distcp"):
        sharded.read_object(saved, "o")
    assert not (tmp_path / "owned").exists()


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


# -- padding -----------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_padded_rows_are_cut_anew_for_whole_and_flat_parts(saved_rows, rows, data):
    """What both have is read, the rest is zero: also where a rank holds a flat range that begins within a row."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        there = torch.arange(1.0, saved_rows * 3 + 1).view(saved_rows, 3)
        sharded.write(folder, {"w": (there, whole("w", (saved_rows, 3)))}, {}, None)
        begin = data.draw(st.integers(0, rows * 3))
        end = data.draw(st.integers(begin, rows * 3))
        full, flat = torch.full((rows, 3), 9.0), torch.full((end - begin,), 9.0)
        spec = whole("w", (rows, 3))
        for tensor, at in ((full, spec), (flat, flat_range(spec, begin, end))):
            sharded.read(folder, {"w": (tensor, at)}, padded=lambda key: key == "w")
        want = torch.zeros(rows, 3)
        kept = min(rows, saved_rows)
        want[:kept] = there[:kept]
        assert torch.equal(full, want) and torch.equal(flat, want.view(-1)[begin:end])
        if rows != saved_rows:
            with pytest.raises(CheckpointError, match="of another shape"):
                sharded.read(folder, {"w": (full, spec)})
