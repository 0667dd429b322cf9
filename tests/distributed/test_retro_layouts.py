"""Retro under tensor, sequence and data parallelism and a sharded optimizer, against one process: losses, gradients,
norms, weights after five steps. Checkpoints cross layouts, resume to the bit, and take a GPT's weights."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

import pytest
import torch

from megatron_lite import parallel_state
from megatron_lite.cli.retro import main as retro
from megatron_lite.models.retro import RetroConfig, RetroModel, get_retro_decoder_block_spec
from megatron_lite.tensor_parallel import model_parallel_cuda_manual_seed
from megatron_lite.training.layout_check import table
from tests.distributed.layouts import CACHE, CORPUS, Layout, Matrix


@pytest.fixture(scope="module")
def matrix(world) -> Matrix:
    """With the project that the rows train on."""
    words = f"""preprocess --retro-project-dir {CACHE / "retro"} --retro-gpt-data-path {CORPUS}
        --retro-gpt-data-cache-path {CACHE} --retro-gpt-tokenizer-type NullTokenizer --retro-gpt-vocab-size 511
        --retro-gpt-seq-length 16 --retro-gpt-chunk-length 4 --retro-gpt-split 1,0,0 --retro-gpt-train-samples 40
        --retro-gpt-global-batch-size 8 --retro-gpt-eval-interval 5 --retro-gpt-eval-iters 0 --retro-embedder-dim 64
        --retro-query-num-neighbors-query 50 --retro-query-num-neighbors-save 3 --workers 1"""
    with redirect_stdout(io.StringIO()):
        assert retro(words.split()) == 0
    return Matrix(world)


ROWS = [
    Layout(model="retro", tp=2),
    Layout(model="retro", tp=2, sp=True),
    Layout(model="retro", dp=2, distributed_optimizer=True),
    Layout(model="retro", tp=2, sp=True, dp=2, distributed_optimizer=True, overlap_grad_reduce=True),
    Layout(model="retro", tp=2, dp=2, recompute="full"),
    Layout(model="retro", dp=2, split=("--use-torch-fsdp2",)),  # an encoder inside of a layer: units in a unit
]


@pytest.mark.parametrize("layout", ROWS, ids=str)
def test_a_layout_trains_what_one_process_trains(matrix, layout):
    rows = matrix.check(layout)
    assert all(row.is_ok for row in rows), table(rows)


# -- dropout between shards --------------------------------------------------------------------------------------------
def _dropped(sequence_parallel: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
    """A step with dropout under tp 2: (gradients of what both ranks hold whole in the encoder, logits)."""
    parallel_state.initialize_model_parallel(2)
    try:
        torch.manual_seed(3)
        model_parallel_cuda_manual_seed(7, force_reset_rng=True)
        config = RetroConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            retro_layers=[1, 2],
            retro_chunk_length=4,
            tensor_model_parallel_size=2,
            sequence_parallel=sequence_parallel,
            attention_dropout=0.0,
        )
        model = RetroModel(config, get_retro_decoder_block_spec(config), 64, 16, parallel_output=False)
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, 64, (2, 8), generator=generator)
        neighbors = torch.randint(0, 64, (2 * 2 * 2, 8), generator=generator)
        logits = model(tokens, torch.arange(8).expand(2, 8), None, neighbors)
        logits.square().mean().backward()
        encoder = model.decoder.layers[0].cross_attention.encoder
        whole = [p.grad for n, p in encoder.named_parameters() if "layernorm" in n or "linear_proj.bias" in n]
        return whole, logits.detach()
    finally:
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ranks_of_a_tensor_parallel_group_drop_the_same_of_what_they_hold_alike(world, sequence_parallel):
    """Between shards of the sequence the encoder is replicated: other masks on each rank would tear it apart."""
    (first, logits), (second, other) = world(2).run(_dropped, sequence_parallel)
    assert torch.equal(logits, other) and len(first) > 5
    assert all(torch.equal(a, b) for a, b in zip(first, second)) and any(g.abs().sum() > 0 for g in first)
