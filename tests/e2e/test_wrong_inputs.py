"""What users get wrong ends in one clear message on standard error and a status that is not 0, without a traceback.

The real script is started for each; several at once, since each waits for torch.
"""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.e2e.launch import ROOT, TINY, Finished, environment, run
from tests.unit.datasets.corpora import write_corpus

pytestmark = pytest.mark.slow


@dataclass
class Wrong:
    """A command line and what its message must name."""

    names: list[str]
    flags: list[str] = field(default_factory=list)  # after those of a run that is fine
    script: list[str] = field(default_factory=lambda: [str(ROOT / "pretrain_gpt.py")])
    env: dict[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()  # flags of the good run that are left out
    base: bool = True


def words(text):
    return text.split()


# The places in braces are made by the fixture `place`.
CASES = {
    "empty data": Wrong(["{empty}"], words("--data-path {empty}"), without=("--mock-data",)),
    "torn .idx": Wrong(["{torn}"], words("--data-path {torn}"), without=("--mock-data",)),
    ".bin shorter than .idx says": Wrong(["{short}"], words("--data-path {short}"), without=("--mock-data",)),
    "missing data": Wrong(["/nowhere/data"], words("--data-path /nowhere/data"), without=("--mock-data",)),
    "odd blend": Wrong(["--data-path"], words("--data-path 0.3 {good} 0.7"), without=("--mock-data",)),
    "split of letters": Wrong(
        ["--split", "ninety"], words("--data-path {good} --split ninety,ten"), without=("--mock-data",)
    ),
    "ids beyond the vocabulary": Wrong(
        ["token 900", "256 tokens"], words("--data-path {large}"), without=("--mock-data",)
    ),
    "sequence beyond the positions": Wrong(["--seq-length", "--max-position-embeddings"], words("--seq-length 64")),
    "batch not divisible": Wrong(["--global-batch-size 7", "--micro-batch-size 2"], words("--global-batch-size 7")),
    "heads not divisible": Wrong(["--hidden-size", "--num-attention-heads"], words("--num-attention-heads 7")),
    "unknown flag": Wrong(["--hiden-size", "--hidden-size"], words("--hiden-size 64")),
    "word for a number": Wrong(["--num-layers", "two"], words("--num-layers two")),
    "no micro-batch size": Wrong(["--micro-batch-size"], without=("--micro-batch-size",)),
    "two number formats": Wrong(["--fp16", "--bf16"], words("--fp16 --bf16")),
    "warm-up longer than the decay": Wrong(["--lr-warmup-iters"], words("--lr-warmup-iters 9 --lr-decay-iters 3")),
    "a flag refused for good": Wrong(["--perform-rl-step"], words("--perform-rl-step")),
    "save folder is a file": Wrong(["--save", "{file}"], words("--save {file}")),
    "save folder below a file": Wrong(["--save", "{file}/save"], words("--save {file}/save")),
    "missing load folder": Wrong(["--load", "/nowhere/run"], words("--load /nowhere/run")),
    "checkpoint of another model": Wrong(["hidden_size", "64", "128"], words("--load {saved} --hidden-size 128")),
    "torn checkpoint": Wrong(["{broken}"], words("--load {broken}")),
    "missing tokenizer model": Wrong(
        ["--tokenizer-model", "/nowhere/t.model"],
        words("--tokenizer-type SentencePieceTokenizer --tokenizer-model /nowhere/t.model"),
    ),
    "tokenizer model of another kind": Wrong(
        ["{file}"], words("--tokenizer-type SentencePieceTokenizer --tokenizer-model {file}")
    ),
    "missing configuration": Wrong(["/nowhere/c.yaml"], words("--config /nowhere/c.yaml")),
    "unknown key in the configuration": Wrong(["hiden-size", "hidden"], words("--config {yaml}")),
    "nonsense from the launcher": Wrong(["RANK=abc"], env={"RANK": "abc"}),
    "generate without a checkpoint": Wrong(
        ["/nowhere/run"], words("--load /nowhere/run"), ["-m", "megatron_lite", "generate"], base=False
    ),
    "generate with a mistyped flag": Wrong(
        ["--temprature"], words("--load {saved} --temprature 1"), ["-m", "megatron_lite", "generate"], base=False
    ),
    "generate with a prompt beyond the context": Wrong(
        ["34 tokens", "32"],
        ["--load", "{saved}", "--prompt", " ".join("7" * 34)],
        ["-m", "megatron_lite", "generate"],
        base=False,
    ),
    "preprocess of a bad line": Wrong(
        ["{jsonl}", "line 2"],
        words("--input {jsonl} --output-prefix {root}/out --tokenizer-type ByteTokenizer --workers 1"),
        ["-m", "megatron_lite", "preprocess"],
        base=False,
    ),
    "report of no run": Wrong(["{root}"], words("{root}"), ["-m", "megatron_lite", "report"], base=False),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Name -> path of the files that the cases need."""
    root = tmp_path_factory.mktemp("wrong")
    paths = {name: str(root / name) for name in ("good", "empty", "torn", "short", "large", "saved", "broken")}
    paths |= {"file": str(root / "file"), "yaml": str(root / "c.yaml"), "jsonl": str(root / "bad.jsonl")}
    paths["root"] = str(root)
    (root / "file").write_text("a file, no folder\n" * 20)
    (root / "c.yaml").write_text("hiden-size: 64\n")
    (root / "bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    write_corpus(paths["good"], [list(range(1, 80))] * 40)
    write_corpus(paths["empty"], [])
    write_corpus(paths["large"], [[900] * 80] * 40)
    for name, end in (("torn", ".idx"), ("short", ".bin")):
        for suffix in (".bin", ".idx"):
            shutil.copy(f"{root / 'good'}{suffix}", f"{root / name}{suffix}")
        with open(f"{root / name}{end}", "r+b") as file:
            file.truncate(Path(f"{root / name}{end}").stat().st_size // 2)
    run(*TINY, "--train-iters", 2, "--save-interval", 2, "--save", root / "saved").ok()
    shutil.copytree(root / "saved", root / "broken")
    for file in (root / "broken").rglob("*.distcp"):
        os.truncate(file, file.stat().st_size // 2)
    return paths


def start(case, place):
    flags = [*TINY, "--train-iters", "2", "--save-interval", "2"] if case.base else []
    for name in case.without:
        at = flags.index(name)
        flags[at : at + (1 if name == "--mock-data" else 2)] = []
    flags += [word.format(**place) for word in case.flags]
    done = subprocess.run(
        [sys.executable, *case.script, *flags],
        cwd=ROOT,
        env=environment(**case.env),
        capture_output=True,
        text=True,
        timeout=120,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def results(place):
    with ThreadPoolExecutor(3) as pool:
        return dict(zip(CASES, pool.map(lambda case: start(case, place), CASES.values())))


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_input_ends_in_one_clear_message(name, results, place):
    done = results[name]
    assert done.status not in (0, None) and done.status > 0, f"it went on:\n{done.out[-2000:]}"
    assert "Traceback" not in done.err + done.out, done.err[-3000:]
    for text in CASES[name].names:
        assert text.format(**place) in done.err, done.err
    message = [line for line in done.err.splitlines() if line.strip()]
    assert len(message) <= 12, f"the message is buried:\n{done.err}"
    assert any(line.strip().startswith(("why:", "fix:")) for line in message), done.err


def test_the_run_that_all_of_them_are_made_from_is_fine(place):
    """Else the cases could fail for a reason of their own."""
    flags = [word for word in TINY if word != "--mock-data"]
    run(*flags, "--train-iters", 2, "--data-path", place["good"], "--split", "90,10,0").ok()


def test_there_are_at_least_twenty_of_them():
    assert len(CASES) >= 20
