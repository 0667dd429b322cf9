"""The scripts of `examples/`: sound shell, flags that make a run of their size, a run that trains when made small.

A script starts `${LAUNCHER:-torchrun}`; here that is `echo`, so that its words come out. A new one is a row of
EXAMPLES.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_lite.cli import dry_run, verify
from megatron_lite.training.arguments import parse_args, validate_args
from megatron_lite.training.record import args_defaults_of, load_script
from tests.e2e.launch import ROOT, environment


@dataclass(frozen=True)
class Example:
    """A script of `examples/`.

    words: what it is called with. vocabulary: size of the tokenizer that its files would make.
    parameters: of the whole model, as a formula or as published; None where nobody has said.
    twin: the YAML file of `configs/` that resolves to the same, given the paths.
    project: it reads a Retro project, whose settings are written for the test; the last word is its directory.
    """

    path: str
    words: tuple[str, ...]
    vocabulary: int
    parameters: int | None = None
    twin: str | None = None
    project: bool = False

    @property
    def name(self) -> str:
        return self.path.removesuffix(".sh")


def gpt(layers: int, hidden: int, vocabulary: int, positions: int) -> int:
    """Parameters of GPT-2's architecture with a tied table: 12h^2 + 13h a layer, the tables, the last norm."""
    return layers * (12 * hidden**2 + 13 * hidden) + (vocabulary + positions + 2) * hidden


def t5(layers: int, hidden: int, vocabulary: int, positions: int) -> int:
    """Parameters of as many encoder as decoder layers with a tied table and the bias of its output layer."""
    decoder = 16 * hidden**2 + 19 * hidden  # cross attention and its norm are 4h^2 + 6h
    both = layers * (12 * hidden**2 + 13 * hidden + decoder)
    return both + (vocabulary + positions + 4) * hidden + vocabulary


EXAMPLES = [
    Example(
        "gpt3/train_gpt3_175b_distributed.sh",
        ("checkpoints", "tensorboard", "vocab.json", "merges.txt", "data"),
        vocabulary=50257,
        parameters=gpt(96, 12288, 51200, 2048),  # 174.6 billion; the paper counts 50,257 tokens
    ),
    Example(
        "mixtral/train_mixtral_8x7b_distributed.sh",
        ("checkpoints", "tokenizer.model", "data"),
        vocabulary=32000,
        parameters=46_702_792_704,
        twin="mixtral_8x7b.yaml",
    ),
    Example(
        "llama3_8b/train_llama3_8b_distributed.sh",
        ("checkpoints", "tokenizer", "data"),
        vocabulary=128256,
        parameters=8_030_261_248,
        twin="llama3_8b.yaml",
    ),
    Example(
        "deepseek_v2_lite/train_deepseek_v2_lite_distributed.sh",
        ("checkpoints", "tokenizer", "data"),
        vocabulary=102400,
        parameters=15_706_484_224,
        twin="deepseek_v2_lite.yaml",
    ),
    Example(
        "bert/train_bert_340m_distributed.sh",
        ("checkpoints", "tensorboard", "vocab.txt", "data"),
        vocabulary=30522,
        # 24 layers; the tables with two segments; pooler, both heads. Published: 340 million.
        parameters=gpt(24, 1024, 30720, 512 + 2) + 2 * (1024**2 + 1024) + 2 * 1024 + 30720 + 2 * 1024 + 2,
    ),
    Example(
        "t5/train_t5_220m_distributed.sh",
        ("checkpoints", "tensorboard", "vocab.txt", "data"),
        vocabulary=28998,  # BERT's cased one, a beginning and an end; the flags add 100 sentinels
        parameters=t5(12, 768, 29184, 512),  # 221 million
    ),
    Example("retro/train_retro_2b_distributed.sh", ("checkpoints", "tensorboard"), vocabulary=50257, project=True),
]

RETRO_PROJECT = {
    "retro_gpt_data_path": ["data"],
    "retro_gpt_split": "98,2,0",
    "retro_gpt_seed": 1234,
    "retro_gpt_seq_length": 2048,
    "retro_gpt_chunk_length": 64,
    "retro_gpt_global_batch_size": 256,
    "retro_gpt_train_samples": 25_600_000,
    "retro_gpt_eval_interval": 2000,
    "retro_gpt_eval_iters": 50,
    "retro_gpt_tokenizer_type": "GPT2BPETokenizer",
    "retro_gpt_vocab_file": "vocab.json",
    "retro_gpt_merge_file": "merges.txt",
    "retro_neighbor_dirs": {},
}


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `retro-project` is a project's directory."""
    monkeypatch.setenv("PROJECT_OF_TEST", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(RETRO_PROJECT))


