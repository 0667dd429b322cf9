"""Promise 1 for an encoder and its decoder: wherever the row of both is cut, training is that of one process.

cut         inside the encoder    at its end         inside the decoder
layout      Et|tttL               Ett|ttL            Ettt|tL               2 encoder and 2 decoder layers
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from megatron_lite.collectives import sent_bytes
from megatron_lite.models.T5 import T5Model
from megatron_lite.training.layout_check import compare, table
from megatron_lite.training.record import RankRecord, joined, record_rank
from tests.distributed.layouts import Layout, Matrix, run

pytestmark = pytest.mark.slow

S_E, S_D, B, H, FP32 = 32, 16, 2, 32, 4  # of `layouts.MODELS`


def cut(text: str) -> tuple[str, str]:
    return "--pipeline-model-parallel-layout", text


IN_ENCODER, IN_DECODER = cut("Et|tttL"), cut("Ettt|tL")
AT_END = ("--pipeline-model-parallel-split-rank", "1")
ZERO_BUBBLE = ("--delay-wgrad-compute",)
SHARDED = {"dp": 2, "distributed_optimizer": True}
OVERLAPPED = {**SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 3000}

# Of tensor parallel x sequence parallel x cut x chunks x data parallel x distributed optimizer a subset in which every
# two values meet that can; the whole table holds as well.
ROWS = [
    Layout(model="t5", tp=2, recompute="selective"),
    Layout(model="t5-rope", tp=2, sp=True, **SHARDED),
    Layout(model="t5", pp=2, split=IN_ENCODER, recompute="full"),
    Layout(model="t5", pp=2, split=(*IN_DECODER, *ZERO_BUBBLE), per_token_loss=True),
    Layout(model="t5-rope", pp=2, split=AT_END, **OVERLAPPED),
    Layout(model="t5", pp=2, vpp=2, tp=2, sp=True),
    Layout(model="t5", pp=2, vpp=2, **OVERLAPPED),
    Layout(model="t5", pp=4, split=ZERO_BUBBLE),
    Layout(model="t5-rope", pp=2, tp=2, split=IN_DECODER, dp=2),
]


@pytest.fixture(scope="module")
def matrix(world) -> Matrix:
    """Rows on the session's worlds; references live as long as this module's tests."""
    return Matrix(world)


@pytest.mark.parametrize("layout", ROWS, ids=str)
def test_c128_encoder_and_decoder_train_as_one_process(matrix, layout):
    """C128 (T5 under some tensor-parallel sizes only), and all numbers within 1e-5."""
    rows = matrix.check(layout, 3)
    assert all(row.is_ok for row in rows), f"{layout}\n{table(rows)}"


def _without_the_gradient_of_later_stages(args: Namespace, script: str, steps: int) -> RankRecord:
    """Stages hand on the encoder's output without a way back for the gradients of the decoder layers behind."""
    forward = T5Model.forward

    def broken(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        if isinstance(out, list) and self.decoder is not None:
            out[0] = out[0].detach()
        return out

    T5Model.forward = broken
    try:
        return record_rank(args, script, steps)
    finally:
        T5Model.forward = forward


def test_a_lost_gradient_of_the_encoders_output_is_noticed(matrix, world):
    """The sum over all decoder layers is what the encoder learns from."""
    layout = Layout(model="t5", pp=2, split=IN_DECODER)
    broken = joined(world(2).run(run, layout, 1, _without_the_gradient_of_later_stages))
    rows = {row.what: row for row in compare(matrix.record(layout.reference, 1), broken, _fp32())}
    assert rows["losses"].is_ok and not rows["gradients"].is_ok


def _fp32():
    from megatron_lite.training.layout_check import TOLERANCE

    return TOLERANCE["fp32"]


def _sent(rank: RankRecord) -> Counter[str]:
    """Elements that a rank sent in its last step, by purpose."""
    elements: Counter[str] = Counter()
    for (group, kind, purpose), (_, size) in rank.traffic[-1].items():
        elements[purpose] += int(sent_bytes(kind, size, rank.group_sizes[group]) / FP32)
    return elements


@pytest.mark.parametrize("tp, sp", [(1, False), (2, True)])
def test_stages_send_the_encoders_and_the_decoders_stream_and_nothing_else(world, tp, sp):
    """(s_e + s_d) b h a micro-batch each way, cut by sequence parallelism; the tables of relative positions once."""
    ranks = world(2 * tp).run(run, Layout(model="t5", pp=2, tp=tp, sp=sp, split=IN_DECODER), 1)
    microbatches = 8 // B
    stream = microbatches * (S_E + S_D) * B * H // (tp if sp else 1)
    first, last = _sent(ranks[0]), _sent(ranks[-1])
    assert first["activations"] == last["gradients of activations"] == stream
    assert not first["gradients of activations"] and not last["activations"]
    tables = 2 * 32 * 8  # buckets, heads
    assert first["gradients of copies on stages"] == last["gradients of copies on stages"] == tables


# -- checkpoints -------------------------------------------------------------------------------------------------


def _train(layout: Layout, words: tuple[str, ...], steps: int) -> list[dict[str, float]]:
    """Some steps of the loop itself, with its saving and loading. Returns: the losses that this rank logged."""
    from megatron_lite.enums import ModelType
    from megatron_lite.training import training
    from megatron_lite.training.arguments import parse_args, validate_args
    from megatron_lite.training.families import defaults_of
    from megatron_lite.training.record import _forget_run, load_script
    from tests.distributed.layouts import MODELS

    seen: list[dict[str, float]] = []
    step = training.train_step

    def noted(*args, **kwargs):
        result = step(*args, **kwargs)
        seen.append(result.losses)
        return result

    script = load_script(MODELS[layout.model].script)
    training.train_step = noted
    try:
        with redirect_stdout(StringIO()):
            args = parse_args([*layout.words(), *words], args_defaults=defaults_of("t5"))
            validate_args(args, layout.world_size)
            training.start(args)
            training.run(
                args,
                script.train_valid_test_datasets_provider,
                script.model_provider,
                ModelType.encoder_or_decoder,
                script.forward_step,
            )
    except SystemExit:  # --exit-interval
        pass
    finally:
        training.train_step = step
        _forget_run()
    assert len(seen) == steps, len(seen)
    return seen


@pytest.mark.parametrize(
    "saving, loading",
    [
        (Layout(model="t5", pp=2, split=IN_ENCODER, **SHARDED), Layout(model="t5", pp=2, vpp=2, tp=2)),
        (Layout(model="t5", tp=2, sp=True), Layout(model="t5", pp=2, split=IN_DECODER)),
    ],
    ids=str,
)
def test_a_checkpoint_of_one_cut_goes_on_under_another(world, tmp_path: Path, saving, loading):
    """Two steps, then three more elsewhere: the losses of five steps in one process."""
    same = ("--make-vocab-size-divisible-by", "128")  # 502 tokens make 512 under each of them
    save = (*same, "--save", str(tmp_path), "--save-interval", "100", "--exit-interval", "2")
    first = world(saving.world_size).run(_train, saving, save, 2)
    more = (*same, "--load", str(tmp_path), "--no-load-rng")
    rest = world(loading.world_size).run(_train, loading, more, 3)
    whole = world(1).run(_train, saving.reference, same, 5)[0]
    losses = [step["lm loss"] for ranks in (first, rest) for step in max(ranks, key=lambda steps: len(steps[0]))]
    assert losses == pytest.approx([step["lm loss"] for step in whole], rel=1e-5)


def test_a_resume_is_bit_for_bit_the_run_that_never_stopped(world, tmp_path: Path):
    """With dropout: weights, moments, random numbers and the place in the data all come back."""
    layout = Layout(model="t5", pp=2, split=IN_ENCODER)
    dropout = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
    whole = world(2).run(_train, layout, dropout, 5)
    saved = (*dropout, "--save", str(tmp_path), "--save-interval", "100")
    world(2).run(_train, layout, (*saved, "--exit-interval", "2"), 2)
    rest = world(2).run(_train, layout, (*dropout, "--load", str(tmp_path)), 3)
    assert whole[-1][2:] == rest[-1] and whole[-1][0] != whole[-1][1]
