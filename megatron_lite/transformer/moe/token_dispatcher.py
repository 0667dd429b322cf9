"""How tokens get to the ranks of their experts, and results back.

    hidden [s, b, h]
       dispatch_preprocess    what to send: tokens (or rows sorted by expert) and their probabilities
       token_dispatch         the communication
       dispatch_postprocess   rows [n, h] of this rank's experts, expert after expert; how many each has
    experts
       combine_preprocess     back into the order in which rows arrived
       token_combine          the communication
       combine_postprocess    the sum of each token's rows, [s, b, h]

    allgather    every rank of tp_ep gets all tokens and keeps what its experts want; results are reduce-scattered.
                 Sends (g - 1) T h there and back, g = |tp_ep|, whatever k is; nothing depends on the routing.
    alltoall     a row travels to its expert's rank alone. Sends (1 - 1/e) T k h there and back, plus a number a row.
                 Ranks that share an expert (expert tensor parallelism) then gather each other's rows, and
                 reduce-scatter the parts of the results.

T tokens on this rank, E experts, e ranks in `ep`. Backward is the same communication the other way round. A rank that
is alone moves nothing. How many rows go where has to be known on the host, once a layer, unless every expert is padded
to its capacity: then everything is known before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite import collectives
from megatron_lite.collectives import group_rank, group_size
from megatron_lite.fusions.permute import (
    RowPlan,
    permute,
    plan_rows,
    reorder,
    row_values,
    transposed_chunks,
    unpermute,
)
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.tensor_parallel.mappings import (
    all_to_all,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron_lite.transformer.moe.moe_utils import get_capacity
from megatron_lite.transformer.transformer_config import TransformerConfig


class MoETokenDispatcher(ABC):
    """Base of the dispatchers. One object serves one layer; a forward ends before the next one begins.

    Args:
        num_local_experts: E/e.
        local_expert_indices: their numbers among all experts, which follow each other.
        pg_collection: None = the registered groups; `ep`, `expt_tp` and `tp_ep` are read.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.config, self.num_local_experts = config, num_local_experts
        self.local_expert_indices = local_expert_indices
        assert config.num_moe_experts is not None
        self.num_experts: int = config.num_moe_experts
        self.ep_group, self.tp_group, self.tp_ep_group = groups.ep, groups.expt_tp, groups.tp_ep
        self._shares_microbatch = group_size(groups.tp_cp) > 1
        self.ep_size, self.tp_size = group_size(self.ep_group), group_size(self.tp_group)
        first = group_rank(self.ep_group) * num_local_experts
        assert local_expert_indices == list(range(first, first + num_local_experts)), local_expert_indices
        self._shape = torch.Size()
        self._plan: RowPlan | None = None

    @property
    def ep_rank(self) -> int:
        """This rank's place in `ep`."""
        return group_rank(self.ep_group)

    @abstractmethod
    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """hidden `[s, b, h]`, map bool `[T, E]`, probs `[T, E]` -> what `token_dispatch` takes."""

    @abstractmethod
    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """The communication to the experts."""

    @abstractmethod
    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, list[int], Tensor]:
        """-> rows `[n, h]`, rows of each local expert, probability of each row `[n]`."""

    @abstractmethod
    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """The experts' output `[n, h]` -> what `token_combine` takes."""

    @abstractmethod
    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """The communication from the experts."""

    @abstractmethod
    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """-> `[s, b, h]`, and forgets the routing."""

    def _padded_rows(self, num_tokens: int) -> int | None:
        """Rows that each expert gets from `num_tokens` tokens where all are padded to the capacity; else None.

        Where ranks share a micro-batch the capacity is that of all of them, and how much of it is here is not known.
        """
        factor = self.config.moe_expert_capacity_factor
        if not self.config.moe_pad_expert_input_to_capacity or factor is None or self._shares_microbatch:
            return None
        return min(get_capacity(num_tokens * self.config.moe_router_topk, self.num_experts, factor), num_tokens)


class MoEAllGatherTokenDispatcher(MoETokenDispatcher):
    """Gathers all tokens of the ranks that hold an expert of each kind together."""

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        self._shape, self._map = hidden_states.shape, routing_map
        return hidden_states.reshape(-1, hidden_states.shape[-1]), probs

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        self._num_tokens, ranks = len(hidden_states), group_size(self.tp_ep_group)
        if ranks == 1:
            return hidden_states, probs
        gathered = self._map.new_empty(ranks * self._num_tokens, self.num_experts)
        collectives.all_gather(gathered, self._map, self.tp_ep_group, purpose="routing map")
        self._map = gathered
        return _gathered(hidden_states, self.tp_ep_group), _gathered(probs, self.tp_ep_group)

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, list[int], Tensor]:
        if self.ep_size > 1:
            first = self.local_expert_indices[0]
            self._map = self._map[:, first : first + self.num_local_experts]
            probs = probs[:, first : first + self.num_local_experts]
        padded = self._padded_rows(self._num_tokens)
        if padded is None:
            counts = self._map.sum(0).tolist()
        else:
            counts = [padded * group_size(self.tp_ep_group)] * self.num_local_experts
        self._plan = plan_rows(self._map, sum(counts))
        return permute(hidden_states, self._plan), counts, row_values(probs, self._plan)

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        assert self._plan is not None
        return unpermute(hidden_states, self._plan)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        return _reduce_scattered(hidden_states, self.tp_ep_group)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        self._plan = None
        del self._map
        return hidden_states.view(self._shape)


