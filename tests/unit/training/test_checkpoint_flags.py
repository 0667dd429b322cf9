"""Flags of saving and loading: each does what it says, on the toy of test_checkpointing."""

import json

import pytest
import torch

from megatron_lite.checkpointing import folders, sharded
from megatron_lite.checkpointing.checkpoint import read_args
from megatron_lite.errors import CheckpointError
from megatron_lite.training import global_vars
from megatron_lite.training.arguments import parse_args
from megatron_lite.training.checkpointing import load_args_from_checkpoint
from tests.unit.training.test_checkpointing import Run, Tied, _same


@pytest.fixture(autouse=True)
def own_globals(monkeypatch):
    """`get_args()` and its kin are those of this test alone."""
    monkeypatch.setattr(global_vars, "_values", {})


@pytest.fixture
def saved(tmp_path):
    """The folder with the checkpoint of iteration 5, and the run that saved it."""
    run = Run("--save", tmp_path / "run")
    run.steps(5)
    run.save()
    return tmp_path / "run", run


# -- rolling checkpoints -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own_folder", [False, True])
def test_a_rolling_checkpoint_replaces_the_one_before_and_is_loaded_while_it_is_the_newest(tmp_path, own_folder):
    words = ["--save", tmp_path / "run", "--load", tmp_path / "run", "--non-persistent-ckpt-type", "global"]
    words += ["--non-persistent-global-ckpt-dir", tmp_path / "rolling"] if own_folder else []
    rolling = tmp_path / "rolling" if own_folder else tmp_path / "run" / "non_persistent"
    run = Run(*words, "--non-persistent-save-interval", 1)
    run.steps(2)
    run.save()
    for _ in range(2):
        run.steps(1)
        run.save(rolling=True)
    assert folders.complete_iterations(rolling) == [4] and folders.complete_iterations(tmp_path / "run") == [2]
    state, losses = run.state(), run.steps(2)
    again = Run(*words)
    assert again.load()[0] == 4 and _same(again.state(), state) and again.steps(2) == losses
    assert Run(*words, "--ckpt-step", 2).load()[0] == 2
    run.save()
    assert Run(*words).load()[0] == 6


def test_a_local_checkpoint_is_each_ranks_own(tmp_path):
    words = ["--save", tmp_path / "run", "--load", tmp_path / "run", "--non-persistent-ckpt-type", "local"]
    words += ["--non-persistent-local-ckpt-dir", tmp_path / "disk"]
    run = Run(*words, "--non-persistent-save-interval", 1)
    run.steps(2)
    run.save()
    for _ in range(2):
        run.steps(1)
        run.save(rolling=True)
    assert folders.complete_iterations(tmp_path / "disk" / "rank_00000") == [4]
    state, losses = run.state(), run.steps(2)
    again = Run(*words)
    assert again.load()[0] == 4 and _same(again.state(), state) and again.steps(2) == losses
    (tmp_path / "disk" / "rank_00000" / "iter_0000004" / "common.pt").unlink()  # torn: as if it were not there
    assert Run(*words).load()[0] == 2


def test_a_local_checkpoint_of_another_layout_is_not_taken(tmp_path):
    words = ["--load", tmp_path, "--save", tmp_path, "--non-persistent-ckpt-type", "local"]
    words += ["--non-persistent-local-ckpt-dir", tmp_path / "disk"]
    run = Run(*words)
    run.steps(1)
    run.save()
    run.steps(1)
    run.save(rolling=True)
    manifest = tmp_path / "disk" / "rank_00000" / "iter_0000002" / folders.MANIFEST
    facts = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**facts, "layout": {**facts["layout"], "tp": 2}}))
    assert Run(*words).load()[0] == 1


# -- what does not fit ---------------------------------------------------------------------------------------------


class More(Tied):
    """Has a weight that the checkpoint lacks, and lacks one that it has."""

    def __init__(self):
        super().__init__()
        self.more = torch.nn.Parameter(torch.full((3,), 2.0))
        del self.seen
        self.seen = torch.zeros(1)


@pytest.mark.parametrize(
    "strictness, fails, said",
    [
        ("assume_ok_unexpected", "1 missing in it: more", ""),
        ("raise_all", "1 missing in it: more", ""),
        ("raise_unexpected", "1 missing in it: more", ""),
        ("log_unexpected", None, "only the run has, and keeps as they were: more"),
        ("log_all", None, "only the checkpoint has, and that are left: seen"),
        ("ignore_all", None, ""),
    ],
)
def test_strictness_decides_what_happens_to_tensors_of_one_side(saved, capsys, strictness, fails, said):
    run = Run("--load", saved[0], "--no-load-optim", "--dist-ckpt-strictness", strictness, module=More())
    capsys.readouterr()
    if fails:
        with pytest.raises(CheckpointError, match=fails):
            run.load()
        return
    run.load()
    assert torch.equal(run.state()["more"], torch.full((3,), 2.0))
    out = capsys.readouterr().out
    assert said in out and ("only the run has" in out) == (strictness != "ignore_all")
    assert ("only the checkpoint has" in out) == (strictness == "log_all")


