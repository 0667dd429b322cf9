"""Machines that lack something: optional packages, a compiler, devices; launchers that say nonsense."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest

from tests.e2e.launch import TINY, command, environment, run, torchrun

pytestmark = pytest.mark.slow

# Found first on the path and imported by Python itself at its start: from then on these packages are not there. (What
# remains is torch with what it asks for itself, numpy, and yaml for the configuration.)
BARE = """
import sys

OPTIONAL = {
    "transformer_engine", "apex", "transformers", "tokenizers", "sentencepiece", "tiktoken", "safetensors", "wandb",
    "tensorboard", "matplotlib", "rich", "nltk", "flash_attn", "triton", "pybind11", "einops", "huggingface_hub",
}

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in OPTIONAL:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""

BYTES = ["ByteTokenizer" if word == "NullTokenizer" else word for word in TINY if word != "--mock-data"]
at = BYTES.index("--vocab-size")
del BYTES[at : at + 2]


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """PYTHONPATH of an environment with torch and numpy, and nothing that is optional."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "sitecustomize.py").write_text(BARE)
    return {"PYTHONPATH": str(folder)}


def test_C139_without_optional_packages_help_preprocessing_and_training_work(bare, tmp_path):
    assert "--num-layers" in run("--help", **bare).ok().out
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": f"document {n} " * 20}) + "\n" for n in range(40)))
    data = f"--input {tmp_path}/in.jsonl --output-prefix {tmp_path}/data --tokenizer-type ByteTokenizer --append-eod"
    verb = ["-m", "megatron_lite", "preprocess", *data.split(), "--workers", "2"]
    done = _python(verb, bare)
    assert done.returncode == 0, done.stderr
    trained = run(*BYTES, "--train-iters", 2, "--data-path", tmp_path / "data_text_document", **bare).ok()
    assert len(trained.lines) == 2


def test_C139_a_feature_names_the_package_that_it_lacks(bare, tmp_path):
    (tmp_path / "t.model").write_text("model")
    flags = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", tmp_path / "t.model"]
    for extra, package in ((flags, "sentencepiece"), (["--tensorboard-dir", tmp_path / "tb"], "tensorboard")):
        done = run(*TINY, "--train-iters", 2, *extra, **bare)
        assert done.status != 0 and package in done.err and "Traceback" not in done.err, done.err
        assert str(extra[0]) in done.err or str(extra[1]) in done.err


@pytest.mark.parametrize(
    ("name", "flags", "package"),
    [
        ("in.jsonl.zst", [], "zstandard"),
        ("in.parquet", [], "pyarrow"),
        ("in.jsonl", ["--split-sentences"], "sentencex"),
    ],
)
def test_C139_preprocess_names_the_package_that_it_lacks(tmp_path, name, flags, package):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "sitecustomize.py").write_text(BARE.replace("OPTIONAL = {", f'OPTIONAL = {{"{package}", '))
    bare = {"PYTHONPATH": str(tmp_path / "bare")}
    (tmp_path / name).write_bytes(b'{"text": "One. Two."}\n')
    words = ["--input", str(tmp_path / name), "--output-prefix", str(tmp_path / "out"), *flags]
    done = _python(["-m", "megatron_lite", "preprocess", "--tokenizer-type", "ByteTokenizer", *words], bare)
    assert done.returncode == 2 and f"pip install {package}" in done.stderr and "Traceback" not in done.stderr


def test_C140_gradient_accumulation_fusion_needs_no_extension_and_changes_no_number():
    """Relative 1e-5: fused, a weight gradient is added inside the product, which may round another way."""
    with_fusion = run(*TINY, "--train-iters", 3).ok()
    without = run(*TINY, "--train-iters", 3, "--no-gradient-accumulation-fusion").ok()
    assert "apex" not in with_fusion.err
    for field in ("lm loss", "grad norm"):
        assert with_fusion.values(field) == pytest.approx(without.values(field), rel=1e-5)
    assert with_fusion.values("lm loss")[0] != with_fusion.values("lm loss")[-1]


def test_C141_a_machine_without_a_compiler_builds_its_indices(tmp_path):
    """Nothing is compiled, so that neither a compiler nor a writable installation is asked for."""
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": f"document {n} " * 20}) + "\n" for n in range(40)))
    data = f"--input {tmp_path}/in.jsonl --output-prefix {tmp_path}/data --tokenizer-type ByteTokenizer --workers 1"
    env = {"PATH": str(tmp_path / "empty"), "CC": "/nowhere/cc", "CXX": "/nowhere/c++", "PYTHONDONTWRITEBYTECODE": "1"}
    assert _python(["-m", "megatron_lite", "preprocess", *data.split()], env).returncode == 0
    cache = tmp_path / "cache"
    run(
        *BYTES, "--train-iters", 2, "--data-path", tmp_path / "data_text_document", "--data-cache-path", cache, **env
    ).ok()
    assert list(cache.glob("*shuffle_index.npy"))


def test_C142_the_launcher_says_how_many_processes_there_are():
    """Two processes on a machine that shows no device."""
    done = torchrun(2, *TINY, "--train-iters", 2).ok()
    assert "using world size: 2, data-parallel size: 2" in done.out
    assert len(done.lines) == 2  # one line an iteration, not one a rank


def test_C143_nonsense_from_the_launcher_is_named_and_nothing_hangs():
    for env, words in (
        ({"RANK": "abc"}, ["RANK=abc"]),
        ({"RANK": "5", "WORLD_SIZE": "2"}, ["RANK=5", "WORLD_SIZE=2"]),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "no such host", "MASTER_PORT": "1"}, ["MASTER_ADDR=no such"]),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"}, ["MASTER_PORT=x"]),
    ):
        began = time.monotonic()
        done = run(*TINY, "--train-iters", 2, timeout=60, **env)
        assert time.monotonic() - began < 20  # a second or two on an idle machine: torch is not even imported
        assert done.status == 2 and all(word in done.err for word in words), done.err


def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        done = run(*TINY, "--train-iters", 2, timeout=120, **place)
    assert done.status == 2 and "Traceback" not in done.err, done.err
    assert f"MASTER_PORT={place['MASTER_PORT']}" in done.err and "taken" in done.err


def test_srun_starts_a_world_without_torchrun():
    """Two tasks of a step of SLURM: no variable of torchrun's is set."""
    step = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
    }
    words = command(*TINY, "--train-iters", 2)
    tasks = [
        subprocess.Popen(
            words,
            env=environment(**step, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    out = [task.communicate(timeout=240)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], out
    assert "using world size: 2, data-parallel size: 2" in out[0]


def _python(words, env):
    return subprocess.run(
        [sys.executable, *words], env={**environment(), **env}, cwd=os.getcwd(), capture_output=True, text=True
    )