class MoEAlltoAllTokenDispatcher(MoETokenDispatcher):
    """Sends each row to its expert's rank.

    With several ranks (sources) and several experts here, rows arrive by source and, of each, by expert; they are
    sorted by expert and, of each, by source.
    """

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        self._shape = hidden_states.shape
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        self._count(routing_map, len(tokens))
        self._plan = plan_rows(routing_map, self._num_rows)
        return permute(tokens, self._plan), row_values(probs, self._plan)

    def _count(self, routing_map: Tensor, num_tokens: int) -> None:
        """How many rows go where: the one time that the host waits for the device.

        Sets: rows that leave here, by ep rank (`_sent`), that arrive by ep rank (`_arriving`), that each rank of the
        expert-parallel exchange hands to those that share its experts (`_shared`), and for this rank's experts rows by
        source and expert, `[tp, ep, E/e]` (`_sources`).
        """
        tp, ep, local = self.tp_size, self.ep_size, self.num_local_experts
        padded = self._padded_rows(num_tokens)
        if padded is not None:
            counts = torch.full((tp, ep, self.num_experts), padded, dtype=torch.int64)
            mine = counts[0, 0]
        else:
            own = routing_map.sum(0)
            everyone = own
            if tp * ep > 1:  # the tensor-parallel ranks of an expert are neighbours: they vary fastest
                everyone = own.new_empty(tp * ep * self.num_experts)
                collectives.all_gather(everyone, own, self.tp_ep_group, purpose="rows of each expert")
            counts = everyone.cpu().view(ep, tp, self.num_experts).transpose(0, 1)
            mine = counts[group_rank(self.tp_group), self.ep_rank]
        first = self.local_expert_indices[0]
        self._sources = counts[:, :, first : first + local].contiguous()
        self._num_rows = int(mine.sum())
        self._sent = mine.view(ep, local).sum(1).tolist()
        by_rank = self._sources.sum(2)
        self._arriving = by_rank[group_rank(self.tp_group)].tolist()
        self._shared = by_rank.sum(1).tolist()
        self._counts = self._sources.sum((0, 1)).tolist()

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        def exchanged(x: Tensor) -> Tensor:
            x = all_to_all(self.ep_group, x, self._arriving, self._sent)
            return _gathered(x, self.tp_group, self._shared)

        return exchanged(hidden_states), exchanged(probs)

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, list[int], Tensor]:
        sources = self._sources.view(-1, self.num_local_experts)
        self._order: tuple[Tensor, Tensor] | None = None
        if min(sources.shape) > 1:
            order, inverse = (x.to(hidden_states.device) for x in transposed_chunks(sources))
            self._order = order, inverse
            hidden_states, probs = reorder(hidden_states, order, inverse), reorder(probs, order, inverse)
        return hidden_states, self._counts, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        if self._order is None:
            return hidden_states
        order, inverse = self._order
        return reorder(hidden_states, inverse, order)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        x = _reduce_scattered(hidden_states, self.tp_group, self._shared)
        return all_to_all(self.ep_group, x, self._sent, self._arriving)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        assert self._plan is not None
        y = unpermute(hidden_states, self._plan).view(self._shape)
        self._plan = self._order = None
        return y


def _gathered(x: Tensor, group: ProcessGroup | None, sizes: list[int] | None = None) -> Tensor:
    """Rows of all ranks; backward reduce-scatters. None is a rank alone, not the registered group."""
    if group_size(group) == 1:
        return x
    return gather_from_sequence_parallel_region(x, group=group, output_split_sizes=_uneven(sizes))


def _reduce_scattered(x: Tensor, group: ProcessGroup | None, sizes: list[int] | None = None) -> Tensor:
    """This rank's rows of the sum; backward gathers."""
    if group_size(group) == 1:
        return x
    return reduce_scatter_to_sequence_parallel_region(x, group, _uneven(sizes))


def _uneven(sizes: list[int] | None) -> list[int] | None:
    return None if sizes is None or len(set(sizes)) == 1 else sizes


# `moe_token_dispatcher_type` -> class; `flex` is refused by the config
DISPATCHERS: dict[str, type[MoETokenDispatcher]] = {
    "allgather": MoEAllGatherTokenDispatcher,
    "alltoall": MoEAlltoAllTokenDispatcher,
}
