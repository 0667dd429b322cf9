"""The command line of a run: Megatron's rules of parsing, YAML in and out, errors that name everything at once."""

from __future__ import annotations

import argparse
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megatron_lite.errors import ConfigError
from megatron_lite.training.arguments import (
    checkpoint_config_from_args,
    core_transformer_config_from_args,
    ddp_config_from_args,
    optimizer_config_from_args,
    parse_args,
    print_args,
    resolved_configuration,
    save_config,
    tokenizer_config_from_args,
    validate_args,
)
from megatron_lite.training.command_line import strip_stray_quotes
from megatron_lite.training.families import FAMILIES, defaults_of
from megatron_lite.transformer.enums import AttnBackend

SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 10 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 100"
)


def resolve(flags: str = "", world_size: int = 1) -> Namespace:
    return validate_args(parse_args(f"{SMALL} {flags}".split()), world_size)


def error_of(flags: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse_args(flags.split())
    return str(error.value)


# ------------------------------------------------------------------------------------------------------------- parsing
def test_both_forms_of_a_value_are_read_and_the_last_wins() -> None:
    args = parse_args("--lr 1 --lr=2 --weight-decay 0.1 --weight-decay 0.2 --data-path a b --data-path c".split())
    assert (args.lr, args.weight_decay, args.data_path) == (2.0, 0.2, ["c"])


@pytest.mark.parametrize(
    ("words", "stripped"),
    [
        (["--split", "'99,1,0'"], ["--split", "99,1,0"]),
        (['--split="99,1,0"'], ["--split=99,1,0"]),
        (["--data-path", '"a', "b'", 'c"', "d"], ["--data-path", "a b' c", "d"]),
        (["--x", '"0:384', '3B:768"', "--y", "1"], ["--x", "0:384 3B:768", "--y", "1"]),
        (["--x", "it's"], ["--x", "it's"]),
        (["--x", "''"], ["--x", ""]),
        (["--x", "'open", "--y"], ["--x", "'open", "--y"]),
    ],
)
def test_quotes_that_a_script_left_are_stripped(words: list[str], stripped: list[str]) -> None:
    assert strip_stray_quotes(words) == stripped


def test_values_may_start_with_a_minus_sign() -> None:
    args = parse_args("--window-size -1,0 --null-tokenizer-pad-id -1 --lr -1e-3".split())
    assert (args.window_size, args.null_tokenizer_pad_id, args.lr) == ((-1, 0), -1, -1e-3)


@pytest.mark.parametrize(
    ("flag", "likely"),
    [
        ("--num-l", "--num-layers"),  # no abbreviations
        ("--hiden-size", "--hidden-size"),
        ("--disable-bia-linear", "--disable-bias-linear"),
        ("--fp4", "--fp4-format"),
        ("--batchsize", "--batch-size"),  # an old spelling may be meant as well
    ],
)
def test_an_unknown_flag_gets_a_did_you_mean(flag: str, likely: str) -> None:
    text = error_of(f"{flag} 3")
    assert f"unknown flag {flag}" in text and likely in text.split("did you mean")[1]


def test_all_mistakes_of_a_command_line_are_told_at_once() -> None:
    text = error_of(
        "stray --num-layrs 2 --hidden-size wide --lr --normalization Rmsnorm --rampup-batch-size 1 2 --swiglu=yes "
        "--transformer-impl inference_optimized --perform-rl-step --use-legacy-models"
    )
    for found in (
        "10 problems with the flags",
        "stray belongs to no flag",
        "--num-layrs",
        "'wide' is no int",
        "--lr: 1 value expected",
        "did you mean RMSNorm?",
        "--rampup-batch-size 1 2: 3 values expected",
        "--swiglu is a switch",
        "--transformer-impl inference_optimized is not supported: those layers cannot be trained",
        "--perform-rl-step is not supported: reinforcement learning",
        "--use-legacy-models",
    ):
        assert found in text


def test_unknown_words_may_be_left_alone() -> None:
    assert parse_args(["--mine", "1", "--lr", "2"], ignore_unknown_args=True).lr == 2.0


def test_a_script_adds_flags_and_defaults_that_lose_to_what_is_typed() -> None:
    def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument_group("mine").add_argument("--my-flag", type=int, default=3)
        return parser

    defaults = {"tokenizer_type": "ByteTokenizer", "seed": 5}
    args = parse_args(["--my-flag", "4", "--seed", "6"], provider, defaults)
    assert (args.my_flag, args.tokenizer_type, args.seed) == (4, "ByteTokenizer", 6)
    assert args.typed == ["my_flag", "seed"]


def test_what_was_typed_is_known_whatever_its_value() -> None:
    args = parse_args("--seed 1234 --disable-bias-linear --batch-size 1".split())
    assert args.typed == ["add_bias_linear", "micro_batch_size", "seed"]


def test_two_runs_of_the_parser_share_no_list() -> None:
    parse_args([]).profile_ranks.append(7)
    assert parse_args([]).profile_ranks == []


def test_the_launcher_says_rank_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    args = parse_args(["--local-rank", "9"])
    assert (args.rank, args.world_size, args.local_rank) == (3, 4, 1)


@pytest.mark.parametrize(("rank", "size"), [("abc", "2"), ("5", "2"), ("0", "many")])
def test_C143_nonsense_of_a_launcher_is_named(rank: str, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    text = error_of("--lr 1")
    assert rank in text or size in text
    assert "RANK" in text or "WORLD_SIZE" in text


def test_old_flags_and_harmless_ones_are_told_in_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    parse_args("--fp32-allreduce --use-sharp --use-mcore-models --no-one-logger --rerun-mode disabled".split())
    assert capsys.readouterr().out.splitlines() == [
        "--fp32-allreduce is now --accumulate-allreduce-grads-in-fp32",
        "--use-sharp has no effect here: NCCL keeps its defaults",
    ]


def test_help_and_mistakes_come_without_torch() -> None:
    """Importing torch alone takes longer than the whole of --help may."""
    code = (
        "import sys\n"
        "from megatron_lite.training.arguments import parse_args\n"
        "try:\n    parse_args(['--help'])\nexcept SystemExit:\n    pass\n"
        "from megatron_lite.errors import ConfigError\n"
        "try:\n    parse_args(['--num-l', '2'])\nexcept ConfigError:\n    pass\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules, 'slow start'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--num-layers N" in done.stdout and "transformer:" in done.stdout and "no effect:" in done.stdout


# ---------------------------------------------------------------------------------------------------------------- YAML
def test_the_command_line_wins_over_the_file_and_the_file_over_the_script(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model:\n  num_layers: 4\n  hidden_size: 32\n  lr: 1e-4\n  seed: 9\n")
    args = parse_args(["--hidden-size", "64", "--config", str(file)], args_defaults={"seed": 1, "eval_iters": 7})
    assert (args.num_layers, args.hidden_size, args.lr, args.seed, args.eval_iters) == (4, 64, 1e-4, 9, 7)


def test_keys_may_be_names_flags_fields_or_old_spellings(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "add_bias_linear: false\nswiglu: true\nqk_layernorm: false\nlayernorm_epsilon: 1.e-6\nbatch-size: 3\n"
        "override-opt_param-scheduler: true\nwindow_size: [8, 0]\nno_rope_freq: [0, 1]\ndata_path: [1, a, 2, b]\n"
        "rampup_batch_size: 2 2 100\nsplit: 99,1,0\nexit_signal: SIGUSR1\nkv_channels: null\ninit_method_std: 0.5\n"
        "use-flash-attn: true\n"
    )
    args = parse_args(["--yaml-cfg", str(file)])
    assert (args.add_bias_linear, args.swiglu, args.qk_layernorm, args.norm_epsilon) == (False, True, False, 1e-6)
    assert (args.micro_batch_size, args.override_opt_param_scheduler, args.window_size) == (3, True, (8, 0))
    assert (args.no_rope_freq, args.data_path, args.rampup_batch_size) == ([0, 1], ["1", "a", "2", "b"], [2, 2, 100])
    assert (args.split, args.exit_signal, args.kv_channels, args.init_method_std) == ("99,1,0", 10, None, 0.5)
    assert args.attention_backend == "flash"


def test_megatrons_yaml_sections_are_read(tmp_path: Path) -> None:
    """The two nested sections, and what they say with fields of the config class."""
    file = tmp_path / "gpt_config.yaml"
    file.write_text(
        "language_model:\n  num_layers: 24\n  hidden_size: 1024\n  num_attention_heads: 16\n  num_query_groups: null\n"
        "  layernorm_zero_centered_gamma: True\n  gated_linear_unit: True\n  activation_func: swiglu\n"
        "  init_method: null\n  apply_rope_fusion: True\n"
        "model_parallel:\n  tensor_model_parallel_size: 1\n  params_dtype: null\n"
        "use_legacy_models: False\nmicro_batch_size: 2\ntrain_iters: 5\n"
    )
    args = parse_args(["--yaml-cfg", str(file)])
    assert (args.num_layers, args.hidden_size, args.apply_layernorm_1p, args.swiglu) == (24, 1024, True, True)
    assert (args.micro_batch_size, args.train_iters) == (2, 5)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("num_layrs: 2", "did you mean num_layers"),
        ("swiglu: 3", "swiglu: 3"),
        ("lr: fast", "'fast' is no float"),
        ("- 1", "holds a list"),
        ("a: [", "is not YAML"),
    ],
)
def test_mistakes_of_a_file_are_told(text: str, found: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert found in error_of(f"--config {file}")


def test_a_missing_file_is_an_error() -> None:
    assert "cannot be read" in error_of("--config /nowhere/run.yaml")
    assert "needs a file" in error_of("--config --lr 1")


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--swiglu --disable-bias-linear --position-embedding-type rope --group-query-attention --num-query-groups 2",
        "--bf16 --window-size 8,0 --no-rope-freq [0,1] --split '90,5,5' --iterations-to-skip 3 4 --exit-signal SIGUSR1",
        "--recompute-activations --no-weight-decay-cond-type apply_wd_to_qk_layernorm --use-sharp --no-rope-fusion",
        "--weight-decay-incr-style linear --start-weight-decay 0.01 --end-weight-decay 0.1 --lr-warmup-fraction .1",
    ],
)
def test_a_saved_configuration_reads_back_to_the_same_run(flags: str, tmp_path: Path) -> None:
    first = resolve(flags)
    file = tmp_path / "config.yaml"
    save_config(first, str(file))
    second = validate_args(parse_args(["--config", str(file)]))
    differing = {k: (v, vars(second)[k]) for k, v in vars(first).items() if vars(second)[k] != v and k != "config"}
    assert not differing
    save_config(second, str(tmp_path / "again.yaml"))
    assert file.read_text() == (tmp_path / "again.yaml").read_text()


def test_a_saved_configuration_keeps_what_a_derived_value_follows_from(tmp_path: Path) -> None:
    """A sample-based run has iterations as well, once it is resolved; as settings the two would contradict."""
    flags = SMALL.replace("--train-iters 10", "--train-samples 80")
    save_config(validate_args(parse_args(flags.split())), str(tmp_path / "c.yaml"))
    args = validate_args(parse_args(["--config", str(tmp_path / "c.yaml"), "--global-batch-size", "4"]))
    assert (args.train_samples, args.train_iters) == (80, 20)


# -------------------------------------------------------------------------------------------------------------- output
def test_the_arguments_are_listed_as_megatron_does(capsys: pytest.CaptureFixture[str]) -> None:
    args = resolve()
    out = capsys.readouterr().out.splitlines()
    assert out[0] == (
        "using world size: 1, data-parallel size: 1, context-parallel size: 1, hierarchical context-parallel sizes: "
        "None, tensor-model-parallel size: 1, pipeline-model-parallel size: 1"
    )
    assert out[-1] == "using torch.float32 for parameters ..."
    print_args(args)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "------------------------ arguments ------------------------"
    assert lines[-1] == "-------------------- end of arguments ---------------------"
    assert "  hidden_size ..................................... 64" in lines
    names = [line.split()[0] for line in lines[1:-1]]
    assert names == sorted(names, key=str.lower) and len(set(names)) == len(names)
    assert {"seq_length", "tensor_model_parallel_size", "data_parallel_size", "params_dtype"} <= set(names)
    assert not {"use_sharp", "rl_default_top_k"} & set(names), "flags that do nothing here are left out"


def test_the_global_batch_is_said_when_it_was_not_given(capsys: pytest.CaptureFixture[str]) -> None:
    args = validate_args(parse_args(SMALL.replace("--global-batch-size 8", "").split()), 4)
    assert args.global_batch_size == 8
    assert "setting global batch size to 8" in capsys.readouterr().out.splitlines()


def test_the_configuration_is_grouped_by_what_it_sets() -> None:
    groups = resolved_configuration(resolve("--swiglu --use-sharp"))
    assert groups["transformer"]["hidden_size"] == 64 and groups["model"]["swiglu"] is True
    assert groups["no effect"] == {"use_sharp": True}
    assert "tokenizer" in groups and "checkpoint" in groups and "training" in groups


# ------------------------------------------------------------------------------------------------------------- configs
def test_the_transformer_config_follows_the_flags() -> None:
    config = core_transformer_config_from_args(resolve())
    assert (config.num_layers, config.hidden_size, config.ffn_hidden_size, config.kv_channels) == (2, 64, 256, 16)
    assert (config.num_query_groups, config.add_bias_linear, config.gated_linear_unit) == (4, True, False)
    assert config.activation_func is F.gelu and config.bias_activation_fusion
    assert config.attention_softmax_in_fp32 is False and config.gradient_accumulation_fusion
    assert config.attention_backend is AttnBackend.auto and config.params_dtype is torch.float32

    config = core_transformer_config_from_args(
        resolve(
            "--swiglu --disable-bias-linear --group-query-attention --num-query-groups 2 --normalization RMSNorm "
            "--norm-epsilon 1e-6 --apply-layernorm-1p --attention-backend local --bf16 --qk-layernorm "
            "--no-gradient-accumulation-fusion --recompute-activations --attention-dropout 0"
        )
    )
    assert config.activation_func is F.silu and config.gated_linear_unit and config.ffn_hidden_size == 128
    assert (config.num_query_groups, config.add_bias_linear, config.normalization) == (2, False, "RMSNorm")
    assert (config.layernorm_epsilon, config.layernorm_zero_centered_gamma) == (1e-6, True)
    assert config.attention_backend is AttnBackend.local and config.params_dtype is torch.bfloat16
    assert (config.recompute_granularity, config.recompute_modules) == ("selective", ["core_attn"])
    assert not config.gradient_accumulation_fusion and config.attention_dropout == 0.0 and config.qk_layernorm


@pytest.mark.parametrize(
    ("flag", "at_minus_one", "gated"),
    [("--squared-relu", 0.0, False), ("--quick-geglu", -0.1542, True), ("--openai-gelu", -0.1588, False)],
)
def test_activations_follow_their_switches(flag: str, at_minus_one: float, gated: bool) -> None:
    """Values at -1 from the formulas: max(x, 0)^2, x * sigmoid(1.702 x), GELU's tanh form."""
    config = core_transformer_config_from_args(resolve(flag))
    torch.testing.assert_close(
        config.activation_func(torch.tensor(-1.0)), torch.tensor(at_minus_one), atol=1e-4, rtol=0
    )
    assert config.gated_linear_unit is gated


def test_optimizer_and_buckets_follow_the_flags() -> None:
    args = resolve(
        "--bf16 --clip-grad 0.5 --adam-beta2 0.95 --overlap-grad-reduce --ddp-num-buckets 4 --log-num-zeros-in-grad"
    )
    optimizer = optimizer_config_from_args(args)
    assert (optimizer.lr, optimizer.clip_grad, optimizer.adam_beta2, optimizer.bf16) == (1e-3, 0.5, 0.95, True)
    assert optimizer.params_dtype is torch.bfloat16 and optimizer.log_num_zeros_in_grad
    ddp = ddp_config_from_args(args, torch.nn.Linear(10, 9))  # 99 parameters in 4 buckets
    assert (ddp.bucket_size, ddp.num_buckets, ddp.grad_reduce_in_fp32) == (24, None, True)
    assert ddp.overlap_grad_reduce and ddp.check_for_nan_in_grad
    assert not ddp_config_from_args(resolve("--bf16 --grad-reduce-in-bf16")).grad_reduce_in_fp32
    assert ddp_config_from_args(resolve("--ddp-bucket-size 77")).bucket_size == 77
    assert not ddp_config_from_args(resolve("--no-check-for-nan-in-loss-and-grad")).check_for_nan_in_grad


def test_tokenizer_and_checkpoint_configs_follow_the_flags() -> None:
    args = resolve("--save x --save-interval 5 --no-save-optim")
    assert (tokenizer_config_from_args(args).tokenizer_type, tokenizer_config_from_args(args).vocab_size) == (
        "NullTokenizer",
        100,
    )
    checkpoint = checkpoint_config_from_args(args)
    assert (checkpoint.save, checkpoint.save_interval, checkpoint.no_save_optim, checkpoint.load) == (
        "x",
        5,
        True,
        None,
    )


CONFIG_FILES = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("file", CONFIG_FILES, ids=lambda file: file.name)
def test_the_files_that_we_ship_resolve(file: Path) -> None:
    """With the files of the user's own added, which a shipped file cannot know."""
    family = next((name for name in FAMILIES if file.name.startswith(name)), "gpt")
    if family == "retro":
        pytest.skip("its project says the rest: the quickstart's test has one")
    words = ["--config", str(file), "--data-path", "x", "--tokenizer-model", "y"]
    if FAMILIES[family].reads_sentences:
        words += ["--vocab-file", "z"]
    args = parse_args(words, args_defaults=defaults_of(family))
    ranks = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    ranks *= args.expert_model_parallel_size
    args = validate_args(args, ranks)
    assert args.global_batch_size and args.train_iters and args.typed