def started(example: Example) -> tuple[int, str, list[str]]:
    """Ranks, entry script and flags of what the example would start."""
    words = [*example.words, *([os.environ["PROJECT_OF_TEST"]] if example.project else [])]
    done = subprocess.run(
        ["bash", str(ROOT / "examples" / example.path), *words],
        env=environment(LAUNCHER="echo"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    at = next(i for i, word in enumerate(words) if re.fullmatch(r"pretrain_\w+\.py", word))
    launcher = dict(zip(words[:at:2], words[1:at:2]))
    return int(launcher["--nproc_per_node"]) * int(launcher["--nnodes"]), words[at], words[at + 1 :]


SCRIPTS = sorted(path for path in (ROOT / "examples").rglob("*") if path.suffix in (".sh", ".sbatch"))

each = pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)


def test_every_script_is_in_the_table() -> None:
    found = {str(path.relative_to(ROOT / "examples")) for path in (ROOT / "examples").rglob("train*.sh")}
    assert found == {example.path for example in EXAMPLES}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_it_is_sound_shell(path: Path) -> None:
    checks = [["bash", "-n", str(path)]]
    if shutil.which("shellcheck"):
        checks.append(["shellcheck", str(path)])
    for check in checks:
        done = subprocess.run(check, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert path.stat().st_mode & 0o111, "not executable"


@each
def test_the_run_of_its_size_may_start(example: Example, capsys: pytest.CaptureFixture[str]) -> None:
    """Under fake process groups; its parameters sum to the published size."""
    ranks, script, flags = started(example)
    dry_run.main(
        ["--ranks", str(ranks), "--script", str(ROOT / script), "--vocabulary", str(example.vocabulary), *flags]
    )
    told = re.search(r"the model has ([\d,]+) parameters", capsys.readouterr().out)
    assert told
    if example.parameters is not None:
        assert int(told[1].replace(",", "")) == example.parameters


@pytest.mark.parametrize("example", [e for e in EXAMPLES if e.twin], ids=lambda example: example.name)
def test_its_twin_in_yaml_is_the_same_run(example: Example) -> None:
    ranks, script, flags = started(example)
    defaults = args_defaults_of(load_script(ROOT / script))
    machine = [word for flag in _MACHINE if flag in flags for word in (flag, flags[flags.index(flag) + 1])]
    one, other = (
        vars(validate_args(parse_args(words, args_defaults=defaults), ranks))
        for words in (flags, ["--config", str(ROOT / "configs" / str(example.twin)), *machine])
    )
    assert {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)} <= {"config", "typed"}


# What belongs to a machine and not to a model: no file of configs/ has it.
_MACHINE = (
    "--tokenizer-model",
    "--vocab-file",
    "--merge-file",
    "--data-path",
    "--save",
    "--load",
    "--tensorboard-dir",
)


@pytest.mark.slow
@pytest.mark.parametrize("example", [e for e in EXAMPLES if not e.project], ids=lambda example: example.name)
def test_it_trains_when_made_small(example: Example, capsys: pytest.CaptureFixture[str]) -> None:
    """The same kind of layout on a few ranks of this machine, against one process."""
    _, script, flags = started(example)
    status = verify.main(["--script", str(ROOT / script), "--steps", "2", *flags])
    assert status == 0, capsys.readouterr().out


# -- jobs of SLURM -----------------------------------------------------------------------------------------------

JOB = {
    "SLURM_JOB_NAME": "job",
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_JOB_NODELIST": "node[1-4]",
    "TEE": "0",
}


@pytest.mark.parametrize("name", ["train_gpt.sbatch", "train_gpt_srun.sbatch"])
def test_a_job_of_slurm_may_start(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """srun and scontrol are played by stubs: srun runs the words that follow its options once, and they are an echo."""
    for tool, text in {
        "srun": 'while [[ $1 == --* ]]; do if [[ $1 == *=* ]]; then shift; else shift 2; fi; done; exec "$@"',
        "scontrol": "echo node1; echo node2",
    }.items():
        (tmp_path / tool).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / tool).chmod(0o755)
    path = f"{tmp_path}:{environment()['PATH']}"
    done = subprocess.run(
        ["bash", str(ROOT / "examples" / "slurm" / name), "data", "tokenizer.model", "--log-interval", "10"],
        env=environment(**JOB, PATH=path, LAUNCHER="echo", PYTHON="echo", RUN=str(tmp_path / "run")),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    flags = words[words.index("pretrain_gpt.py") + 1 :]
    assert "--exit-signal-handler" in flags and flags[-2:] == ["--log-interval", "10"]
    if name == "train_gpt.sbatch":
        assert words[words.index("--rdzv_endpoint") + 1] == "node1:24711"
    flags = [word if not word.startswith("configs/") else str(ROOT / word) for word in flags]
    dry_run.main(["--ranks", "32", "--vocabulary", "128256", *flags])
    assert "32 ranks = " in capsys.readouterr().out
