"""Which rank steps on which elements: for any parameters, buckets and number of ranks every element has one owner."""

import math
from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megatron_lite.distributed.buffer_layout import ParamSpec, Range, plan_buffer, shard_of_bucket
from megatron_lite.optimizer.distrib_optimizer import owned_ranges, range_map
from megatron_lite.optimizer.flat_shard import parts_of
from megatron_lite.sharding import split


@given(
    shapes=st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=3), min_size=1, max_size=12),
    bucket_size=st.none() | st.integers(1, 4000),
    dp=st.integers(1, 9),
    tp=st.integers(1, 3),
)
def test_the_parts_of_all_ranks_are_the_parameters_each_element_once(shapes, bucket_size, dp, tp):
    """Over data-parallel and tensor-parallel ranks, into the global tensors: what a checkpoint is made of. And back:
    the four ranges of a part point at the same elements."""
    covered = {}
    for tp_rank in range(tp):
        params = {f"p{i}": nn.Parameter(torch.empty(shape)) for i, shape in enumerate(shapes)}
        for i, (name, param) in enumerate(params.items()):
            param.shard = split(name, tuple(param.shape), i % param.dim(), tp_rank, tp)
            covered.setdefault(name, torch.zeros(param.shard.global_shape, dtype=torch.int))
        layout = plan_buffer(
            [ParamSpec(name, p.numel()) for name, p in params.items()], bucket_size, dp, use_distributed_optimizer=True
        )
        for rank in range(dp):
            shards = tuple(shard_of_bucket(bucket, rank, dp) for bucket in layout.buckets)
            buffer = SimpleNamespace(layout=layout, params=params, shards=shards)
            owned = owned_ranges(buffer)
            assert all(any(s.overlap(r) == r for s in shards) for r in owned)
            parts = [(r, part) for r in owned for part in parts_of(buffer, r)]
            assert [part.name for _, part in parts] == [name for bucket in range_map(buffer) for name in bucket]
            for r, part in parts:
                place = layout.ranges[part.name]
                assert part.place.shifted(r.start) == part.in_param.shifted(place.start)
                assert part.is_whole == (part.in_param == Range(0, place.size))
                spec = part.spec()
                assert sum(math.prod(piece.shape) for piece in spec.pieces) == part.in_param.size
                for piece in spec.pieces:
                    covered[part.name][piece.global_slices()] += 1
    assert all(bool((count == 1).all()) for count in covered.values())
