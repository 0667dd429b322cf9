"""`megatron-lite data index` builds the files that the run then finds, from the run's own flags."""

import json

import pytest
import torch

import pretrain_gpt
from megatron_lite.cli import data_index
from megatron_lite.cli import main as cli
from megatron_lite.errors import ConfigError, DataError
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.training import global_vars
from megatron_lite.training.arguments import parse_args, validate_args
from megatron_lite.training.data_loading import build_train_valid_test_data_iterators
from tests.e2e.launch import ROOT, TINY
from tests.unit.datasets.corpora import numbered, write_corpus

NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "5000"]
SHORT = ["--seq-length", "16", "--train-iters", "4", "--global-batch-size", "8", "--eval-iters", "1", *NULL]


def files(folder):
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*.*") if path.is_file()}


def test_flags_of_the_data_are_enough_and_a_second_call_builds_nothing(tmp_path, capsys):
    prefix = write_corpus(tmp_path / "p", numbered(200, 20))
    words = ["data", "index", "--data-path", prefix, "--split", "90,10,0", "--data-cache-path", str(tmp_path / "cache")]
    assert cli.main([*words, *SHORT]) == 0
    assert "2 datasets" in (said := capsys.readouterr().out) and "2 built, 0 were there" in said
    made = files(tmp_path / "cache")
    assert sorted(name.split("-")[2] for name in made if name.endswith("sample_index.npy")) == ["train", "valid"]
    assert cli.main([*words, *SHORT]) == 0
    assert "0 built, 2 were there" in capsys.readouterr().out
    assert files(tmp_path / "cache") == made


def test_flags_that_count_on_the_files_do_not_keep_them_from_being_made(tmp_path, capsys):
    """--dataloader-fast-cache-load is what one gives a run whose caches were built before."""
    words = ["--train-data-path", write_corpus(tmp_path / "p", numbered(200, 20))]
    words += ["--valid-data-path", write_corpus(tmp_path / "q", numbered(50, 20))]
    words += ["--data-cache-path", str(tmp_path / "cache"), "--dataloader-fast-cache-load", *SHORT]
    assert data_index.main(words) == 0
    assert "2 built, 0 were there" in capsys.readouterr().out


def test_counts_of_the_corpora_are_written_as_the_flag_reads_them(tmp_path):
    """What Megatron's tools/build_sequences_per_dataset.py makes; the run holds the corpora against it."""
    prefix, path = write_corpus(tmp_path / "p", numbered(200, 20)), tmp_path / "counts.json"
    words = ["--data-path", prefix, "--split", "90,10,0", "--per-dataset-sequences-path", str(path), *SHORT]
    assert data_index.main(words) == 0
    assert json.loads(path.read_text()) == {prefix: [200, 201]}
    with pytest.raises(DataError, match="cannot write"):
        data_index.main([str(tmp_path / "nothere" / "c.json") if word == str(path) else word for word in words])


@pytest.fixture
def forgotten():
    """What start-up sets is gone afterwards."""
    yield
    global_vars.destroy_global_vars()


def test_the_run_finds_every_file_and_makes_none(tmp_path, forgotten):
    """With the whole command line of the run: a blend, three splits, a cache folder. The run's own provider is asked,
    as its start-up does it."""
    corpora = [write_corpus(tmp_path / name, numbered(150, 25)) for name in "ab"]
    flags = [word for word in TINY if word != "--mock-data"]
    flags += ["--data-path", "0.3", corpora[0], "0.7", corpora[1], "--split", "80,10,10"]
    flags += ["--data-cache-path", str(tmp_path / "cache"), "--train-iters", "2", "--eval-iters", "1"]
    flags[flags.index("255")] = "4000"
    assert data_index.main(flags) == 0
    made = files(tmp_path / "cache")
    assert {name.split("-")[1] for name in made} == {"GPTDataset", "BlendedDataset"}
    args = validate_args(parse_args(flags, None, {"tokenizer_type": "GPT2BPETokenizer"}), 1)
    args.device = torch.device("cpu")
    global_vars.set_args(args)
    global_vars.set_tokenizer(global_vars.build_tokenizer(args))
    data = build_train_valid_test_data_iterators(
        pretrain_gpt.train_valid_test_datasets_provider, args, ProcessGroupCollection()
    )
    assert next(data.train)["tokens"].shape == (2, 32) and len(data.valid) == len(data.test) == 1
    assert files(tmp_path / "cache") == made


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seq-length", "16", "--train-iters", "4"], "without a corpus"),
        (["--mock-data", *SHORT], "without a corpus"),
        (["--data-path", "p", "--sft", *SHORT], "--sft"),
        (["--data-path", "p", "--seq-length", "16", "--train-iters", "4", *NULL], "neither --global-batch-size"),
        (["--data-path", "p", "--prepare-cache-world-size", "0", *SHORT], "--prepare-cache-world-size 0"),
        (["--data-path", "p", "--global-batch-size", "8", "--train-iters", "4", *NULL], "--seq-length is missing"),
        (["--data-path", "p", "--sequence-length", "8"], "--sequence-length"),
    ],
)
def test_what_is_missing_or_wrong_is_said(words, message):
    with pytest.raises(ConfigError, match=message):
        data_index.main(words)


def test_help_says_what_to_give(capsys):
    assert cli.main(["data", "index", "--help"]) == 0
    assert "--data-path" in capsys.readouterr().out and (ROOT / "pretrain_gpt.py").exists()
