"""Saving and resuming: where a load looks, what it takes, what it refuses, and that the run goes on bit for bit."""

import random
from argparse import Namespace

import numpy as np
import pytest
import torch
from torch import nn

from megatron_lite.checkpointing import folders, sharded
from megatron_lite.distributed import DistributedDataParallel
from megatron_lite.errors import CheckpointError
from megatron_lite.optimizer import get_megatron_optimizer
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron_lite.training import global_vars
from megatron_lite.training.arguments import (
    core_transformer_config_from_args,
    ddp_config_from_args,
    optimizer_config_from_args,
    parse_args,
    validate_args,
)
from megatron_lite.training.checkpointing import (
    find_checkpoint,
    load_args_from_checkpoint,
    load_checkpoint,
    model_tensors,
    save_checkpoint,
    will_load_checkpoint,
)
from megatron_lite.training.model_setup import get_optimizer_param_scheduler
from megatron_lite.training.resume_differences import check_args
from megatron_lite.training.rng_state import find_state

FLAGS = """--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8
    --micro-batch-size 2 --train-iters 50 --lr 0.01 --min-lr 0.001 --lr-warmup-iters 20 --lr-decay-style cosine
    --tokenizer-type NullTokenizer --vocab-size 15 --mock-data --save-interval 5""".split()


class Tied(nn.Module):
    """A toy with what matters for a checkpoint: dropout, tied weights, a buffer that is state and one that is not."""

    def __init__(self, width: int = 8, bias: bool = True):
        super().__init__()
        self.first = nn.Linear(width, width, bias=bias)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(width, width, bias=bias)
        self.last.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x):
        self.seen += x.sum()
        with get_cuda_rng_tracker().fork():
            x = self.drop(self.first(x))
        return self.last(self.drop(x))


class Run:
    """One process's run of the toy under the real optimizer and schedule."""

    def __init__(self, *words, module=None, seed=1):
        self.args = parse_args([*FLAGS, *map(str, words)])
        if self.args.use_checkpoint_args:
            load_args_from_checkpoint(self.args)
        validate_args(self.args, 1)
        self.args.consumed_train_samples = self.args.consumed_valid_samples = self.args.skipped_train_samples = 0
        global_vars.set_args(self.args)
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed)
        config = core_transformer_config_from_args(self.args)
        module = module or Tied()
        self.model = DistributedDataParallel(config, ddp_config_from_args(self.args, module), module)
        self.optimizer = get_megatron_optimizer(optimizer_config_from_args(self.args), [self.model])
        self.schedule = get_optimizer_param_scheduler(self.optimizer, self.args)
        self.iteration = 0

    def steps(self, number):
        """Steps whose result depends on every generator, the schedule and the moments. Returns: the losses."""
        losses = []
        for _ in range(number):
            self.model.zero_grad_buffer()
            x = torch.randn(2, 8) + np.random.rand() + random.random()
            loss = self.model(x).square().mean()
            loss.backward()
            self.model.finish_grad_sync()
            ok, _, _ = self.optimizer.step()
            assert ok
            self.schedule.step(2)
            self.iteration += 1
            self.args.consumed_train_samples += 2
            losses.append(loss.item())
        return losses

    def save(self, **more):
        save_checkpoint(self.iteration, [self.model], self.optimizer, self.schedule, 1e6 * self.iteration, **more)

    def load(self, **more):
        self.iteration, operations = load_checkpoint([self.model], self.optimizer, self.schedule, **more)
        return self.iteration, operations

    def state(self):
        everything = {**model_tensors(self.model), **self.optimizer.sharded_state()}
        return {name: tensor.detach().clone() for name, (tensor, _) in everything.items()}


def _same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(autouse=True)
def own_globals(monkeypatch):
    """`get_args()` and its kin are those of this test alone."""
    monkeypatch.setattr(global_vars, "_values", {})


@pytest.fixture
def saved(tmp_path):
    """A folder with the checkpoints of iterations 5 and 10, and the run that saved them."""
    run = Run("--save", tmp_path / "run")
    for _ in range(2):
        run.steps(5)
        run.save()
    return tmp_path / "run", run


