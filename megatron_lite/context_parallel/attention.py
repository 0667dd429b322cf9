"""Attention of a sequence that is spread over ranks: which exchange, over which groups.

    --cp-comm-type    over the cp group, or over the levels of --hierarchical-context-parallel-sizes
    p2p               ring
    all_gather        keys and values to everyone
    a2a               tokens for heads, then all keys are here
    a2a+p2p           tokens for heads inside level 0, then the ring over level 1

Packed documents on one rank are a ring of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from megatron_lite import collectives
from megatron_lite.context_parallel.all_gather_attention import all_gather_attention
from megatron_lite.context_parallel.all_to_all_attention import gather_rows, heads_to_tokens, tokens_to_heads
from megatron_lite.context_parallel.blocks import Share
from megatron_lite.context_parallel.comm_types import problem_of_exchange
from megatron_lite.context_parallel.partition import Documents, order_of
from megatron_lite.context_parallel.ring_attention import ring_attention
from megatron_lite.context_parallel.visibility import Visible
from megatron_lite.fusions.block_attention import Arithmetic

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class ContextParallelAttention:
    """Attention between shares of a sequence.

    Args:
        comm_type: of `comm_types.COMM_TYPES`.
        cp: the context-parallel ranks; None: there is one.
        hcp: their two levels, for a2a+p2p.
        heads, groups: query heads and key/value heads of this rank, before any exchange.
    Raises: ConfigError for a type that there is not, levels that are missing, heads that cannot be shared out.
    """

    def __init__(
        self,
        comm_type: str,
        cp: ProcessGroup | None,
        hcp: list[ProcessGroup | None] | None,
        heads: int,
        groups: int,
    ):
        size = collectives.group_size(cp)
        levels = None if hcp is None else [collectives.group_size(level) for level in hcp]
        comm_type = comm_type if size > 1 else "p2p"
        problem = problem_of_exchange(comm_type, size, levels, heads, groups)
        if problem is not None:
            raise problem
        self.gathers = comm_type == "all_gather"
        self.cp = cp
        self.heads_group: ProcessGroup | None = None
        self.rest: ProcessGroup | None = cp  # over which keys are spread once heads are traded
        if comm_type == "a2a":
            self.heads_group, self.rest = cp, None
        elif comm_type == "a2a+p2p":
            assert hcp is not None
            self.heads_group, self.rest = hcp

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: Visible,
        documents: Documents,
        key_documents: Documents,
        arithmetic: Arithmetic,
        sink: Tensor | None = None,
    ) -> Tensor:
        """This rank's share of the result.

        Args:
            q: `[sq/cp, b, n, d]`; k: `[sk/cp, b, groups, d]`; v: `[sk/cp, b, groups, dv]`.
            documents, key_documents: of the whole sequences.
            sink: `[n]`.
        Returns: `[sq/cp, b, n, dv]`.
        """
        size, ways = collectives.group_size(self.cp), collectives.group_size(self.heads_group)
        order = None
        if ways > 1:
            assert self.heads_group is not None
            first = collectives.group_rank(self.cp) // ways * ways
            ranks = range(first, first + ways)
            order = order_of(ranks, size, documents, q.device)
            if documents == key_documents:
                q, k, v = tokens_to_heads([q, k, v], order, self.heads_group)
            else:
                key_order = order_of(ranks, size, key_documents, q.device)
                (q,) = tokens_to_heads([q], order, self.heads_group)
                k, v = tokens_to_heads([k, v], key_order, self.heads_group)
            if visible.rows is not None and visible.rows.shape[2] > 1:
                rows = gather_rows(visible.rows, order, self.heads_group)
                visible = Visible(visible.left, visible.right, visible.segments, rows)
            if sink is not None:
                sink = sink.chunk(ways)[collectives.group_rank(self.heads_group)]
        share = Share(
            collectives.group_rank(self.rest), collectives.group_size(self.rest), documents, key_documents, visible
        )
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [b, n, s, d], views
        if self.gathers:
            assert self.cp is not None
            y = all_gather_attention(q, k, v, share, self.cp, arithmetic, sink)
        else:
            y = ring_attention(q, k, v, share, self.rest, arithmetic, sink)
        y = y.permute(2, 0, 1, 3)
        return y if order is None else heads_to_tokens(y, order, self.heads_group)  # type: ignore[arg-type]
