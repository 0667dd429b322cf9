"""The profile of a CUDA run, with torch's CUDA functions replaced by notes of their calls."""

import pickle
from argparse import Namespace
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from megatron_lite import log
from megatron_lite.training.profiling import Profiler, Ranges


class Inner(nn.Module):
    """Two parts, one of which fails on demand."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.second(self.first(x))


class Wrapped(nn.Module):
    """As DDP holds a model."""

    def __init__(self):
        super().__init__()
        self.module = Inner()

    def forward(self, x):
        return self.module(x)


def arguments(tmp_path, **given):
    off = dict.fromkeys(
        """nvtx_ranges record_shapes record_memory_history use_pytorch_profiler pytorch_profiler_collect_shapes
        pytorch_profiler_collect_callstack pytorch_profiler_collect_chakra""".split(),
        False,
    )
    return Namespace(
        **{
            **off,
            "device": torch.device("cuda"),
            "profile": True,
            "profile_ranks": [],
            "profile_step_start": 2,
            "profile_step_end": 4,
            "log_interval": 3,
            "train_iters": 5,
            "tensorboard_dir": str(tmp_path),
            "save": None,
            "memory_snapshot_path": str(tmp_path / "memory" / "snapshot.pickle"),
            **given,
        }
    )


@pytest.fixture
def cuda(monkeypatch):
    """The calls, in order."""
    calls = []

    @contextmanager
    def emit_nvtx(record_shapes):
        calls.append(("nvtx", record_shapes))
        yield
        calls.append("end of nvtx")

    library = Namespace(cudaProfilerStart=lambda: calls.append("start"), cudaProfilerStop=lambda: calls.append("stop"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: library)
    monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", emit_nvtx)
    memory = Namespace(
        _record_memory_history=lambda *given, **more: calls.append(("history", *given)),
        _snapshot=lambda: {"segments": len(calls)},
    )
    monkeypatch.setattr(torch.cuda, "memory", memory)
    return calls


def run(profiler, calls, steps=5):
    for iteration in range(1, steps + 1):
        profiler.before_step(iteration)
        calls.append(iteration)
        profiler.after_step(iteration)
    profiler.close()


def test_nsys_sees_the_chosen_steps_and_their_operators(cuda, tmp_path):
    """Work of a step that is still on its way would fall out of the range, or into it."""
    run(Profiler(arguments(tmp_path, record_shapes=True), []), cuda)
    assert cuda == [1, "wait", "start", ("nvtx", True), 2, 3, "wait", "end of nvtx", "stop", 4, 5]


def test_a_run_that_ends_inside_the_range_ends_the_range(cuda, tmp_path):
    run(Profiler(arguments(tmp_path), []), cuda, steps=2)
    assert cuda == [1, "wait", "start", ("nvtx", False), 2, "wait", "end of nvtx", "stop"]


def test_the_memory_is_written_at_each_log_interval_and_at_the_end(cuda, tmp_path):
    """Also where the run dies later: the snapshot before is there."""
    args = arguments(tmp_path, profile=False, record_memory_history=True)
    run(Profiler(args, []), cuda)
    assert cuda == [("history", "all"), 1, 2, 3, 4, 5, ("history", None)]
    written = pickle.loads((tmp_path / "memory" / "snapshot.pickle").read_bytes())
    assert written == {"segments": 6}  # of iteration 5


def test_other_ranks_write_files_of_their_own_and_unchosen_ones_none(cuda, tmp_path, monkeypatch):
    for rank, chosen in ((3, True), (1, False)):
        monkeypatch.setattr(log, "_rank", (rank, 4))
        args = arguments(tmp_path, profile=False, record_memory_history=True, profile_ranks=[0, 3])
        run(Profiler(args, []), cuda)
        assert (tmp_path / "memory" / f"snapshot_rank{rank}.pickle").exists() == chosen


def test_flags_of_a_trace_say_that_nsys_does_not_read_them(cuda, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(log, "_said", set())
    Profiler(arguments(tmp_path, pytorch_profiler_collect_callstack=True), [])
    said = capsys.readouterr().out
    assert said.startswith("--pytorch-profiler-collect-callstack: no effect without --use-pytorch-profiler")


def test_ranges_are_named_as_the_parts_and_closed_also_after_an_error(monkeypatch):
    """An open range would hold all that follows."""
    model, events = Wrapped(), []

    class Note:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            events.append(self.name)

        def __exit__(self, *error):
            events.append(f"/{self.name}")

    monkeypatch.setattr(torch.profiler, "record_function", Note)
    ranges = Ranges([model])
    ranges.attach()
    ranges.begin_iteration(7)
    model(torch.ones(1, 2))
    ranges.end_iteration()
    assert events == ["iteration 7", "first", "/first", "second", "/second", "/iteration 7"]
    events.clear()
    ranges.begin_iteration(8)
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 3))
    ranges.detach()
    assert events == ["iteration 8", "first", "/first", "/iteration 8"]
    events.clear()
    model(torch.ones(1, 2))
    assert events == []


@pytest.mark.parametrize("takes", [True, False])
def test_a_trace_that_the_disk_did_not_take_is_not_said_to_be_written(tmp_path, monkeypatch, capsys, takes):
    """torch tells nobody: it leaves its partial file, and a former run's trace beside it."""

    def export(self, path):
        (tmp_path / ("trace_rank0.json" if takes else "trace_rank0.json.tmp")).write_text("new")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export)
    (tmp_path / "trace_rank0.json").write_text("of a former run")
    profiler = Profiler(arguments(tmp_path, device=torch.device("cpu")), [])
    profiler.before_step(2)
    profiler.close()
    out, err = capsys.readouterr()
    left = {path.name: path.read_text() for path in tmp_path.iterdir()}
    if takes:
        assert left == {"trace_rank0.json": "new"} and "written to" in out and not err
    else:
        assert left == {} and "written to" not in out and "no profile written to" in err
