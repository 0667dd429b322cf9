"""Keys and values of many sequences of different lengths, in blocks of one pool.

    pool     | 0 | 1 | 2 | 3 | 4 | 5 |      a block: `block_size` tokens, in every layer
    table    request A: 0 3      request B: 1      free: 2 4 5

    step = cache.step([(table of A, 20 tokens so far), (table of B, 7)], new=1)     what each layer is handed
    logits = model(ids [2, 1], step.positions, step.attention_mask, inference_context=step)

A step gives a layer the keys of its sequences side by side, aligned at their *ends*, the shorter ones hidden in front:

    A   k0 k1 ... k19 k20          so that the last query stands at the last key for all of them, as causal masks and
    B   -- -- ... k6  k7           windows have it for one sequence

Memory is as large as the sequences are, rounded up to blocks; the price is a copy of a step's keys, layer by layer.
Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_lite.errors import ConfigError
from megatron_lite.transformer.inference_context import InferenceContext


class PagedCache:
    """The pool, and which of its blocks are free. Memory is allocated layer by layer at first use.

    Args:
        num_blocks, block_size: blocks, and tokens in each.
        max_sequence_length: of a sequence, prompt and answer together.
    """

    def __init__(self, num_blocks: int, block_size: int, max_sequence_length: int, device: torch.device):
        self.num_blocks, self.block_size, self.max_sequence_length = num_blocks, block_size, max_sequence_length
        self.device = device
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._free = list(range(num_blocks))[::-1]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_of(self, tokens: int) -> int:
        """How many blocks so many tokens take."""
        return -(-tokens // self.block_size)

    def allocate(self, tokens: int) -> list[int] | None:
        """A table of blocks for so many tokens; None: there are not enough free ones."""
        count = self.blocks_of(tokens)
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def release(self, table: list[int]) -> None:
        """Give a table's blocks back."""
        self._free.extend(reversed(table))
        table.clear()

    def step(self, sequences: Sequence[tuple[Sequence[int], int]], new: int) -> PagedStep:
        """One forward pass.

        Args:
            sequences: (table of blocks, tokens stored so far) of each sequence.
            new: tokens that each of them gets now.
        """
        return PagedStep(self, sequences, new)


class PagedStep(InferenceContext):
    """What layers are handed for one forward pass over `new` tokens of each of some sequences.

    `positions` `[b, new]` are the tokens' places in their sequences; `attention_mask` `[b, 1, 1, keys]` hides the
    places in front of shorter sequences, and is None where all are equally long.
    """

    def __init__(self, cache: PagedCache, sequences: Sequence[tuple[Sequence[int], int]], new: int):
        super().__init__(len(sequences), cache.max_sequence_length)
        self.cache, self.new = cache, new
        lengths = [so_far + new for _, so_far in sequences]
        longest, size = max(lengths), cache.block_size
        if longest > cache.max_sequence_length or any(
            length > len(t) * size for (t, _), length in zip(sequences, lengths)
        ):
            raise ConfigError(
                f"{longest} tokens of a sequence in a cache for {cache.max_sequence_length}",
                why="its blocks were given out for less",
                fix="a table of as many blocks as prompt and answer take",
            )
        if new > 1 and min(lengths) < longest:
            raise ConfigError(
                f"{new} new tokens of sequences of different lengths", why="their causal masks differ", fix="one by one"
            )
        slots = torch.zeros(longest, len(sequences), dtype=torch.long)  # of keys, aligned at their ends
        for row, ((table, _), length) in enumerate(zip(sequences, lengths)):
            places = torch.arange(length)
            slots[longest - length :, row] = torch.tensor(table)[places // size] * size + places % size
        self._slots = slots.to(cache.device)
        ends = torch.tensor(lengths)
        self.positions = (ends[:, None] - new + torch.arange(new)).to(cache.device)
        self.attention_mask: Tensor | None = None
        if min(lengths) < longest:
            hidden = torch.arange(longest) < (longest - ends)[:, None]
            self.attention_mask = hidden[:, None, None, :].to(cache.device)

    def check_room(self, s: int, b: int) -> None:
        assert (s, b) == (self.new, self.max_batch_size), f"{s} tokens of {b} sequences in a step of {self.new}"

    def angles_of_tokens(self, angles: Tensor) -> Tensor:
        """`[positions, 1, 1, r]` -> `[new, b, 1, r]`: those of this step's tokens."""
        return angles[:, 0][self.positions.t()]

    def store(self, layer_number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add a layer's new keys and values `[new, b, ...]`; all so far `[keys, b, ...]`, copies."""
        self.check_room(*key.shape[:2])
        cache = self.cache
        if layer_number not in cache.layers:
            total = cache.num_blocks * cache.block_size
            cache.layers[layer_number] = (
                torch.zeros(total, *key.shape[2:], dtype=key.dtype, device=key.device),
                torch.zeros(total, *value.shape[2:], dtype=value.dtype, device=value.device),
            )
        keys, values = cache.layers[layer_number]
        fresh = self._slots[-self.new :]
        keys[fresh], values[fresh] = key, value
        return keys[self._slots], values[self._slots]
