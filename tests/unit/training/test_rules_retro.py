"""What a Retro run takes from its project, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_lite.errors import ConfigError
from megatron_lite.training.arguments import parse_args, validate_args
from megatron_lite.training.families import defaults_of

_SETTINGS = {
    "retro_gpt_data_path": ["0.5", "a", "0.5", "/elsewhere/b"],
    "retro_gpt_data_cache_path": None,
    "retro_gpt_split": "90,10,0",
    "retro_gpt_seed": 7,
    "retro_gpt_seq_length": 32,
    "retro_gpt_chunk_length": 8,
    "retro_gpt_global_batch_size": 4,
    "retro_gpt_train_samples": 40,
    "retro_gpt_eval_interval": 5,
    "retro_gpt_eval_iters": 2,
    "retro_gpt_tokenizer_type": "SentencePieceTokenizer",
    "retro_gpt_tokenizer_model": "tokenizer/spm.model",
    "retro_gpt_vocab_file": None,
    "retro_gpt_merge_file": None,
    "retro_gpt_vocab_size": None,
    "retro_block_size": 100,
    "retro_neighbor_dirs": {"train": "train_x", "valid": "valid_x", "test": None},
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(_SETTINGS))
    return tmp_path


def run_of(project: Path | None, more: str = "", model: str = "retro"):
    words = "--num-layers 6 --hidden-size 32 --num-attention-heads 4 --micro-batch-size 4 --lr 1e-3 " + more
    where = [] if project is None else ["--retro-project-dir", str(project)]
    return validate_args(parse_args([*words.split(), *where], args_defaults=defaults_of(model)), 1)


def test_settings_come_from_the_project(project):
    args = run_of(project, "--retro-add-retriever")
    assert (args.seed, args.seq_length, args.global_batch_size, args.train_samples) == (7, 32, 4, 40)
    assert (args.eval_interval, args.eval_iters, args.split, args.train_iters) == (5, 2, "90,10,0", 10)
    assert args.data_path == ["0.5", str(project / "data/a"), "0.5", "/elsewhere/b"]
    assert args.tokenizer_model == str(project / "tokenizer/spm.model") and args.data_cache_path == str(
        project / "cache"
    )
    assert (args.retro_chunk_length, args.retro_block_size, args.max_position_embeddings) == (8, 100, 32)
    assert args.retro_split_preprocessing == "90,10,0" and args.retro_neighbor_dirs["test"] is None


def test_positions_serve_neighbours_that_are_longer_than_samples(project):
    assert run_of(project, "--retro-add-retriever --retro-num-retrieved-chunks 6").max_position_embeddings == 48
    with pytest.raises(ConfigError, match="--max-position-embeddings 48"):
        run_of(project, "--retro-add-retriever --retro-num-retrieved-chunks 6 --max-position-embeddings 32")


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ("--seed 8", "--seed 8, and"),
        ("--seq-length 64", "--seq-length 64, and"),
        ("--global-batch-size 8", "--global-batch-size 8, and"),
        ("--tokenizer-model other.model", "--tokenizer-model other.model, and"),
        ("--train-samples 44", "--retro-cyclic-train-iters 11"),
        ("--train-iters 11", "--retro-cyclic-train-iters 11"),
        ("--train-iters 5 --retro-cyclic-train-iters 9", "one of them"),
        ("--mock-data", "--mock-data with Retro"),
        ("--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 2 with Retro"),
        ("--group-query-attention --num-query-groups 2", "--num-query-groups 2 with Retro"),
        ("--retro-attention-gate 0.5", "--retro-attention-gate 0.5"),
        ("--retro-layers 2 9", "--retro-layers 2 9"),
        ("--retro-encoder-layers 0", "--retro-encoder-layers 0"),
        ("--train-data-path a", "corpora for each split"),
        ("--retro-gpt-seed 5", "megatron-lite retro preprocess with this flag"),
        ("--bert-embedder-type huggingface", "megatron-lite retro preprocess with this flag"),
    ],
)
def test_what_contradicts_the_project_or_the_model_is_refused(project, more, what):
    with pytest.raises(ConfigError) as error:
        run_of(project, f"--retro-add-retriever {more}")
    assert what in str(error.value)


def test_runs_may_be_shorter_or_cyclic(project):
    assert run_of(project, "--train-iters 5").train_iters == 5
    args = run_of(project, "--retro-cyclic-train-iters 25")
    assert args.train_samples == 100 and args.train_iters == 25


def test_a_project_is_needed_and_must_be_one(project, tmp_path):
    with pytest.raises(ConfigError, match="--retro-project-dir is missing"):
        run_of(None)
    (project / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="it is no Retro project"):
        run_of(project)
    with pytest.raises(ConfigError, match="config.json cannot be read"):
        run_of(tmp_path / "nowhere")


def test_retro_flags_in_another_script_name_the_right_one(project):
    with pytest.raises(ConfigError, match="pretrain_retro.py"):
        run_of(project, "--train-iters 1 --seq-length 8", model="gpt")
