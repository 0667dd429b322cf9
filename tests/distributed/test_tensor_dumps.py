"""Tensors of a step in files, and the largest score of attention: the same under every layout, and right in one.

Runs are whole ones (`training.run`), on the session's worlds.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.errors import DataError
from megatron_lite.training.layout_check import TOLERANCE, _tensors
from megatron_lite.training.tensor_dumps import read_dump
from tests.distributed.layouts import Layout
from tests.distributed.test_expert_log import whole_run
from tests.e2e.launch import checkpoint_tensors

KINDS = ("params", "wgrads", "activations", "dgrads")
WORDS = """--train-iters 3 --lr-warmup-iters 0 --log-interval 1 --save-interval 2 --log-max-attention-logit
    --save-params-interval 2 --save-wgrads-interval 2 --save-activations-interval 2 --save-dgrads-interval 2""".split()
ROWS = [
    Layout(model="llama", tp=2, sp=True, pp=2, recompute="full"),
    Layout(model="llama", tp=2, dp=2, distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True),
    Layout(model="gpt2", cp=2, tp=2, sp=True),
    Layout(model="gpt2", cp=2, dp=2, exchange=("a2a",), micro_batch_size=1),
    Layout(model="mixtral", ep=2, dp=2, distributed_optimizer=True),
    Layout(model="further", pp=2),
    Layout(model="latent", cp=2, recompute="selective"),
    Layout(model="gpt2", pp=2, vpp=2, flags=("--num-layers", "4"), per_token_loss=True),
    Layout(model="t5", tp=2, sp=True),
    Layout(model="bert", cp=2),
    Layout(model="llama", dp=2, split=("--use-torch-fsdp2",)),
]


@pytest.fixture(scope="module")
def dumped(world, tmp_path_factory):
    """Layout -> its run's save folder."""

    @functools.cache
    def run(layout: Layout) -> Path:
        folder = tmp_path_factory.mktemp("dumps")
        world(layout.world_size).run(whole_run, layout, [*WORDS, "--save", str(folder)])
        return folder

    return run


def read(save: Path, kind: str) -> dict[str, torch.Tensor]:
    return read_dump(save / kind / "iter_0000002")


def logits(save: Path) -> list[float]:
    rows = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    return [row["max_attention_logit"] for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ROWS, ids=str)
def test_every_layout_dumps_the_tensors_of_one_process(dumped, layout):
    """A part under a wrong name or at a wrong place, a gradient of one rank's samples only, a scaled one."""
    here, alone = dumped(layout), dumped(layout.reference)
    for kind in KINDS:
        deviation = _tensors(kind, [read(alone, kind)], [read(here, kind)], TOLERANCE["fp32"].weights)
        assert deviation.is_ok, deviation
    assert logits(here) == pytest.approx(logits(alone), rel=1e-5)


def test_parameters_are_those_of_the_checkpoint_and_gradients_are_theirs(dumped):
    """Against the checkpoint of the same iteration; and plain SGD is what the gradients say."""
    save = dumped(Layout(model="llama"))
    saved = checkpoint_tensors(save, 2)
    params = read(save, "params")
    assert len(params) > 10
    for name, tensor in params.items():
        assert torch.equal(tensor, saved[name].float()), name
    assert {*read(save, "wgrads")} == {*params}


def test_activations_and_their_gradients_are_those_of_every_part(dumped):
    """What a layer adds to its input is in its attention and its MLP (no biases in this model)."""
    save = dumped(Layout(model="llama"))
    values, grads = read(save, "activations"), read(save, "dgrads")
    parts = {f"decoder.layers.{i}{part}" for i in (0, 1) for part in ("", ".self_attention", ".mlp")}
    assert {*values} == {*grads} == {"decoder.input", "decoder.final_layernorm", *parts}
    assert values["decoder.input"].shape == (16, 8, 32)  # of all samples of the batch
    for layer, before in (("decoder.layers.0", "decoder.input"), ("decoder.layers.1", "decoder.layers.0")):
        total = values[before] + values[f"{layer}.self_attention"] + values[f"{layer}.mlp"]
        torch.testing.assert_close(total, values[layer], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(grads[f"{layer}.mlp"], grads[layer], rtol=1e-6, atol=1e-9)
    # The gradient of a norm's weight is that of its output times the normed input, over all tokens of the batch.
    x, g = values["decoder.layers.1"], grads["decoder.final_layernorm"]
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    expected = (g * normed).sum((0, 1))
    torch.testing.assert_close(read(save, "wgrads")["decoder.final_layernorm.weight"], expected, rtol=1e-4, atol=1e-6)


def test_a_dump_of_which_files_are_missing_is_no_dump(dumped, tmp_path):
    """Zeros in their place would look like values."""
    with pytest.raises(DataError, match="holds no dump"):
        read_dump(tmp_path)
    parts: dict[str, Any] = {"iteration": 2, "parts": []}
    torch.save(parts, tmp_path / "rank_00000_of_00002.pt")
    with pytest.raises(DataError, match="1 of 2 ranks"):
        read_dump(tmp_path)


def test_steps_in_between_write_nothing(dumped):
    save = dumped(Layout(model="llama"))
    for kind in KINDS:
        assert [path.name for path in (save / kind).iterdir()] == ["iter_0000002"]


def test_a_frozen_run_dumps_its_activations(world, tmp_path):
    """Its passes are without gradients, as those of layers that will be recomputed, which do not count."""
    words = "--train-iters 2 --lr-warmup-iters 0 --save-interval 2 --save-activations-interval 2".split()
    world(1).run(whole_run, Layout(model="llama"), [*words, "--freeze-all-layers", "--save", str(tmp_path)])
    assert "decoder.layers.1.mlp" in read(tmp_path, "activations")
