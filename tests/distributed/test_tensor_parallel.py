"""Two ranks that split layers, against one process that holds all of them."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_lite import collectives
from megatron_lite.errors import DataError
from megatron_lite.initialization import Normal, fill
from megatron_lite.model_parallel_config import ModelParallelConfig
from megatron_lite.models.gpt import GPTModel, get_gpt_layer_local_spec
from megatron_lite.process_groups_config import ProcessGroupCollection, register_process_groups
from megatron_lite.sharding import whole
from megatron_lite.tensor_parallel import (
    VocabParallelEmbedding,
    all_gather_last_dim_from_tensor_parallel_region,
    all_to_all_hp2sp,
    all_to_all_sp2hp,
    broadcast_data,
    checkpoint,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_last_dim_to_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
    vocab_parallel_cross_entropy,
)
from megatron_lite.training.batch import get_batch, skip_batch
from megatron_lite.transformer import TransformerConfig


def as_tensor_parallel() -> int:
    register_process_groups(ProcessGroupCollection(tp=dist.group.WORLD))
    return dist.get_rank()


def operators() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(output, input gradient) of every operator; the input is rank + 0..7, the gradient rank-dependent too."""
    rank = as_tensor_parallel()
    results = {}
    for name, operator in {
        "copy": copy_to_tensor_model_parallel_region,
        "reduce": reduce_from_tensor_model_parallel_region,
        "scatter": scatter_to_tensor_model_parallel_region,
        "gather": gather_from_tensor_model_parallel_region,
        "scatter_sp": scatter_to_sequence_parallel_region,
        "gather_sp": gather_from_sequence_parallel_region,
        "gather_sp_same": lambda x: gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False),
        "reduce_scatter_sp": reduce_scatter_to_sequence_parallel_region,
    }.items():
        x = (torch.arange(8.0).view(2, 4) + 10 * rank).requires_grad_()
        y = operator(x)
        g = torch.arange(float(y.numel())).view(y.shape) + 100 * rank
        results[name] = (y.detach(), torch.autograd.grad(y, x, g)[0])
    return results


def test_every_operator_and_its_adjoint(world):
    """A forward that is right with a backward that is not trains the wrong model quietly."""
    a, b = world(2).run(operators)
    x = [torch.arange(8.0).view(2, 4) + 10 * rank for rank in (0, 1)]
    for rank, result in enumerate((a, b)):
        own = slice(2 * rank, 2 * rank + 2)
        g = {name: torch.arange(float(y.numel())).view(y.shape) for name, (y, _) in result.items()}
        both = {name: [value, value + 100] for name, value in g.items()}
        want = {
            "copy": (x[rank], sum(both["copy"])),
            "reduce": (x[0] + x[1], both["reduce"][rank]),
            "scatter": (x[rank][:, own], torch.cat(both["scatter"], 1)),
            "gather": (torch.cat(x, 1), both["gather"][rank][:, 4 * rank : 4 * rank + 4]),
            "scatter_sp": (x[rank][rank : rank + 1], torch.cat(both["scatter_sp"])),
            "gather_sp": (torch.cat(x), sum(both["gather_sp"])[own]),
            "gather_sp_same": (torch.cat(x), both["gather_sp_same"][rank][own]),
            "reduce_scatter_sp": ((x[0] + x[1])[rank : rank + 1], torch.cat(both["reduce_scatter_sp"])),
        }
        for name, (y, grad) in want.items():
            assert torch.equal(result[name][0], y), name
            assert torch.equal(result[name][1], grad), f"backward of {name}"


