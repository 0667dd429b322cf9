"""Every command of the README is run as it stands there, in a copy of nothing but a folder for its results.

Lengths are cut down by flags that are added at the end of a command, never by changing it; `runs/` becomes a temporary
folder. The first command is case C144 and is run at its full size.
"""

import json
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.launch import ROOT, environment

pytestmark = pytest.mark.slow

README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands():
    """The commands of all shell blocks, in order, without comments; a trailing backslash joins lines."""
    found = []
    for block in re.findall(r"^```bash\n(.*?)^```", README, re.M | re.S):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            line = re.sub(r"\s+#.*", "", line).strip()
            if line and not line.startswith("#"):
                found.append(line)
    return found


def starting(words):
    """The command that starts with these words."""
    return next(line for line in commands() if line.startswith(words))


def make(*words, **options):
    """`make` in the checkout, with this environment in the place of .venv, which is taken as installed."""
    stamp = f"{sys.prefix}/.installed"
    command = ["make", "--no-print-directory", "-C", str(ROOT), "-o", stamp, f"VENV={sys.prefix}", *words]
    # two threads, as on the smallest machine that the README speaks of
    env = environment(OMP_NUM_THREADS="2")
    return subprocess.run(command, capture_output=True, text=True, timeout=540, env=env, **options)


def here(line, runs):
    """A README command with its results in `runs` and its programs from this environment."""
    line = re.sub(r"\bruns/", f"{runs}/", line)
    words = shlex.split(line)
    program = Path(sys.executable).parent / words[0]
    return [str(program) if program.exists() else words[0], *words[1:]]


def run(line, runs, *more):
    done = subprocess.run(
        [*here(line, runs), *map(str, more)], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def first(runs):
    """The first command, and the seconds of CPU that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    first_command = commands()[0]
    assert first_command == "make train ITERS=30"
    done = make(*first_command.split()[1:], f"RUN={runs}/stdlib")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_C144_the_first_command_trains_within_two_minutes_and_the_loss_falls(first, runs):
    """CPU time, which other work on the machine does not add to: two cores have 240 seconds in two minutes."""
    _, cpu_seconds = first
    rows = [json.loads(line) for line in (runs / "stdlib/checkpoints/metrics.jsonl").read_text().splitlines()]
    validation = {row["iteration"]: row["validation"]["lm loss"] for row in rows if "validation" in row}
    assert validation[30] < 0.8 * validation[0]
    assert cpu_seconds < 240, f"{cpu_seconds:.0f} seconds of CPU"
    assert (runs / "stdlib/loss.png").exists() and (runs / "stdlib/report.html").exists()


def test_the_run_by_make_goes_on_to_the_length_of_the_config():
    """`make train` after the first look is the same quickstart without `--iters`; other tests try its resume."""
    line = commands()[1]
    assert line == "make train"
    printed = make("-n", *line.split()[1:]).stdout.replace("\\\n", " ")
    assert printed.split() == f"{sys.prefix}/bin/python -m megatron_lite quickstart --model gpt".split()
    printed = make("-n", "train", "TEXT=some path/x.txt", "ITERS=5", "RUN=there").stdout
    expected = ["--model", "gpt", "--text", "some path/x.txt", "--iters", "5", "--run", "there"]
    assert shlex.split(printed.replace("\\\n", " "))[4:] == expected


def test_text_report_and_curves_of_that_run(first, runs):
    text = run(starting("megatron-lite generate"), runs, "--num-tokens-to-generate", 8).stdout
    assert text.startswith("def read(") and len(text) > len("def read(\n")
    assert "report.html" in run(starting("megatron-lite report"), runs).stdout
    where = Path(here(starting("tensorboard"), runs)[-1])
    assert list(where.glob("events.out.tfevents.*")), "there is nothing for TensorBoard to show"


@pytest.mark.usefixtures("first")
def test_the_steps_by_hand_and_two_processes_of_training(runs):
    text = runs / "mine.txt"
    text.write_text("".join(f"{name}\n\n{README}\n" for name in commands()))
    assert "documents" in run(starting("megatron-lite corpus"), runs, "--text", text).stdout
    run(starting("megatron-lite train-tokenizer"), runs, "--vocab-size", 600)
    run(starting("megatron-lite preprocess"), runs)
    short = "--train-iters 2 --eval-iters 1 --eval-interval 2 --save-interval 2 --log-interval 1".split()
    done = run(starting("torchrun"), runs, *short, "--num-workers", 0)
    assert "using world size: 2, data-parallel size: 2" in done.stdout
    assert (runs / "mine/checkpoints/latest_checkpointed_iteration.txt").read_text().strip() == "2"


def test_the_layout_is_verified_as_shown(runs):
    """The command of the section on layouts, and the flags of its longest layout as 8 processes."""
    assert "gradients" in run(starting("megatron-lite verify"), runs).stdout
    flags = README.split("```text\n--tensor-model-parallel-size")[1].split("```")[0]
    line = starting("megatron-lite verify").split(" --tensor-model-parallel-size")[0]
    done = run(f"{line} --tensor-model-parallel-size {flags} --ranks 8 --steps 2", runs)
    assert "pipeline" in done.stdout or "pp 2" in done.stdout


def test_a_run_of_128_ranks_is_checked_as_shown(runs):
    out = run(starting("megatron-lite dry-run"), runs).stdout
    assert "128 ranks = tp 8 x cp 1 x dp 1 x pp 16" in out and "174,615,846,912 parameters" in out


@pytest.mark.parametrize("model", ["bert", "t5", "retro"])
def test_other_models_train_by_the_same_verb(model):
    """Their quickstarts are tried, short, where quickstarts are."""
    line = next(line for line in commands() if f"MODEL={model}" in line)
    printed = make("-n", *line.split()[1:]).stdout
    assert printed.split()[-2:] == ["--model", model]
    assert (ROOT / f"configs/{model}_small.yaml").exists()


@pytest.mark.parametrize(
    "target, words",
    [
        ("test", "-m pytest"),
        ("test-fast", '-m pytest -m "not slow"'),
        ("lint", "ruff check ."),
        ("docs", "mkdocs build --strict"),
        ("bench", "benchmarks/step_time.py"),
    ],
)
def test_targets_of_make_do_what_the_readme_says(target, words):
    assert f"make {target}" in commands()
    printed = make("-n", target)
    assert printed.returncode == 0 and words in printed.stdout
    for file in re.findall(r"\S+\.py", printed.stdout):
        assert (ROOT / file).exists()


def test_no_command_of_the_readme_is_left_out():
    tried = ("make ", "megatron-lite ", "torchrun ", "tensorboard ")
    assert all(line.startswith(tried) for line in commands()), "a new kind of command needs a test here"
    assert sum(line.startswith("make ") for line in commands()) == 10
    assert sorted(line.split()[1] for line in commands() if line.startswith("megatron-lite ")) == sorted(
        ["generate", "report", "corpus", "train-tokenizer", "preprocess", "verify", "dry-run"]
    )


def test_files_that_the_readme_names_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target
    reading = README.split("A path for a weekend")[1].split("Why things are")[0]
    room = ""
    for names in re.findall(r"`([\w/]+)`", reading):
        if names.endswith("/"):
            room = names.removeprefix("megatron_lite/")
        else:
            places = [ROOT / f"megatron_lite/{room}{names}.py", ROOT / f"megatron_lite/{names}.py"]
            assert any(place.exists() for place in places), names
