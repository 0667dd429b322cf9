"""Megatron's flags are all understood: with kinds, choices and defaults, and with an answer where they do nothing.

`golden/flags.tsv` lists the parser of Megatron-LM (spellings, name in the namespace, kind, choices, default) and how
important a flag is: A and B work or will, a star marks mere speed, C is no part of this project.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_lite.config import KINDS, flags_of
from megatron_lite.errors import ConfigError
from megatron_lite.training.arguments import CONFIGS, build_parser, parse_args
from megatron_lite.training.flag_aliases import ALIASES, foreign, translate
from megatron_lite.training.flag_tables import NOTICES, REASONS, REFUSED_VALUES, Row, noted, refused

ROOT = Path(__file__).parents[3]


class Known(NamedTuple):
    """A line of the golden table."""

    spellings: tuple[str, ...]
    dest: str
    kind: str
    choices: tuple[str, ...]
    default: str
    tier: str


def known() -> list[Known]:
    lines = (ROOT / "tests/golden/flags.tsv").read_text(encoding="utf-8").splitlines()[1:]
    cells = [line.split("\t") for line in lines]
    return [Known(tuple(c[0].split()), c[1], c[2], tuple(c[3].split()), c[4], c[5]) for c in cells]


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return build_parser()


@pytest.fixture(scope="module")
def actions(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {spelling: action for action in parser._actions for spelling in action.option_strings}


def of_today(tiers: Iterable[str]) -> list[Known]:
    """Flags of the parser itself; old spellings are translated before it."""
    return [flag for flag in known() if flag.tier in tiers and flag.spellings[0] not in ALIASES]


WORKING, FOREIGN = ("A", "A*", "B", "B*"), ("C", "A-later")


def test_the_golden_table_is_whole() -> None:
    assert len(known()) == 882
    assert Counter(flag.tier for flag in known()) == {"C": 292, "A": 269, "B": 225, "B*": 54, "A*": 40, "A-later": 2}


@pytest.mark.parametrize("tiers", [WORKING, FOREIGN], ids=["A and B", "C"])
def test_every_flag_parses_with_its_name_kind_choices_and_default(
    tiers: tuple[str, ...], parser: argparse.ArgumentParser, actions: dict[str, argparse.Action]
) -> None:
    different = []
    for flag in of_today(tiers):
        for spelling in flag.spellings:
            action = actions.get(spelling)
            if action is None:
                different.append(f"{spelling}: unknown")
                continue
            default = parser.get_default(action.dest)
            if action.dest != flag.dest and spelling != "--yaml-cfg":
                different.append(f"{spelling}: sets {action.dest}, not {flag.dest}")
            if default != expected_default(flag, action):
                different.append(f"{spelling}: default {default!r}, not {flag.default!r}")
            if (flag.kind in ("switch", "pair")) != (action.nargs == 0):
                different.append(f"{spelling}: kind {flag.kind}")
            if flag.choices and not {str(choice) for choice in action.choices or ()} >= set(flag.choices):
                different.append(f"{spelling}: choices {action.choices}")
            if flag.kind in ("int", "float") and callable(action.type) and action.type("3") != 3:
                different.append(f"{spelling}: no {flag.kind}")
    assert not different


def expected_default(flag: Known, action: argparse.Action) -> Any:
    if flag.kind in ("switch", "pair"):
        if flag.dest in ("yarn_correction_range_round_to_int", "ckpt_fully_parallel_save"):  # two switches, one name
            return True
        return flag.default in ("on", "True")
    if flag.default == "":
        return None
    if flag.default.startswith("["):
        return ast.literal_eval(flag.default)
    if flag.default == '""':
        return ""
    return action.type(flag.default) if callable(action.type) else flag.default


def test_old_spellings_of_the_golden_table_are_translated() -> None:
    old = {flag.spellings[0] for flag in known()} & set(ALIASES)
    assert {"--batch-size", "--checkpoint-activations", "--warmup", "--use-flash-attn", "--cuda-graph-scope"} <= old


def test_no_flag_is_declared_twice() -> None:
    spellings = [s for config in CONFIGS for flag in flags_of(config) for s in flag.spellings]
    assert max(Counter(spellings).values()) == 1
    rows = [s for row in (*noted(), *refused()) for s in (*row.flag.spellings, *row.flag.negations)]
    assert max(Counter(rows).values()) == 1
    assert not set(ALIASES) & {*spellings, *rows}


def test_no_flag_waits_for_its_capability() -> None:
    """A flag is of a config, or noted, or refused, and never of two of these."""
    declared = {spelling for config in CONFIGS for flag in flags_of(config) for spelling in flag.spellings}
    assert not declared & {spelling for row in (*noted(), *refused()) for spelling in row.flag.spellings}


def test_keys_of_the_tables_have_their_text() -> None:
    assert {row.key for row in noted()} == set(NOTICES)
    values = {key for values in REFUSED_VALUES.values() for key in values.values()}
    assert {row.key for row in refused()} | values == set(REASONS)


def another_value(row: Row) -> list[str]:
    """Words that give the flag a value other than its default, of those that the row means."""
    flag = row.flag
    if flag.is_switch:
        return [(flag.negations if flag.default == flag.stores else flag.spellings)[0]]
    if row.values:
        return [flag.spellings[0], row.values[0]]
    if flag.choices:
        default = flag.default if isinstance(flag.default, list) else [flag.default]
        return [flag.spellings[0], str(next(choice for choice in flag.choices if choice not in default))]
    sample = {
        "int": "7",
        "float": "0.37",
        "int list": "7",
        "float list": "0.37",
        "int or list expr": "7",
        "bool": "true",
    }
    return [flag.spellings[0], sample.get(flag.kind, "word")]


def outcome(words: list[str]) -> str:
    """The error that a command line ends with, or nothing."""
    try:
        parse_args(words)
    except ConfigError as error:
        return str(error)
    return ""


def problems(rows: list[Row]) -> dict[str, str]:
    """Flag -> what the user reads about it, of one command line with all of them."""
    text = outcome([word for row in rows for word in another_value(row)])
    items = re.split(r"\n *\d+\. ", text)
    assert items[0] == f"{len(rows)} problems with the flags"
    return {re.split(r"[ :]", item)[0]: item for item in items[1:]}


def test_values_that_are_refused_stop_the_run_with_reason_and_alternative() -> None:
    for name, values in REFUSED_VALUES.items():
        for value, key in values.items():
            reason, alternative = REASONS[key]
            text = outcome([f"--{name.replace('_', '-')}", value])
            assert f"{value} is not supported: {reason}" in text and f"fix: {alternative}" in text


def test_a_foreign_flag_is_refused_with_reason_and_alternative() -> None:
    found = problems(list(refused()))
    for row in refused():
        reason, alternative = REASONS[row.key]
        text = found[another_value(row)[0]]
        assert f" is not supported: {reason}" in text and f"fix: {alternative}" in text


def test_flags_of_both_tables_given_their_default_pass_in_silence(capsys: pytest.CaptureFixture[str]) -> None:
    words = []
    for row in (*noted(), *refused()):
        value = row.flag.default
        if row.flag.is_switch or value in (None, [], ""):
            continue
        words += [row.flag.spellings[0], *map(str, value if isinstance(value, list) else [value])]
    assert len(words) > 150
    assert outcome(words) == ""
    assert capsys.readouterr().out == ""


def test_harmless_flags_say_in_one_line_what_is_done_instead(capsys: pytest.CaptureFixture[str]) -> None:
    rows = noted()
    words = [word for row in rows for word in another_value(row)]
    assert outcome(words) == ""
    lines = capsys.readouterr().out.splitlines()
    spoken = [row for row in rows if NOTICES[row.key]]
    assert len(lines) == len(spoken) > 30
    for row, line in zip(spoken, lines):
        assert line.startswith(another_value(row)[0]) and line.endswith(NOTICES[row.key])


# ------------------------------------------------------------------------------------------------------- old spellings
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--batch-size 4", "--micro-batch-size 4"),
        ("--batch-size=4", "--micro-batch-size 4"),
        ("--warmup .01", "--lr-warmup-fraction .01"),
        ("--model-parallel-size 1", "--tensor-model-parallel-size 1"),
        ("--intra-layer-model-parallel-size 2", "--tensor-model-parallel-size 2"),
        ("--inter-layer-model-parallel-size 2", "--pipeline-model-parallel-size 2"),
        ("--lr-warmup-percent 5", "--lr-warmup-fraction 0.05"),
        ("--min-scale 2", "--min-loss-scale 2"),
        ("--fp32-allreduce", "--accumulate-allreduce-grads-in-fp32"),
        ("--virtual-pipeline-model-parallel-size 2", "--num-virtual-stages-per-pipeline-rank 2"),
        ("--empty-unused-memory-each-iter", "--empty-unused-memory-level 1"),
        (
            "--checkpoint-activations",
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        ),
        ("--activations-checkpoint-method block", "--recompute-granularity full --recompute-method block"),
        ("--checkpoint-method block", "--recompute-granularity full --recompute-method block"),
        ("--activations-checkpoint-num-layers 3", "--recompute-num-layers 3"),
        ("--checkpoint-num-layers 3", "--recompute-num-layers 3"),
        ("--checkpoint-granularity full", "--recompute-granularity full"),
        ("--checkpoint-attention", "--recompute-granularity selective"),
        ("--moe-layer-recompute", "--recompute-granularity selective --recompute-modules moe"),
        ("--distribute-checkpointed-activations", "--distribute-saved-activations"),
        ("--distribute-recomputed-activations", "--distribute-saved-activations"),
        ("--model-parallel-memory-opt", "--sequence-parallel"),
        ("--start-wd 0.1 --end-wd 0.2", "--start-weight-decay 0.1 --end-weight-decay 0.2"),
        ("--wd-incr-style linear", "--weight-decay-incr-style linear"),
        ("--no-weight-decay-cond-type apply_wd_to_qk_layernorm", "--apply-wd-to-qk-layernorm"),
        ("--override-lr-scheduler", "--override-opt_param-scheduler"),
        ("--use-checkpoint-lr-scheduler", "--use-checkpoint-opt_param-scheduler"),
        ("--use-rotary-position-embeddings", "--position-embedding-type rope"),
        ("--use-flash-attn", "--attention-backend flash"),
        ("--fp8-hybrid", "--fp8-format hybrid"),
        ("--fp8-e4m3", "--fp8-format e4m3"),
        ("--DDP-impl local", ""),
        ("--no-contiguous-buffers-in-local-ddp", ""),
        ("--use-contiguous-buffers-in-ddp", ""),
        ("--data-impl mmap", ""),
        ("--data-impl infer --mmap-warmup", ""),
        ("--layernorm-epsilon 1e-6", "--norm-epsilon 1e-6"),
        ("--expert-parallel", "--expert-model-parallel-size 4"),
        ("--model-spec a.b c", "--spec a.b c"),
        ("--no-query-key-layer-scaling", ""),
        ("--moe-loss-coeff 0.1", "--moe-aux-loss-coeff 0.1"),
        ("--moe-router-type none", "--moe-router-load-balancing-type none"),
        ("--retro-workdir x", "--retro-project-dir x"),
        ("--use-gpu-initialization", ""),
        ("--local_rank 3", "--local-rank 3"),
        ("--log-batch-size-to-tensorboard --no-log-learnig-rate-to-tensorboard", ""),
        ("--no-delay-grad-reduce", "--no-align-grad-reduce"),
        ("--delay-param-gather --align-param-gather", ""),
        ("--standalone-embedding-stage", "--account-for-embedding-in-pipeline-split"),
        ("--renormalize-blend-weights", ""),
        (
            "--expert-model-parallel-size 4 --moe-router-topk-limited-devices 2",
            "--expert-model-parallel-size 4 --moe-router-group-topk 2 --moe-router-num-groups 4",
        ),
        ("--s3-cache-path x", "--object-storage-cache-path x"),
        ("--encoder-tensor-model-parallel-size 0 --encoder-pipeline-model-parallel-size 1", ""),
        ("--use-custom-fsdp", "--use-megatron-fsdp"),
        ("--keep-fp8-transpose-cache-when-using-custom-fsdp", "--keep-fp8-transpose-cache"),
        (
            "--tensor-model-parallel-size 2 --moe-extended-tp",
            "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 2",
        ),
        ("--moe-use-legacy-grouped-gemm", "--moe-grouped-gemm"),
        ("--no-async-tensor-model-parallel-allreduce --no-scatter-gather-tensors-in-pipeline", ""),
        ("--muon-use-nesterov", "--muon-nesterov"),
        ("--tiktoken-special-tokens <a> <b>", "--tokenizer-special-tokens <a> <b>"),
        ("--tokenizer-hf-use-fast --tokenizer-hf-include-special-tokens --legacy-tokenizer", ""),
        ("--hybrid-override-pattern M*", "--hybrid-layer-pattern M*"),
        ("--inference-max-batch-size 3", "--inference-max-requests 3"),
        ("--disable-chunked-prefill", ""),
        ("--enable-cuda-graph", "--cuda-graph-impl local"),
        ("--external-cuda-graph", "--cuda-graph-impl transformer_engine"),
        ("--cuda-graph-scope attn mlp", "--cuda-graph-modules attn mlp"),
        ("--moe-enable-deepep", "--moe-flex-dispatcher-backend deepep"),
        ("--moe-router-padding-for-fp8", "--moe-router-padding-for-quantization"),
        # 4 micro-batches of 2 on 4 data-parallel ranks
        ("--micro-batch-size 2 --num-microbatches 4", "--micro-batch-size 2 --global-batch-size 32"),
    ],
)
def test_old_flags_become_new_ones(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    words, notices, problems = translate(old.split())
    assert (words, problems) == (new.split(), [])
    known_flags = {s for action in build_parser()._actions for s in action.option_strings}
    assert all(word in known_flags for word in words if word.startswith("--"))
    assert len(notices) <= len(old.split())


def test_a_renamed_flag_is_named_in_one_notice() -> None:
    _, notices, _ = translate(["--batch-size", "4"])
    assert notices == ["--batch-size is now --micro-batch-size 4"]


@pytest.mark.parametrize(
    ("old", "fix"),
    [
        ("--DDP-impl torch", "leave --DDP-impl out"),
        ("--data-impl lazy", "megatron-lite preprocess"),
        ("--embedding-weights-in-fp32", "leave it out"),
        ("--moe-token-dropping", "--moe-expert-capacity-factor"),
        ("--encoder-tensor-model-parallel-size 2", "--tensor-model-parallel-size"),
        ("--load-model-opt-format", "leave it out"),
        ("--use-legacy-models", "leave it out"),
        ("--num-microbatches 4", "--micro-batch-size"),
        ("--batch-size", "--batch-size X"),
        ("--lr-warmup-percent many", "--lr-warmup-percent X"),
    ],
)
def test_old_flags_without_a_new_form_are_errors(old: str, fix: str) -> None:
    _, _, problems = translate(old.split())
    assert len(problems) == 1
    assert old.split()[0] in problems[0].what and fix in problems[0].fix


@pytest.mark.parametrize("word", ["--export-dir", "--freeze-LM", "--task", "--faiss-use-gpu", "--top_k", "--prune-x"])
def test_flags_of_packages_around_megatron_are_recognised(word: str) -> None:
    assert foreign(word)
    assert f"{word} is not supported" in outcome([word, "value"])


def test_kinds_read_their_words() -> None:
    window, pattern = KINDS["int,int"][0], KINDS["int or list expr"][0]
    assert window is not None and pattern is not None
    assert window("128,0") == (128, 0) and window("(-1, 0)") == (-1, 0)
    assert pattern("4") == 4 and pattern("([0]*3+[1]*2)*2") == [0, 0, 0, 1, 1] * 2
    for text in ("__import__('os')", "[1]*9**9", "[1]*99999999", "[", "1,2", "[1.5]"):
        with pytest.raises(argparse.ArgumentTypeError):
            pattern(text)
