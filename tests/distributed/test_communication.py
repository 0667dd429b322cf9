"""Counted bytes are the textbook's, exactly: what a layout costs can be computed before it is run.

Formulas (elements that each rank sends; x(n) = (n - 1) / n; s, b, h sequence, micro-batch, hidden; v vocabulary):

    tensor parallel        4 all-reduces a layer: 2 forward, 2 backward                        8 x(t) s b h
    + sequence parallel    4 all-gathers or reduce-scatters forward, 6 backward                10 x(t) s b h
    data parallel          an all-reduce of the N parameters a rank holds, a step              2 x(d) N
    tied embedding         an all-reduce over first and last stage, a step                     2 x(2) v / t h
    recomputed layer       its forward once more
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import timedelta
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist

from megatron_lite import collectives
from megatron_lite.collectives import sent_bytes
from megatron_lite.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron_lite.errors import PeerLost
from megatron_lite.models.gpt import GPTModel, get_gpt_layer_local_spec
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.training.record import RankRecord
from megatron_lite.transformer import TransformerConfig
from tests.distributed.layouts import Layout, run

FP32 = 4
S, B, H = 16, 2, 32  # of `layouts.MODELS`


def record(world, layout: Layout, layers: int = 2) -> list[RankRecord]:
    """The ranks' records of one step of a row with another number of layers."""
    words = (*layout.flags, "--num-layers", str(layers))
    return world(layout.world_size).run(run, replace(layout, flags=words), 1)


def sent(rank: RankRecord) -> Counter[tuple[str, str]]:
    """(group, purpose) -> elements that the rank sent in its last step."""
    elements: Counter[tuple[str, str]] = Counter()
    for (group, kind, purpose), (_, size) in rank.traffic[-1].items():
        share = sent_bytes(kind, size, rank.group_sizes[group]) / FP32
        assert share == int(share), (group, kind, purpose, size)
        elements[group, purpose] += int(share)
    return elements


def calls(rank: RankRecord, kind: str, purpose: str) -> int:
    """How often the last step made a call."""
    return sum(n for (_, k, p), (n, _) in rank.traffic[-1].items() if (k, p) == (kind, purpose))


def of_one_layer(world, layout: Layout) -> dict[str, Fraction]:
    """Elements that a layer adds to a step, by micro-batch, over the tensor-parallel group."""
    two, one = (sent(record(world, layout, layers)[0]) for layers in (2, 1))
    microbatches = 8 // (layout.micro_batch_size * layout.dp)
    added = {purpose: two["tp", purpose] - one["tp", purpose] for group, purpose in two if group == "tp"}
    of_step = "non-tensor-parallel gradients"  # once a step, not once a micro-batch
    return {p: Fraction(n, 1 if p == of_step else microbatches) for p, n in added.items() if n}


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_a_tensor_parallel_layer_sends_8_sbh(world, tp, model):
    added = of_one_layer(world, Layout(model=model, tp=tp))
    x = Fraction(tp - 1, tp)
    assert added == {"reduce_from forward": 4 * x * S * B * H, "column backward": 4 * x * S * B * H}
    assert sum(added.values()) == 8 * x * S * B * H


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_a_sequence_parallel_layer_sends_10_sbh_and_its_norms_gradients(world, model):
    """2 of the 10 are inputs gathered again in backward; norms and row-parallel biases are summed once a step."""
    added = of_one_layer(world, Layout(model=model, tp=2, sp=True))
    x = Fraction(1, 2)
    replicated = {"gpt2": 2 * 2 * H + 2 * H, "llama": 2 * H}[model]
    assert added.pop("non-tensor-parallel gradients") == 2 * x * replicated
    assert added == {
        name: 2 * x * S * B * H
        for name in (
            "column forward",
            "reduce_scatter_to_sequence forward",
            "column re-gather",
            "column backward",
            "reduce_scatter_to_sequence backward",
        )
    }
    assert sum(added.values()) == 10 * x * S * B * H


def test_the_worked_example_of_128_and_160_elements(world):
    """s = 4, b = 1, h = 8, t = 2."""
    shape = "--seq-length 4 --max-position-embeddings 4 --hidden-size 8 --num-attention-heads 2".split()
    for sp, want in ((False, 128), (True, 160)):
        added = of_one_layer(world, Layout(tp=2, sp=sp, micro_batch_size=1, flags=tuple(shape)))
        added.pop("non-tensor-parallel gradients", None)
        assert sum(added.values()) == want


