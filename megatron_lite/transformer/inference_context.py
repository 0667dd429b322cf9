"""Keys and values of the tokens so far, so that generation computes each token once.

context = InferenceContext(max_batch_size=1, max_sequence_length=64)
logits = model(prompt, positions 0..n-1, None, inference_context=context)       fills n places of every layer
context.increment_sequence_len_offset(n)
logits = model(next token, position n, None, inference_context=context)         sees n + 1 keys
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lite.errors import ConfigError


class InferenceContext:
    """A cache of fixed size, allocated layer by layer at first use.

    Args:
        max_batch_size: sequences at once; all have the same length so far.
        max_sequence_length: prompt and generated tokens together.
    """

    def __init__(self, max_batch_size: int, max_sequence_length: int):
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length
        self.sequence_len_offset = 0
        self.key_value_memory_dict: dict[int, tuple[Tensor, Tensor]] = {}

    def increment_sequence_len_offset(self, num_tokens: int) -> None:
        """To be called after a whole forward over `num_tokens` tokens: every layer has stored them."""
        self.sequence_len_offset += num_tokens

    def reset(self) -> None:
        """Forget the sequences, keep the memory."""
        self.sequence_len_offset = 0

    def check_room(self, s: int, b: int) -> None:
        """Raises ConfigError unless `s` more tokens of `b` sequences fit."""
        end = self.sequence_len_offset + s
        if end > self.max_sequence_length or b > self.max_batch_size:
            raise ConfigError(
                f"a cache of {self.max_sequence_length} tokens x {self.max_batch_size} sequences for {end} x {b}",
                why="its size is fixed when it is made",
                fix=f"InferenceContext(max_batch_size={b}, max_sequence_length={end}) or more",
            )

    def angles_of_tokens(self, angles: Tensor) -> Tensor:
        """Rotary angles from position 0 on -> those that attention layers are handed, and take from the offset on."""
        return angles

    def store(self, layer_number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add a layer's new keys and values; all of them so far.

        Args:
            key, value: `[s, b, ng, hn]`.
        Returns: `[offset + s, b, ng, hn]` each, views of the cache.
        Raises: ConfigError if the cache is too small.
        """
        s, b = key.shape[:2]
        self.check_room(s, b)
        end = self.sequence_len_offset + s
        if layer_number not in self.key_value_memory_dict:
            shape = self.max_sequence_length, self.max_batch_size
            self.key_value_memory_dict[layer_number] = (
                torch.empty(*shape, *key.shape[2:], dtype=key.dtype, device=key.device),
                torch.empty(*shape, *value.shape[2:], dtype=value.dtype, device=value.device),
            )
        keys, values = self.key_value_memory_dict[layer_number]
        keys[self.sequence_len_offset : end, :b] = key
        values[self.sequence_len_offset : end, :b] = value
        return keys[:end, :b], values[:end, :b]
