"""A full disk costs lines and events of the logs, never the training; what is written is never torn."""

import contextlib
import resource
import signal
import threading

import pytest

from megatron_lite.training.run_logs import SparingWriter, append_line

tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="the package tensorboard is missing")


@contextlib.contextmanager
def largest_file(size):
    """No file of this process may grow beyond so many bytes: not longer than needed, pytest writes files as well."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_lines_that_do_not_fit_are_lost_whole_and_that_is_said_once(tmp_path, capsys):
    path = tmp_path / "new" / "metrics.jsonl"
    append_line(path, "first")
    with largest_file(10):  # 6 are there: of the next line 4 would fit
        append_line(path, "a longer line")
        append_line(path, "another line")
    assert path.read_bytes() == b"first\n"
    err = capsys.readouterr().err
    assert err.count("cannot write") == 1 and str(path) in err and "training goes on" in err
    append_line(path, "second")
    with largest_file(15):
        append_line(path, "a longer line")
    assert path.read_bytes() == b"first\nsecond\n" and capsys.readouterr().err.count("cannot write") == 1


def _events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [event.step for event in events.Scalars("loss")]


def test_tensorboard_drops_events_while_the_disk_is_full_and_begins_another_file(tmp_path, capsys, monkeypatch):
    """Its thread ends with the first error; every later call raised that, and the last rank of the run with it."""
    monkeypatch.setattr(threading, "excepthook", lambda info: None)  # the writer's thread prints its end
    now = [0.0]
    writer = SparingWriter(tensorboard.SummaryWriter(str(tmp_path)), lambda: now[0])
    writer.add_scalar("loss", 1.0, 1)
    writer.flush()
    with largest_file(10):
        for step in (2, 3):
            writer.add_scalar("loss", 1.0, step)
            writer.flush()
    assert capsys.readouterr().err.count("cannot write") == 1
    writer.add_scalar("loss", 1.0, 4)  # half a minute is not over
    now[0] += 31.0
    writer.add_scalar("loss", 1.0, 5)
    writer.flush()
    writer.close()
    assert _events(tmp_path) == [1, 5]
    assert writer.log_dir == str(tmp_path)


def test_other_errors_of_the_writer_are_not_hidden():
    class Broken:
        log_dir = "somewhere"

        def add_scalar(self, *what):
            raise ValueError("not a number")

    with pytest.raises(ValueError, match="not a number"):
        SparingWriter(Broken()).add_scalar("loss", "x")