# -- resuming ----------------------------------------------------------------------------------------------------


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(saved):
    """A forgotten generator, moment, buffer or clock changes a loss here."""
    folder, run = saved
    at_save = run.state()
    losses = run.steps(7)
    resumed = Run("--save", folder, "--load", folder, seed=99)
    assert not _same(resumed.state(), at_save)
    assert resumed.load() == (10, 1e7)
    assert _same(resumed.state(), at_save) and resumed.args.consumed_train_samples == 20
    assert resumed.steps(7) == losses and len(set(losses)) == 7
    assert _same(resumed.state(), run.state()) and not _same(run.state(), at_save)
    assert [g["lr"] for g in resumed.optimizer.param_groups] == [g["lr"] for g in run.optimizer.param_groups]


def test_every_generator_is_restored(saved):
    folder, run = saved

    def draws():
        with get_cuda_rng_tracker().fork():
            regional = torch.rand(1).item()
        return random.random(), np.random.rand(), np.random.randn(), torch.rand(1).item(), regional

    run.save()
    expected = draws()
    resumed = Run("--save", folder, "--load", folder, seed=99)
    assert all(a != b for a, b in zip(draws(), expected))
    resumed.load()
    assert draws() == expected


def test_a_save_leaves_the_run_as_it_was(tmp_path):
    """Saving must not advance a generator or touch a weight: a run with more saves would be another run."""
    quiet, saving = Run("--save", tmp_path / "a"), None
    losses = quiet.steps(6)
    saving = Run("--save", tmp_path / "b")
    others = []
    for _ in range(6):
        others += saving.steps(1)
        saving.save()
    assert others == losses


def test_an_older_iteration_is_loaded_with_ckpt_step(saved):
    folder, _ = saved
    run = Run("--load", folder, "--save", folder, "--ckpt-step", 5)
    assert run.load()[0] == 5 and run.args.consumed_train_samples == 10


def test_sgd_and_mixed_precision_resume_too(tmp_path):
    for number, flags in enumerate(["--optimizer sgd", "--bf16", "--fp16 --initial-loss-scale 64"]):
        folder = tmp_path / str(number)

        def make(*words, flags=flags):
            half = torch.float16 if "--fp16" in flags else torch.bfloat16 if "--bf16" in flags else torch.float32
            return Run(*flags.split(), *words, module=Tied().to(half), seed=3)

        run = make("--save", folder)
        for group in (run, run):
            _half_steps(group, 2)
        run.save()
        resumed = make("--save", folder, "--load", folder)
        resumed.load()
        assert (
            _same(resumed.state(), run.state()) and resumed.optimizer.get_loss_scale() == run.optimizer.get_loss_scale()
        )
        names = {name.split(".")[2] for name in run.optimizer.sharded_state()}
        assert names == ({"momentum_buffer"} if "sgd" in flags else {"param", "exp_avg", "exp_avg_sq"})
        _half_steps(run, 2)
        _half_steps(resumed, 2)
        assert _same(resumed.state(), run.state())


def _half_steps(run, number):
    dtype = next(run.model.parameters()).dtype
    generator = torch.Generator().manual_seed(run.iteration)
    for _ in range(number):
        run.model.zero_grad_buffer()
        x = torch.randn(2, 8, generator=generator).to(dtype)
        run.optimizer.scale_loss(run.model.module.last(run.model.module.first(x)).float().square().mean()).backward()
        run.model.finish_grad_sync()
        run.optimizer.step()
        run.schedule.step(2)
        run.iteration += 1


# -- what is taken -----------------------------------------------------------------------------------------------


def test_finetune_takes_the_weights_alone(saved):
    folder, run = saved
    tuned = Run("--load", folder, "--finetune", seed=99)
    state = random.getstate()
    assert tuned.load() == (0, 0)
    assert tuned.args.consumed_train_samples == 0 and tuned.schedule.num_steps == 0 and random.getstate() == state
    weights = {name: tensor for name, (tensor, _) in model_tensors(run.model).items()}
    assert _same({name: t for name, (t, _) in model_tensors(tuned.model).items()}, weights)
    assert all(t.eq(0).all() for name, t in tuned.state().items() if name.startswith("optimizer."))


