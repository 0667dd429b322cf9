"""What went wrong in other packages with split layers, each with the value that is right."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_lite import collectives, parallel_state
from megatron_lite.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron_lite.models.gpt import GPTModel, get_gpt_layer_local_spec
from megatron_lite.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron_lite.tensor_parallel import reduce_from_tensor_model_parallel_region, vocab_parallel_cross_entropy
from megatron_lite.transformer import TransformerConfig
from tests.distributed.test_tensor_parallel import joined, train_step


# -- sums --------------------------------------------------------------------------------------------------------
def reduced_views():
    parallel_state.initialize_model_parallel(2)
    rank = dist.get_rank()
    x = (torch.arange(12.0).view(3, 4) + 100 * rank).t()
    y = reduce_from_tensor_model_parallel_region(x)
    collectives.all_reduce(x, collectives.world(), purpose="test")
    return y, x


def test_c066_a_transposed_view_is_summed(world):
    """The sum went into a contiguous copy, and the view came back as it was."""
    want = (2 * torch.arange(12.0).view(3, 4) + 100).t()
    for y, x in world(2).run(reduced_views):
        assert torch.equal(y, want) and torch.equal(x, want)


# -- what every rank holds ---------------------------------------------------------------------------------------
def one_step(tp: int, sequence_parallel: bool, gated: bool):
    """By parameter name what it says of itself, its gradient at step time, and the gradient norm."""
    if tp > 1:
        parallel_state.initialize_model_parallel(tp)
    torch.manual_seed(11)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        qk_layernorm=True,
        gated_linear_unit=gated,
        activation_func=F.silu if gated else F.gelu,
        normalization="RMSNorm" if gated else "LayerNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.2,
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel,
        gradient_accumulation_fusion=True,
    )
    spec = get_gpt_layer_local_spec(qk_layernorm=True)
    model = GPTModel(config, spec, 64, 16, share_embeddings_and_output_weights=not gated)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, clip_grad=1.0), [ddp])
    tokens = torch.randint(0, 64, (2, 13), generator=torch.Generator().manual_seed(0))
    loss = ddp(tokens[:, :-1], torch.arange(12).expand(2, -1), None, labels=tokens[:, 1:])
    loss.mean().backward()
    finalize_model_grads([ddp])
    grads = {name: param.main_grad.clone() for name, param in model.named_parameters()}
    _, norm, _ = optimizer.step()
    marks = {
        name: (tuple(p.shape), p.tensor_model_parallel, p.partition_dim, p.shard.is_whole, p.shard.global_shape)
        for name, p in model.named_parameters()
    }
    return grads, norm, marks


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_c067_c073_replicated_parameters_agree_and_say_so(world, sequence_parallel, gated):
    """C067: gradients of norms, of biases behind a row-parallel layer and of the norms of heads were parts of the sum.
    C073: a parameter that says wrongly whether it is split counts twice, or a half, in the norm."""
    want, norm, alone = one_step(1, False, gated)
    ranks = world(2).run(one_step, 2, sequence_parallel, gated)
    kinds = set()
    for name, (shape, split, dim, whole, global_shape) in ranks[0][2].items():
        full = alone[name][0]
        assert global_shape == full and whole == (not split), name
        assert shape == tuple(n // 2 if split and d == dim else n for d, n in enumerate(full)), name
        if split:
            continue
        kinds.add(name.split(".")[-2])
        first, second = (grads[name] for grads, *_ in ranks)
        assert want[name].abs().max() > 0 and torch.equal(first, second), name
        torch.testing.assert_close(first, want[name], atol=1e-6, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert kinds >= {"input_layernorm", "final_layernorm", "q_layernorm", "k_layernorm", "linear_proj", "linear_fc2"}
    assert [result[1] for result in ranks] == pytest.approx([norm, norm], rel=1e-5) and norm > 0


# -- vocabulary --------------------------------------------------------------------------------------------------
def fifty_losses(tp: int, smoothing: float):
    """The loss of each of 50 steps, and plain cross entropy of the gathered logits at the last."""
    if tp > 1:
        parallel_state.initialize_model_parallel(tp)
    torch.manual_seed(3)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), 258, 16, position_embedding_type="rope")
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, clip_grad=1.0), [ddp])
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(50):
        tokens = torch.randint(0, 257, (2, 9), generator=generator) // 8 * 8
        ddp.zero_grad_buffer()
        logits = ddp(tokens[:, :-1], None, None)
        loss = vocab_parallel_cross_entropy(logits, tokens[:, 1:], smoothing).mean()
        loss.backward()
        finalize_model_grads([ddp])
        optimizer.step()
        losses.append(loss.item())
    parts = [logits.detach()]
    if tp > 1:
        parts = collectives.all_gather_object(parts[0], collectives.world(), purpose="test")
    # Torch's smoothing takes its share from the label too: s = a K / (K - 1).
    share = smoothing * 258 / 257
    plain = F.cross_entropy(torch.cat(parts, -1).flatten(0, 1), tokens[:, 1:].flatten(), label_smoothing=share)
    return losses, plain.item()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_c068_an_odd_vocabulary_trains_alike_split_and_whole(world, smoothing):
    """257 tokens in 258 rows on both layouts; smoothing over one rank's share would drift from the first step on."""
    want, _ = fifty_losses(1, smoothing)
    for losses, plain in world(2).run(fifty_losses, 2, smoothing):
        assert losses == pytest.approx(want, rel=2e-5)
        assert losses[-1] == pytest.approx(plain, rel=1e-6)
    assert want[-1] < want[0] - 0.5


# -- recompute ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("distribute", [False, True])
def test_recomputed_layers_may_share_out_their_saved_inputs(world, distribute):
    """Full recompute, each rank keeping a half of every saved input: gradients of one process without recompute."""
    more = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    alone = [train_step(1, False, False, False)]
    split = world(2).run(train_step, 2, False, True, False, {**more, "distribute_saved_activations": distribute})
    grads = joined(split, 1)
    for name, want in joined(alone, 1).items():
        torch.testing.assert_close(grads[name], want, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


# -- four ranks, two key/value heads -----------------------------------------------------------------------------
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_c069_c094_four_ranks_share_two_key_value_heads(world, sequence_parallel):
    """C069: the initial spread depended on the number of ranks; here every weight starts bit-equal. C094: heads that
    several ranks look at have the gradient of all of them."""
    alone = [train_step(1, False, False, False)]
    split = world(4).run(train_step, 4, sequence_parallel, True, False)
    start, grads = joined(split, 2), joined(split, 1)
    for name, want in joined(alone, 2).items():
        assert torch.equal(start[name], want), f"{name} starts differently"
    for loss, *_ in split:
        torch.testing.assert_close(loss, alone[0][0], atol=1e-5, rtol=1e-5)
    for name, want in joined(alone, 1).items():
        torch.testing.assert_close(grads[name], want, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