@pytest.mark.parametrize(("recompute", "more"), [("selective", 0), ("full", 2)])
def test_recomputing_a_layer_repeats_its_forward_messages(world, recompute, more):
    """Full recomputation: 6 all-reduces a layer instead of 4. Attention's core holds none."""
    plain = of_one_layer(world, Layout(tp=2))
    again = of_one_layer(world, Layout(tp=2, recompute=recompute))
    assert sum(again.values()) - sum(plain.values()) == more * Fraction(2, 2) * S * B * H


def test_outside_of_layers_embedding_output_and_loss(world):
    """One all-reduce each of the embedding's output and of the output layer's input gradient; three numbers a token
    for the loss."""
    rank = record(world, Layout(tp=2))[0]
    layers, microbatches, x = 2, 4, Fraction(1, 2)
    elements = sent(rank)
    assert elements["tp", "reduce_from forward"] == microbatches * (2 * layers + 1) * 2 * x * S * B * H
    assert elements["tp", "column backward"] == microbatches * (2 * layers + 1) * 2 * x * S * B * H
    assert elements["tp", "cross entropy"] == microbatches * 2 * x * 3 * S * B
    assert calls(rank, "all_reduce", "cross entropy") == 2 * microbatches
    assert calls(rank, "all_reduce", "gradient norm") == 1


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (4, 1), (2, 2)])
def test_data_parallel_ranks_send_2_x_n(world, dp, tp):
    """N counts what the rank holds: its share of split weights."""
    layout = Layout(dp=dp, tp=tp, micro_batch_size=1)
    for rank in record(world, layout):
        held = sum(tensor.numel() for _, tensor in rank.first_weights)
        assert sent(rank)["dp_cp", "gradients"] == 2 * Fraction(dp - 1, dp) * held
        assert calls(rank, "all_reduce", "gradients") == 1


def test_buckets_send_what_one_message_would(world):
    rank = record(world, Layout(dp=2, overlap_grad_reduce=True, bucket_size=5000))[0]
    held = sum(tensor.numel() for _, tensor in rank.first_weights)
    assert calls(rank, "all_reduce", "gradients") > 1
    assert sent(rank)["dp_cp", "gradients"] == held


def test_a_worked_number_of_parameters():
    """N = 1000 on 4 ranks: 1500 elements by all-reduce, or 750 and 750 by reduce-scatter and all-gather."""
    assert sent_bytes("all_reduce", 1000, 4) == 1500
    assert sent_bytes("reduce_scatter", 1000, 4) == sent_bytes("all_gather", 1000, 4) == 750
    assert sent_bytes("all_to_all", 1000, 4) == 750


def _tied_stages() -> tuple[dict, int]:
    """First and last stage of a tied GPT, one on each rank: what the end of a step moves, and the weight's size."""
    groups = ProcessGroupCollection(pp=dist.group.WORLD, embd=dist.group.WORLD, mp=dist.group.WORLD)
    collectives.name_group(groups.pp, "embd")
    config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, pipeline_model_parallel_size=2)
    first = dist.get_rank() == 0
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        64,
        16,
        pre_process=first,
        post_process=not first,
        share_embeddings_and_output_weights=True,
        pg_collection=groups,
    )
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), model, pg_collection=groups)
    ddp.zero_grad_buffer()
    weight = model.shared_embedding_or_output_weight()
    weight.main_grad.fill_(dist.get_rank() + 1.0)
    collectives.COUNTERS.clear()
    finalize_model_grads([ddp], pg_collection=groups)
    assert torch.equal(weight.main_grad, torch.full_like(weight.main_grad, 3.0))
    return collectives.counts(), weight.numel()


def test_a_tied_embedding_is_summed_once_a_step_over_first_and_last_stage(world):
    for traffic, numel in world(2).run(_tied_stages):
        assert traffic == {("embd", "all_reduce", "shared embedding gradients"): (1, FP32 * numel)}
        assert numel == 64 * 8 and sent_bytes("all_reduce", FP32 * numel, 2) == FP32 * numel


# -- a call that fails says which one it was ---------------------------------------------------------------------


def _wait_for_nobody() -> str:
    """Rank 0 asks for a sum that rank 1 never joins."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    collectives.name_group(group, "dp_cp")
    told = "rank 1 has better things to do"
    if dist.get_rank() == 0:
        try:
            collectives.all_reduce(torch.ones(5000), group, purpose="gradients")
        except PeerLost as error:
            told = str(error)
    dist.barrier()
    return told


def test_a_hung_collective_names_rank_group_and_purpose(world):
    """ "Timed out" alone tells nobody which of a hundred messages it was."""
    told = world(2).run(_wait_for_nobody)[0]
    assert told.startswith("rank 0: all_reduce for gradients over the group dp_cp (ranks 0, 1) failed: ")
    assert "--distributed-timeout-minutes" in told