def uneven_and_exchanged():
    """(output, input gradient): rank 0 holds one row, rank 1 three; and the operators that exchange."""
    rank = as_tensor_parallel()
    results = {}
    rows = 1 + 2 * rank
    for name, operator, shape in (
        ("gather", lambda x: gather_from_sequence_parallel_region(x, output_split_sizes=[1, 3]), (rows, 2)),
        ("gather_same", lambda x: gather_from_sequence_parallel_region(x, False, output_split_sizes=[1, 3]), (rows, 2)),
        ("reduce", lambda x: reduce_scatter_to_sequence_parallel_region(x, input_split_sizes=[1, 3]), (4, 2)),
        ("gather_last", all_gather_last_dim_from_tensor_parallel_region, (2, 3)),
        ("reduce_last", reduce_scatter_last_dim_to_tensor_parallel_region, (2, 4)),
        ("sp2hp", all_to_all_sp2hp, (2, 4)),
        ("hp2sp", all_to_all_hp2sp, (4, 2)),
    ):
        x = (torch.arange(float(shape[0] * shape[1])).view(shape) + 10 * rank).requires_grad_()
        y = operator(x)
        g = torch.arange(float(y.numel())).view(y.shape) + 100 * rank
        results[name] = (x.detach(), y.detach(), g, torch.autograd.grad(y, x, g)[0])
    return results


def test_uneven_rows_and_exchanges_and_their_adjoints(world):
    """Rows that land in another rank's place, or gradients that are not summed, show here."""
    ranks = world(2).run(uneven_and_exchanged)
    x, y, g, dx = ({name: [r[name][i] for r in ranks] for name in ranks[0]} for i in range(4))
    for rank in (0, 1):
        rows, half = slice(rank, 1 + 3 * rank), slice(2 * rank, 2 * rank + 2)
        want = {
            "gather": (torch.cat(x["gather"]), sum(g["gather"])[rows]),
            "gather_same": (torch.cat(x["gather_same"]), g["gather_same"][rank][rows]),
            "reduce": (sum(x["reduce"])[rows], torch.cat(g["reduce"])),
            "gather_last": (torch.cat(x["gather_last"], 1), sum(g["gather_last"])[:, 3 * rank : 3 * rank + 3]),
            "reduce_last": (sum(x["reduce_last"])[:, half], torch.cat(g["reduce_last"], 1)),
            "sp2hp": (torch.cat(x["sp2hp"])[:, half], torch.cat(g["sp2hp"], 1)[half]),
            "hp2sp": (torch.cat(x["hp2sp"], 1)[half], torch.cat(g["hp2sp"])[:, half]),
        }
        for name, (output, grad) in want.items():
            assert torch.equal(y[name][rank], output), name
            assert torch.equal(dx[name][rank], grad), f"backward of {name}"


def losses(dtype: torch.dtype, smoothing: float):
    rank = as_tensor_parallel()
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(5, 3, 16, generator=generator) * 3).to(dtype)
    target = torch.randint(0, 16, (5, 3), generator=generator)
    mine = logits.chunk(2, -1)[rank].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(mine, target, smoothing)
    weight = torch.rand(5, 3, generator=generator)
    return loss.detach(), torch.autograd.grad(loss, mine, weight)[0], logits, target, weight


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_split_cross_entropy_equals_torchs(world, smoothing):
    """Smoothing over one rank's share alone would differ from rank to rank."""
    results = world(2).run(losses, torch.float32, smoothing)
    _, _, logits, target, weight = results[0]
    logits.requires_grad_()
    want = F.cross_entropy(logits.view(-1, 16), target.view(-1), label_smoothing=smoothing * 16 / 15, reduction="none")
    for loss, *_ in results:
        torch.testing.assert_close(loss.view(-1), want, atol=1e-5, rtol=1e-5)
    grad = torch.autograd.grad(want.view(5, 3), logits, weight)[0]
    torch.testing.assert_close(torch.cat([r[1] for r in results], -1), grad, atol=1e-6, rtol=1e-5)


def look_up(scattered: bool):
    as_tensor_parallel()
    config = ModelParallelConfig(sequence_parallel=scattered, tensor_model_parallel_size=2)
    table = VocabParallelEmbedding(8, 4, init_method=Normal(1.0), reduce_scatter_embeddings=scattered, config=config)
    ids = torch.tensor([[0, 7, 3, 4], [7, 7, 1, 5]])
    y = table(ids)
    y.sum().backward()
    return y.detach(), table.weight.grad, table.weight.detach()


