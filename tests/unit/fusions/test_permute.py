"""Rows sorted by expert against the definition, token by token."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.fusions.permute import permute, plan_rows, reorder, row_values, transposed_chunks, unpermute

MAPS = st.integers(0, 9).flatmap(
    lambda t: st.integers(1, 5).flatmap(
        lambda e: st.lists(st.lists(st.booleans(), min_size=e, max_size=e), min_size=t, max_size=t).map(
            lambda rows: torch.tensor(rows, dtype=torch.bool).view(t, e)
        )
    )
)


@given(MAPS)
def test_rows_are_the_marked_tokens_by_expert_and_sums_bring_them_back(routing_map):
    """Tokens without an expert, experts without a token, none of either; gradients are each other's forward."""
    t, e = routing_map.shape
    plan = plan_rows(routing_map, int(routing_map.sum()))
    want = [(token, expert) for expert in range(e) for token in range(t) if routing_map[token, expert]]
    assert plan.tokens.tolist() == [token for token, _ in want]
    x = torch.randn(t, 3, dtype=torch.float64, requires_grad=True)
    values = torch.randn(t, e, dtype=torch.float64, requires_grad=True)
    rows, entries = permute(x, plan), row_values(values, plan)
    assert torch.equal(rows, x[[token for token, _ in want]].reshape(-1, 3))
    assert entries.tolist() == [values[place].item() for place in want]
    y = unpermute(rows * entries.unsqueeze(1), plan)
    masked = values * routing_map
    torch.testing.assert_close(y, x * masked.sum(1, keepdim=True))
    g = torch.randn_like(y)
    got = torch.autograd.grad(y, (x, values), g, allow_unused=True)
    reference = torch.autograd.grad(x * masked.sum(1, keepdim=True), (x, values), g)
    for a, b in zip(got, reference):
        torch.testing.assert_close(a, b)


def test_the_table_of_three_tokens():
    """Two experts a token: rows by expert are tokens 0 2, 0 1, 1, 2."""
    routing_map = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1]], dtype=torch.bool)
    assert plan_rows(routing_map, 6).tokens.tolist() == [0, 2, 0, 1, 1, 2]


def test_bf16_sums_are_rounded_once():
    """Four rows of one token: added up in bf16 they would lose the small ones."""
    plan = plan_rows(torch.ones(1, 4, dtype=torch.bool), 4)
    rows = torch.tensor([[256.0], [0.75], [0.75], [0.75]], dtype=torch.bfloat16)
    assert unpermute(rows, plan).item() == torch.tensor(258.25).bfloat16().item() == 258.0


def test_chunks_of_two_and_of_three_sources():
    """Source-major to expert-major; with three sources the two directions differ."""
    for counts, there, back in (
        ([[1, 1], [1, 1]], [0, 2, 1, 3], [0, 2, 1, 3]),
        ([[1, 1]] * 3, [0, 2, 4, 1, 3, 5], [0, 3, 1, 4, 2, 5]),
        ([[2, 1], [0, 2]], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
        ([[1, 2], [2, 0]], [0, 3, 4, 1, 2], [0, 3, 4, 1, 2]),
    ):
        order, inverse = transposed_chunks(torch.tensor(counts))
        assert order.tolist() == there and inverse.tolist() == back


@given(st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=4))
def test_reordered_chunks_lie_by_expert_and_come_back(counts):
    """Each row carries its (source, expert, number); gradients take the way back."""
    sizes = torch.tensor(counts)
    rows = [(s, e, i) for s, row in enumerate(counts) for e, n in enumerate(row) for i in range(n)]
    want = sorted(rows, key=lambda row: (row[1], row[0], row[2]))
    x = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3).requires_grad_()
    order, inverse = transposed_chunks(sizes)
    y = reorder(x, order, inverse)
    assert [tuple(map(int, row)) for row in y.tolist()] == want
    assert torch.equal(reorder(y, inverse, order), x)
    g = torch.randn_like(y)
    assert torch.equal(torch.autograd.grad(y, x, g)[0], g[inverse])
