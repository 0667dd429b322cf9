"""How tokens get to the ranks of their experts, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.transformer.transformer_config import TransformerConfig


class MoETokenDispatcher(ABC):
    """The six steps of a dispatch. Sizes: T tokens on this rank, E experts, E_l of them here, R rows of all that come.

        x [s, b, h], map [T, E], probs [T, E]
         | dispatch_preprocess     sorts locally what can be sorted before it travels
         | token_dispatch          communication
         | dispatch_postprocess    rows [R, h] sorted by local expert, rows of each [E_l], their weights [R]
        experts
         | combine_preprocess      undoes dispatch_postprocess
         | token_combine           communication
         | combine_postprocess     y [s, b, h]: for each token the sum of what its experts returned

    What the way back needs is kept in the dispatcher between the steps of one forward pass.

    Args:
        num_local_experts, local_expert_indices: the experts of this rank, by their global number.
        config: the transformer's.
        pg_collection: `ep`, `expt_tp` and `tp_ep` are used.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
    ):
        self.num_local_experts, self.local_expert_indices = num_local_experts, local_expert_indices
        self.config, self.pg_collection = config, pg_collection

    @abstractmethod
    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """x `[s, b, h]`, bool `[T, E]`, `[T, E]` (0 where the map is False) -> (rows to send, their weights)."""

    @abstractmethod
    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Rows and weights to the ranks of their experts."""

    @abstractmethod
    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(rows `[R, h]` sorted by local expert, number of rows of each int64 `[E_l]` on the CPU, weights `[R]`)."""

    @abstractmethod
    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """What the experts returned `[R, h]` -> rows in the order in which they came."""

    @abstractmethod
    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Rows back to the ranks of their tokens."""

    @abstractmethod
    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Sums the rows of each token -> `[s, b, h]`."""


# `moe_token_dispatcher_type` -> class
DISPATCHERS: dict[str, type[MoETokenDispatcher]] = {}
