"""Attention put together from blocks is attention: results and all gradients, in fp64, whatever the blocks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_lite.context_parallel.blocks import Keys, Share
from megatron_lite.context_parallel.partition import Documents, join_sequence, one_document, split_sequence
from megatron_lite.context_parallel.visibility import SegmentMask, Visible
from megatron_lite.fusions.block_attention import (
    Arithmetic,
    Sum,
    block_backward,
    block_forward,
    sink_backward,
    zeros_for_sums,
)

S, B, HEADS, GROUPS, CHANNELS, SCALE = 32, 2, 4, 2, 16, 0.3
AT = torch.arange(S)
VISIBLE = {
    "causal": Visible(None, 0),
    "everything": Visible(),
    "window": Visible(5, 0),
    "window to both sides": Visible(3, 2),
    "documents": Visible(None, 0, segments=(AT // 7).expand(B, S)),
    "padding": Visible(segments=SegmentMask.of_padding((AT < 25).expand(B, S)).ids),
}


def written_out(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, sink: Tensor | None) -> Tensor:
    """The formula, on the whole sequence."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = (q @ k.transpose(-1, -2)) * SCALE
    if hidden is not None:
        scores = scores.masked_fill(hidden, -10000.0)
    if sink is None:
        return scores.softmax(-1) @ v
    column = sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v


def by_ranks(
    tensors: tuple[Tensor, ...], g: Tensor, sink: Tensor | None, ranks: int, visible: Visible, kernel: str
) -> list[Tensor]:
    """y, dq, dk, dv (and the sink's gradient), as ranks would compute them, one after another."""
    documents, arithmetic = one_document(S), Arithmetic(kernel, SCALE)  # type: ignore[arg-type]
    q, k, v, g = ([split_sequence(x, rank, ranks, 2) for rank in range(ranks)] for x in (*tensors, g))
    results, dq = [], [zeros_for_sums(x) for x in q]
    dk, dv = [zeros_for_sums(x) for x in k], [zeros_for_sums(x) for x in v]
    dsink = torch.zeros(HEADS, dtype=torch.float64)
    for rank in range(ranks):
        share = Share(rank, ranks, documents, documents, visible)
        total = Sum(q[rank], v[rank].shape[-1])
        for other in range(ranks):
            share.keys_of(other).add(total, q[rank], k[other], v[other], arithmetic)
        if sink is not None:
            total.add_sink(sink)
            dsink += sink_backward(sink, g[rank], total.y, total.lse)
        results.append(total.y)
        for other in range(ranks):
            parts = share.keys_of(other).backward(
                dq[rank], g[rank], q[rank], k[other], v[other], total.y, total.lse, arithmetic
            )
            dk[other] += parts[0]
            dv[other] += parts[1]
    joined = [join_sequence(shares, 2) for shares in (results, dq, dk, dv)]
    return joined if sink is None else [*joined, dsink]


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("name", VISIBLE)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kernel", ["flash", "products"])
def test_blocks_add_up_to_attention(kernel: str, ranks: int, name: str, with_sink: bool) -> None:
    """A wrong weight in a merge, a piece too many, a mask of other positions, dk of the wrong rank."""
    if name == "padding" and kernel == "flash":
        pytest.skip("queries that see nothing go by products: DotProductAttention chooses so")
    visible, generator = VISIBLE[name], torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    q, k, v = random(B, HEADS, S, CHANNELS), random(B, GROUPS, S, CHANNELS), random(B, GROUPS, S, CHANNELS - 4)
    sink = random(HEADS) if with_sink else None
    y = written_out(q, k, v, visible.hidden(AT, slice(0, S), AT), sink)
    g = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    wanted = [y, *torch.autograd.grad(y, [q, k, v, *([] if sink is None else [sink])], g)]
    with torch.no_grad():
        found = by_ranks((q.detach(), k.detach(), v.detach()), g, sink, ranks, visible, kernel)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_two_blocks_merge_by_their_log_sum_exp() -> None:
    """o = 1 at weight e^0 and o = 3 at weight 3: (1 + 9) / 4."""
    q = torch.zeros(1, 1, 1, 1)
    total = Sum(q, 1)
    total.add(slice(0, 1), torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1))
    total.add(slice(0, 1), torch.full((1, 1, 1, 1), 3.0), torch.full((1, 1, 1), math.log(3.0)))
    assert total.y.item() == pytest.approx(2.5) and total.lse.item() == pytest.approx(math.log(4.0))


def test_backward_drops_what_forward_dropped() -> None:
    """Dropout in blocks: the gradient of the sum is checked by finite differences through the same seed."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 6, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    arithmetic = Arithmetic("flash", SCALE, dropout=0.4, seed=7)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return block_forward(q, k, v, None, True, arithmetic)[0]

    y, lse = block_forward(q, k, v, None, True, arithmetic)
    assert torch.equal(y, forward(q, k, v)), "one seed drops one set"
    assert not torch.equal(y, block_forward(q, k, v, None, True, arithmetic.of_block(1))[0])
    g = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    grads = block_backward(g, q, k, v, y, lse, None, True, arithmetic)
    for place, grad in enumerate(grads):
        tensors = [q, k, v]
        for index in [(0, 0, 0, 0), (0, 1, 3, 2), (0, 1, 5, 3)]:
            step = torch.zeros_like(q)
            step[index] = 1e-6
            up, down = ([t + s * step if i == place else t for i, t in enumerate(tensors)] for s in (1, -1))
            slope = ((forward(*up) - forward(*down)) * g).sum() / 2e-6
            assert grad[index].item() == pytest.approx(slope.item(), rel=1e-5, abs=1e-8)


def test_keys_that_nobody_sees_cost_nothing() -> None:
    """A window over neighbours leaves whole ranks out."""
    documents: Documents = one_document(64)
    share = Share(0, 4, documents, documents, Visible(4, 0))
    assert [len(Keys(share, share.keys_of(rank).runs).pieces()) for rank in range(4)] == [2, 1, 0, 0]