@pytest.mark.parametrize("scattered", [False, True])
def test_split_embedding_equals_the_whole_table(world, scattered):
    a, b = world(2).run(look_up, scattered)
    full = torch.empty(8, 4)
    fill(full, whole("weight", (8, 4)), Normal(1.0), torch.initial_seed())
    ids = torch.tensor([[0, 7, 3, 4], [7, 7, 1, 5]])
    assert a[2].shape == (4, 4)
    table = torch.cat([a[2], b[2]])
    want = table[ids.t()] if scattered else table[ids]
    got = torch.cat([a[0], b[0]]) if scattered else a[0]
    assert torch.equal(got, want)
    assert torch.equal(torch.cat([a[1], b[1]])[:, 0], torch.bincount(ids.view(-1), minlength=8).float())


MODEL = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.2,
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "ffn_hidden_size": 48,
}


def train_step(size: int, sequence_parallel: bool, fused: bool, learned: bool, more: dict | None = None):
    """Loss and every gradient, as (shard, tensor) by global name.

    Args:
        more: other fields of the config.
    """
    if size > 1:
        as_tensor_parallel()
    torch.manual_seed(5)
    config = TransformerConfig(
        **MODEL,
        tensor_model_parallel_size=size,
        sequence_parallel=sequence_parallel,
        gradient_accumulation_fusion=fused,
        **(more or {}),
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        64,
        16,
        position_embedding_type="learned_absolute" if learned else "rope",
        share_embeddings_and_output_weights=learned,
    )
    if fused:
        for param in model.parameters():
            param.main_grad = torch.zeros_like(param)
    tokens = torch.randint(0, 64, (2, 13), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(12).expand(2, -1)
    loss = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
    loss.mean().backward()
    grads = {}
    for param in model.parameters():
        grad = param.grad if param.grad is not None else param.main_grad
        if sequence_parallel and getattr(param, "sequence_parallel", False):
            collectives.all_reduce(grad, dist.group.WORLD, purpose="test")  # as finalize_model_grads does
        grads[param.shard.name] = (param.shard, grad)
    if learned and sequence_parallel:
        table = grads["embedding.position_embeddings.weight"][1]
        assert table.shape == (16, 32)
    return loss.detach(), grads, {p.shard.name: (p.shard, p.detach()) for p in model.parameters()}


def joined(results, which):
    """Global tensors out of both ranks' pieces."""
    tensors = {}
    for result in results:
        for name, (shard, local) in result[which].items():
            full = tensors.setdefault(name, torch.full(shard.global_shape, torch.nan))
            for piece in shard.pieces:
                full[piece.global_slices()] = local[piece.local_slices()]
    return tensors


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize(("sequence_parallel", "fused"), [(False, False), (False, True), (True, False), (True, True)])
def test_a_split_gpt_equals_the_whole_one(world, sequence_parallel, fused, learned):
    """Same weights bit by bit at the start, then the same loss and the same gradient of every weight."""
    split = world(2).run(train_step, 2, sequence_parallel, fused, learned)
    alone = [train_step(1, False, False, learned)]
    for name, want in joined(alone, 2).items():
        assert torch.equal(joined(split, 2)[name], want), f"{name} starts differently"
    for loss, *_ in split:
        torch.testing.assert_close(loss, alone[0][0], atol=1e-5, rtol=1e-5)
    got = joined(split, 1)
    for name, want in joined(alone, 1).items():
        assert want.abs().max() > 0
        torch.testing.assert_close(got[name], want, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def dropped_activations(recompute: bool, sequence_parallel: bool = True):
    """Loss and gradients with dropout, and the next draws inside and outside of the ranks' own region."""
    as_tensor_parallel()
    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(99)
    more = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    config = TransformerConfig(
        **{**MODEL, "hidden_dropout": 0.3, "attention_dropout": 0.3},
        tensor_model_parallel_size=2,
        sequence_parallel=sequence_parallel,
        **(more if recompute else {}),
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), 64, 16)
    tokens = torch.randint(0, 64, (2, 13), generator=torch.Generator().manual_seed(0))
    loss = model(tokens[:, :-1], torch.arange(12).expand(2, -1), None, labels=tokens[:, 1:])
    loss.mean().backward()
    with get_cuda_rng_tracker().fork():
        own = torch.rand(4)
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}, own, torch.rand(4)


