"""`make train` in miniature: a small text, a tiny model, stopped, killed, resumed, done."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.e2e.launch import ROOT, environment

pytestmark = pytest.mark.slow

TINY = """--num-layers 1 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 2 --seq-length 64
    --max-position-embeddings 64 --eval-iters 2 --lr 1e-2 --num-workers 0""".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a text of 330 KB."""
    root = tmp_path_factory.mktemp("quickstart")
    library = Path(sysconfig.get_path("stdlib"))
    sources = ["argparse.py", "ast.py", "inspect.py", "typing.py"]
    (root / "mine.txt").write_text("".join((library / name).read_text(encoding="utf-8") for name in sources))
    return root


def words(folder, iterations):
    run = ["--run", folder / "run", "--text", folder / "mine.txt", "--iters", iterations]
    return [sys.executable, "-m", "megatron_lite", "quickstart", *map(str, run), *TINY]


def quickstart(folder, iterations):
    return subprocess.run(
        words(folder, iterations), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240
    )


def metrics(folder):
    rows = [json.loads(line) for line in (folder / "run/checkpoints/metrics.jsonl").read_text().splitlines()]
    return rows, {row["iteration"]: row["validation"]["lm loss"] for row in rows if "validation" in row}


@pytest.fixture(scope="module")
def first(folder):
    done = quickstart(folder, 12)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def test_text_becomes_a_trained_model_with_picture_report_and_sample(folder, first):
    run = folder / "run"
    for name in (
        "data/corpus.jsonl",
        "data/tokenizer.model",
        "data/corpus_text_document.bin",
        "checkpoints/config.yaml",
    ):
        assert (run / name).stat().st_size > 0
    assert (run / "checkpoints/latest_checkpointed_iteration.txt").read_text().strip() == "12"
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert any((run / "tensorboard").glob("events.out.tfevents.*"))
    _, validation = metrics(folder)
    assert list(validation)[0] == 0 and list(validation)[-1] == 12
    assert validation[12] < validation[0] - 0.3, "the model has not learned"
    sample = (run / "sample.txt").read_text()
    page = (run / "report.html").read_text()
    assert len(sample) > 50 and "<h2>Sample</h2>" in page and "<td>training</td>" in page


def test_a_pipe_gets_plain_lines_with_every_command_that_ran(first):
    assert "\x1b" not in first.stdout + first.stderr and "\r" not in first.stdout
    for number, step in enumerate(("corpus", "tokenizer", "tokens", "training", "sample", "report"), 1):
        assert f"[{number}/6] {step}" in first.stdout
    shown = [line.strip() for line in first.stdout.splitlines() if line.startswith("    $ ")]
    assert [line.split()[1:3] for line in shown if "megatron-lite" in line] == [
        ["megatron-lite", verb] for verb in ("corpus", "train-tokenizer", "preprocess", "generate", "report")
    ]
    assert sum("pretrain_gpt.py --config configs/gpt_small.yaml" in line for line in shown) == 1


def test_a_second_start_says_that_it_is_done(folder, first):
    checkpoint = folder / "run/checkpoints/iter_0000012"
    before = checkpoint.stat().st_mtime_ns
    again = quickstart(folder, 12)
    assert again.returncode == 0, again.stderr
    assert "done before: 12 iterations are trained" in again.stdout and "[1/6]" not in again.stdout
    assert checkpoint.stat().st_mtime_ns == before


def test_a_killed_run_goes_on_from_its_last_checkpoint(folder, first):
    """SIGKILL to everything at once, after a checkpoint; the next start trains the rest and no data anew."""
    corpus = (folder / "run/data/corpus.jsonl").stat().st_mtime_ns
    process = subprocess.Popen(
        words(folder, 300), cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout
    for line in process.stdout:
        if "successfully saved checkpoint from iteration     100" in line:
            os.killpg(process.pid, signal.SIGKILL)
            break
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    process.stdout.close()

    rest = quickstart(folder, 120)
    assert rest.returncode == 0, rest.stdout[-3000:] + rest.stderr[-3000:]
    assert "[1/6] corpus: done before" in rest.stdout
    assert (folder / "run/data/corpus.jsonl").stat().st_mtime_ns == corpus
    assert "loaded checkpoint" in rest.stdout
    rows, validation = metrics(folder)
    trained = [row["iteration"] for row in rows if "validation" not in row]
    assert max(trained) == 120 and validation[120] < validation[12]
    assert (folder / "run/checkpoints/latest_checkpointed_iteration.txt").read_text().strip() == "120"
    assert rest.stdout.count("The model writes:") == 1


@pytest.mark.parametrize("model, more", [("bert", "mask 1: "), ("t5", "2 gap(s)"), ("retro", "160 tokens: ")])
def test_every_model_comes_from_a_text_to_a_sample(folder, model, more):
    """`make train MODEL=...` from the top: its tokenizer, its data, training, pictures, a use for the result."""
    run = folder / model
    command = [sys.executable, "-m", "megatron_lite", "quickstart", "--model", model, "--iters", "4"]
    command += [*"--hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 2 --eval-iters 1 --num-workers 0".split()]
    command += ["--run", str(run), "--text", str(folder / "mine.txt")]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert more in done.stdout + done.stderr and "The model writes:" in done.stdout
    for name in ("checkpoints/latest_checkpointed_iteration.txt", "loss.png", "report.html"):
        assert (run / name).stat().st_size > 0, name
