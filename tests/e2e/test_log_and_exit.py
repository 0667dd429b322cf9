"""What a run prints, writes and answers when it is told to stop."""

import contextlib
import json
import os
import re
import signal
import subprocess

import pytest

from megatron_lite.checkpointing import folders
from tests.e2e.launch import TINY, command, environment, run

pytestmark = pytest.mark.slow

LINE = re.compile(
    r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration +\d+/ +\d+ \| consumed samples: +\d+ \|"
    r"( skipped samples: +\d+ \|)? elapsed time per iteration \(ms\): \d+\.\d \|"
    r"(?P<throughput> throughput per GPU \(TFLOP/s/GPU\): \d+\.\d \|)?"
    r" learning rate: \d\.\d{6}E[+-]\d\d \| global batch size: +\d+ \| lm loss: \d\.\d{6}E[+-]\d\d \|"
    r" loss scale: \d+\.\d \| grad norm: \d+\.\d{3} \|(?P<zeros> num zeros: \d+ \|)?"
    r"(?P<params> params norm: \d+\.\d{3} \|)?"
    r" number of skipped iterations: +\d+ \| number of nan iterations: +\d+ \|"
)


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A run of six iterations with everything on, and its folders."""
    root = tmp_path_factory.mktemp("logged")
    done = run(
        *TINY,
        *"--train-iters 6 --log-interval 3 --eval-interval 3 --eval-iters 2 --save-interval 3 --log-progress".split(),
        *"--log-throughput --log-params-norm --log-num-zeros-in-grad --timing-log-level 2".split(),
        *"--log-validation-ppl-to-tensorboard --log-timers-to-tensorboard --log-world-size-to-tensorboard".split(),
        *["--save", root / "save", "--tensorboard-dir", root / "tb"],
    ).ok()
    return root, done


def scalars(folder):
    """Tag -> {step: value} of a TensorBoard folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_iteration_lines_have_megatrons_fields_in_order(logged):
    """Scripts that parse Megatron's log read ours."""
    lines = [line for line in logged[1].out.splitlines() if " iteration " in line and "consumed samples" in line]
    assert len(lines) == 3  # after the first iteration, and at each interval
    for line in lines:
        match = LINE.fullmatch(line)
        assert match, line
        assert match["throughput"] and match["zeros"] and match["params"]


def test_the_line_shows_the_mean_of_its_interval(logged):
    """A line with the last step's loss is noisier than Megatron's and cannot be compared with it."""
    steps = scalars(logged[0] / "tb")["lm loss"]
    at_3, at_6 = (float(line["lm loss"]) for line in logged[1].lines[1:])
    assert at_3 == pytest.approx(sum(steps[i] for i in (1, 2, 3)) / 3, rel=1e-5)
    assert at_6 == pytest.approx(sum(steps[i] for i in (4, 5, 6)) / 3, rel=1e-5)


def test_tensorboard_holds_exactly_megatrons_tags(logged):
    """Dashboards look for these names."""
    twins = [
        "learning-rate",
        "batch-size",
        "lm loss",
        "loss-scale",
        "world-size",
        "grad-norm",
        "num-zeros",
        "params-norm",
    ]
    twins += ["lm loss validation", "lm loss validation ppl"]
    found = set(scalars(logged[0] / "tb"))
    timers = {tag for tag in found if tag.endswith("-time") and tag != "iteration-time"}
    expected = {*twins, *(f"{tag} vs samples" for tag in twins), "iteration-time", "throughput"}
    assert found - timers == expected
    assert {"forward-backward-time", "optimizer-time", "batch-generator-time"} <= timers