def test_C097_masks_under_sequence_parallelism_are_redrawn_and_differ_between_shards(world):
    """Gradients bit-equal with recompute on and off; shards draw other masks, replicated regions equal ones."""
    plain, again = world(2).run(dropped_activations, False), world(2).run(dropped_activations, True)
    for a, b in zip(plain, again):
        assert torch.equal(a[0], b[0])
        for name, grad in a[1].items():
            assert grad.abs().max() > 0
            assert torch.equal(grad, b[1][name]), name
    assert not torch.equal(plain[0][2], plain[1][2]), "both shards draw the same masks"
    assert torch.equal(plain[0][3], plain[1][3]), "replicated activations draw different masks"


def test_C097_whole_activations_lose_the_same_on_every_rank(world):
    """Without sequence parallelism hidden states are equal on all ranks, so their masks must be; heads have their own.
    A rank that drops others goes its own way from the first layer on."""
    plain, again = world(2).run(dropped_activations, False, False), world(2).run(dropped_activations, True, False)
    assert torch.equal(plain[0][0], plain[1][0])
    assert not torch.equal(plain[0][2], plain[1][2]) and torch.equal(plain[0][3], plain[1][3])
    for a, b in zip(plain, again):
        for name, grad in a[1].items():
            assert grad.abs().max() > 0 and torch.equal(grad, b[1][name]), name
            if "layernorm" in name:
                assert torch.equal(grad, plain[0][1][name]), name


def distributed_checkpoint(distribute: bool):
    """Gradients through a recomputed function whose saved input is cut over the ranks, and the bytes that are kept."""
    rank = as_tensor_parallel()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    kept = []

    def keep(t):
        kept.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = checkpoint(lambda x, factor: torch.tanh(x) * factor, distribute, x, 3.0 + rank)
    y.square().sum().backward()
    return x.grad, sum(kept)


def test_saved_activations_may_be_cut_over_the_ranks(world):
    """Half of the input on each of two ranks, the same gradients."""
    for (got, half), (want, full) in zip(
        world(2).run(distributed_checkpoint, True), world(2).run(distributed_checkpoint, False)
    ):
        assert want.abs().max() > 0 and torch.equal(got, want)
        assert (half, full) == (12, 24)


def received():
    rank = as_tensor_parallel()
    batch = {"tokens": torch.arange(6).view(2, 3), "mask": torch.ones(4, dtype=torch.int64)} if rank == 0 else {}
    return broadcast_data(["tokens", "mask"], batch, torch.int64)


def test_rank_0s_batch_reaches_the_other_rank(world):
    for batch in world(2).run(received):
        assert torch.equal(batch["tokens"], torch.arange(6).view(2, 3)) and torch.equal(batch["mask"], torch.ones(4))


SAMPLE = {
    "tokens": torch.arange(6).view(2, 3),
    "labels": torch.arange(6).view(2, 3) + 1,
    "position_ids": torch.arange(3).expand(2, 3),
    "loss_mask": torch.tensor([[1.0, 0.0, 1.0], [0.5, 1.0, 1.0]]),
    "attention_mask": torch.ones(2, 1, 3, 3, dtype=torch.bool).triu(1),
}


def batches(count: int):
    """A loader of `count` micro-batches on rank 0; what the others hold is not asked."""
    return None if dist.get_rank() else iter([SAMPLE] * count)


def received_batches():
    as_tensor_parallel()
    data = batches(2)
    skip_batch(data)
    batch = get_batch(data, torch.device("cpu"), 7)
    ends = []
    for read in (lambda: get_batch(data, torch.device("cpu"), 7), lambda: skip_batch(data)):
        try:
            read()
        except StopIteration:
            ends.append("end")
    try:
        get_batch(batches(1), torch.device("cpu"), 6)
    except DataError as error:
        ends.append(error.what)
    return batch, ends


def test_a_batch_its_end_and_its_faults_reach_every_rank(world):
    """A rank that waits for a batch that rank 0 could not read hangs for ever."""
    for batch, ends in world(2).run(received_batches):
        for name, tensor in SAMPLE.items():
            got = getattr(batch, name)
            assert got.dtype == tensor.dtype and torch.equal(got, tensor), name
        assert ends[:2] == ["end", "end"] and "token 6" in ends[2]
