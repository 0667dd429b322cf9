"""Relative positions as a bias on attention's scores (Raffel et al. 2020, section 2.1).

    score(i, j) += table[bucket(j - i), head]          one table for all layers of a stack

    causal, 32 buckets, distance 128      distance   0  1 ... 15 | 16-18  19-20 ... 99-112  113 and more
                                          bucket     0  1 ... 15 |  16     17   ...   30        31
    bidirectional                         half of the buckets for keys before the query, half for those behind it

Near distances have a bucket each, far ones share buckets that widen with the logarithm, and from the largest distance
on all share the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_lite.errors import ConfigError
from megatron_lite.initialization import set_init
from megatron_lite.sharding import whole
from megatron_lite.tensor_parallel.mappings import default_group, scatter_to_tensor_model_parallel_region


def relative_position_bucket(
    relative_position: Tensor, bidirectional: bool = True, num_buckets: int = 32, max_distance: int = 128
) -> Tensor:
    """key - query -> bucket, any shape, int64. Without `bidirectional` keys behind the query are in bucket 0."""
    if bidirectional:
        num_buckets //= 2
        begin = (relative_position > 0).long() * num_buckets
        distance = relative_position.abs()
    else:
        begin = torch.zeros_like(relative_position)
        distance = relative_position.neg().clamp(min=0)
    exact = num_buckets // 2
    share = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (share * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return begin + torch.where(distance < exact, distance, far)


class RelativePositionEmbedding(nn.Module):
    """The table of a stack, and the bias that it gives.

    Every tensor-parallel rank holds the table of all heads and takes its own heads' columns of the bias; the gradient
    of the bias is gathered, so that the table's is equal on all of them.

    Args:
        bidirectional: keys behind the query count too (encoder); else the stack is causal.
        init_method: of the table.
        relative_attention_num_buckets: rows of the table.
        relative_attention_max_distance: from which on all distances are in the last bucket.
        dtype: of the table.
        tp_group: None = the registered tensor-parallel group.
    Raises: ConfigError where no distance would have a bucket of its own.
    """

    def __init__(
        self,
        bidirectional: bool,
        init_method: Callable[[Tensor], Any],
        num_attention_heads: int,
        relative_attention_num_buckets: int = 32,
        relative_attention_max_distance: int = 128,
        dtype: torch.dtype = torch.float32,
        tp_group: ProcessGroup | None = None,
    ):
        super().__init__()
        least = 4 if bidirectional else 2
        exact = relative_attention_num_buckets // least
        if relative_attention_num_buckets < least or relative_attention_max_distance <= exact:
            raise ConfigError(
                f"--relative-attention-num-buckets {relative_attention_num_buckets} with "
                f"--relative-attention-max-distance {relative_attention_max_distance}",
                why=f"a {'bidirectional' if bidirectional else 'causal'} table has a bucket each for the first "
                f"{exact or 'few'} distances, and far ones share the rest up to the largest distance",
                fix="--relative-attention-num-buckets 32 --relative-attention-max-distance 128",
            )
        self.bidirectional, self.tp_group = bidirectional, default_group(tp_group)
        self.num_buckets, self.max_distance = relative_attention_num_buckets, relative_attention_max_distance
        shape = (relative_attention_num_buckets, num_attention_heads)
        self.relative_attention_bias = nn.Embedding(*shape, _weight=torch.empty(shape))
        weight = nn.Parameter(torch.empty(shape, dtype=dtype))
        weight.shard = whole("weight", shape)  # type: ignore[attr-defined]
        set_init(weight, init_method, "weight")
        self.relative_attention_bias.weight = weight

    def forward(self, query_seq_length: int, key_seq_length: int, offset: int = 0) -> Tensor:
        """`[1, np, sq, sk]`, this rank's heads; the first query stands at position `offset`."""
        device = self.relative_attention_bias.weight.device
        queries = torch.arange(offset, offset + query_seq_length, device=device).unsqueeze(1)
        relative = torch.arange(key_seq_length, device=device) - queries  # [sq, sk]
        bucket = relative_position_bucket(relative, self.bidirectional, self.num_buckets, self.max_distance)
        bias = scatter_to_tensor_model_parallel_region(self.relative_attention_bias(bucket), self.tp_group)
        return bias.permute(2, 0, 1).unsqueeze(0)