def test_start_up_says_what_megatrons_says(logged):
    """In this order."""
    wanted = [
        r"using world size: 1, data-parallel size: 1",
        r"using torch.float32 for parameters",
        r"-+ arguments -+",
        r"  hidden_size \.+ 64",
        r"-+ end of arguments -+",
        r" > padded vocab \(size: 256\) with 0 dummy tokens \(new size: 256\)",
        r"> initializing torch distributed",
        r"> initialized tensor model parallel with size 1",
        r"> setting random seeds to 1234",
        r"time to initialize megatron \(seconds\): ",
        r"\[after megatron is initialized\] datetime: ",
        r"building GPT model",
        r" > number of parameters on \(tensor, pipeline\) model parallel rank \(0, 0\): 118\d\d\d",
        r"> learning rate decay style: cosine",
        r"\[after model, optimizer, and learning rate scheduler are built\]",
        r"> building train, validation, and test datasets \.\.\.",
        r" > datasets target sizes \(minimum size\):",
        r"    train: +48",
        r"> finished creating GPT datasets",
        r"\[after dataloaders are built\]",
        r"done with setup",
        r"training \.\.\.",
        r"\[before the start of training step\]",
        r"\[after training is done\]",
    ]
    at = 0
    for pattern in wanted:
        match = re.compile(pattern).search(logged[1].out, at)
        assert match, f"{pattern!r} is missing, or comes too early, in\n{logged[1].out[:6000]}"
        at = match.end()


def test_validation_lines_and_their_perplexity(logged):
    """The middle part repeats for every loss; PPL is exp of it."""
    lines = re.findall(r" validation loss at (.+?) \| lm loss value: (\S+) \| lm loss PPL: (\S+) \| ", logged[1].out)
    assert [name for name, _, _ in lines] == [
        "iteration 3",
        "iteration 6",
        "iteration 6 on validation set",
        "iteration 6 on test set",
    ]
    for _, loss, ppl in lines:
        assert float(ppl) == pytest.approx(2.718281828 ** float(loss), rel=1e-4)


def test_metrics_and_progress_are_written(logged):
    """The report and the throughput over restarts are computed from these files."""
    rows = [json.loads(line) for line in (logged[0] / "save" / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows if "lm loss" in row] == [1, 3, 6]
    assert [row["iteration"] for row in rows if "validation" in row] == [3, 6]
    progress = (logged[0] / "save" / "progress.txt").read_text().splitlines()
    assert [line.split("\t")[3] for line in progress] == ["Starting job", "Saved checkpoint", "Saved checkpoint"]


def test_timers_are_printed_in_megatrons_form(logged):
    """`(min, max)` over ranks, dots up to 48 columns."""
    assert "(min, max) time across ranks (ms):" in logged[1].out
    assert re.search(r"^    forward-backward \.+: \(\d+\.\d\d, \d+\.\d\d\)$", logged[1].out, re.M)


def test_exit_interval_saves_and_ends_with_status_0(tmp_path):
    """A job that leaves without a checkpoint loses what it trained."""
    done = run(*TINY, "--train-iters", 9, "--exit-interval", 3, "--save", tmp_path, "--save-interval", 100).ok()
    assert "[exiting program at iteration 3] datetime: " in done.out and len(done.lines) == 3
    assert folders.read_tracker(tmp_path) == 3


def test_exit_duration_saves_and_ends_with_status_0(tmp_path):
    """Clusters kill jobs at their limit; the run must leave before."""
    flags = "--train-iters 100000 --exit-duration-in-mins 2 --save-interval 100000 --started-minutes-ago 3".split()
    done = run(*TINY, *flags, "--save", tmp_path, script="tests/e2e/faulty_gpt.py").ok()
    assert re.search(r"\[exiting program after 3\.\d+ minutes\] datetime: ", done.out)
    assert folders.read_tracker(tmp_path) == len(done.lines) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=["SIGTERM", "SIGUSR1"])
def test_a_signal_ends_the_run_after_a_save(tmp_path, number):
    """Schedulers send it ahead of the limit."""
    flags = [*TINY, *"--train-iters 100000 --exit-signal-handler --save-interval 100000".split(), "--save", tmp_path]
    process = subprocess.Popen(command(*flags), stdout=subprocess.PIPE, text=True, cwd=os.getcwd(), env=environment())
    out = []
    for line in process.stdout:
        out.append(line)
        if "iteration        3/" in line:
            process.send_signal(number)
    assert process.wait() == 0
    assert f"[exiting program after receiving {number.name}.] datetime: " in "".join(out)
    last = max(int(line.split(" iteration ")[1].split("/")[0]) for line in out if "consumed samples" in line)
    assert folders.read_tracker(tmp_path) == last >= 3


