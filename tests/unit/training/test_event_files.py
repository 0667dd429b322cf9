"""TensorBoard's curves over a kill and a resume."""

import pytest

pytest.importorskip("tensorboard", reason="TensorBoard is not installed")

from torch.utils.tensorboard import SummaryWriter

from megatron_lite.training.event_files import forget_after
from tests.e2e.test_log_and_exit import scalars


def write(folder, steps, value, name):
    """A run of these steps, 8 samples each."""
    writer = SummaryWriter(str(folder), filename_suffix=f".{name}")
    for step in steps:
        writer.add_scalar("lm loss", value, step)
        writer.add_scalar("lm loss vs samples", value, 8 * step)
    writer.add_text("lr", "1e-3", steps[0] - 1)
    writer.close()


def rename(folder, name, time):
    """Files are named by the second in which they are made."""
    (path,) = folder.glob(f"*.{name}")
    path.rename(folder / f"events.out.tfevents.{time}.host.{name}")


def test_a_resumed_run_shows_every_step_once_by_iterations_and_by_samples(tmp_path):
    """TensorBoard's own mark would take the twins' whole history: sample 8 is later than iteration 7."""
    for time, (name, steps, value) in enumerate(
        (("first", range(1, 5), 1.0), ("second", range(5, 10), 2.0), ("third", range(10, 12), 3.0))
    ):
        write(tmp_path, steps, value, name)
        rename(tmp_path, name, 100 + time)
    first = (tmp_path / "events.out.tfevents.100.host.first").stat()
    assert forget_after(tmp_path, 7, 56) == 9  # four pairs of scalars, and the third run's text
    write(tmp_path, range(8, 13), 4.0, "fourth")
    found = scalars(tmp_path)
    expected = {step: 1.0 for step in range(1, 5)} | {5: 2.0, 6: 2.0, 7: 2.0} | {step: 4.0 for step in range(8, 13)}
    assert found["lm loss"] == expected
    assert found["lm loss vs samples"] == {8 * step: value for step, value in expected.items()}
    assert (tmp_path / "events.out.tfevents.100.host.first").stat().st_ino == first.st_ino  # not even rewritten


def test_a_record_torn_by_a_kill_ends_its_file_and_no_run(tmp_path):
    write(tmp_path, range(1, 10), 1.0, "run")
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    assert forget_after(tmp_path, 4, 32) == 10
    assert [*scalars(tmp_path)["lm loss"]] == [1, 2, 3, 4]


def test_a_folder_without_events_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    assert forget_after(tmp_path, 3, 3) == 0 and forget_after(tmp_path / "missing", 3, 3) == 0