def test_raise_unexpected_leaves_what_the_run_does_not_want(saved, capsys):
    class Less(Tied):
        def __init__(self):
            super().__init__()
            del self.seen
            self.seen = torch.zeros(1)

    Run("--load", saved[0], "--dist-ckpt-strictness", "raise_unexpected", module=Less()).load()
    assert "only the checkpoint has, and that are left: seen" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="1 unknown to this run: seen"):
        Run("--load", saved[0], module=Less()).load()


# -- what is taken otherwise -----------------------------------------------------------------------------------------


def test_another_iteration_moves_samples_and_schedule_along(saved, capsys):
    run = Run("--load", saved[0], "--override-ckpt-iteration", 8)
    assert run.load()[0] == 8
    assert run.args.consumed_train_samples == 16 and run.schedule.num_steps == 16
    assert "iteration 5 of the checkpoint counts as 8" in capsys.readouterr().out


def test_main_parameters_of_the_checkpoint_have_more_digits_than_the_models_weights(tmp_path):
    def half(*words):
        return Run("--bf16", *words, module=Tied().bfloat16())

    run = half("--save", tmp_path)
    run.optimizer.reload_model_params()
    for part in run.optimizer.sharded_state().values():
        part[0].add_(torch.rand_like(part[0]) / 4096)
    run.save()
    main = {name: tensor for name, tensor in run.state().items() if name.startswith("optimizer.state.param.")}
    assert main
    plain = half("--load", tmp_path, "--no-load-optim")
    plain.load()
    exact = half("--load", tmp_path, "--no-load-optim", "--load-main-params-from-ckpt")
    exact.load()
    assert all(torch.equal(exact.state()[name], tensor) for name, tensor in main.items())
    weight = "optimizer.state.param.first.weight"
    assert not torch.equal(plain.state()[weight], main[weight])
    assert not exact.state()["optimizer.state.exp_avg.first.weight"].any()


def test_sizes_of_parallelism_and_tokenizer_files_of_the_checkpoint(tmp_path, capsys):
    run = Run("--save", tmp_path / "run")
    run.args.tensor_model_parallel_size, run.args.tokenizer_model = 4, "/there/tokenizer.model"
    run.save()

    def taken(*words):
        args = parse_args(["--load", str(tmp_path / "run"), "--use-checkpoint-args", *words])
        load_args_from_checkpoint(args)
        return args.tensor_model_parallel_size, args.tokenizer_model

    assert taken() == (1, "/there/tokenizer.model")
    assert taken("--use-mp-args-from-checkpoint-args") == (4, "/there/tokenizer.model")
    assert taken("--no-use-tokenizer-model-from-checkpoint-args") == (1, None)


@pytest.mark.parametrize("more", [[], ["--no-save-tokenizer-assets"]])
def test_the_tokenizers_files_go_along(tmp_path, more):
    run = Run("--save", tmp_path / "run", *more)
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    run.args.vocab_file = str(tmp_path / "vocab.txt")
    run.save()
    folder = folders.find(tmp_path / "run", 0)
    copy = folder / "tokenizer" / "vocab.txt"
    assert copy.exists() != bool(more)
    if not more:
        assert copy.read_text() == "a\nb\n"
        assert "tokenizer/vocab.txt" in folders.read_manifest(folder)["files"]
        copy.write_text("a\n")
        with pytest.raises(CheckpointError, match=r"tokenizer/vocab.txt has 2 bytes instead of 4"):
            folders.read_manifest(folder)


def test_files_of_a_rank(tmp_path):
    run = Run("--save", tmp_path, "--dist-ckpt-workers", 3, "--ckpt-assume-constant-structure")
    run.steps(1)
    run.save()
    folder = folders.find(tmp_path, 1)
    assert sorted(path.name for path in folder.glob("*.distcp")) == [f"__0_{n}.distcp" for n in range(3)]
    again = Run("--load", tmp_path)
    assert again.load()[0] == 1 and _same(again.state(), run.state())
    assert sharded.saved_files(folder) == {f"__0_{n}.distcp" for n in range(3)}
    assert read_args(folder)["dist_ckpt_workers"] == 3