def test_C122_a_signal_to_every_process_of_the_job_ends_it_after_a_save(tmp_path):
    """As schedulers send it. The processes that read data died of it, and the run with them, before it had saved."""
    flags = "--train-iters 100000 --exit-signal-handler --async-save --save-interval 2 --num-workers 2".split()
    process = subprocess.Popen(
        command(*TINY, *flags, "--save", tmp_path),
        stdout=subprocess.PIPE, text=True, cwd=os.getcwd(), env=environment(), start_new_session=True,
    )  # fmt: skip
    out = []
    for line in process.stdout:
        out.append(line)
        if "iteration        3/" in line:
            os.killpg(process.pid, signal.SIGTERM)
    assert process.wait() == 0
    assert "[exiting program after receiving SIGTERM.] datetime: " in "".join(out)
    assert folders.read_tracker(tmp_path) >= 3


def test_skipped_iterations_read_their_batch_and_leave_weights_alone(tmp_path):
    """A batch that is not read would shift the data of all later iterations."""
    plain = run(*TINY, "--train-iters", 4).ok()
    skipping = run(*TINY, "--train-iters", 4, "--iterations-to-skip", 2).ok()
    assert skipping.values("iteration") == [1, 3, 4]
    assert skipping.lines[0]["lm loss"] == plain.lines[0]["lm loss"]
    assert skipping.values("consumed samples") == [8, 24, 32]
    assert "skipped samples" not in skipping.lines[0]
    assert [line["skipped samples"] for line in skipping.lines[1:]] == ["8", "8"]
    assert skipping.lines[1]["lm loss"] != plain.lines[2]["lm loss"]


def test_the_last_iterations_are_in_the_log_though_they_fill_no_interval(tmp_path):
    """5 iterations at an interval of 3: the last two were in no line, no file and no picture. Also the memory of a CPU
    is a scalar, where --log-memory-to-tensorboard wrote nothing."""
    flags = (
        "--train-iters 5 --log-interval 3 --save-interval 5 --log-memory-to-tensorboard --timing-log-level 1".split()
    )
    done = run(*TINY, *flags, "--save", tmp_path / "save", "--tensorboard-dir", tmp_path / "tb").ok()
    assert [line["iteration"] for line in done.lines] == ["1", "3", "5"]
    seen = scalars(tmp_path / "tb")
    rows = [json.loads(line) for line in (tmp_path / "save" / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 3, 5]
    assert rows[-1]["lm loss"] == pytest.approx((seen["lm loss"][4] + seen["lm loss"][5]) / 2, rel=1e-5)
    memory = seen["mem-max-resident-bytes" if "mem-max-resident-bytes" in seen else "mem-allocated-bytes"]
    assert sorted(memory) == [1, 2, 3, 4, 5] and min(memory.values()) > 1e6


def test_a_terminal_shows_where_the_run_is_between_its_lines_and_a_pipe_does_not(tmp_path):
    """Escape sequences in a log file, or a run that says nothing for a hundred iterations."""
    flags = [*TINY, "--train-iters", "6", "--log-interval", "4"]
    ours, theirs = os.openpty()
    process = subprocess.Popen(command(*flags), stdout=theirs, stderr=theirs, cwd=os.getcwd(), env=environment())
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(ours, 65536):
            shown += part
    os.close(ours)
    assert process.wait() == 0
    between = re.findall(
        r"\r\x1b\[2K iteration (\d)/6 \| loss \d\.\d{3} \| \d+\.\d\d it/s \| \d+:\d\d left", shown.decode()
    )
    assert between == ["2", "3", "5"]
    lines = [line for line in shown.decode().split("\r\n") if "consumed samples" in line]
    assert len(lines) == 3 and all(LINE.search(line) for line in lines)
    assert "\x1b" not in run(*flags).ok().out