def test_C050_no_load_optim_keeps_the_position_of_the_schedule(saved):
    """Moments start over; the learning rate does not go back to its warm-up."""
    folder, run = saved
    fresh = Run("--load", folder, "--no-load-optim")
    assert fresh.load()[0] == 10
    assert fresh.schedule.num_steps == run.schedule.num_steps == 20
    assert fresh.optimizer.param_groups[0]["lr"] == run.optimizer.param_groups[0]["lr"] > 0
    assert all(t.eq(0).all() for name, t in fresh.state().items() if name.startswith("optimizer."))


def test_main_parameters_follow_the_loaded_weights_when_the_optimizer_is_not_loaded(tmp_path):
    """Else the first step would put the initial weights back."""
    run = Run("--save", tmp_path, "--bf16", module=Tied().bfloat16())
    _half_steps(run, 3)
    run.save()
    for words in (["--no-load-optim"], ["--finetune"]):
        other = Run("--load", tmp_path, "--bf16", *words, module=Tied().bfloat16(), seed=42)
        other.load()
        for name, (tensor, _) in model_tensors(other.model).items():
            if name != "seen":
                main = other.optimizer.sharded_state()[f"optimizer.state.param.{name}"][0]
                assert torch.equal(main, tensor.float())


def test_no_load_rng_keeps_the_runs_own_seeds(saved):
    folder, _ = saved
    run = Run("--load", folder, "--no-load-rng", seed=7)
    before = torch.get_rng_state(), random.getstate()
    run.load()
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def test_what_was_not_saved_cannot_be_loaded_and_says_how_to_go_on(tmp_path):
    run = Run("--save", tmp_path, "--no-save-optim", "--no-save-rng")
    run.steps(2)
    run.save()
    assert not any(name.startswith("optimizer.") for name in sharded.saved_tensors(tmp_path / "iter_0000002"))
    with pytest.raises(CheckpointError, match="no optimizer state") as caught:
        Run("--load", tmp_path).load()
    assert "--no-load-optim" in caught.value.fix
    with pytest.raises(CheckpointError, match="no states of random generators") as caught:
        Run("--load", tmp_path, "--no-load-optim").load()
    assert "--no-load-rng" in caught.value.fix
    assert Run("--load", tmp_path, "--no-load-optim", "--no-load-rng").load()[0] == 2


@pytest.mark.parametrize("switch", [None, "--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler"])
def test_another_schedule_on_the_command_line_is_refused_or_one_side_is_chosen(saved, switch):
    folder, _ = saved
    run = Run("--load", folder, "--lr", 0.5, *([switch] if switch else []))
    if switch is None:
        with pytest.raises(CheckpointError, match="--lr: 0.01 saved, 0.5 now"):
            run.load()
        return
    run.load()
    assert run.schedule.num_steps == 20
    assert run.schedule.max_lr == (0.5 if "override" in switch else 0.01)


def test_C114_a_release_loads_at_iteration_0_with_a_fresh_optimizer(tmp_path, capsys):
    run = Run("--save", tmp_path)
    run.steps(3)
    run.save(release=True)
    assert (tmp_path / folders.TRACKER).read_text() == "release"
    loaded = Run("--load", tmp_path, seed=5)
    assert loaded.load() == (0, 0)
    assert " loading release checkpoint from" in capsys.readouterr().out
    assert torch.equal(loaded.state()["first.weight"], run.state()["first.weight"])
    assert loaded.schedule.num_steps == 0
    assert not any(name.startswith("optimizer.") for name in sharded.saved_tensors(tmp_path / "release"))


def test_tied_weights_are_saved_once_and_scratch_buffers_not_at_all():
    names = set(model_tensors(Tied()))
    assert names == {"first.weight", "first.bias", "last.bias", "seen"}


# -- where a load looks ------------------------------------------------------------------------------------------


def test_C113_a_typo_in_the_load_path_stops_the_run(tmp_path):
    """Training from random weights for a week because of a typo is the classic."""
    for words in (["--save", tmp_path / "new"], []):
        with pytest.raises(CheckpointError, match="typo: the folder does not exist") as caught:
            Run("--load", tmp_path / "typo", *words).load()
        assert "random weights" in caught.value.why
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        Run("--load", tmp_path / "empty").load()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        Run("--load", tmp_path / "file").load()


