"""Runs with experts as a user sees them: losses and load in the log, counts, traces, a start from a dense model.

Each run is a whole one (`training.run`), on the session's worlds.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.enums import ModelType
from megatron_lite.errors import RankFailure
from megatron_lite.log import rank_and_world_size
from megatron_lite.training import defaults_of
from megatron_lite.training.arguments import parse_args, validate_args
from megatron_lite.training.record import _forget_run, load_script
from megatron_lite.training.training import run, start
from megatron_lite.training.upcycling import scales
from tests.distributed.layouts import MODELS, Layout
from tests.e2e.launch import checkpoint_tensors, iteration_line
from tests.e2e.test_log_and_exit import scalars

pytestmark = pytest.mark.slow

LOSSES = """--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.02 0.03
    --moe-z-loss-coeff 1e-3 --log-interval 1 --train-iters 3 --lr-warmup-iters 0""".split()


def whole_run(layout: Layout, words: list[str]) -> str:
    """On each rank of a world: the run, and what this rank printed."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            model = MODELS[layout.model]
            args = parse_args([*layout.words(), *words], args_defaults=defaults_of(model.family))
            validate_args(args, rank_and_world_size()[1])
            script = load_script(model.script)
            start(args)
            run(
                args,
                script.train_valid_test_datasets_provider,
                script.model_provider,
                getattr(script, "MODEL_TYPE", ModelType.encoder_or_decoder),
                script.forward_step,
            )
    finally:
        _forget_run()
    return printed.getvalue()


def lines(printed: list[str]) -> list[dict[str, str]]:
    return [iteration_line(line) for text in printed for line in text.splitlines() if re.match(r" \[.*\] iter", line)]


def numbers(world: Any, layout: Layout, *words: object) -> list[dict[str, float]]:
    """The fields of each line that experts added."""
    printed = world(layout.world_size).run(whole_run, layout, [*LOSSES, *map(str, words)])
    names = ("load_balancing_loss", "seq_load_balancing_loss", "z_loss", "lm loss", "grad norm")
    return [{name: float(line[name]) for name in names} for line in lines(printed)]


@pytest.fixture(scope="module")
def alone(world) -> list[dict[str, float]]:
    return numbers(world, Layout(model="mixtral"))


def test_c136_the_summary_counts_what_the_model_and_the_optimizer_hold(world) -> None:
    """C136: 2 layers of 8 experts on 2 ranks, 4 of a layer on each; Adam keeps two fp32 numbers of a parameter, dense
    ones shared by both ranks, an expert's on its rank alone."""
    layout = Layout(model="deepseek", dp=2, ep=2, distributed_optimizer=True)
    (text, _) = world(2).run(whole_run, layout, ["--train-iters", "1", "--lr-warmup-iters", "0"])
    hidden, width, shared = 32, 24, 32
    experts = 2 * 4 * 3 * hidden * width
    attention = hidden * (32 + 2 * 16) + 32 * hidden
    dense = 2 * 512 * hidden + hidden + 2 * (attention + 2 * hidden + 8 * hidden + 3 * hidden * shared)
    assert f"parameters        {experts + dense:,} on this rank" in text
    state = (8 * dense // 2 + 8 * experts) / 1024
    assert f"optimizer state {state:.1f} KiB" in text
    assert "8 in 2 of 2 layers, 2 for a token; 4 of a layer on a rank (ep 2, expert tp 1)" in text


@pytest.mark.parametrize(
    "layout",
    [
        Layout(model="mixtral", tp=2, sp=True),
        Layout(model="mixtral", dp=2),
        Layout(model="mixtral", pp=2),
        Layout(model="mixtral", per_token_loss=True, recompute="full"),
        Layout(model="mixtral", flags=("--recompute-granularity", "selective", "--recompute-modules", "moe")),
    ],
    ids=str,
)
def test_c107_logged_losses_equal_those_of_one_process(world, alone, layout: Layout) -> None:
    """C107: under tensor (sequence), data and pipeline parallelism, and with every pass computed twice."""
    found = numbers(world, layout)
    assert len(found) == 3 and found[0]["load_balancing_loss"] > 0.9
    for one, other in zip(alone, found):
        assert other == pytest.approx(one, rel=2e-5, abs=6e-4)  # the norm is printed with three digits
        for name in ("load_balancing_loss", "seq_load_balancing_loss", "z_loss"):
            assert other[name] == pytest.approx(one[name], rel=5e-6)


def test_load_drops_counts_and_traces_are_written(world, tmp_path: Path) -> None:
    """Two stages, of which one has the layer with experts, and two data-parallel ranks."""
    words = f"""--moe-expert-capacity-factor 1.0 --moe-per-layer-logging
        --tensorboard-dir {tmp_path / "tb"}
        --save {tmp_path / "save"} --save-interval 100
        --save-tokens-per-expert-interval 2 --moe-routing-trace-path {tmp_path / "trace"}
        --moe-routing-trace-max-training-iters 1 --moe-routing-trace-capture-logits
        --moe-routing-trace-dump-weights""".split()
    printed = world(2).run(whole_run, Layout(model="mixtral", dp=2), [*LOSSES, *words])
    line = lines(printed)[-1]
    assert 1.0 <= float(line["expert load (max / mean)"]) < 4.0 and 0.0 < float(line["dropped share"]) < 0.5

    tags = scalars(tmp_path / "tb")
    assert tags["z_loss"] == pytest.approx(tags["moe/z_loss_layer_2"]) and len(tags["z_loss"]) == 3
    assert "moe/load_balancing_loss_layer_2" in tags and "moe/z_loss_layer_1" not in tags
    assert "expert-load" in tags and "z_loss vs samples" not in tags

    (row,) = map(json.loads, (tmp_path / "save" / "tokens_per_expert.jsonl").read_text().splitlines())
    counts, kept = row["tokens_per_expert"]["2"], row["kept"]["2"]
    assert row["iteration"] == 2 and list(row["tokens_per_expert"]) == ["2"]
    assert sum(counts) == 8 * 16 * 2 and all(k <= c for k, c in zip(kept, counts))
    assert max(kept) <= 4 * 16, "4 micro-batches of 32 tokens: an expert takes 16 of each"

    rows = [json.loads(text) for text in (tmp_path / "trace" / "rank_00001.jsonl").read_text().splitlines()]
    assert [(row["iteration"], row["layer"], row["pass"], row["shape"]) for row in rows] == [
        (1, 2, 0, [16, 2]),
        (1, 2, 1, [16, 2]),
    ]
    logits = torch.tensor(rows[0]["logits"])
    assert logits.shape == (32, 4)
    for row_logits, experts in zip(logits, rows[0]["experts"]):
        assert set(experts) <= set(row_logits.topk(2).indices.tolist())  # of the two some may be dropped
    weights = torch.load(tmp_path / "trace" / "rank_00000_weights.pt")
    assert list(weights) == [2] and weights[2].shape == (4, 32)


# -- upcycling -----------------------------------------------------------------------------------------------------
DENSE = "--train-iters 2 --log-interval 1 --lr-warmup-iters 0 --save-interval 100"


@pytest.fixture(scope="module")
def dense_of(world, tmp_path_factory):
    """Layout of a dense model -> the folder of its checkpoint, which is made once."""

    @functools.cache
    def of(layout: Layout) -> Path:
        folder = tmp_path_factory.mktemp("dense") / "save"
        world(1).run(whole_run, layout, [*DENSE.split(), "--save", str(folder)])
        return folder

    return of


def evaluation(printed: list[str]) -> Iterator[float]:
    for text in printed:
        for found in re.findall(r"validation loss at iteration \d+ \| lm loss value: (\S+)", text):
            yield float(found)


EVALUATE = "--split 9,1,0 --eval-iters 1 --eval-interval 10 --eval-before-training --train-iters 1 --lr-warmup-iters 0"
UPCYCLE = f"{EVALUATE} --num-experts 8 --moe-use-upcycling --save-interval 100 --log-interval 1"


def upcycled(world: Any, layout: Layout, dense: Path, folder: Path, *words: str) -> list[str]:
    flags = f"{UPCYCLE} --load {dense} --save {folder}"
    return world(layout.world_size).run(whole_run, layout, [*flags.split(), *words])


LLAMA, SQUARES = Layout(model="llama"), Layout(model="gpt2", flags=("--squared-relu",))
WAYS = {
    "granularity 1": (LLAMA, "--moe-router-topk 2", replace(LLAMA, tp=2, sp=True, pp=2)),
    "granularity 4": (
        SQUARES,
        "--moe-router-topk 4 --moe-ffn-hidden-size 32 --moe-upcycling-granularity 4",
        replace(SQUARES, dp=2, ep=2),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_upcycled_model_computes_what_the_dense_one_did(world, tmp_path, dense_of, way: str) -> None:
    """Weights add up to 1 and equal experts give one of them. With four parts the four experts of one row of the router
    are chosen together, each for a quarter: scaled by 4, exactly so for squared ReLU. Under several ranks, which cut or
    spread experts, the model is the same bit for bit."""
    layout, words, spread = WAYS[way]
    dense, one, several = dense_of(layout), tmp_path / "one", tmp_path / "several"
    flags = f"{EVALUATE} --load {dense} --no-load-optim --finetune"
    before = world(1).run(whole_run, layout, flags.split())
    after = upcycled(world, layout, dense, one, *words.split())
    assert "Upcycled checkpoint saved to" in after[0]
    assert next(evaluation(after)) == pytest.approx(next(evaluation(before)), rel=3e-6)

    upcycled(world, spread, dense, several, *words.split())
    release, other = (checkpoint_tensors(folder, "release") for folder in (one, several))  # type: ignore[arg-type]
    assert release["decoder.layers.1.mlp.router.weight"].shape == (8, 32) and release.keys() == other.keys()
    assert all(torch.equal(release[name], other[name]) for name in release)


@pytest.mark.parametrize(
    ("words", "factors"),
    [
        ("--moe-router-topk 2", (1.0, 1.0)),
        ("--moe-router-topk 2 --moe-router-pre-softmax", (1.5874, 2.0)),
        ("--moe-router-topk 8 --num-experts 64 --moe-upcycling-granularity 8 --moe-ffn-hidden-size 12", (2.0, 2.8284)),
        (
            "--moe-router-topk 8 --num-experts 64 --moe-upcycling-granularity 8 --moe-ffn-hidden-size 12 "
            "--moe-router-pre-softmax",
            (4.0, 8.0),
        ),
    ],
)
def test_scales_of_upcycled_weights(words: str, factors: tuple[float, float]) -> None:
    """A root of the factor that the sum over the chosen lacks: cube root for a gated MLP, else square root."""
    for model, factor in zip(("llama", "gpt2"), factors):
        args = parse_args([*Layout(model=model).words(), "--num-experts", "8", *words.split()])
        assert scales(args)["linear_fc1.weight"] == scales(args)["linear_fc2.weight"] == pytest.approx(factor, abs=1e-4)


def test_upcycling_is_done_once_and_from_a_dense_model(world, tmp_path, dense_of) -> None:
    folder, dense = tmp_path / "save", dense_of(LLAMA)
    upcycled(world, Layout(model="llama"), dense, folder)
    with pytest.raises(RankFailure, match="holds a checkpoint"):
        upcycled(world, Layout(model="llama"), dense, folder)
    with pytest.raises(RankFailure, match="has 8 experts"):
        upcycled(world, Layout(model="llama"), folder, tmp_path / "again")
    with pytest.raises(RankFailure, match="MLP of width 96"):
        upcycled(world, Layout(model="llama"), dense, tmp_path / "x", "--moe-ffn-hidden-size", "40")


def test_c102_the_kind_of_softmax_is_stored_and_must_agree(world, tmp_path) -> None:
    """C102: weights trained with the one mean something else with the other; no tensor's shape tells."""
    words = [
        "--train-iters",
        "1",
        "--lr-warmup-iters",
        "0",
        "--save-interval",
        "9",
        "--save",
        str(tmp_path),
        "--load",
        str(tmp_path),
    ]
    printed = world(1).run(whole_run, Layout(model="mixtral"), [*words, "--moe-router-pre-softmax"])
    assert re.search(r"moe_router_pre_softmax \.+ True", printed[0])
    with pytest.raises(RankFailure, match="moe_router_pre_softmax: True there, False here"):
        world(1).run(whole_run, Layout(model="mixtral"), words)