def test_C113_a_step_that_does_not_exist_stops_the_run_and_lists_those_that_do(saved):
    folder, _ = saved
    with pytest.raises(CheckpointError, match="iter_0000007") as caught:
        Run("--load", folder, "--save", folder, "--ckpt-step", 7).load()
    assert "5, 10" in caught.value.why


def test_C113_a_first_start_whose_load_is_its_save_begins_from_scratch_and_says_so(tmp_path, capsys):
    run = Run("--load", tmp_path / "run", "--save", f"{tmp_path}/./run/")
    assert will_load_checkpoint(run.args)
    before = run.state()
    assert run.load() == (0, 0) and _same(run.state(), before)
    out = capsys.readouterr().out
    assert f"WARNING: could not find the metadata file {tmp_path}/run/latest_checkpointed_iteration.txt" in out
    assert "    will not load any checkpoints and will start from random" in out
    with pytest.raises(CheckpointError):
        Run("--load", tmp_path / "run", "--save", tmp_path / "run", "--exit-on-missing-checkpoint").load()


def test_the_folder_of_one_checkpoint_is_pointed_to_its_parent(saved):
    folder, _ = saved
    with pytest.raises(CheckpointError, match="is one checkpoint") as caught:
        Run("--load", folder / "iter_0000005").load()
    assert f"--load {folder}" in caught.value.fix


def test_pretrained_checkpoint_counts_only_while_load_holds_nothing(saved, tmp_path):
    folder, run = saved
    mine = tmp_path / "mine"
    words = ["--load", mine, "--save", mine, "--pretrained-checkpoint", folder]
    first = Run(*words, seed=8)
    assert first.load() == (0, 0)
    assert torch.equal(first.state()["first.weight"], run.state()["first.weight"])
    first.steps(2)
    first.save()
    assert Run(*words).load()[0] == 2
    with pytest.raises(CheckpointError, match="--pretrained-checkpoint"):
        Run("--pretrained-checkpoint", tmp_path / "nothing").load()


def test_a_complete_checkpoint_without_a_tracker_is_found(saved, capsys):
    """The very first save was killed between its rename and its tracker."""
    folder, _ = saved
    (folder / folders.TRACKER).unlink()
    assert Run("--load", folder, "--save", folder).load()[0] == 10
    assert "has no latest_checkpointed_iteration.txt" in capsys.readouterr().err


def test_a_run_that_was_told_of_no_checkpoint_looks_for_none():
    assert not will_load_checkpoint(Run().args)
    assert find_checkpoint(Run().args) is None


def test_a_torn_checkpoint_is_refused_before_anything_is_changed(saved):
    folder, _ = saved
    path = next((folder / "iter_0000010").glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:-10])
    run = Run("--load", folder, seed=99)
    before = run.state()
    with pytest.raises(CheckpointError, match="instead of") as caught:
        run.load()
    assert "--ckpt-step" in caught.value.fix and _same(run.state(), before)


# -- what must agree ---------------------------------------------------------------------------------------------


def test_all_arguments_that_give_the_weights_another_meaning_are_refused_at_once(saved):
    """Most of these change no tensor's shape: without the check the model would talk nonsense."""
    folder, _ = saved
    words = "--num-layers 3 --num-attention-heads 4 --position-embedding-type rope --normalization RMSNorm".split()
    with pytest.raises(CheckpointError) as caught:
        Run("--load", folder, *words).load()
    for line in (
        "num_layers: 2 there, 3 here",
        "num_attention_heads: 2 there, 4 here",
        "position_embedding_type: learned_absolute there, rope here",
        "normalization: LayerNorm there, RMSNorm here",
    ):
        assert line in caught.value.what
    assert "hidden_size" not in caught.value.what


def test_what_may_change_from_run_to_run_may_change(saved):
    folder, _ = saved
    words = "--micro-batch-size 1 --global-batch-size 2 --log-interval 7".split()
    assert Run("--load", folder, *words).load()[0] == 10


def test_what_makes_it_another_training_may_change_with_force(saved):
    folder, _ = saved
    words = ["--load", folder, *"--attention-dropout 0.3 --seed 5".split()]
    with pytest.raises(CheckpointError, match="--force attention_dropout seed"):
        Run(*words).load()
    assert Run(*words, "--force", "attention_dropout", "seed").load()[0] == 10
    assert Run(*words, "--no-load-optim", "--finetune").load()[0] == 0
    assert Run(*words, "--skip-train").load()[0] == 10


def test_another_vocabulary_is_refused_on_resume(saved):
    folder, _ = saved
    other = ("--vocab-size", 31, "--make-vocab-size-divisible-by", 64)
    with pytest.raises(CheckpointError, match="make_vocab_size_divisible_by: 128 there, 64 here"):
        Run("--load", folder, *other).load()
    assert Run("--load", folder, *other[2:]).load()[0] == 10  # the same tokens, padded otherwise


def test_tensors_that_do_not_fit_are_named(saved):
    folder, _ = saved
    with pytest.raises(CheckpointError, match="unknown to this run") as caught:
        Run("--load", folder, module=Tied(bias=False)).load()
    assert "first.bias" in caught.value.what and "biases" in caught.value.why
    with pytest.raises(CheckpointError, match=r"first.weight \[8, 8\] there, \[16, 16\] here"):
        Run("--load", folder, module=Tied(width=16)).load()


def test_without_strict_the_tensors_that_fit_are_loaded(saved, capsys):
    folder, run = saved
    partial = Run("--load", folder, "--finetune", module=Tied(bias=False), seed=4)
    partial.load(strict=False)
    assert torch.equal(partial.state()["first.weight"], run.state()["first.weight"])
    assert "first.bias, last.bias" in capsys.readouterr().out


def test_C121_the_checkpoints_arguments_are_taken_and_what_was_typed_wins(tmp_path, capsys):
    run = Run("--save", tmp_path, "--ffn-hidden-size", 24, "--swiglu", "--rotary-base", 500, "--num-layers", 3)
    run.steps(1)
    run.save()
    capsys.readouterr()
    words = FLAGS[2:]  # without --num-layers 2
    assert "--num-layers" not in words
    args = parse_args([*words, "--use-checkpoint-args", "--load", str(tmp_path), "--rotary-base", "700"])
    load_args_from_checkpoint(args)
    assert (args.num_layers, args.ffn_hidden_size, args.swiglu, args.rotary_base) == (3, 24, True, 700)
    assert args.micro_batch_size == 2
    out = capsys.readouterr().out
    for line in (
        "Setting num_layers to 3 from checkpoint",
        "Setting ffn_hidden_size to 24 from checkpoint",
        "Setting swiglu to True from checkpoint",
        "Keeping rotary_base at 700, as typed; the checkpoint has 500",
    ):
        assert line in out.splitlines()
    assert "hidden_size to 8" not in out.replace("ffn_hidden_size", "")


# -- lines and rotation ------------------------------------------------------------------------------------------


def test_the_lines_are_megatrons(tmp_path, capsys):
    run = Run("--save", tmp_path)
    run.steps(3)
    capsys.readouterr()
    run.save()
    assert capsys.readouterr().out.splitlines() == [
        f"saving checkpoint at iteration       3 to {tmp_path} in torch_dist format",
        f"  successfully saved checkpoint from iteration       3 to {tmp_path} [ t 1/1, p 1/1 ]",
    ]
    again = Run("--load", tmp_path)
    capsys.readouterr()
    again.load()
    assert capsys.readouterr().out.splitlines() == [
        f" loading distributed checkpoint from {tmp_path} at iteration 3",
        " checkpoint version 3.0",
        f"  successfully loaded checkpoint from {tmp_path} [ t 1/1, p 1/1 ] at iteration 3",
    ]


def test_the_retain_interval_deletes_what_is_superseded_and_says_so(tmp_path, capsys):
    run = Run("--save", tmp_path, "--save-interval", 1, "--save-retain-interval", 3)
    for _ in range(5):
        run.steps(1)
        run.save()
    assert folders.complete_iterations(tmp_path) == [3, 5]
    out = capsys.readouterr().out
    assert f"  successfully deleted checkpoint from iteration       4 at {tmp_path}" in out
    assert "iteration       3 at" not in out


def test_a_save_that_fails_raises_on_the_spot_and_the_run_can_go_on(saved, monkeypatch):
    folder, run = saved
    run.steps(1)
    with monkeypatch.context() as patch:
        patch.setattr(folders, "write_file", lambda path, data: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(CheckpointError) as caught:
            run.save()
        assert caught.value.why == "the disk is full"
    assert folders.read_tracker(folder) == 10 and folders.complete_iterations(folder) == [5, 10]
    run.steps(1)
    run.save()
    assert folders.read_tracker(folder) == 12


def test_a_changed_layout_ignores_the_generators_and_says_so(saved, capsys):
    folder, _ = saved
    path = folder / "iter_0000010" / "common.pt"
    common = torch.load(path, weights_only=True)
    common["layout"]["tp"] = 2
    torch.save(common, path)
    manifest = folder / "iter_0000010" / "metadata.json"
    sizes = manifest.read_text().replace(_size_of(manifest, "common.pt"), f'"size": {path.stat().st_size}')
    manifest.write_text(sizes)
    run = Run("--load", folder, seed=99)
    state = torch.get_rng_state()
    run.load()
    assert torch.equal(torch.get_rng_state(), state)
    out = capsys.readouterr().out
    assert "(TP, PP, CP) mismatch after resume ((1, 1, 1) vs (2, 1, 1)): RNG state will be ignored" in out


def _size_of(manifest, name):
    return manifest.read_text().split(f'"{name}": {{')[1].split("}")[0].strip()


def test_a_bare_model_without_optimizer_loads_for_sampling(saved):
    folder, run = saved
    sampler = Run("--load", folder, "--no-load-rng", seed=3)
    model = Tied()
    iteration, _ = load_checkpoint(model, None, None)
    assert iteration == 10 and sampler.args.consumed_train_samples == 20
    assert torch.equal(model.first.weight, run.state()["first.weight"])


def test_a_rank_takes_its_own_generators_or_those_of_data_parallel_rank_0():
    alone = ProcessGroupCollection()
    assert find_state(["rng_state.tp0.pp0.cp0.dp0", "rng_state.tp0.pp0.cp0.dp1"], alone) == "rng_state.tp0.pp0.cp0.dp0"
    assert find_state(["rng_state.tp1.pp0.cp0.dp0"], alone) is None


def test_a_changed_setting_that_may_change_is_told(capsys):
    """Another rotary base shows in no shape: resuming with it in silence is how a run goes wrong for a week."""
    saved = {"rotary_base": 10000, "window_size": None, "hidden_size": 8}
    here = Namespace(rotary_base=500000, window_size=(4, 0), hidden_size=8, group_query_attention=True)
    check_args(here, saved, "folder", finetune=False)
    out = capsys.readouterr().out
    assert "rotary_base: 10000 there, 500000 here" in out and "window_size: None there" in out


def test_another_padding_of_the_vocabulary_names_the_flag_that_helps():
    """The padding depends on the tensor-parallel size, which may change from run to run."""
    with pytest.raises(CheckpointError) as error:
        check_args(Namespace(padded_vocab_size=51200), {"padded_vocab_size": 50304}, "x", finetune=False)
    assert error.value.fix == "--padded-vocab-size 50304"


def test_with_verify_integrity_a_turned_bit_stops_the_load(saved):
    """Sizes do not show it, and torch reads it as a number."""
    folder, run = saved
    path = next((folder / "iter_0000010").glob("*.distcp"))
    data = bytearray(path.read_bytes())
    where = data.find(run.state()["first.weight"].numpy().tobytes())
    assert where > 0
    data[where] ^= 1
    path.write_bytes(data)
    Run("--load", folder).load()
    with pytest.raises(CheckpointError, match=rf"{path.name} has the checksum .* instead of"):
        Run("--load", folder, "--verify-integrity").load()
    assert Run("--load", folder, "--verify-integrity", "--ckpt-step", 5).load()[0] == 5
